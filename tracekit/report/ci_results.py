"""What formats for CI say alike: what fails a check, what a check found worth showing, and how grave each is there."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tracekit.regression.budgets import BudgetOutcome
from tracekit.regression.gate import CheckResult, FindingStatus, JudgedFinding
from tracekit.regression.metrics import metric_of
from tracekit.report import comparison, phrases
from tracekit.rules.rule import Finding, Severity


class Level(StrEnum):
    """How grave CI shows something. What fails the build is an error; what is known is a notice."""

    ERROR = "error"
    WARNING = "warning"
    NOTICE = "notice"


class ItemKind(StrEnum):
    """What an item of a verdict speaks of."""

    FINDING = "finding"
    METRIC = "metric"
    BUDGET = "budget"


@dataclass(frozen=True, eq=False)
class CheckItem:
    """One thing that a check has to show: a finding, a metric that got worse, or a budget that is not kept."""

    kind: ItemKind
    id: str
    """As `Gate.failures` names it."""
    title: str
    message: str
    """Sentences with the numbers, and what to change."""
    level: Level
    fails: bool
    standing: FindingStatus | None = None
    finding: Finding | None = None
    """What it is, or, of a metric or a budget, what new finding tells most of it: where a person looks first."""


def items(gate: CheckResult) -> tuple[CheckItem, ...]:
    """Return all that a check has to show, what fails first."""
    found = [*map(_finding, gate.findings), *_metrics(gate), *_budgets(gate)]
    order = list(Level)
    return tuple(sorted(found, key=lambda item: (not item.fails, order.index(item.level))))


def failure_counts(gates: Sequence[CheckResult]) -> str:
    """Return how much of what fails: "2 findings, 1 metric, 1 budget"."""
    counts = {
        "finding": sum(each.fails for gate in gates for each in gate.findings),
        "metric": sum(len(gate.regressions) for gate in gates),
        "budget": sum(gate.fails_budget(each) for gate in gates for each in gate.budgets),
    }
    return ", ".join(f"{number} {noun}{'s' * (number > 1)}" for noun, number in counts.items() if number)


def run_names(gates: Iterable[CheckResult]) -> list[str]:
    """Return the unique names of the runs."""
    return unique_names([gate.report.run.name for gate in gates])


def unique_names(names: Sequence[str]) -> list[str]:
    """Return names of runs, equal ones distinguished by their number in the list."""
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def level(judged: JudgedFinding) -> Level:
    """Return how grave CI shows a finding."""
    if judged.fails:
        return Level.ERROR
    if judged.status is FindingStatus.KNOWN or judged.finding.severity is Severity.INFO:
        return Level.NOTICE
    return Level.WARNING


def rule_title(code: str) -> str:
    """Return a rule's name and code: "exposed-communication (COMM001)"."""
    name = phrases.rule_name(code)
    return f"{name} ({code})" if name != code else code


def _finding(judged: JudgedFinding) -> CheckItem:
    found = judged.finding
    worse = judged.status is FindingStatus.WORSE and judged.impact_before is not None
    before = f" It took {100 * (judged.impact_before or 0):.1f}% of the step before." if worse else ""
    fix = f" Fix: {found.fix}" if found.fix else ""
    return CheckItem(
        ItemKind.FINDING,
        found.id,
        rule_title(found.code),
        f"{found.message}{before}{fix}",
        level(judged),
        judged.fails,
        judged.status,
        found,
    )


def _metrics(gate: CheckResult) -> list[CheckItem]:
    against = f" than in {gate.baseline}" if gate.baseline else " than before"
    made = []
    for change in gate.regressions:
        before, now = (metric_of(change.metric).text(value) for value in (change.reference, change.candidate))
        name = comparison.label(change.metric)
        causes = [cause.message for cause in gate.causes if change.metric in cause.metrics]
        told = f"{name} is worse{against}: {before} before, {now} now, {comparison.change_text(change)}."
        message = " ".join([told, *causes])
        made.append(
            CheckItem(
                ItemKind.METRIC,
                change.metric,
                f"{name} regressed",
                message,
                Level.ERROR,
                fails=True,
                finding=_costliest_new_finding(gate, change.metric),
            )
        )
    return made


def _costliest_new_finding(gate: CheckResult, metric: str) -> Finding | None:
    """Return the new or worse finding that costs most of what a metric measures."""
    found = [each.finding for each in gate.findings if each.status is not FindingStatus.KNOWN]
    costs = [each.cost_bytes if metric.endswith("_bytes") else each.impact for each in found]
    return found[costs.index(max(costs))] if any(costs) else None


def _budgets(gate: CheckResult) -> list[CheckItem]:
    made = []
    for each in gate.budgets:
        if each.outcome is BudgetOutcome.KEPT:
            continue
        fails = gate.fails_budget(each)
        grave = Level.ERROR if fails else Level.NOTICE
        at = _costliest_new_finding(gate, each.metric) if fails else None
        made.append(
            CheckItem(ItemKind.BUDGET, each.budget, f"budget {each.budget}", each.message, grave, fails, finding=at)
        )
    return made
