"""For how long others wait for a rank, or for a group of ranks."""

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tracekit.analysis.parallelism import late_groups

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
