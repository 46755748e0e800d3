"""Baseline -> text: the configuration, the findings and the metrics of its recordings."""

import numpy as np
from rich.console import RenderableType

from tracekit.model import units
from tracekit.regression.baseline import Baseline
from tracekit.regression.metrics import compared_metrics
from tracekit.regression.samples import job_samples
from tracekit.report import phrases, text_layout


def render(baseline: Baseline, *, width: int, color: bool = False) -> str:
    """Return a baseline as text at most `width` columns wide."""
    parts: list[RenderableType] = [
        text_layout.line((baseline.name, text_layout.BOLD), f"  {units.count(len(baseline.recordings), 'recording')}"),
        "",
        text_layout.title("What ran"),
        text_layout.indent(
            text_layout.table(["", ""], [[name, str(value)] for name, value in baseline.fingerprint.items()])
        ),
        "",
        text_layout.title("Findings"),
        text_layout.indent(text_layout.table(["", "", "", "of time"], _findings(baseline))),
        "",
        text_layout.title("Metrics", "  the median of each recording"),
        text_layout.indent(
            text_layout.table(["", "mean", "least", "most"], _metrics(baseline), right=[False, True, True, True])
        ),
    ]
    return text_layout.print_to_string(parts, width=width, color=color)


def _findings(baseline: Baseline) -> list[list[str]]:
    rows = []
    for name, findings in baseline.known_findings.items():
        worst = max(findings, key=lambda finding: (finding.severity, finding.impact))
        rows.append([worst.severity.label, phrases.rule_name(worst.code), name, phrases.share_or_size(worst)])
    return rows or [["none", "", "", ""]]


def _metrics(baseline: Baseline) -> list[list[str]]:
    recordings = [job_samples(recording.samples) for recording in baseline.recordings]
    rows = []
    for metric in compared_metrics():
        medians = [float(np.median(samples[metric.key])) for samples in recordings if metric.key in samples]
        if medians:
            values = [float(np.mean(medians)), min(medians), max(medians)]
            rows.append([metric.label, *(metric.text(value) for value in values)])
    return rows
