"""What a check of one run comes to: which findings count, what got worse, which budgets are broken, what fails."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.regression.change import Change
from tracekit.regression.comparison import Comparison
from tracekit.rules.rule import Finding, Report, Severity


class FindingStatus(StrEnum):
    """How a finding stands to the baseline. Without a baseline every finding is new."""

    NEW = "new"
    WORSE = "worse"
    KNOWN = "known"


class BudgetOutcome(StrEnum):
    """What became of a budget."""

    KEPT = "kept"
    BROKEN = "broken"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, eq=False)
class JudgedFinding:
    """A finding, how it stands to the baseline, and whether it fails the check."""

    finding: Finding
    status: FindingStatus
    fails: bool
    impact_before: float | None = None
    """The share of the step that it took in the baseline; None where it was not in it."""


@dataclass(frozen=True)
class FixedFinding:
    """A finding of the baseline that the run does not have any more."""

    id: str
    code: str
    severity: Severity
    impact: float
    subject: str = ""


@dataclass(frozen=True)
class Cause:
    """What made the run worse than the baseline: where the time, or the memory, that is new goes to."""

    name: str
    """compute, communication, checkpointing, memory or host."""
    message: str
    """One sentence with the numbers and the place."""
    metrics: tuple[str, ...]
    """The changes that show it."""


@dataclass(frozen=True)
class BudgetResult:
    """A budget beside what was measured, both in the metric's own unit (`metric` as `analysis.samples` names it)."""

    budget: str
    """As the settings name it: ``step_time``, or with the rank or unit that it is for."""
    metric: str
    limit: float
    measured: float | None
    outcome: BudgetOutcome
    message: str
    """One sentence with both numbers in words, or why it cannot be told."""


@dataclass(frozen=True, eq=False)
class CheckResult:
    """A report with its verdict: what every format for CI renders, and what the exit code follows."""

    report: Report
    fail_on: Severity | None
    """The severity from which a finding fails; None where none does."""
    findings: tuple[JudgedFinding, ...]
    """Those of the report, in its order."""
    comparison: Comparison | None = None
    """The metrics against the baseline's, where there is one."""
    regressions: tuple[Change, ...] = ()
    """The changes of `comparison` that fail the check."""
    budgets: tuple[BudgetResult, ...] = ()
    fixed: tuple[FixedFinding, ...] = ()
    """What the baseline has and the run has not."""
    causes: tuple[Cause, ...] = ()
    """Why metrics regressed, the likeliest first; empty where none did."""
    baseline: str = ""
    """What the run was held against, by name; empty where nothing."""
    is_strict: bool = False
    """Whether a budget that cannot be told fails too."""

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the names of all that fails: ids of findings, metrics, budgets. Empty where the check passes."""
        return (
            *(each.finding.id for each in self.findings if each.fails),
            *(change.metric for change in self.regressions),
            *(each.budget for each in self.budgets if self.fails_budget(each)),
        )

    def fails_budget(self, budget: BudgetResult) -> bool:
        """Return whether a budget fails the check."""
        return budget.outcome is BudgetOutcome.BROKEN or (
            self.is_strict and budget.outcome is BudgetOutcome.CANNOT_TELL
        )


def result_of_findings(report: Report, fail_on: Severity | None) -> CheckResult:
    """Return the verdict on a report by its findings alone: those at or above `bar` fail."""
    findings = (
        JudgedFinding(each, FindingStatus.NEW, fail_on is not None and each.severity >= fail_on)
        for each in report.findings
    )
    return CheckResult(report, fail_on, tuple(findings))
