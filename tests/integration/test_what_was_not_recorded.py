"""Public traces of which a part was taken away: the report says what is missing, and judges only what is there."""

from pathlib import Path

import pytest

from tests.support.kineto_files import read_recording, write_recording
from tracekit.analysis.parallelism import group_axes
from tracekit.ingest.loader import load
from tracekit.replay.graph import causes, savings
from tracekit.report import text
from tracekit.rules.engine import check

TRACE = Path(__file__).parents[3] / "shared" / "traces" / "nanogpt_h100_8ranks" / "rank0-chrome-trace.json.gz"
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
LAUNCHES = {"cuda_runtime", "cuda_driver"}
HOST = {"cpu_op", "user_annotation", "python_function"}


@pytest.fixture
def without(tmp_path):
    if not TRACE.is_file():
        pytest.skip("the shared traces are not installed")
    content = read_recording(TRACE)

    def cut(categories, *, after=0.0):
        """Return the report and its text without events of some categories, of those that start after a share."""
        kernels = sorted(event["ts"] for event in content["traceEvents"] if event.get("cat") == "kernel")
        first = kernels[int(after * len(kernels))]
        kept = [e for e in content["traceEvents"] if e.get("cat") not in categories or (after and e["ts"] < first)]
        path = tmp_path / "rank0.json"
        write_recording(path, content | {"traceEvents": kept})
        run = load(path, cache=False)
        report = check(run)
        return report, text.render(report, run)

    return cut


def messages(report):
    return {found.subject: found.message for found in report.findings if found.code == "DATA001"}


def test_a_trace_without_kernels_names_the_device_and_is_not_judged(without):
    report, shown = without(DEVICE)
    assert (
        "kernels and copies on NVIDIA H100 80GB HBM3, but no device activity" in messages(report)["no_device_activity"]
    )
    assert "\nCannot judge this run: no device activity was recorded" in shown
    assert "on the CPU" not in shown
    assert {found.code for found in report.findings} == {"DATA001"}


def test_a_what_if_says_that_no_device_activity_was_recorded(without):
    report, _ = without(DEVICE)
    names = [cause.name for cause in causes.run_causes()]
    reasons = {cause: savings.saving(report.run, cause).unavailable_reason for cause in names}
    unrecorded = [cause for cause, reason in reasons.items() if "no device activity was recorded" in reason]
    assert "blocking-sync" in unrecorded
    assert len(unrecorded) > 1
    assert not [reason for reason in reasons.values() if "was on the CPU" in reason]


def test_a_trace_of_operators_alone_is_not_taken_for_a_cpu_run(without):
    report, shown = without(DEVICE | LAUNCHES)
    assert "its collectives run over NCCL" in messages(report)["no_device_activity"]
    assert "\nCannot judge this run" in shown


def test_kernels_that_are_cut_off_are_said_to_be(without):
    report, _ = without(DEVICE, after=0.5)
    assert messages(report)["dropped_events"].startswith("The kernels of NVIDIA H100 80GB HBM3 are cut off: ")


def test_a_trace_without_cpu_activity_says_so_and_keeps_its_device_times(without):
    report, shown = without(HOST | LAUNCHES)
    assert "unlinked" not in messages(report)
    assert messages(report)["no_host_activity"].startswith("CPU activity was not recorded")
    assert report.cannot_judge is None
    assert {"HOST001", "HOST002", "HOST003"} <= set(report.blind_spots)
    assert "Start the profiler" not in shown


@pytest.mark.skipif(not TRACE.is_file(), reason="the shared traces are not installed")
def test_collectives_whose_launch_is_not_recorded_are_no_evidence_of_tensor_parallelism():
    # Its collectives are of parameters, sharded over all ranks; those launched before the recording began run while
    # the host is in the first forward of the recording.
    (axis,) = load(TRACE).table(group_axes.group_axes)["axis"].to_list()
    assert axis == "dp_shard"
