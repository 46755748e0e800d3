"""Baseline -> text: what ran, what was found, and what its recordings measured."""

import numpy as np
from rich.console import RenderableType

from tracekit import markup, units
from tracekit.analysis.samples import LOWER_IS_BETTER
from tracekit.compare import job_samples
from tracekit.gate.baseline import Baseline
from tracekit.reports import comparison, paper, words


def render(baseline: Baseline, *, width: int, color: bool = False) -> str:
    """Return a baseline as text at most `width` columns wide."""
    count = len(baseline.recordings)
    parts: list[RenderableType] = [
        paper.line((baseline.name, paper.BOLD), f"  {count} recording{'s' * (count > 1)}"),
        "",
        paper.line(("What ran", paper.BOLD)),
        paper.indented(paper.table(["", ""], [[name, str(value)] for name, value in baseline.fingerprint.items()])),
        "",
        paper.line(("Findings", paper.BOLD)),
        paper.indented(paper.table(["", "", "", "of step"], _findings(baseline))),
        "",
        paper.line(("Metrics", paper.BOLD), ("  the median of each recording", paper.DIM)),
        paper.indented(paper.table(["", "mean", "least", "most"], _metrics(baseline), right=[False, True, True, True])),
    ]
    return paper.print_to_string(parts, width=width, color=color)


def _findings(baseline: Baseline) -> list[list[str]]:
    rows = []
    for name, each in baseline.known.items():
        worst = max(each, key=lambda one: (one.severity, one.impact))
        cost = units.share(worst.impact) if worst.impact or not worst.cost_bytes else units.size(worst.cost_bytes)
        rows.append([worst.severity.label, words.rule_name(worst.code), name, cost])
    return rows or [["none", "", "", ""]]


def _metrics(baseline: Baseline) -> list[list[str]]:
    found = [job_samples(recording.samples) for recording in baseline.recordings]
    rows = []
    for metric in LOWER_IS_BETTER:
        medians = [float(np.median(each[metric])) for each in found if metric in each]
        if medians:
            told = [float(np.mean(medians)), min(medians), max(medians)]
            rows.append([comparison.label(metric), *(markup.cell(metric, value) for value in told)])
    return rows
