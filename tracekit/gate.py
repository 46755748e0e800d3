"""What a check of one run comes to: which findings count, what got worse, which budgets are broken, what fails."""

from dataclasses import dataclass
from enum import StrEnum

from tracekit.change import Change
from tracekit.compare import Comparison
from tracekit.rule import Finding, Report, Severity


class Standing(StrEnum):
    """How a finding stands to the baseline. Without a baseline every finding is new."""

    NEW = "new"
    WORSE = "worse"
    KNOWN = "known"


class Outcome(StrEnum):
    """What became of a budget."""

    KEPT = "kept"
    BROKEN = "broken"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True, eq=False)
class Judged:
    """A finding, how it stands to the baseline, and whether it fails the check."""

    finding: Finding
    standing: Standing
    fails: bool
    impact_before: float | None = None
    """The share of the step that it took in the baseline; None where it was not in it."""


@dataclass(frozen=True)
class Budgeted:
    """A budget beside what was measured, both in the metric's own unit (`metric` as `analysis.samples` names it)."""

    budget: str
    """As the settings name it: ``step_time``, or with the rank or unit that it is for."""
    metric: str
    limit: float
    measured: float | None
    outcome: Outcome
    message: str
    """One sentence with both numbers in words, or why it cannot be told."""


@dataclass(frozen=True, eq=False)
class Gate:
    """A report with its verdict: what every format for CI renders, and what the exit code follows."""

    report: Report
    bar: Severity | None
    """The severity from which a finding fails; None where none does."""
    findings: tuple[Judged, ...]
    """Those of the report, in its order."""
    comparison: Comparison | None = None
    """The metrics against the baseline's, where there is one."""
    regressions: tuple[Change, ...] = ()
    """The changes of `comparison` that fail the check."""
    budgets: tuple[Budgeted, ...] = ()

    @property
    def failures(self) -> tuple[str, ...]:
        """Return the names of all that fails: ids of findings, metrics, budgets. Empty where the check passes."""
        return (
            *(each.finding.id for each in self.findings if each.fails),
            *(change.metric for change in self.regressions),
            *(each.budget for each in self.budgets if each.outcome is Outcome.BROKEN),
        )


def of_findings(report: Report, bar: Severity | None) -> Gate:
    """Return the verdict on a report by its findings alone: those at or above `bar` fail."""
    judged = (Judged(each, Standing.NEW, bar is not None and each.severity >= bar) for each in report.findings)
    return Gate(report, bar, tuple(judged))
