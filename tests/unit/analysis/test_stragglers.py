"""What ranks lose to late ones, against the definition in pairs, and to late groups of ranks."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tracekit.analysis.parallelism import late_groups
from tracekit.analysis.parallelism.stragglers import _medians_of_others


@given(st.lists(st.tuples(st.integers(-50, 10**12), st.integers(0, 6)), max_size=20))
def test_the_median_of_others_is_that_of_all_values_of_other_groups(rows: list[tuple[int, int]]) -> None:
    present = sorted({group for _, group in rows})
    values = np.array([value for value, _ in rows], np.int64)
    group = np.array([present.index(number) for _, number in rows], np.int64)
    expected = [np.median(values[group != each]) if len(present) > 1 else np.nan for each in range(len(present))]
    np.testing.assert_array_equal(_medians_of_others(values, group), np.array(expected, np.float64))


ARRIVALS = {"window": pl.Int64, "instance": pl.Int64, "rank": pl.Int64, "step": pl.Int64, "arrival_ns": pl.Int64}
ARRIVALS |= {"residual_ns": pl.Int64}


@st.composite
def arrivals(draw: st.DrawFn) -> pl.DataFrame:
    places = draw(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 3), st.integers(0, 4)), unique=True))
    time, error = st.none() | st.integers(0, 9), st.none() | st.integers(0, 3)
    rows = [(window, instance, rank, 0, draw(time), draw(error)) for window, instance, rank in places]
    return pl.DataFrame(rows, ARRIVALS, orient="row")


@given(arrivals())
def test_the_leads_of_single_ranks_are_those_of_groups_of_one(table: pl.DataFrame) -> None:
    ranks = table["rank"].unique().sort().to_list()
    assert late_groups.leads_of_ranks(table) == {rank: late_groups.lead_ns(table, [rank]) for rank in ranks}
    assert list(late_groups.leads_of_ranks(table)) == ranks
