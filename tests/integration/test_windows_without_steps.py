"""Runs whose steps are not marked: the same recordings without ProfilerStep and optimizer spans.

The iterations of a loop are found by repetition; what does not repeat is one window.
"""

import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.support import shared_findings
from tests.support.kineto_files import read_recording, write_recording
from tests.support.selection import others_in_accuracy
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces" / "faults"
OTHERS = ROOT.parent / "shared" / "traces"
MARKS = re.compile(r"^ProfilerStep|Optimizer\.step|Iteration Start")


def without_marks(folder, copy, only="*.json.gz", keep=lambda event: True):
    """Copy the traces and the manifest of a run, without the events that mark steps, and those not to `keep`."""
    copy.mkdir()
    for path in folder.glob(only):
        content = read_recording(path)
        events = [e for e in content["traceEvents"] if not MARKS.search(str(e.get("name", "")))]
        content["traceEvents"] = [event for event in events if keep(event)]
        write_recording(copy / path.name.removesuffix(".gz"), content)
    if (folder / "run.json").exists():
        shutil.copy(folder / "run.json", copy)
    return load(copy)


def shared(name):
    folder = OTHERS / name
    if not folder.is_dir():
        pytest.skip(f"needs ../shared/traces/{name}, which is not part of the project")
    return folder


def judged(run):
    return by_code(check(run).findings)


def judged_as_recorded(folder):
    return by_code(shared_findings.findings(folder))


def by_code(findings):
    return {found.code: found for found in findings if not found.code.startswith("DATA")}


@pytest.fixture(scope="module")
def unmarked(tmp_path_factory):
    """Return a function that gives the run of a folder without marks; each folder is copied once."""
    copies = {}

    def of(folder):
        if folder in copies:
            return load(copies[folder])
        copies[folder] = tmp_path_factory.mktemp("unmarked") / folder.name
        return without_marks(folder, copies[folder])

    return of


@pytest.fixture(scope="module")
def window_of_megatron(unmarked):
    """The findings on a recording of one step without the mark of that step."""
    return judged(unmarked(shared("megatron_tp8_a100_8ranks")))


JUDGED = {
    "torchrec_v100_4ranks": {"HOST001", "RANK001", "MEM001", "COMM001"},
    "hta_dlrm_a100": {"COMM001"},
    "hta_cpu_gloo": {"COMM001"},
    "nanogpt_h100_8ranks": {"HOST001", "RANK001"},
    "kineto_resnet_v100_memory": {"HOST001"},
}


@pytest.mark.parametrize("name", others_in_accuracy(JUDGED, {"hta_cpu_gloo", "torchrec_v100_4ranks"}))
def test_a_recording_of_others_has_the_same_findings_in_iterations_that_are_found(name, unmarked):
    folder, codes = shared(name), JUDGED[name]
    in_steps, in_iterations = judged_as_recorded(folder), judged(unmarked(folder))
    assert codes <= in_steps.keys()
    assert codes <= in_iterations.keys()
    for code in codes:
        found, expected = in_iterations[code], in_steps[code]
        assert found.is_of_iterations
        assert len(found.steps) == len(expected.steps)
        assert found.severity == expected.severity
        assert found.cost_ns == pytest.approx(expected.cost_ns, rel=0.15)
        assert "iteration" in found.message
        assert not re.search(r"\bsteps?\b", found.message)


@pytest.mark.accuracy
def test_a_recording_of_one_step_has_the_same_findings_in_its_window(window_of_megatron):
    in_step, in_window = judged_as_recorded(shared("megatron_tp8_a100_8ranks")), window_of_megatron
    for code in ("HOST001", "RANK003"):
        found = in_window[code]
        assert (found.steps, found.is_of_window, found.is_of_iterations) == ((), True, False)
        assert found.severity == in_step[code].severity
        assert found.cost_ns > 0
        assert "the step" not in found.message
        assert "None" not in found.message


AGREEING = (
    "torchrec_v100_4ranks", "hta_dlrm_a100", "hta_cpu_gloo", "nanogpt_h100_8ranks", "hta_pair_of_128",
    "kineto_resnet_v100_memory", "hta_nccl_args_a100", "tracelens_mi300_resnet_ddp", "megatron_tp8_a100_8ranks",
)  # fmt: skip


