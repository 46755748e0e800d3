"""How rules are scored against the truth of simulated runs."""

from dataclasses import replace

import pytest

from benchmarks import labelled_report, labelled_runs
from benchmarks.labelled_runs import Judged
from tests.unit.simulate.jobs import job
from tracekit.rules.rule import Finding, Severity
from tracekit.simulate.run import KnownFault


def _run(known: dict[str, int], found: dict[str, int]) -> Judged:
    """Return a run of 100 ms in one step: true costs in ms by code, and those that rules report."""
    return Judged(
        job(steps=1),
        (),
        tuple(KnownFault("fault", code, (0,), (0,), 0, 1, ms * 1_000_000) for code, ms in known.items()),
        100_000_000,
        tuple(Finding(code, Severity.WARNING, "", "", cost_ns=ms * 1_000_000) for code, ms in found.items()),
    )


def test_findings_are_right_wrong_or_missing_and_small_costs_do_not_count() -> None:
    runs = [
        _run({"RANK001": 10}, {"RANK001": 9}),  # right, 10% off
        _run({"RANK001": 10}, {}),  # missed
        _run({}, {"RANK001": 5}),  # wrong
        _run({"RANK001": 1}, {}),  # too small to matter
        _run({"RANK001": 1}, {"RANK001": 1}),
        _run({"COMM001": 22}, {}),  # below the threshold of COMM001
    ]
    found = labelled_report.score(runs, "RANK001")
    assert (found.right, found.wrong, found.missed) == (1, 1, 1)
    assert (found.precision, found.recall) == (0.5, 0.5)
    assert found.cost_error == pytest.approx(0.1)
    assert labelled_report.score(runs, "COMM001").missed == 0


def test_a_finding_about_retries_is_not_wrong_if_there_are_device_allocations() -> None:
    found = labelled_report.score([_run({"MEM001": 10}, {"MEM007": 11}), _run({}, {"MEM007": 5})], "MEM007")
    assert (found.right, found.wrong, found.missed) == (0, 1, 0)


def test_a_clock_drop_reports_the_rank_that_straggles_from_some_step_on() -> None:
    run = replace(_run({"RANK001": 10}, {"STEP003": 9}), requested=("straggler-from-step",))
    found = labelled_report.score([run], "RANK001")
    assert (found.right, found.wrong, found.missed) == (1, 0, 0)
    assert found.cost_error == pytest.approx(0.1)
    assert "| straggler-from-step | RANK001 | 1 | 1 | 1 | 0 |" in labelled_report.by_fault([run])


def test_the_table_lists_every_rule_with_findings_or_faults_and_names_the_others() -> None:
    table = labelled_report.table([_run({"COMM001": 40}, {"COMM001": 40})])
    assert "| COMM001 | 1 | 0 | 0 | 100% | 100% | 0% | 100% |" in table
    assert "| MEM001 |" not in table
    assert "MEM001" in table.partition("Rules without a fault of their own in these runs: ")[2]
    assert "COMM001" not in table.partition("Rules without a fault of their own in these runs: ")[2]


def test_a_random_run_is_simulated_and_judged() -> None:
    (found,) = labelled_runs.judge_runs(1, seed=4)
    assert found.total_ns > 0
    assert len(found.faults) >= len(found.requested)
