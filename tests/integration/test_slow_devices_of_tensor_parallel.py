"""A tensor-parallel job of eight A100s that its devices limit: a slow GPU, uneven work, a slow link, a slow while."""

import random
from pathlib import Path

import pytest

from benchmarks import injected_faults, perturbation_graph, perturbed
from tracekit.rules.rule import Severity

FOLDER = Path(__file__).parents[3] / "shared" / "traces" / "megatron_tp8_a100_8ranks"
HOST_SPEED = 5
"""The recorded hosts launch too slowly for anything else to matter."""

pytestmark = [
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the public traces are not here"),
    pytest.mark.accuracy,  # unit/rules/test_one_fault has a recorded slow rank and its price
]


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return perturbation_graph.with_faster_hosts(FOLDER, tmp_path_factory.mktemp("fast"), HOST_SPEED)


@pytest.fixture(scope="module")
def control(recordings, tmp_path_factory):
    job = perturbation_graph.load(recordings.glob("*.json.gz"))
    return perturbed.Control.of(perturbed.check_job(job, tmp_path_factory.mktemp("control")))


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (injected_faults.slow_rank, "RANK001"),
        (injected_faults.uneven_work, "RANK003"),
        (injected_faults.slow_collectives, "COMM001"),
        (injected_faults.background_save, "STEP003"),
    ],
)
def test_a_fault_is_one_warning_at_its_price(recordings, control, tmp_path, fault, code):
    job = perturbation_graph.load(recordings.glob("*.json.gz"))
    culprit = fault(job, 0.15, random.Random("slow"))
    (finding,) = (f for f in perturbed.check_job(job, tmp_path).findings if f.code == code)
    assert finding.severity >= Severity.WARNING
    assert culprit is None or finding.ranks == (culprit,)
    truth_ns = 1000 * job.lost_in_steps_us()
    assert finding.cost_ns - control.cost_ns(finding) == pytest.approx(truth_ns, rel=0.15)
