"""Rules against the known faults of new simulated runs, and of recorded runs with their healthy twins."""

import time

import pytest

from benchmarks import labelled_pairs, labelled_report, labelled_runs
from tracekit.simulate import faults

RUNS = 12
ALLOWED = 1  # mistake: a run that is 95% right makes two or more of them in one of eight


def test_rules_are_right_about_fresh_simulated_runs() -> None:
    seed = time.time_ns() % 1_000_000
    runs = list(labelled_runs.judged(RUNS, seed))
    known = {fault.code for fault in faults.FAULTS.values()} <= set(labelled_report.codes())
    mistakes = [line for each in runs for line in labelled_report.mistakes(each)]
    assert len(mistakes) <= ALLOWED, f"--runs {RUNS} --seed {seed}: {mistakes}"
    must = sum(each.must_be_found(code) for each in runs for code in labelled_report.codes())
    assert must >= RUNS // 3 or not known
    warned, healthy = labelled_report.false_alarms(runs)
    assert healthy == RUNS // 4
    assert warned <= ALLOWED, f"--runs {RUNS} --seed {seed}"


@pytest.fixture(scope="module")
def pairs() -> list[labelled_pairs.Pair]:
    return labelled_pairs.judged()


def test_recorded_faults_are_reported_by_a_rule_that_should_report_them(pairs: list[labelled_pairs.Pair]) -> None:
    for pair in pairs:
        assert any(each.startswith(tuple(pair.code.split(", "))) for each in pair.findings), pair


def test_healthy_twins_get_no_warning(pairs: list[labelled_pairs.Pair]) -> None:
    for pair in pairs:
        assert set(pair.twin) <= {"CKPT001 (info)", "COMM001 (info)"}, pair
