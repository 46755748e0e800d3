"""Our numbers compared with those of HTA's functions, on one public trace that both read alike (docs/hta.md)."""

import json
from pathlib import Path

import polars as pl
import pytest

pytest.importorskip("hta", reason="needs the extra [hta]")

import tracekit
from tests.support import cli_runner
from tracekit.analysis.compute import kernel_sequences, kernels
from tracekit.analysis.host import launch_delay
from tracekit.analysis.time import breakdown

TRACES = Path(__file__).parents[3] / "shared" / "traces" / "hta_nccl_args_a100"
pytestmark = [
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.skipif(not TRACES.is_dir(), reason="the downloaded traces are not in ../shared"),
]
_US = 1e3


@pytest.fixture(scope="module")
def file():
    return next(TRACES.glob("*.json.gz"))


@pytest.fixture(scope="module")
def theirs(file):
    from hta.common.trace import Trace
    from hta.configs.env_options import HTAEnvOptions
    from hta.trace_analysis import TraceAnalysis

    with pytest.MonkeyPatch.context() as patch:
        options = HTAEnvOptions.instance()  # it may have read the environment already
        patch.setitem(options._options, "HTA_DISABLE_NS_ROUNDING", True)
        loaded = Trace(trace_files={0: str(file)})
        # Without the last step HTA leaves out work of the second to last one, too.
        loaded.load_traces(include_last_profiler_step=True, use_multiprocessing=False)
        analysis = TraceAnalysis.__new__(TraceAnalysis)
        analysis.t = loaded
        yield analysis


@pytest.fixture(scope="module")
def ours(file):
    return tracekit.load(str(file))


def test_temporal_breakdown_and_overlap_are_those_of_the_summary(theirs, ours):
    (own,) = ours.table(breakdown.by_rank).to_dicts()
    hta = theirs.get_temporal_breakdown(visualize=False).iloc[0]
    assert hta["idle_time(us)"] == pytest.approx(own["idle_ns"] / _US, abs=0.01)
    assert hta["compute_time(us)"] == pytest.approx(own["compute_ns"] / _US, abs=0.01)
    assert hta["non_compute_time(us)"] == pytest.approx(
        (own["exposed_communication_ns"] + own["exposed_copy_ns"]) / _US, abs=0.01
    )
    overlap = theirs.get_comm_comp_overlap(visualize=False).iloc[0]["comp_comm_overlap_pctg"]
    assert overlap == pytest.approx(100 * own["overlapped_ns"] / own["communication_ns"], abs=0.005)


