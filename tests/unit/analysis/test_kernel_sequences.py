import json

import polars as pl
import pytest

from tests.support import drawn_kernels, drawn_traces
from tests.support.drawn_kernels import Kernel
from tracekit.analysis.compute import kernel_sequences
from tracekit.errors import ConfigError
from tracekit.report import query_rows, summary_tables
from tracekit.report.render import text

A, B, C = (Kernel(f"aten::{name}", us, name=f"{name}_kernel") for name, us in (("a", 2), ("b", 3), ("c", 4)))


def moved(kernels: tuple[Kernel, ...], gap_ns: int, *, steps: int = 2, is_graph: bool = False):
    """Return a trace of steps with a gap before each kernel; as a graph, the first call launches all of a step."""
    trace = drawn_kernels.trace(*kernels, around="forward", steps=steps)
    number = pl.int_range(pl.len())
    launch = pl.col("launch_id").first().over("step") if is_graph else pl.col("launch_id")
    activities = trace.activities.with_columns(pl.col("start_ns") + number * gap_ns, launch)
    return type(trace)(**{**vars(trace), "activities": activities})


def test_a_sequence_has_count_time_gaps_and_launches():
    # step     a . b . a . b . c      a . b twice, 100 ns before each kernel
    (row,) = kernel_sequences.kernel_sequences(moved((A, B, A, B, C), 100, steps=1)).to_dicts()
    assert row["kernels"] == ["a_kernel", "b_kernel"]
    assert (row["count"], row["steps"], row["total_ns"], row["gap_ns"]) == (2, 1, 2 * 5_000, 2 * 100)
    assert (row["launches"], row["first_id"], row["stream"]) == (4, 0, 7)


def test_kernels_of_one_cuda_graph_are_one_launch_per_occurrence():
    (row,) = kernel_sequences.kernel_sequences(moved((A, B, C), 0, is_graph=True)).to_dicts()
    assert (row["length"], row["count"], row["launches"]) == (3, 2, 2)


def test_sequences_of_ranks_are_summed_and_counted_per_step():
    run = drawn_traces.run(drawn_kernels.trace(A, B, A, B, C))
    (row,) = kernel_sequences.by_sequence(run, 2).to_dicts()
    assert (row["count"], row["per_step"], row["total_ns"]) == (4, 2.0, 20_000)
    assert row["time_ratio"] == pytest.approx(20_000 / 28_000)
    assert json.loads(query_rows.as_json(kernel_sequences.by_sequence(run, 2)))[0]["kernels"] == [
        "a_kernel",
        "b_kernel",
    ]
    shown = text.render(summary_tables.sequences(kernel_sequences.by_sequence(run, 2), 5), width=100)
    assert "a_kernel → b_kernel" in shown


def test_calls_of_operators_have_the_sequences_that_they_launch(wording):
    run = drawn_kernels.run(A, B, C, around="forward")
    (row,) = kernel_sequences.by_call(run, "forw").to_dicts()
    assert (row["op"], row["count"], row["total_ns"]) == ("forward", 2, 18_000)
    assert row["kernels"] == ["a_kernel", "b_kernel", "c_kernel"]
    with wording.raises(ConfigError):
        kernel_sequences.by_call(run, "aten::a")


@pytest.mark.parametrize("longest", [1, 257])
def test_a_length_that_is_no_sequence_is_an_error(longest):
    with pytest.raises(ConfigError, match="2 to 256 kernels"):
        kernel_sequences.by_sequence(drawn_kernels.run(A), longest)


def test_nothing_that_recurs_is_said_so():
    assert kernel_sequences.kernel_sequences(drawn_kernels.trace(A, steps=1)).is_empty()
    empty = kernel_sequences.by_sequence(drawn_kernels.run(A), 4)
    assert "No sequence of kernels occurs twice" in text.render(summary_tables.sequences(empty, 5), width=100)
