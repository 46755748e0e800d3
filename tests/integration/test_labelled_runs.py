"""Rules against the known faults of new simulated runs, and of recorded runs with their healthy twins."""

import pytest

from benchmarks import labelled_pairs, labelled_report, labelled_runs
from tracekit.simulate import faults

pytestmark = pytest.mark.accuracy  # many runs with known faults: `make accuracy`

RUNS = 12
SEED = 1  # any: the rules were not made for it; docs/lab/labelled_runs.md has many more runs, of new seeds
ALLOWED = 1  # mistake: of 12 runs that are 95% right each, one in eight sets has two or more


def test_rules_are_right_about_simulated_runs() -> None:
    runs = list(labelled_runs.judge_runs(RUNS, SEED))
    known = {fault.code for fault in faults.FAULTS.values()} <= set(labelled_report.codes())
    mistakes = [line for each in runs for line in labelled_report.mistakes(each)]
    assert len(mistakes) <= ALLOWED, f"--runs {RUNS} --seed {SEED}: {mistakes}"
    must = sum(each.must_be_found(code) for each in runs for code in labelled_report.codes())
    assert must >= RUNS // 3 or not known
    warned, healthy = labelled_report.false_alarms(runs)
    assert healthy == RUNS // 4
    assert warned <= ALLOWED, f"--runs {RUNS} --seed {SEED}"


@pytest.fixture(scope="module")
def pairs() -> list[labelled_pairs.Pair]:
    return labelled_pairs.judge_pairs()


def test_recorded_faults_are_reported_by_a_rule_that_should_report_them(pairs: list[labelled_pairs.Pair]) -> None:
    for pair in pairs:
        assert any(each.startswith(tuple(pair.code.split(", "))) for each in pair.findings), pair


def test_healthy_twins_get_no_warning(pairs: list[labelled_pairs.Pair]) -> None:
    # True of the twins: FSDP2 on gloo blocks on each collective (8.8% of a step), and a save after every six steps of
    # 17 ms takes most of the time.
    costs = {"COMM001 (warning)", "CKPT001 (warning)"}
    for pair in pairs:
        warnings = {finding for finding in pair.twin if not finding.endswith("(info)")}
        assert warnings <= {cost for cost in costs if cost.partition(" ")[0] in pair.code}, pair
