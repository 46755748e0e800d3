"""The cost of a finding is the time that a replay without its cause saves."""

import ast
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

import tracekit
from tests.support import drawn_traces, rule_examples
from tests.support.wording import Wording
from tests.unit.simulate.jobs import job, written
from tracekit import rules
from tracekit.model import units
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes import CAUSES
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.collectives import COMMUNICATION
from tracekit.replay.graph.causes.device_time import STRAGGLER
from tracekit.replay.graph.causes.stalls import Removal
from tracekit.rules import cost_attribution
from tracekit.rules.memory_reuse import NeedlessRecomputation
from tracekit.rules.rule import Finding, Report, Rule, Severity, WhatIf
from tracekit.rules.stragglers import Straggler
from tracekit.simulate.run import KnownFault


def simulated(out: Path, fault: str, **changes: int) -> tuple[tracekit.Run, KnownFault]:
    found = written(job("fsdp2", steps=4, ranks_written=3, **changes), out, fault)
    return tracekit.load(str(out), cache=False), found.known_faults[0]


def uncosted_report(run: tracekit.Run, rule: Rule) -> Report:
    """Return the findings of a rule before their costs are attributed."""
    return Report(run, tuple(rule.check(run)), (), (), "")


def test_the_cost_is_what_the_mean_step_of_the_run_is_longer(tmp_path: Path) -> None:
    run, known = simulated(tmp_path, "straggler-from-step:2:1:1.5")
    uncosted = uncosted_report(run, Straggler())
    (found,) = cost_attribution.attribute_costs(uncosted).findings
    assert (found.is_priced, uncosted.findings[0].is_priced) == (True, False)
    assert found.steps == known.steps == (2, 3)
    assert found.cost_ns == pytest.approx(known.cost_ns * len(known.steps) / 4, rel=0.05)
    assert found.cost_ns == savings.saving(run, "straggler").saved_ns
    assert found.message.startswith(uncosted.findings[0].message)
    assert found.measured_ns == uncosted.findings[0].cost_ns
    assert found.sentence.endswith(f" a step ({units.share(found.impact)})")
    assert f"; fixing it saves {units.duration(found.cost_ns)} of " in found.sentence
    assert found.severity is Severity.WARNING


def test_another_recording_of_the_job_says_what_the_same_removal_saves_there(tmp_path: Path) -> None:
    slow, _ = simulated(tmp_path / "slow", "straggler-from-step:2:1:1.5")
    (found,) = cost_attribution.attribute_costs(uncosted_report(slow, Straggler())).findings
    assert found.removals == (Removal(STRAGGLER, found.ranks),)
    written(job("fsdp2", steps=4, ranks_written=3), tmp_path / "healthy")
    healthy = Report(tracekit.load(str(tmp_path / "healthy"), cache=False), (), (), (), "")
    assert cost_attribution.saved_by(Report(slow, (found,), (), (), ""), found.removals) == found.cost_ns
    assert cost_attribution.saved_by(healthy, found.removals) < 0.05 * found.cost_ns


def test_only_activations_that_fit_in_memory_are_saved(tmp_path: Path, wording: Wording) -> None:
    run, _ = simulated(tmp_path, "needless-recomputation")
    regions = run.table(NeedlessRecomputation.facts[0])
    (every,) = cost_attribution.attribute_costs(uncosted_report(run, NeedlessRecomputation())).findings
    room = NeedlessRecomputation()._free_bytes(run) or 0
    memory = 80 << 30
    # Two of four layers fit.
    two = (room - 2.5 * regions["activation_bytes"][0]) / memory
    (half,) = cost_attribution.attribute_costs(
        uncosted_report(run, NeedlessRecomputation(keep_free_ratio=0.05 + two))
    ).findings
    wording(half.message)
    assert 0 < half.cost_ns < 0.7 * every.cost_ns