def test_queue_lengths_are_those_of_the_summary_by_stream(theirs, ours):
    own = launch_delay.by_stream(ours)
    hta = theirs.get_queue_length_summary(ranks=[0])["queue_length"]
    assert {stream: (row["count"] // 2, row["max"]) for (_, stream), row in hta.iterrows()} == {
        stream: (launched, most) for stream, launched, most in own.select("stream", "launched", "queue_max").iter_rows()
    }
    # HTA's mean is of the values after each change, however long they last.
    series = theirs.get_queue_length_time_series(ranks=[0])[0]
    busiest = series[series.stream == 7].sort_values("ts")
    lasts = busiest.ts.shift(-1) - busiest.ts
    assert own.filter(stream=7)["queue_mean"].item() == pytest.approx(
        (busiest.queue_length * lasts).sum() / lasts.sum(), rel=1e-6
    )


def test_launch_statistics_are_those_of_the_launches(theirs, ours):
    hta = theirs.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
    trace = ours.trace(ours.ranks[0])
    calls = trace.ops.select(launch_id="id", called_ns=pl.col("start_ns") + pl.col("dur_ns"), call_ns="dur_ns")
    work = trace.activities.join(calls, on="launch_id")
    delays = (work["start_ns"] - work["called_ns"]).clip(0).sort()
    assert len(hta) == work.height
    assert hta.launch_delay.sort_values().to_list() == pytest.approx((delays / _US).to_list(), abs=0.3)
    assert hta.cpu_duration.sum() == pytest.approx(work["call_ns"].sum() / _US, abs=1)


def test_kernels_have_the_sums_of_the_kernel_breakdown(theirs, ours):
    _, by_name = theirs.get_gpu_kernel_breakdown(visualize=False, num_kernels=5)
    named = by_name[by_name.name != "others"]
    own = dict(kernels.kernels(ours).select("name", "total_ns").iter_rows())
    assert len(named) >= 5
    for name, total in zip(named["name"], named["sum (us)"], strict=True):
        assert total == pytest.approx(own[name] / _US, abs=0.01)


@pytest.fixture(scope="module")
def sequences_of_hta(theirs, tmp_path_factory):
    """Return HTA's function of an operator's name, with one call graph for all names, and without its overlaid trace.

    The graph does not depend on the name. The overlaid trace is a file for a viewer: to make it takes 10 s each time.
    """
    from hta.analyzers import cuda_kernel_analysis

    graph, folder = cuda_kernel_analysis.CallGraph(theirs.t, ranks=[0]), str(tmp_path_factory.mktemp("sequences"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda_kernel_analysis, "CallGraph", lambda trace, ranks: graph)
        analysis = cuda_kernel_analysis.CudaKernelAnalysis
        patch.setattr(analysis, "_overlay_frequent_patterns_with_trace", lambda *_: {})
        yield lambda op: theirs.get_frequent_cuda_kernel_sequences(op, folder, min_pattern_len=2, visualize=False)


@pytest.mark.parametrize("op", ["aten::linear", "aten::cudnn_convolution", "ConvolutionBackward"])
def test_sequences_that_operators_launch_are_those_of_hta(sequences_of_hta, ours, op):
    hta = sequences_of_hta(op)
    own = {"|".join((row["op"], *row["kernels"])): row for row in kernel_sequences.by_call(ours, op).to_dicts()}
    assert set(hta["pattern"]) == set(own)
    for pattern, count, on_device, on_host in hta[
        ["pattern", "count", "GPU kernel duration (us)", "CPU op duration (us)"]
    ].itertuples(index=False):
        row = own[pattern]
        assert count == row["count"]
        assert on_device == pytest.approx(row["total_ns"] / _US, abs=0.01)
        assert on_host == pytest.approx(row["op_ns"] / _US, abs=0.01)


def test_kernels_that_operators_launch_and_their_delays_are_those_of_hta(theirs, ours):
    # HTA scans all operators for each launch, 90 s for the trace: one step is compared.
    trace = ours.trace(ours.ranks[0])
    step = trace.steps.sort("step").row(1, named=True)
    frame = theirs.t.traces[0]
    begin_us, end_us = frame.loc[_host_step(theirs.t, step["step"])][["ts", "end"]]
    cut = frame[(frame.stream != -1) | ((frame.ts >= begin_us) & (frame.end <= end_us))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(theirs.t.traces, 0, cut.copy())
        hta = theirs.get_aten_op_kernels_and_delay(ranks=[0])[0]
    own = _launches_of_operators(trace, step)
    assert len(hta) == own.height > 10
    rows = {(op, kernels): rest for op, kernels, *rest in own.iter_rows()}
    for op, sequence, count, to_launch, to_start in hta.itertuples(index=False):
        assert rows[op, sequence] == [count, pytest.approx(to_launch, abs=0.01), pytest.approx(to_start, abs=0.01)]
    per_kernel = hta.assign(name=hta.kernel_sequence.str.split(" -> ")).explode("name")
    by_kernel = kernels.kernels(ours, ("op", "name", "step")).filter(step=step["step"])
    expected = per_kernel.groupby(["aten_op_name", "name"]).occurrence_count.sum()
    counts = {(op, name): count for op, name, count in by_kernel.select("op", "name", "count").iter_rows()}
    assert {key: counts[key] for key in expected.index} == expected.to_dict()


def test_bandwidths_of_copies_are_those_of_the_activities(theirs, ours, file):
    query = (
        "SELECT split_part(name, ' (', 1) AS copy, count(*) AS copies, avg(bytes / dur_ns) AS mean, "
        "stddev_samp(bytes / dur_ns) AS std, min(bytes / dur_ns) AS least, "
        "quantile_cont(bytes / dur_ns, 0.5) AS median, max(bytes / dur_ns) AS most "
        "FROM activities WHERE kind IN ('memcpy', 'memset') GROUP BY 1 ORDER BY 1"
    )
    done = cli_runner.tracekit("query", file, query, "--format", "json")
    assert done.returncode == 0, done.stderr
    hta = theirs.get_memory_bw_summary(ranks=[0])["memory_bw_gbps"]
    rows = json.loads(done.stdout)
    assert [row["copy"] for row in rows] == [name for _, name in hta.index]
    for row, (_, summary) in zip(rows, hta.iterrows(), strict=True):
        assert [*row.values()][1:] == pytest.approx(
            [summary[name] for name in ("count", "mean", "std", "min", "50%", "max")], rel=1e-4
        )
    series = theirs.get_memory_bw_time_series(ranks=[0])[0]
    begun = series[series.memory_bw_gbps > 1e-6].sort_values("ts")
    copies = ours.trace(ours.ranks[0]).activities.filter(pl.col("kind").is_in(["memcpy", "memset"])).sort("start_ns")
    assert begun.memory_bw_gbps.to_list() == pytest.approx((copies["bytes"] / copies["dur_ns"]).to_list(), rel=1e-3)


def _host_step(hta, step):
    """Return the index of the host's ProfilerStep of a step in HTA's frame."""
    frame = hta.traces[0]
    names = hta.symbol_table.get_sym_table()
    return frame[(frame.name == names.index(f"ProfilerStep#{step}")) & (frame.stream == -1)].index[0]


def _launches_of_operators(trace, step):
    """Return the kernels of each call of an aten operator in a step, counted, and the first one's mean delays in µs.

    Columns op, kernels, count, to_launch (from the operator's start), to_start (from the launch to the device).
    """
    row = pl.Series("row", kernels.innermost_op(trace))
    calls = trace.ops.select(launch_id="id", called_ns="start_ns")
    work = trace.activities.with_columns(row).join(calls, on="launch_id").filter(pl.col("row") >= 0)
    launched = work.with_columns(
        op=trace.ops["name"].gather(work["row"]), op_ns=trace.ops["start_ns"].gather(work["row"])
    ).filter(
        pl.col("op").str.starts_with("aten::"),
        ~pl.col("kind").is_in(["memcpy", "memset"]),  # HTA takes launches of kernels only
        pl.col("called_ns").is_between(step["host_start_ns"], step["host_end_ns"]),
    )
    of_calls = launched.sort("called_ns").group_by("row", maintain_order=True)
    to_launch, to_start = (pl.col("called_ns") - pl.col("op_ns")), (pl.col("start_ns") - pl.col("called_ns"))
    sequences = of_calls.agg(
        pl.col("op").first(),
        pl.col("name").str.join(" -> ").alias("kernels"),
        to_launch.first().alias("to_launch"),
        to_start.first().alias("to_start"),
    )
    means = (pl.col(name).mean() / _US for name in ("to_launch", "to_start"))
    return sequences.group_by("op", "kernels").agg(pl.len().alias("count"), *means)


def test_the_summary_by_stream_is_on_the_command_line(ours, file):
    done = cli_runner.tracekit("summary", file, "--by", "stream")
    assert done.returncode == 0, done.stderr
    assert "queue" in done.stdout
    rows = cli_runner.tracekit("query", file, "SELECT stream, queue_max FROM launch_queues ORDER BY 1")
    assert rows.returncode == 0, rows.stderr
    assert launch_delay.by_stream(ours)["queue_max"].to_list() == [10, 1]


def test_sequences_are_on_the_command_line_and_in_sql(ours, file):
    done = cli_runner.tracekit("kernels", file, "--sequences", "4", "--format", "json")
    assert done.returncode == 0, done.stderr
    first = json.loads(done.stdout)[0]
    assert first["kernels"] == kernel_sequences.by_sequence(ours, 4)["kernels"][0].to_list()
    done = cli_runner.tracekit("kernels", file, "--launched-by", "aten::linear")
    assert "aten::linear" in done.stdout
    done = cli_runner.tracekit("kernels", file, "--launched-by", "aten::linear", "--sequences", "4")
    assert done.returncode == 2
    assert "two tables" in done.stderr
    rows = cli_runner.tracekit("query", file, "SELECT max(length) AS longest FROM kernel_sequences")
    assert "8" in rows.stdout
