"""One fault makes one finding: public recordings with a fault of all ranks, or without one rank's recording."""

import random
from pathlib import Path

import pytest

import tracekit
from benchmarks import injected_faults, perturbed
from tests.support import recorded_jobs, shared_findings
from tracekit.rules.rule import Severity

pytestmark = pytest.mark.accuracy  # recordings with injected faults: `make accuracy`
TRACES = Path(__file__).parents[3] / "shared" / "traces"
TORCHREC, MEGATRON = "torchrec_v100_4ranks", "megatron_tp8_a100_8ranks"


def shared(name):
    if not (TRACES / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    return TRACES / name


@pytest.fixture(scope="module")
def controls():
    """Return a function that gives the findings on an unchanged recording."""
    return lambda name: shared_findings.findings(shared(name))


def changed(name, kind, size, scratch):
    """Return the findings on a recording with a fault, and what it costs as a share of the recording."""
    job = recorded_jobs.job(shared(name))
    next(each for each in injected_faults.KINDS if each.name == kind).apply(job, size, random.Random(kind))
    findings = perturbed.check_job(job, scratch).findings
    length_us = max(rank.end for rank in job.ranks) - min(rank.start for rank in job.ranks)
    return findings, job.lost_us / length_us


def warnings(findings, *families):
    return {each.code for each in findings if each.severity > Severity.INFO and each.code.startswith(families)}


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        (TORCHREC, "reading scalars", "HOST002"),
        (TORCHREC, "allocation retries", "MEM001"),
        (MEGATRON, "allocation retries", "MEM001"),
    ],
)
def test_a_fault_of_all_ranks_makes_no_straggler(name, kind, code, tmp_path):
    # The pauses of the ranks differ by chance, so one of them arrives last; without the fault, none does.
    findings, share = changed(name, kind, 0.3, tmp_path)
    assert share > 0.25
    assert code in warnings(findings, code)
    assert warnings(findings, "RANK") == set()


def test_a_missing_rank_makes_no_finding_on_communication(controls, tmp_path):
    families = ("COMM", "RANK002", "STREAM")
    findings, _ = changed(TORCHREC, "missing rank", 0.1, tmp_path)
    assert "missing_ranks" in {each.subject for each in findings}
    assert warnings(findings, *families) <= warnings(controls(TORCHREC), *families)


def test_the_wait_for_a_rank_without_a_recording_is_no_warning_on_communication(tmp_path):
    # Ranks 0 and 6 launch late. Without rank 0, the wait of rank 6 for it cannot be told from a transfer.
    for path in shared(MEGATRON).glob("*.json.gz"):
        if not path.name.endswith("_0.json.gz"):
            (tmp_path / path.name).symlink_to(path)
    findings = tracekit.check(tracekit.load(tmp_path)).findings
    (exposed,) = (each for each in findings if each.code == "COMM001")
    assert "218 ms of 606 ms" in exposed.message
    assert exposed.severity is Severity.INFO
    assert exposed.impact < 0.02
    assert warnings(findings, "COMM", "RANK", "STREAM") == set()


def test_contention_of_one_percent_is_at_least_information(tmp_path):
    findings, share = changed(TORCHREC, "contention", 0.5, tmp_path)
    assert share == pytest.approx(0.007, abs=0.003)
    (found,) = (each for each in findings if each.code == "STREAM003")
    assert found.severity >= Severity.INFO
    assert found.impact == pytest.approx(share, abs=0.005)