def test_a_cause_whose_removal_saves_nothing_is_information(tmp_path: Path) -> None:
    written(job("fsdp2", steps=4, ranks_written=3), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    straggler = Finding(
        "RANK001", Severity.WARNING, "a.", "", impact=0.2, cost_ns=5, steps=(0, 1, 2, 3), what_if=WhatIf(STRAGGLER)
    )
    costly = Finding("RANK003", Severity.WARNING, "b.", "", impact=0.99, cost_ns=5)
    first, second = cost_attribution.attribute_costs(Report(run, (straggler, costly), (), (), "")).findings
    assert (first.code, second.code, second.severity) == ("RANK003", "RANK001", Severity.INFO)
    assert second.impact < 0.005


def test_a_run_with_too_little_work_is_not_replayed() -> None:
    report = uncosted_report(rule_examples.straggler_run(0, 3), Straggler())
    assert report.findings[0].severity is Severity.WARNING
    assert cost_attribution.attribute_costs(report).findings == report.findings


def test_findings_without_a_cause_are_unchanged() -> None:
    run = drawn_traces.run(drawn_traces.trace(rule_examples.HIDDEN))
    findings = (
        Finding("RANK003", Severity.WARNING, "a.", "", impact=0.2, cost_ns=5),
        Finding("COMM001", Severity.INFO, "b.", "", impact=0.1),
        Finding("MEM001", Severity.INFO, "c.", "", cost_ns=3, subject="retries"),
    )
    attributed = cost_attribution.attribute_costs(Report(run, findings, (), (), "")).findings
    assert [(each.message, each.cost_ns, each.impact) for each in attributed] == [
        (each.message, each.cost_ns, each.impact) for each in findings
    ]


def test_information_that_saves_nothing_is_left_out(tmp_path: Path) -> None:
    written(job("fsdp2", steps=4, ranks_written=3), tmp_path)
    run = tracekit.load(str(tmp_path), cache=False)
    costly = Finding("A", Severity.INFO, "a.", "", impact=0.2, cost_ns=5, what_if=WhatIf(STRAGGLER))
    cheap = Finding("B", Severity.WARNING, "b.", "", impact=0.01, cost_ns=5, what_if=WhatIf(STRAGGLER, 0.02))
    confirmed = Finding("C", Severity.WARNING, "c.", "", impact=0.01, cost_ns=5, what_if=WhatIf(COMMUNICATION, 0.02))
    (found,) = cost_attribution.attribute_costs(Report(run, (costly, cheap, confirmed), (), (), "")).findings
    assert (found.code, found.severity) == ("C", Severity.WARNING)
    assert found.impact > 0.02


def test_without_a_replay_the_measured_cost_counts() -> None:
    run = drawn_traces.run(drawn_traces.trace(rule_examples.HIDDEN))
    enough = Finding("A", Severity.WARNING, "a.", "", impact=0.02, cost_ns=5, what_if=WhatIf(STRAGGLER, 0.02))
    little = replace(enough, code="B", impact=0.019)
    assert cost_attribution.attribute_costs(Report(run, (enough, little), (), (), "")).findings == (enough,)


def test_every_cause_of_a_rule_can_be_replayed() -> None:
    found = {
        (code, constant)
        for module in pkgutil.iter_modules(rules.__path__)
        for code, constant in _causes_in(importlib.import_module(f"tracekit.rules.{module.name}"))
    }
    assert {(code, _constant(cause)) for cause in CAUSES for code in cause.codes} >= found
    assert len(found) >= 12


def _causes_in(module: ModuleType) -> Iterator[tuple[str, str]]:
    """Yield the code of each rule with a cause, and the constant of the cause."""
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        code = getattr(getattr(module, node.name), "code", None) if isinstance(node, ast.ClassDef) else None
        for each in ast.walk(node) if code else ():
            if isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id == "WhatIf":
                for name in ast.walk(each.args[0]):
                    if isinstance(name, ast.Name) and name.id.isupper():
                        yield code, name.id


def _constant(cause: Cause) -> str:
    return cause.name.replace("-", "_").upper()