@pytest.mark.parametrize("name", others_in_accuracy(AGREEING, {"hta_cpu_gloo", "torchrec_v100_4ranks"}))
def test_iterations_that_are_found_agree_with_the_marks_that_were_removed(name, unmarked):
    folder = shared(name)
    for expected, found in zip(load(folder).traces(), unmarked(folder).traces(), strict=True):
        check_agreement(expected.steps, found.steps)


@pytest.mark.parametrize(
    "name",
    others_in_accuracy(
        ["dataloader", "host-sync", "late-launch", "slow-rank", "slow-disk", "healthy-fsdp2"],
        ["dataloader", "host-sync", "late-launch", "slow-disk", "healthy-fsdp2"],
    ),
)
def test_iterations_of_a_sample_agree_with_its_marks(name, unmarked):
    folder = SAMPLES / name
    for expected, found in zip(load(folder).traces(), unmarked(folder).traces(), strict=True):
        check_agreement(expected.steps, found.steps)


def check_agreement(marked, found):
    """Windows on the device begin within 2% of a step of each other, and as many were found as were marked."""
    if marked.height == 1:
        assert found["step"].to_list() == [None]
        return
    assert found["step"].to_list() == list(range(marked.height))
    tolerance_ns = 0.02 * (marked["end_ns"] - marked["start_ns"]).median()
    assert ((marked["start_ns"] - found["start_ns"]).abs() <= tolerance_ns).all()
    on_host = (marked["host_start_ns"] - found["host_start_ns"]).abs()
    assert (on_host <= 4 * tolerance_ns).all()


WITH_STEPS = ("nanogpt_h100_8ranks", "torchrec_v100_4ranks", "kineto_resnet_v100_memory")


@pytest.mark.parametrize("name", others_in_accuracy(WITH_STEPS, {"torchrec_v100_4ranks"}))
def test_nothing_repeats_in_one_step(name, tmp_path):
    folder = shared(name)
    run = load(folder)
    for trace in run.traces():
        step = trace.steps.row(1, named=True)
        inside = partial(between, step["host_start_ns"], step["host_end_ns"], trace.header)
        cut = without_marks(folder, tmp_path / f"{name}{trace.rank}", only=Path(trace.path).name, keep=inside)
        (found,) = cut.traces()
        assert found.steps["step"].null_count() == found.steps.height


def between(start_ns, end_ns, header, event):
    """Return whether an event has no time, or begins in a span."""
    if "ts" not in event or event.get("ph") not in ("X", "i"):
        return event.get("ph") == "M"
    at_ns = int(header.get("baseTimeNanoseconds") or 0) + 1000 * float(event["ts"])
    return start_ns <= at_ns < end_ns


@pytest.mark.accuracy
def test_a_replay_prices_a_window(window_of_megatron):
    # Both have one step, so the window is the step; it begins with the mark or with the first op.
    in_step, in_window = judged_as_recorded(shared("megatron_tp8_a100_8ranks")), window_of_megatron
    assert in_window["HOST001"].cost_ns == pytest.approx(in_step["HOST001"].cost_ns, rel=0.001)
    assert "saves 418 ms (" in in_window["HOST001"].sentence


@pytest.mark.parametrize(
    ("name", "code", "severity"),
    [
        ("dataloader", "HOST003", Severity.WARNING),
        ("host-sync", "HOST002", Severity.INFO),
        ("late-launch", "HOST001", Severity.WARNING),
    ],
)
def test_a_fault_on_the_host_is_found_without_marks(name, code, severity, unmarked):
    found = judged(unmarked(SAMPLES / name))
    assert found[code].severity == severity
    assert found[code].is_of_iterations


@pytest.mark.parametrize("name", ["healthy-ddp", "slow-fsync"])
def test_a_window_without_a_fault_of_time_has_no_finding_about_time(name, unmarked):
    found = judged(unmarked(SAMPLES / name))
    assert not [code for code in found if code.startswith(("HOST", "RANK", "STREAM", "MEM"))]


def test_one_long_wait_in_a_window_makes_no_straggler(unmarked):
    # In this recording rank 0 is late at some collectives and rank 1 at others, once by a lot.
    assert "RANK001" not in judged(unmarked(SAMPLES / "healthy-fsdp2"))


def test_what_needs_steps_is_said(tmp_path):
    (trace,) = load(SAMPLES / "churn").traces()
    first = trace.steps.row(0, named=True)
    one_step = partial(between, first["host_start_ns"], first["host_end_ns"], trace.header)
    report = check(without_marks(SAMPLES / "churn", tmp_path / "run", keep=one_step))
    assert "the traces mark no steps" in report.blind_spots["MEM010"]
