"""Runs whose steps are not marked: the same recordings without ProfilerStep and optimizer spans."""

import gzip
import json
import re
import shutil
from pathlib import Path

import pytest

from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

ROOT = Path(__file__).parents[2]
SAMPLES = ROOT / "sample_traces" / "faults"
OTHERS = ROOT.parent / "shared" / "traces"
MARKS = re.compile(r"^ProfilerStep|Optimizer\.step|Iteration Start")


def without_marks(folder, copy):
    """Copy the traces and the manifest of a run, without the events that mark steps."""
    copy.mkdir()
    for path in folder.glob("*.json.gz"):
        content = json.loads(gzip.decompress(path.read_bytes()))
        content["traceEvents"] = [e for e in content["traceEvents"] if not MARKS.search(str(e.get("name", "")))]
        (copy / path.name.removesuffix(".gz")).write_text(json.dumps(content))
    if (folder / "run.json").exists():
        shutil.copy(folder / "run.json", copy)
    return load(copy)


def shared(name):
    folder = OTHERS / name
    if not folder.is_dir():
        pytest.skip(f"needs ../shared/traces/{name}, which is not part of the project")
    return folder


def judged(run):
    return {found.code: found for found in check(run).findings if not found.code.startswith("DATA")}


@pytest.mark.parametrize(
    ("name", "codes"),
    [
        ("torchrec_v100_4ranks", {"HOST001", "RANK001", "MEM001", "COMM001"}),
        ("megatron_tp8_a100_8ranks", {"HOST001", "RANK003"}),
        ("hta_dlrm_a100", {"HOST002", "COMM001"}),
        ("hta_cpu_gloo", {"COMM001"}),
        ("nanogpt_h100_8ranks", {"HOST001", "RANK001"}),
    ],
)
def test_a_recording_of_others_has_the_same_findings_without_its_marks(name, codes, tmp_path):
    folder = shared(name)
    marked, unmarked = judged(load(folder)), judged(without_marks(folder, tmp_path / name))
    assert codes <= marked.keys()
    assert codes <= unmarked.keys()
    for code in codes:
        found = unmarked[code]
        assert (found.steps, found.is_of_window) == ((), True)
        # A smaller cost may be above a rule's bar in a step, and below it in the window.
        assert found.severity == marked[code].severity or marked[code].impact < 0.03
        assert found.cost_ns > 0
        assert "the step" not in found.message
        assert "None" not in found.message


def test_a_replay_prices_a_window(tmp_path):
    # Both have one step, so the window is the step.
    folder = shared("megatron_tp8_a100_8ranks")
    marked, unmarked = judged(load(folder)), judged(without_marks(folder, tmp_path / "run"))
    assert unmarked["HOST001"].cost_ns == marked["HOST001"].cost_ns
    assert re.search(r"Potential saving by replay: 411 ms in the window \(\d", unmarked["HOST001"].message)


@pytest.mark.parametrize(
    ("name", "code", "severity"),
    [
        ("dataloader", "HOST003", Severity.WARNING),
        ("host-sync", "HOST002", Severity.INFO),
        # Without steps, that two pauses are at one place may be a coincidence.
        ("late-launch", "HOST001", Severity.INFO),
    ],
)
def test_a_fault_on_the_host_is_found_without_marks(name, code, severity, tmp_path):
    found = judged(without_marks(SAMPLES / name, tmp_path / name))
    assert found[code].severity == severity
    assert found[code].is_of_window


@pytest.mark.parametrize("name", ["healthy-ddp", "slow-fsync"])
def test_a_window_without_a_fault_of_time_has_no_finding_about_time(name, tmp_path):
    found = judged(without_marks(SAMPLES / name, tmp_path / name))
    assert not [code for code in found if code.startswith(("HOST", "RANK", "STREAM", "MEM"))]


def test_one_long_wait_in_a_window_makes_no_straggler(tmp_path):
    # In this recording rank 0 is late at some collectives and rank 1 at others, once by a lot.
    assert "RANK001" not in judged(without_marks(SAMPLES / "healthy-fsdp2", tmp_path / "run"))


def test_what_needs_marked_steps_is_said(tmp_path):
    report = check(without_marks(SAMPLES / "churn", tmp_path / "run"))
    assert "the traces mark no steps" in report.blind_spots["MEM010"]
