"""Text of lists of ranks: every list comes back, and groups of many ranks are short."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import rank_lists


@given(st.lists(st.integers(-3, 12), max_size=12))
def test_a_list_is_what_it_was_before(ranks):
    assert rank_lists.from_text(rank_lists.to_text(ranks)) == ranks


def test_a_series_is_what_it_was_before():
    series = pl.Series("ranks", [[0, 1, 2], None, [], [3, 1]], pl.List(pl.Int64))
    texts = rank_lists.texts(series)
    assert texts.to_list() == ["0:2:1", None, "", "3,1"]
    assert rank_lists.lists(texts).equals(series, null_equal=True)


def test_a_group_of_many_ranks_is_short():
    assert rank_lists.to_text(range(16384)) == "0:16383:1"
    assert rank_lists.to_text(range(5, 16384, 8)) == "5:16381:8"
