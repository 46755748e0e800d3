"""The parts of a step by what a person would change: each moment counts once, with operator and line of the program."""

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tracekit.analysis.host.step_parts import KINDS, fastest_calls, step_parts
from tracekit.analysis.parallelism import time_by_part
from tracekit.analysis.parallelism.time_by_part import PARTS
from tracekit.analysis.time import breakdown

SAMPLES = "sample_traces/ci/red", "sample_traces/gpu/slow-rank", "sample_traces/parallelism/moe-ep2"


def test_each_moment_of_a_step_counts_once_by_what_runs_and_what_the_gap_ends_with():
    trace = drawn_traces.trace("""
        step     0000011111
        compute  .aa..b.bb.
        comm     ...xx.....
    """)
    parts = step_parts(trace)
    assert parts.select("step", "part", "name", "dur_ns").rows() == [
        (0, "communication", "x", 2),
        (0, "compute", "a", 2),
        (0, "idle", "", 1),
        (1, "compute", "b", 3),
        (1, "idle", "", 2),
    ]


def test_a_trace_without_work_has_no_parts():
    assert step_parts(drawn_traces.trace("step 000")).is_empty()


@pytest.mark.parametrize("path", SAMPLES)
def test_the_parts_of_every_recorded_step_sum_to_its_device_window_exactly(path: str):
    run = tracekit.load(path, cache=False)
    key = ["window", "rank", "step", "device"]
    parts = run.table(step_parts)
    sums = parts.group_by(key).agg(pl.col("dur_ns").sum())
    steps = run.table(breakdown.by_step).join(sums, on=key, how="left", nulls_equal=True)
    assert steps["dur_ns"].to_list() == steps["duration_ns"].to_list()
    assert set(parts["part"]) <= set(KINDS)


def test_waiting_for_a_batch_is_at_the_line_of_the_program_that_waits():
    parts = tracekit.load("sample_traces/ci/red").table(step_parts)
    data = parts.filter(part="data").sort("dur_ns", descending=True)
    assert data["place"][0] == "data.py(20): fetched"
    assert not parts["place"].drop_nulls().str.contains("tracekit/capture").any()


@pytest.mark.parametrize(
    ("name", "part"), [("collects_on_all_ranks", "garbage_collection"), ("compiles_in_every_step", "compile")]
)
def test_compilation_and_garbage_collection_are_no_launch_gaps(name: str, part: str):
    run = tracekit.load(f"tests/recordings/host_phases/{name}")
    sums = dict(run.table(step_parts).group_by("part").agg(pl.col("dur_ns").sum()).iter_rows())
    assert sums[part] > 10 * sums["launch"]
    by_part = run.table(time_by_part.time_by_part)
    assert by_part[f"{part}_ns"].sum() > 10 * by_part["launch_ns"].sum()
    assert (
        by_part.select(pl.sum_horizontal(f"{part}_ns" for part in PARTS)).to_series() == by_part["duration_ns"]
    ).all()


def test_the_fastest_call_of_each_number_in_a_step_counts_without_what_stops_it_in_other_steps():
    # Another program stops the first call of a in step 0, the second one in steps 1 and 2; z runs in one step only.
    picture = """
        step     000000000000111111111111222222222222
        compute  aaaaaa.aa.b.aa.aaaaa.b..aaa.aaaaab.z
    """
    calls = fastest_calls(drawn_traces.trace(picture, on_device=False))
    work = calls.filter(part="compute").select("name", "number", "fastest_ns", "even_ns", "odd_ns").rows()
    assert work == [("a", 0, 2, 3, 2), ("a", 1, 2, 2, 5), ("b", 0, 1, 1, 1)]
    assert calls.filter(pl.col("part") != "compute", operator="a", number=1)["fastest_ns"].to_list() == [1]
    assert fastest_calls(drawn_traces.trace(picture)).is_empty(), "a device is not shared"
