"""How rules are scored against the truth of simulated runs."""

import pytest

from benchmarks import labelled_report, labelled_runs
from benchmarks.labelled_runs import Judged
from tests.unit.simulate.jobs import job
from tracekit.rules.rule import Finding, Severity
from tracekit.simulate.truth import KnownFault


def _run(known: dict[str, int], found: dict[str, int]) -> Judged:
    """Return a run of 100 ms in one step: costs in ms by code, as they are and as rules tell them."""
    return Judged(
        job(steps=1),
        (),
        tuple(KnownFault("fault", code, (0,), (0,), 0, 1, ms * 1_000_000) for code, ms in known.items()),
        100_000_000,
        tuple(Finding(code, Severity.WARNING, "", "", cost_ns=ms * 1_000_000) for code, ms in found.items()),
    )


def test_alarms_are_right_wrong_or_missing_and_small_costs_count_neither_way() -> None:
    runs = [
        _run({"RANK001": 10}, {"RANK001": 9}),  # right, 10% off
        _run({"RANK001": 10}, {}),  # missed
        _run({}, {"RANK001": 5}),  # wrong
        _run({"RANK001": 1}, {}),  # too small to matter
        _run({"RANK001": 1}, {"RANK001": 1}),
        _run({"COMM001": 22}, {}),  # below what COMM001 speaks of
    ]
    found = labelled_report.score(runs, "RANK001")
    assert (found.right, found.wrong, found.missed) == (1, 1, 1)
    assert (found.precision, found.recall) == (0.5, 0.5)
    assert found.cost_error == pytest.approx(0.1)
    assert labelled_report.score(runs, "COMM001").missed == 0


def test_retries_beside_device_mallocs_are_not_wrong() -> None:
    found = labelled_report.score([_run({"MEM001": 10}, {"MEM007": 11}), _run({}, {"MEM007": 5})], "MEM007")
    assert (found.right, found.wrong, found.missed) == (0, 1, 0)


def test_the_table_has_a_line_for_every_rule_that_spoke_or_had_to_and_names_the_others() -> None:
    told = labelled_report.table([_run({"COMM001": 40}, {"COMM001": 40})])
    assert "| COMM001 | 1 | 0 | 0 | 100% | 100% | 0% | 100% |" in told
    assert "| MEM001 |" not in told
    assert "MEM001" in told.partition("Rules without a fault of their own in these runs: ")[2]
    assert "COMM001" not in told.partition("Rules without a fault of their own in these runs: ")[2]


def test_a_drawn_run_is_simulated_and_judged() -> None:
    (found,) = labelled_runs.judged(1, seed=4)
    assert found.total_ns > 0
    assert len(found.known) >= len(found.asked)
