"""What ranks lose to late ones, against the definition in pairs."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tracekit.analysis.parallelism.stragglers import _medians_of_others


@given(st.lists(st.tuples(st.integers(-50, 10**12), st.integers(0, 6)), max_size=20))
def test_the_median_of_others_is_that_of_all_values_of_other_groups(rows: list[tuple[int, int]]) -> None:
    present = sorted({group for _, group in rows})
    values = np.array([value for value, _ in rows], np.int64)
    group = np.array([present.index(number) for _, number in rows], np.int64)
    expected = [np.median(values[group != each]) if len(present) > 1 else np.nan for each in range(len(present))]
    np.testing.assert_array_equal(_medians_of_others(values, group), np.array(expected, np.float64))
