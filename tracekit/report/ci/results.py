"""What all CI formats share: the items that a check shows, which of them fail it, and their level."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tracekit.model import units
from tracekit.regression.budgets import BudgetOutcome, BudgetResult
from tracekit.regression.gate import NUMBERS, CheckResult, FindingStatus, JudgedFinding
from tracekit.regression.metrics import metric_of
from tracekit.regression.thresholds import Change
from tracekit.report import comparison, phrases, step_verdict
from tracekit.rules.rule import Finding, Severity, costliest


class Level(StrEnum):
    """The level at which CI shows an item: an item that fails the build is an error, a known finding a notice."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


class ItemKind(StrEnum):
    """What an item of a check is about."""

    FINDING = "finding"
    METRIC = "metric"
    BUDGET = "budget"
    NUMBERS = "numbers"


@dataclass(frozen=True, eq=False)
class CheckItem:
    """One item that a check shows: a finding, a worse metric, a budget that is not met, or numbers that differ."""

    kind: ItemKind
    id: str
    """As in `CheckResult.failures`."""
    title: str
    message: str
    """Sentences with the numbers, and what to change."""
    level: Level
    fails: bool
    status: FindingStatus | None = None
    finding: Finding | None = None
    """The finding itself; for a metric or a budget, the new finding that explains most of it."""

    @property
    def own_finding(self) -> Finding | None:
        """Return the finding that the item is, None for a metric or a budget."""
        return self.finding if self.kind is ItemKind.FINDING else None


def items(gate: CheckResult) -> tuple[CheckItem, ...]:
    """Return all items of a check, failing items first."""
    check_items = [*map(_finding, gate.findings), *(_metric(gate, change) for change in gate.regressions)]
    check_items += [_budget(gate, budget) for budget in gate.budgets if budget.outcome is not BudgetOutcome.MET]
    check_items += _numbers(gate)
    order = list(Level)
    return tuple(sorted(check_items, key=lambda item: (not item.fails, order.index(item.level))))


def failure_counts(gates: Sequence[CheckResult]) -> str:
    """Counts of the items of each kind that fail: "2 findings, 1 metric, 1 budget"."""
    counts = {
        "finding": sum(finding.fails for gate in gates for finding in gate.findings),
        "metric": sum(len(gate.regressions) for gate in gates),
        "budget": sum(gate.fails_budget(budget) for gate in gates for budget in gate.budgets),
        "numerical difference": sum(NUMBERS in gate.failures for gate in gates),
    }
    return ", ".join(units.count(number, noun) for noun, number in counts.items() if number)


def gates_by_name(gates: Sequence[CheckResult]) -> list[tuple[str, CheckResult]]:
    """Return the results with the unique names of their runs."""
    return list(zip(unique_names([gate.report.run.name for gate in gates]), gates, strict=True))


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names of runs, equal ones distinguished by their number in the list."""
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def level(verdict: JudgedFinding) -> Level:
    """Return the level at which CI shows a finding."""
    if verdict.fails:
        return Level.ERROR
    if verdict.status is FindingStatus.KNOWN or verdict.finding.severity is Severity.INFO:
        return Level.NOTICE
    return Level.WARNING


def _finding(verdict: JudgedFinding) -> CheckItem:
    finding = verdict.finding
    worse = verdict.status is FindingStatus.WORSE and verdict.impact_before is not None
    was = f" It was {100 * (verdict.impact_before or 0):.1f}% of {finding.time_noun} in the baseline."
    before = was if worse else ""
    message = f"{finding.sentence}.{before}" + (f" Fix: {finding.fix}" if finding.fix else "")
    name, status = phrases.rule_name(finding.code), verdict.status
    title = f"{name} ({finding.code})" if name != finding.code else name
    return CheckItem(ItemKind.FINDING, finding.id, title, message, level(verdict), verdict.fails, status, finding)


def _metric(gate: CheckResult, change: Change) -> CheckItem:
    against = f" than in {gate.baseline}" if gate.baseline else " than before"
    before, now = (metric_of(change.metric).text(value) for value in (change.reference, change.candidate))
    name = comparison.label(change.metric)
    causes = [cause.message for cause in gate.causes if change.metric in cause.metrics]
    summary = f"{name} is worse{against}: {before} before, {now} now, {comparison.change_text(change)}."
    if gate.comparison is not None and change is gate.comparison.step:
        summary = f"{comparison.with_minus_signs(step_verdict.headline(gate.comparison))}."
    message, cause = " ".join([summary, *causes]), _costliest_new_finding(gate, change.metric)
    return CheckItem(
        ItemKind.METRIC, change.metric, f"{name} regressed", message, Level.ERROR, fails=True, finding=cause
    )


def _costliest_new_finding(gate: CheckResult, metric: str) -> Finding | None:
    """Return the new or worse finding with the largest cost in a metric's unit."""
    new_findings = [verdict.finding for verdict in gate.findings if verdict.status is not FindingStatus.KNOWN]
    if metric.endswith("_bytes"):
        largest = max(new_findings, key=lambda finding: finding.cost_bytes, default=None)
        return largest if largest and largest.cost_bytes else None
    worst = costliest(new_findings)
    return worst if worst and worst.impact else None


def _numbers(gate: CheckResult) -> list[CheckItem]:
    numbers = gate.comparison.numbers if gate.comparison else None
    fails = NUMBERS in gate.failures
    if numbers is None or numbers.first is None or (numbers.is_other_training and not fails):
        return []
    level = Level.ERROR if fails else Level.NOTICE
    return [CheckItem(ItemKind.NUMBERS, NUMBERS, "numbers", f"{comparison.number_sentence(numbers)}.", level, fails)]


def _budget(gate: CheckResult, result: BudgetResult) -> CheckItem:
    fails = gate.fails_budget(result)
    level = Level.ERROR if fails else Level.NOTICE
    cause = _costliest_new_finding(gate, result.metric) if fails else None
    name = result.budget
    return CheckItem(ItemKind.BUDGET, name, f"budget {name}", result.message, level, fails, finding=cause)
