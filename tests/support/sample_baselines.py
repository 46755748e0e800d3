"""Drawn baselines and candidates for what judges a run against another. All numbers are made by hand."""

from collections.abc import Mapping, Sequence

import numpy as np
import polars as pl

from tracekit.analysis.compute import step_charges
from tracekit.model.run import Run
from tracekit.regression.baseline import UNIT_COLUMNS, Baseline, KnownFinding, Recording
from tracekit.regression.samples import SAMPLE_COLUMNS
from tracekit.rules.rule import Finding, Report, Severity

FINGERPRINT = {"device": "cpu", "world_size": 2, "model.layers": 2}


def recording(
    metrics: Mapping[str, Sequence[float]],
    *,
    name: str = "main",
    ranks: Sequence[int] = (0, 1),
    findings: Sequence[KnownFinding] = (),
    work: Sequence[tuple[str, str | None, str, float]] = (),
) -> Recording:
    """Return a recording in which every rank has the same samples of each metric, one per step."""
    rows = [
        (0, rank, step, metric, float(value))
        for metric, values in metrics.items()
        for rank in ranks
        for step, value in enumerate(values)
    ]
    table = pl.DataFrame(rows, schema=SAMPLE_COLUMNS, orient="row")
    return of_samples(table, name=name, findings=findings, work=work)


def of_samples(
    samples: pl.DataFrame,
    *,
    name: str = "main",
    findings: Sequence[KnownFinding] = (),
    work: Sequence[tuple[str, str | None, str, float]] = (),
) -> Recording:
    """Return a recording of these samples, whose columns are SAMPLE_COLUMNS."""
    work_table = pl.DataFrame(list(work), schema=step_charges.WORK_COLUMNS, orient="row")
    return Recording(name, None, samples, pl.DataFrame(schema=UNIT_COLUMNS), work_table, tuple(findings))


def baseline(*recordings: Recording, fingerprint: Mapping[str, object] = FINGERPRINT) -> Baseline:
    return Baseline("main", dict(fingerprint), recordings)  # type: ignore[arg-type]


def steps(median: float, *, count: int = 20, spread: float = 0.02, seed: int = 0) -> np.ndarray:
    """Return simulated steps of one recording, log-normal around a median."""
    return np.asarray(median * np.exp(np.random.default_rng(seed).normal(0, spread, count)))


def known(
    name: str, severity: Severity = Severity.WARNING, *, impact: float = 0.1, cost_bytes: int = 0
) -> KnownFinding:
    return KnownFinding(name, name.partition("-")[0], severity, impact, 0, cost_bytes, "")


def finding(code: str, severity: Severity = Severity.WARNING, *, impact: float = 0.1, cost_bytes: int = 0) -> Finding:
    return Finding(code, severity, f"{code} costs {impact:.1%}.", "Mend it.", impact=impact, cost_bytes=cost_bytes)


def report(run: Run, *findings: Finding) -> Report:
    return Report(run, findings, (), (), "0")
