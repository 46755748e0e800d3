"""How bad a finding that costs time is: its cost and how certain that is, by the same thresholds for every rule."""

from dataclasses import replace

from tracekit.rules.rule import Finding, Report, Severity, sort_findings

WARNING_RATIO = 0.02
"""Share of the time times confidence from which a finding warns: 3% of the step at the 70% that most rules reach."""
ERROR_RATIO = 0.45
"""The same for an error: half of the time, at a confidence of 90%."""
MIN_CONFIDENCE = 0.5
"""What is less likely than not is information, however much it would cost."""


def grade(impact: float, confidence: float) -> Severity:
    """Severity of a share of time, 0 to 1, that is lost with some confidence.

    >>> grade(0.03, 0.7).label, grade(0.03, 0.4).label, grade(0.6, 0.8).label
    ('warning', 'info', 'error')
    """
    expected_ratio = impact * confidence
    if expected_ratio < WARNING_RATIO or confidence < MIN_CONFIDENCE:
        return Severity.INFO
    return Severity.ERROR if expected_ratio >= ERROR_RATIO else Severity.WARNING


def by_cost(report: Report) -> Report:
    """Return the report with the severity of each finding that costs time by its cost.

    What its rule, or a replay, says is information stays that: a doubt, or the consequence of another finding. An upper
    bound is information too: it does not show that the time is lost. Only what a replay confirms is an error.
    """
    findings = (replace(finding, severity=_severity(finding)) for finding in report.findings)
    return replace(report, findings=sort_findings(findings))


def _severity(finding: Finding) -> Severity:
    if not finding.impact or finding.severity is Severity.INFO:
        return finding.severity  # memory, data, settings
    if finding.is_upper_bound:
        return Severity.INFO
    grades = grade(finding.impact, finding.confidence)
    return grades if finding.is_priced else min(grades, Severity.WARNING)
