"""One trouble, one price: public recordings into which an independent program put a trouble of known cost."""

import random
from pathlib import Path

import pytest

import tracekit
from benchmarks import perturbation_graph, perturbed
from tracekit.rules.rule import Severity

FOLDER = Path(__file__).parents[3] / "shared" / "traces" / "torchrec_v100_4ranks"
SIZE = 0.3

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="the downloaded traces are not in ../shared")


@pytest.fixture(scope="module")
def control():
    return costs(tracekit.check(tracekit.load(FOLDER)).findings)


def costs(findings):
    """Return the sum of the costs of the warnings of each code."""
    warned = [each for each in findings if each.severity >= Severity.WARNING]
    return {code: sum(each.cost_ns for each in warned if each.code == code) for code in {each.code for each in warned}}


def priced(name, scratch, folder=FOLDER):
    """Return the costs of the warnings about a changed recording, and the truth per step."""
    job = perturbation_graph.load(folder.glob("*.json.gz"))
    kind = next(each for each in perturbed.KINDS if each.name == name)
    kind.apply(job, SIZE, random.Random(name))
    found = perturbed.checked(job, scratch)
    return costs(found.findings), 1000 * job.lost_us / max(1, len(job.ranks[0].steps))


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("data stall", "HOST003", 0.15),
        ("data stall of one rank", "HOST003", 0.15),
        ("allocation retries", "MEM001", 0.15),
        ("reading scalars", "HOST002", 0.15),
        ("late launches of two ranks", "RANK001", 0.15),
        ("save without a name", "STEP001", 0.15),
    ],
)
def test_the_cause_that_a_person_can_remove_has_the_price(name, code, error, control, tmp_path):
    found, truth_ns = priced(name, tmp_path)
    assert found[code] - control.get(code, 0) == pytest.approx(truth_ns, rel=error)


@pytest.mark.parametrize("name", ["data stall", "data stall of one rank", "allocation retries"])
def test_late_launches_and_late_ranks_are_consequences_that_cost_no_more_than_in_the_control(name, control, tmp_path):
    found, truth_ns = priced(name, tmp_path)
    # Without a warning about the allocator, its time is part of what makes launches late.
    before_ns = late_ns(control) + (0 if "MEM001" in found else control.get("MEM001", 0))
    assert late_ns(found) - before_ns < 0.25 * truth_ns


def late_ns(found):
    return found.get("HOST001", 0) + found.get("RANK001", 0)


def test_reading_scalars_is_priced_as_a_blocking_call_and_only_once(control, tmp_path):
    # Rank 2 pauses in Python where it did before; a read in the middle of that pause does not explain it.
    found, truth_ns = priced("reading scalars", tmp_path)
    assert found["HOST002"] > 0.5 * truth_ns
    assert found["HOST002"] + late_ns(found) < 1.15 * (truth_ns + late_ns(control))


def test_no_data_stall_is_reported_where_the_host_loads_no_data(control):
    assert "HOST003" not in control


def test_a_stall_in_a_window_of_one_step_has_one_warning(tmp_path):
    # There a steady cause and a single stall look alike.
    found, truth_ns = priced("allocation retries", tmp_path, FOLDER.parent / "megatron_tp8_a100_8ranks")
    assert found["MEM001"] == pytest.approx(truth_ns, rel=0.15)
    assert "STEP001" not in found
