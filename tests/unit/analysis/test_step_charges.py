"""Each moment of a step is charged once: to the work that runs, or to the cause of the idle time."""

from pathlib import Path

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tracekit
from tests.support import drawn_traces, operator_traces
from tracekit.analysis.compute import call_paths, step_charges
from tracekit.analysis.time import breakdown

SAMPLES = Path(__file__).parents[3] / "sample_traces"
PLACE = ["window", "rank", "step", "device"]


def by_part(charges: pl.DataFrame) -> dict[tuple[str, str | None], int]:
    sums = charges.group_by("part", "kernel").agg(pl.col("dur_ns").sum())
    return {(part, kernel): dur_ns for part, kernel, dur_ns in sums.iter_rows() if dur_ns}


def test_compute_hides_communication_and_idle_time_belongs_to_what_ends_it():
    charges = step_charges.step_charges(
        drawn_traces.trace("""
            step     0000000000
            compute  .aa..b.bb.
            comm     .xxxx.....
        """)
    )
    assert by_part(charges) == {
        ("compute", "a"): 2,
        ("compute", "b"): 3,
        ("exposed_communication", "x"): 2,
        ("idle", "a"): 1,
        ("idle", "b"): 1,
        ("idle", None): 1,
    }
    counted = charges.filter(pl.col("count") > 0).select("kernel", "count", "work_ns").sort("kernel")
    assert counted.rows() == [("a", 1, 2), ("b", 2, 3), ("x", 1, 4)]


def test_of_concurrent_kernels_the_one_on_the_lane_with_most_compute_counts():
    charges = step_charges.step_charges(
        drawn_traces.trace("""
            step      000000000
            compute   aaa.bbbb.
            compute1  .ccccc...
        """)
    )
    assert by_part(charges) == {("compute", "a"): 3, ("compute", "b"): 4, ("compute", "c"): 1, ("idle", None): 1}


def test_work_outside_the_window_of_its_step_is_charged_to_the_step_in_whose_window_it_runs():
    charges = step_charges.step_charges(
        drawn_traces.trace("""
            step     00000111111
            compute  aaaaabbbbbb
        """)
    )
    assert charges.select("step", "kernel", "dur_ns").rows() == [(0, "a", 5), (1, "b", 6)]


ROWS = st.lists(st.text(alphabet="..ab", min_size=30, max_size=30), min_size=2, max_size=4)


@settings(max_examples=40, deadline=None)
@given(ROWS)
def test_charges_sum_to_each_part_of_the_breakdown(rows: list[str]) -> None:
    names = ("compute", "comm", "compute1", "copy")
    picture = "\n".join(f"{name} {cells}" for name, cells in zip(names, rows, strict=False))
    trace = drawn_traces.trace(f"step {'0' * 17}{'1' * 13}\n{picture}")
    assert_sums(step_charges.step_charges(trace), breakdown.by_step(trace), ["step", "device"])


@pytest.mark.parametrize("name", ["demo-fsdp2", "demo-yafsdp"])
def test_charges_of_a_recorded_run_sum_to_its_breakdown(name: str) -> None:
    run = tracekit.load(SAMPLES / name)
    assert_sums(run.table(step_charges.step_charges), run.table(breakdown.by_step), PLACE)


def assert_sums(charges: pl.DataFrame, steps: pl.DataFrame, place: list[str]) -> None:
    dur_ns, part = pl.col("dur_ns"), pl.col("part")
    sums = charges.group_by(place).agg(
        dur_ns.sum().alias("duration_ns"),
        *(dur_ns.filter(part == name).sum().alias(f"{name}_ns") for name in step_charges.PARTS),
    )
    known = steps.filter(pl.col("duration_ns") > 0).select(sums.columns)
    assert sums.sort(place).equals(known.sort(place))


# Call paths -----------------------------------------------------------------------------------------------------------


def test_a_call_path_has_the_operators_and_annotations_around_a_call_without_the_marker_of_the_step():
    trace = operator_traces.trace(
        [("forward", [("aten::linear", [("aten::mm", 50)])]), ("aten::add", 3)],
        [("forward", [("aten::linear", [("aten::mm", 50)])])],
    )
    paths = call_paths.call_paths(trace).to_list()
    assert [path for path, kind in zip(paths, trace.ops["kind"], strict=True) if kind == "cpu_op"] == [
        "forward > aten::linear",
        "forward > aten::linear > aten::mm",
        "aten::add",
        "forward > aten::linear",
        "forward > aten::linear > aten::mm",
    ]
    assert paths[0] is None
    charges = step_charges.step_charges(trace).filter(pl.col("count") > 0)
    assert charges.select("step", "operator", "path", "order_ns").rows() == [
        (0, "aten::mm", "forward > aten::linear > aten::mm", 0),
        (0, "aten::add", "aten::add", 50),
        (1, "aten::mm", "forward > aten::linear > aten::mm", 0),
    ]


def test_a_collective_belongs_to_its_own_operator_and_not_to_that_of_the_profiler():
    trace = operator_traces.trace([("c10d::allreduce_", [("record_param_comms::", 4)])])
    renamed = trace.replace(ops=trace.ops.with_columns(pl.col("name").str.replace("::$", "")))
    assert step_charges.step_charges(renamed)["operator"].to_list() == ["c10d::allreduce_"]


def test_a_trace_without_work_is_charged_with_nothing():
    assert step_charges.step_charges(drawn_traces.trace("step 000")).is_empty()
