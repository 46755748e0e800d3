"""Findings of runs whose steps are iterations that were found by repetition: they say so."""

import re
from dataclasses import replace

from tracekit.analysis.quality import trace_quality
from tracekit.model.run import Run
from tracekit.rules.rule import Finding, Report

_NUMBERED = re.compile(r"\bstep \((\d+)\)")
_STEP = re.compile(r"(?<![\w.])([Ss])tep(s?)\b(?!\()")

_KIND = "steps_from_repetition"


def has_found_iterations(run: Run) -> bool:
    """Return whether steps of the run are iterations that were found by repetition."""
    return _KIND in run.table(trace_quality.data_quality)["kind"]


def name_iterations(report: Report) -> Report:
    """Return the report with findings that speak of iterations, where its steps are iterations that were found."""
    if not has_found_iterations(report.run):
        return report
    return replace(report, findings=tuple(map(_name_iteration, report.findings)))


def _name_iteration(finding: Finding) -> Finding:
    if finding.is_of_window or finding.subject == _KIND:
        return finding
    message = _NUMBERED.sub(r"iteration (\1, found by repetition)", finding.message)
    return replace(finding, message=_STEP.sub(_iteration, message), is_of_iterations=True)


def _iteration(match: re.Match[str]) -> str:
    return ("Iteration" if match[1] == "S" else "iteration") + match[2]
