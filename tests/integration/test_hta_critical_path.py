"""The critical path beside HTA's on the traces that HTA tests itself on; every difference is one of the raw events."""

import shutil
from pathlib import Path

import polars as pl
import pytest

from tracekit.ingest.loader import load
from tracekit.replay.graph.critical_path.path import critical_path

pytest.importorskip("hta", reason="needs the extra [hta]")

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
pytestmark = [
    pytest.mark.accuracy,  # what another project measures
    pytest.mark.filterwarnings("ignore::Warning"),
    pytest.mark.skipif(not TRACES.exists(), reason="the downloaded traces are not in ../shared"),
]


def of_hta(path, folder, annotation, instance):
    """Return the time in µs of HTA's critical path by what it is bound by."""
    from hta.trace_analysis import TraceAnalysis

    copy = shutil.copy(path, folder / "rank0.json.gz")
    analysis = TraceAnalysis(trace_files={0: str(copy)}, trace_dir=str(folder))
    graph, is_complete = analysis.critical_path_analysis(rank=0, annotation=annotation, instance_id=instance)
    assert is_complete
    parts = graph.get_critical_path_breakdown()
    return parts.groupby("bound_by")["duration"].sum().to_dict()


def test_a_host_bound_step_is_one_for_both(tmp_path):
    file = TRACES / "hta_nccl_args_a100" / "nccl_data.json.gz"
    theirs = of_hta(file, tmp_path, "ProfilerStep", 1)
    assert theirs["cpu_bound"] / sum(theirs.values()) == pytest.approx(1)
    ours = critical_path(load(file.parent), 5)
    assert ours.shares_by("kind").row(0, named=True)["kind"] == "host"
    assert ours.shares_by("kind")["step_ratio"][0] > 0.999
    # HTA's path leaves out the time between ops; its operators are part of ours.
    in_ops = ours.parts.filter(pl.col("operator").is_not_null())["dur_ns"].sum() / 1000
    assert theirs["cpu_bound"] == pytest.approx(in_ops, rel=0.05)


def test_a_window_of_three_matrix_products_differs_from_hta_by_one_launch(tmp_path):
    # Raw events in µs: aten::matmul from 0; memset 411 to 412; kernels 444 to 567, 841 to 964, 19794 to 19917. The last
    # memset runs 19778 to 19779; cudaLaunchKernel 19779 to 19793; its kernel starts 1 µs after that returns.
    file = TRACES / "hta_event_sync" / "event_sync_trace.json.gz"
    theirs = of_hta(file, tmp_path, "", None)
    ours = critical_path(load(file.parent))
    us = {kind: dur_ns // 1000 for kind, dur_ns in ours.shares_by("kind").select("kind", "dur_ns").rows()}
    assert us == {"host": 19_382, "compute": 123, "idle": 1}
    # Both have the last kernel. HTA's way to it is the memset (1) and the gap after it (15), as if the kernel had
    # waited for the stream; but it was launched only during that gap: ours is the launching call (14) and its latency.
    assert theirs["gpu_compute_bound"] == us["compute"] + 1
    assert theirs["gpu_kernel_kernel_overhead"] == 15
    # HTA begins with the first op, 411 µs before the first activity, where our window begins, and leaves out the time
    # in which no op runs.
    python_us = ours.parts.filter(name="Python")["dur_ns"].sum() // 1000
    host_us = us["host"] - python_us + 411
    assert host_us / (host_us + us["compute"] + us["idle"]) == pytest.approx(0.896, abs=0.001)
    on_host = theirs["cpu_bound"] + theirs["gpu_kernel_kernel_overhead"] + theirs["gpu_kernel_launch_overhead"]
    assert on_host / sum(theirs.values()) == pytest.approx(0.895, abs=0.001)
