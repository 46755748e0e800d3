"""The sweep line against searches one by one."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import intervals, sweep_line

TIMES = st.lists(st.integers(-3, 30), max_size=20)
SPANS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 8)), max_size=8)


@given(TIMES)
def test_distinct_values_are_sorted_and_occur_once(values: list[int]) -> None:
    found = sweep_line.distinct(np.array(values, np.int64))
    assert found.dtype == np.int64
    assert found.tolist() == sorted(set(values))


@given(SPANS, TIMES)
def test_of_the_spans_that_cover_a_moment_the_one_that_ends_last_runs(
    drawn: list[tuple[int, int]], at: list[int]
) -> None:
    spans = np.array([(start, start + dur) for start, dur in drawn], np.int64).reshape(-1, 2)
    for each in (spans, intervals.union(spans)):  # in any order; disjoint and sorted
        found = sweep_line.running(each, np.array(at, np.int64)).tolist()
        for moment, row in zip(at, found, strict=True):
            ends = [end for start, end in each.tolist() if start <= moment < end]
            assert (row >= 0) == bool(ends)
            assert row < 0 or (each[row, 0] <= moment and each[row, 1] == max(ends))
