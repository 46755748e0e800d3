"""A recorded test judged: what failed it in a few lines, and its row of the summary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict

import numpy as np
import polars as pl

from tracekit.cli import settings, settings_file
from tracekit.errors import TracekitError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.regression import gate as checks
from tracekit.regression.budgets import BudgetOutcome, BudgetResult
from tracekit.regression.gate import CheckResult
from tracekit.regression.samples import job_samples, samples
from tracekit.report import phrases
from tracekit.rules import engine
from tracekit.rules.registry import all_rules
from tracekit.rules.rule import Finding, cost_order
from tracekit.testing.marks import TraceBudget
from tracekit.testing.recording import TraceRun

MOST_FINDINGS = 3


class SummaryRow(TypedDict):
    """A test in the summary: medians over its steps, the highest peak; None where not measured."""

    test: str
    step_time_ns: float | None
    exposed_communication_ratio: float | None
    peak_allocated_bytes: float | None
    allocations: float | None
    finding: str
    outcome: str
    failed: bool


@dataclass(frozen=True)
class BudgetVerdict:
    """What failed a test, '' where nothing did, and its row."""

    failure: str
    row: SummaryRow


def judge(recording: TraceRun, budget: TraceBudget, test: str, *, settings_from: Path) -> BudgetVerdict:
    """Judge what a test recorded by its mark, and by the settings that count in a folder.

    What cannot be judged is a failure too, which says why.
    """
    try:
        run = recording.run
        catalog = all_rules()
        file = settings_file.find_file(settings_from)
        settled = settings.read(file, catalog) if file else settings.CheckSettings()
        facts: tuple[TraceFact, ...] = (samples, *checks.facts(budget.budgets, with_baseline=False))
        report = engine.check(run, settings.configured_rules(settled, catalog), facts=facts)
        report = settings.apply_ignores(report, settled.ignore, catalog)
        gate = checks.judge(report, budget.fail_on, budgets=budget.budgets)
    except TracekitError as error:
        return BudgetVerdict(f"trace budget: {error}", _row(test, {}, "", "not recorded"))
    measured = {metric: float(np.median(values)) for metric, values in job_samples(run.table(samples)).items()}
    costliest = _costliest(gate.report.findings)
    top = f"{costliest[0].code} {phrases.rule_name(costliest[0].code)}" if costliest else ""
    outcome = _outcome(gate)
    failed = gate.failures or _unmeasured_budgets(gate)
    return BudgetVerdict(_failure(gate, run, recording.folder) if failed else "", _row(test, measured, top, outcome))


def _failure(gate: CheckResult, run: Run, folder: Path) -> str:
    timed = run.table(samples).filter(pl.col("metric") == "step_time_ns")
    steps = timed["step"].drop_nulls().unique().to_list()
    lines = [f"trace budget broken, by steps {units.ranges(steps)}"]
    unmeasured = _unmeasured_budgets(gate)
    lines += [f"  {r.budget}: {r.message}" for r in gate.budgets if gate.fails_budget(r) or r in unmeasured]
    lines += [f"  {verdict.finding.id}: fails the test" for verdict in gate.findings if verdict.fails]
    findings = _costliest(gate.report.findings)
    if findings:
        lines.append("what costs most:")
    for finding in findings[:MOST_FINDINGS]:
        lines.append(f"  {finding.id} {finding.sentence}")
        lines += [f"    fix: {finding.fix}"] if finding.fix else []
    return "\n".join([*lines, f"the run: tracekit check {folder}"])


def _costliest(findings: Sequence[Finding]) -> list[Finding]:
    costly = [finding for finding in findings if finding.cost_ns or finding.cost_bytes]
    return sorted(costly, key=cost_order, reverse=True)


def _unmeasured_budgets(gate: CheckResult) -> list[BudgetResult]:
    """Budgets whose metric was not measured: a test that can never fail is to fail now."""
    return [result for result in gate.budgets if result.measured is None]


def _outcome(gate: CheckResult) -> str:
    if gate.failures:
        return "broken: " + ", ".join(gate.failures)
    unmeasured = _unmeasured_budgets(gate)
    if unmeasured:
        return "not measured: " + ", ".join(result.budget for result in unmeasured)
    unsure = [result.budget for result in gate.budgets if result.outcome is BudgetOutcome.INCONCLUSIVE]
    if unsure:
        return f"inconclusive: {', '.join(unsure)}"
    return "met" if gate.budgets else ""


def _row(test: str, measured: Mapping[str, float], finding: str, outcome: str) -> SummaryRow:
    return SummaryRow(
        test=test,
        step_time_ns=measured.get("step_time_ns"),
        exposed_communication_ratio=measured.get("exposed_communication_ratio"),
        peak_allocated_bytes=measured.get("peak_allocated_bytes"),
        allocations=measured.get("allocations"),
        finding=finding,
        outcome=outcome,
        failed=False,
    )
