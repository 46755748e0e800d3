import dataclasses

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_traces
from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.report.charts import trace_slices


def _host(*rows: tuple[str, str, int, int]) -> pl.DataFrame:
    table = pl.DataFrame(rows, schema=["name", "kind", "start_ns", "dur_ns"], orient="row")
    return table.with_row_index("id").with_columns(lane=pl.lit(9))


HOST_LANE = {"lane": 9, "name": "main", "role": "host"}


def test_tracks_come_in_order_phases_compute_communication_copies_host():
    trace = drawn_traces.trace(
        """
        copy     ....mm
        comm     .xx...
        compute  aabb..
        """,
        ops=schema.OPS.conform(_host(("tracekit::forward", "annotation", 0, 4), ("aten::mm", "cpu_op", 1, 2))),
    )
    lanes = schema.LANES.conform(pl.concat([trace.lanes, pl.DataFrame([HOST_LANE])], how="diagonal"))
    found = trace_slices.visible_slices(_with_lanes(trace, lanes), (0, 6))
    names = found.unique("track", maintain_order=True).sort("track")["track_name"].to_list()
    assert names == ["phases", "compute · compute", "communication · comm", "copies · copy", "host · main"]


def _with_lanes(trace, lanes):
    return dataclasses.replace(trace, lanes=lanes)


def test_only_slices_that_touch_the_window_are_found():
    # time     0123456789
    trace = drawn_traces.trace("compute  aabb..cc.d")
    assert trace_slices.visible_slices(trace, (1, 6))["name"].to_list() == ["a", "b"]
    assert trace_slices.visible_slices(trace, (4, 6)).is_empty()


def test_slices_that_run_at_once_on_one_track_lie_at_different_depths():
    rows = [("outer", 0, 10), ("inner", 2, 6), ("innermost", 3, 1), ("next", 8, 2), ("after", 10, 5)]
    activities = pl.DataFrame(rows, schema=["name", "start_ns", "dur_ns"], orient="row").with_columns(
        lane=pl.lit(0), kind=pl.lit("compute")
    )
    trace = drawn_traces.trace("compute  a", activities=activities)
    found = dict(trace_slices.visible_slices(trace, (0, 20)).select("name", "depth").iter_rows())
    assert found == {"outer": 0, "inner": 1, "innermost": 2, "next": 1, "after": 0}


@given(st.lists(st.tuples(st.integers(0, 300), st.integers(0, 40)), min_size=1, max_size=60), st.integers(1, 30))
def test_thinning_loses_no_slice_and_moves_no_edge(spans, budget):
    activities = pl.DataFrame(spans, schema=["start_ns", "dur_ns"], orient="row").with_columns(
        name=pl.lit("k"), lane=pl.lit(0), kind=pl.lit("compute")
    )
    table = trace_slices.visible_slices(
        drawn_traces.trace("compute  a", activities=activities), (0, 400), max_depth=100
    )
    thinned, _ = trace_slices.merge_short_slices(table, (0, 400), max_slices=budget)
    assert thinned["count"].sum() == table.height
    assert thinned["start_ns"].min() == table["start_ns"].min()
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    assert thinned.select(end_ns.max()).item() == table.select(end_ns.max()).item()


def test_thinning_leaves_a_table_within_the_budget_alone():
    table = trace_slices.visible_slices(drawn_traces.trace("compute  a.b.c"), (0, 5))
    assert trace_slices.merge_short_slices(table, (0, 5), max_slices=3) == (table, 0)


def test_thinning_keeps_long_slices_unmerged_among_thousands_of_short_ones():
    starts = np.arange(20_000) * 10
    short = pl.DataFrame({"start_ns": starts, "dur_ns": np.full(20_000, 4)}).with_columns(name=pl.lit("short"))
    long = pl.DataFrame({"start_ns": [200_000], "dur_ns": [100_000], "name": ["long"]})
    activities = pl.concat([short, long], how="diagonal").with_columns(lane=pl.lit(0), kind=pl.lit("compute"))
    table = trace_slices.visible_slices(drawn_traces.trace("compute  a", activities=activities), (0, 300_000))
    thinned, below_ns = trace_slices.merge_short_slices(table, (0, 300_000), max_slices=1000)
    assert thinned.height <= 1000
    assert below_ns > 4
    assert thinned.filter(pl.col("name") == "long").select("start_ns", "dur_ns", "count").row(0) == (
        200_000,
        100_000,
        1,
    )


def test_the_representative_step_is_the_slowest_ranks_step_nearest_its_median():
    slow = drawn_traces.trace("step     0000111111222\ncompute  aaaabbbbbbccc", rank=1)
    fast = drawn_traces.trace("step     012\ncompute  abc", rank=0)
    row = breakdown.representative_step(drawn_traces.run(fast, slow).table(breakdown.by_step))
    assert (row["rank"], row["step"], row["duration_ns"]) == (1, 0, 4)


def test_there_is_no_representative_step_where_there_are_no_steps():
    assert (
        breakdown.representative_step(drawn_traces.run(drawn_traces.trace("compute  aa")).table(breakdown.by_step))
        is None
    )


@pytest.mark.parametrize("window", [(0, 1), (5, 5)])
def test_a_trace_without_work_has_no_slices(window):
    assert trace_slices.visible_slices(drawn_traces.trace("compute  ."), window).columns == list(trace_slices.COLUMNS)


def test_what_a_collectives_thread_does_on_the_host_has_no_track_of_its_own():
    trace = drawn_traces.trace(
        "comm  xx", on_device=False, ops=schema.OPS.conform(_host(("gloo:all_gather", "annotation", 0, 2)))
    )
    lanes = trace.lanes.with_columns(lane=pl.lit(9))
    activities = trace.activities.with_columns(lane=pl.lit(9, pl.Int64))
    trace = dataclasses.replace(trace, lanes=schema.LANES.conform(lanes), activities=activities)
    assert trace_slices.visible_slices(trace, (0, 2))["track_name"].to_list() == ["communication · comm"]
