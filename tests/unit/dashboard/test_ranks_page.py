"""The table of the page Ranks stays readable where ranks wait for many others."""

import polars as pl

from dashboard.pages import ranks


def test_the_ranks_with_the_longest_waits_have_a_column():
    waits = {f"waiting_for_{rank}_ns": [0, rank] for rank in range(300)}
    table = ranks.most_awaited(pl.DataFrame({"rank": [0, 1], "waiting_ns": [9, 9], **waits}))
    awaited = [f"waiting_for_{rank}_ns" for rank in range(292, 300)]
    assert table.columns == ["rank", "waiting_ns", *awaited]
    few = pl.DataFrame({"rank": [0], "waiting_for_3_ns": [1]})
    assert ranks.most_awaited(few).equals(few)
    assert ranks.most_awaited(few.select("rank")).equals(few.select("rank"))
