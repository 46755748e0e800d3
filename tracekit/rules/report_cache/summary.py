"""The summary of a run in a list of runs: counts of findings, and step times."""

from collections.abc import Mapping
from dataclasses import dataclass

from tracekit.analysis.time import summary as facts
from tracekit.rules.rule import Report, Severity

MAX_STEPS = 60
DATA_FAMILY = "DATA"


@dataclass(frozen=True)
class Summary:
    """The summary of a report."""

    findings: Mapping[str, int]
    """How many there are of each severity, by label; without those of doubtful data."""
    quality_issues: int
    """How many findings of doubtful data there are that are more than information."""
    ranks: int
    step_time_ns: float | None
    steps_ns: tuple[int, ...]
    """The slowest rank's time of each step, in order; at most the last `MAX_STEPS`."""
    exposed_communication_ratio: float | None
    impact: float
    """The largest share of the step that one finding costs."""


def summarize(report: Report) -> Summary:
    """Return the summary of a report; its run's facts have been measured."""
    judged = [found for found in report.findings if not is_data_quality(found.code)]
    issues = [found for found in report.findings if is_data_quality(found.code) and found.severity > Severity.INFO]
    steps = facts.step_times(report.run)
    return Summary(
        {severity.label: sum(found.severity is severity for found in judged) for severity in Severity},
        len(issues),
        len(report.run.ranks),
        facts.step_time_ns(report.run),
        tuple(steps["duration_ns"].tail(MAX_STEPS).to_list()),
        facts.exposed_communication_ratio(report.run),
        max((found.impact for found in judged), default=0.0),
    )


def is_data_quality(code: str) -> bool:
    """Return whether a rule judges the recording rather than the training."""
    return code.rstrip("0123456789") == DATA_FAMILY
