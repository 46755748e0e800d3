import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import intervals

END = 40
spans = st.lists(
    st.tuples(st.integers(0, END), st.integers(0, 8)).map(lambda p: (p[0], min(p[0] + p[1], END))), max_size=12
).map(lambda rows: np.array(rows, np.int64).reshape(-1, 2))


def mask(set_):
    """Brute force: one boolean per ns."""
    covered = np.zeros(END, bool)
    for start, end in set_:
        covered[start:end] = True
    return covered


def assert_is(result, expected_mask):
    assert (mask(result) == expected_mask).all()
    assert (result[:, 1] > result[:, 0]).all()
    assert (result[1:, 0] > result[:-1, 1]).all(), "sorted, disjoint, touching spans joined"


@given(spans, spans)
def test_union_equals_a_mask(a, b):
    assert_is(intervals.union(a, b), mask(a) | mask(b))


@given(spans, spans)
def test_intersection_equals_a_mask(a, b):
    assert_is(intervals.intersect(a, b), mask(a) & mask(b))


@given(spans, spans)
def test_subtraction_equals_a_mask(a, b):
    assert_is(intervals.subtract(a, b), mask(a) & ~mask(b))


@given(spans, st.integers(0, END), st.integers(0, END))
def test_gaps_fill_the_window(a, x, y):
    window = (min(x, y), max(x, y))
    assert_is(intervals.gaps(a, window), mask([window]) & ~mask(a))


@given(spans, spans)
def test_coverage_counts_each_target_by_itself(targets, by):
    covered = mask(by)
    assert intervals.coverage(targets, by).tolist() == [int(covered[a:b].sum()) for a, b in targets]


@given(spans)
def test_length_counts_each_moment_once(a):
    assert intervals.length(a) == mask(a).sum()
