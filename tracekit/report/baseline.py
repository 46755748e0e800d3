"""A baseline as a document: the configuration, the findings and the metrics of its recordings."""

import numpy as np

from tracekit.model import units
from tracekit.regression.baseline import Baseline
from tracekit.regression.metrics import compared_metrics
from tracekit.regression.samples import job_samples
from tracekit.report import phrases
from tracekit.report.document import Cells, Document, Emphasis, heading, line


def document(baseline: Baseline) -> Document:
    """What ran, the findings and the metrics of a baseline's recordings."""
    recordings = units.count(len(baseline.recordings), "recording")
    facts = tuple((name, str(value)) for name, value in baseline.fingerprint.items())
    findings = Cells(("", "", "", "of time"), _findings(baseline), indent=2)
    return Document(
        (
            [line((baseline.name, Emphasis.STRONG), f"  {recordings}")],
            [heading("What ran"), Cells(("", ""), facts, indent=2)],
            [heading("Findings"), findings],
            [
                heading("Metrics", "  the median of each recording"),
                Cells(("", "mean", "least", "most"), _metrics(baseline), (1, 2, 3), indent=2),
            ],
        )
    )


def _findings(baseline: Baseline) -> tuple[tuple[str, ...], ...]:
    rows = []
    for name, findings in baseline.known_findings.items():
        worst = max(findings, key=lambda finding: (finding.severity, finding.impact))
        rows.append((worst.severity.label, phrases.rule_name(worst.code), name, phrases.share_or_size(worst)))
    return tuple(rows) or (("none", "", "", ""),)


def _metrics(baseline: Baseline) -> tuple[tuple[str, ...], ...]:
    recordings = [job_samples(recording.samples) for recording in baseline.recordings]
    rows = []
    for metric in compared_metrics():
        medians = [float(np.median(samples[metric.key])) for samples in recordings if metric.key in samples]
        if medians:
            values = [float(np.mean(medians)), min(medians), max(medians)]
            rows.append((metric.label, *(metric.text(value) for value in values)))
    return tuple(rows)
