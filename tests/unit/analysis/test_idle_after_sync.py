"""Idle time after waits for the device, of which one rank's host has more than those of the others."""

import polars as pl
import pytest

from tracekit.analysis.host import idle_after_sync

STEPS = 3


def synced_after(gaps_of_ranks, waits_of_ranks):
    """Return for each rank the idle time that still counts as due to the wait, over STEPS steps.

    `gaps_of_ranks` are the times that a rank is idle after the one wait of each step, in µs; None for no wait.
    """
    rows = [
        {"window": 0, "rank": rank, "step": step, "name": "a", "nth": 0, "dur_ns": 1000 * us, "synced": True}
        for rank, us in enumerate(gaps_of_ranks)
        for step in range(STEPS)
        if us is not None
    ]
    rows += [row | {"name": "b", "synced": False} for row in rows]
    rows += [
        {"window": 0, "rank": rank, "step": 0, "name": "c", "nth": 0, "dur_ns": 1000, "synced": False}
        for rank in range(len(gaps_of_ranks))
    ]
    waits = pl.DataFrame([
        {"window": 0, "rank": rank, "step": step, "waits": count}
        for rank, count in enumerate(waits_of_ranks)
        for step in range(STEPS)
    ])  # fmt: skip
    marked = idle_after_sync.with_pauses_of_one_rank(pl.DataFrame(rows), waits)
    assert marked.height == len(rows)
    by_rank = dict(marked.filter("synced").group_by("rank").agg(pl.col("dur_ns").sum()).iter_rows())
    return [by_rank.get(rank, 0) // (1000 * STEPS) for rank in range(len(gaps_of_ranks))]


@pytest.mark.parametrize(
    ("gaps_of_ranks", "waits_of_ranks", "remaining"),
    [
        ([10, 10, 12, 4000], [1, 1, 1, 1], [10, 10, 12, 0]),
        ([10, 4000], [1, 1], [10, 0]),
        ([800, 800, 800, 1100], [1, 1, 1, 1], [800, 800, 800, 1100]),
        ([None, None, None, 4000], [0, 0, 0, 1], [0, 0, 0, 4000]),
        ([10, 10, 10, 4000], [1, 1, 1, 3], [10, 10, 10, 4000]),
        ([4000, 4000, 10, 4000], [1, 1, 1, 1], [4000, 4000, 10, 4000]),
    ],
    ids=[
        "one host pauses", "of two ranks", "similar pauses", "only one rank waits", "it reads more values",
        "most hosts pause",
    ],
)  # fmt: skip
def test_a_pause_of_one_rank_after_a_wait_of_all_is_not_due_to_the_wait(gaps_of_ranks, waits_of_ranks, remaining):
    assert synced_after(gaps_of_ranks, waits_of_ranks) == remaining
