"""What findings cost is what a replay without their cause would take less."""

from pathlib import Path

import pytest

import tracekit
from tests import drawn, proofs
from tests.unit.simulate.jobs import job, written
from tracekit import pricing
from tracekit.rule import Finding, Report, Rule, Severity
from tracekit.rules import RULES
from tracekit.rules.rank import Straggler
from tracekit.rules.recomputation import NeedlessRecomputation
from tracekit.simulate.truth import Known
from tracekit.whatif.causes import CAUSES


def simulated(out: Path, fault: str, **changes: int) -> tuple[tracekit.Run, Known]:
    found = written(job("fsdp2", steps=4, ranks_written=3, **changes), out, fault)
    return tracekit.load(str(out), cache=False), found.known[0]


def told(run: tracekit.Run, rule: Rule) -> Report:
    """Return what a rule says before it is priced."""
    return Report(run, tuple(rule.check(run)), (), (), "")


def test_the_cost_is_that_of_the_steps_in_which_the_fault_acts(tmp_path: Path) -> None:
    run, known = simulated(tmp_path, "straggler-from-step:2:1:1.5")
    bare = told(run, Straggler())
    (found,) = pricing.priced(bare).findings
    assert found.steps == known.steps == (2, 3)
    assert found.cost_ns == pytest.approx(known.cost_ns, rel=0.05)
    assert found.message.startswith(bare.findings[0].message)
    assert f"less ({100 * found.impact:.1f}%)." in found.message
    assert found.severity is Severity.WARNING


def test_only_what_memory_could_hold_is_saved(tmp_path: Path) -> None:
    run, _ = simulated(tmp_path, "needless-recomputation")
    regions = run.table(NeedlessRecomputation.facts[0])
    (every,) = pricing.priced(told(run, NeedlessRecomputation())).findings
    room = NeedlessRecomputation()._room(run) or 0
    memory = 80 << 30
    # Free for two of four layers.
    two = (room - 2.5 * regions["held_bytes"][0]) / memory
    (half,) = pricing.priced(told(run, NeedlessRecomputation(keep_free_ratio=0.05 + two))).findings
    assert "could hold 2 of them" in half.message
    assert 0 < half.cost_ns < 0.7 * every.cost_ns


def test_a_cause_whose_end_would_save_nothing_is_information() -> None:
    run = proofs.meeting(0, 3)
    (found,) = told(run, Straggler()).findings
    (same,) = pricing.priced(told(run, Straggler())).findings
    assert same.severity is Severity.WARNING
    # Of a run whose ranks all take as long the replay without a straggler saves nothing.
    (nothing,) = pricing.priced(Report(proofs.meeting(0, 0), (found,), (), (), "")).findings
    assert (nothing.severity, nothing.cost_ns, nothing.impact) == (Severity.INFO, 0, 0.0)


def test_what_no_replay_can_tell_stays_as_it_is() -> None:
    run = drawn.run(drawn.trace(proofs.HIDDEN))
    findings = (
        Finding("RANK003", Severity.WARNING, "a.", "", impact=0.2, cost_ns=5),
        Finding("COMM001", Severity.INFO, "b.", "", impact=0.1),
        Finding("MEM001", Severity.INFO, "c.", "", cost_ns=3, subject="retries"),
    )
    priced = pricing.priced(Report(run, findings, (), (), "")).findings
    assert [(each.message, each.cost_ns, each.impact) for each in priced] == [
        (each.message, each.cost_ns, each.impact) for each in findings
    ]


def test_findings_are_sorted_anew() -> None:
    run = proofs.meeting(0, 3)
    (found,) = told(run, Straggler()).findings
    dear = Finding("RANK003", Severity.WARNING, "a.", "", impact=0.99, cost_ns=5)
    assert [each.code for each in pricing.priced(Report(run, (found, dear), (), (), "")).findings] == [
        "RANK003",
        "RANK001",
    ]


def test_every_cause_is_one_that_can_be_replayed() -> None:
    codes = {rule.code for rule in RULES}
    for named, cause in pricing._CAUSES.items():
        assert named.split()[0] in codes
        assert CAUSES[cause].code == named.split()[0]
