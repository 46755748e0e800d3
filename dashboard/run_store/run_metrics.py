"""What a comparison of many runs needs of each: its settings, and its metrics by step, from cached reports only."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from dashboard.run_entry import RunEntry
from dashboard.run_store import cached_per_run, refuse_links, stored_report
from tracekit.analysis.compute import efficiency
from tracekit.model import escaping
from tracekit.model.run import Run
from tracekit.regression import baseline, samples
from tracekit.regression.metrics import STEP_TIME, Scope, Unit, compared_metrics, metric_of

__all__ = ["STEP_TIME", "RunMetrics", "label", "of_run", "unit"]
MFU = "mfu_ratio"
MAX_RUNS = 2000
MAX_SETTINGS = 400
MAX_VALUE = 80
_LABELS = {MFU: "model FLOPs utilization (MFU)"}


@dataclass(frozen=True, eq=False)
class RunMetrics:
    """The settings of a run, and its metrics: of each key the job's samples, one per recorded step in order."""

    settings: Mapping[str, str]
    """The fields of its manifest by dotted name, as short text."""
    values: Mapping[str, tuple[float, ...]]


@cached_per_run(max_entries=MAX_RUNS, max_private=1)
def of_run(entry: RunEntry) -> RunMetrics | None:
    """Return the metrics of a run that was checked; None where its report is not cached. Raises TracekitError."""
    refuse_links(entry)
    report = stored_report(entry)
    return None if report is None else measure(report.run)


def measure(run: Run) -> RunMetrics:
    """Return the settings and metrics of a run; without steps no metric."""
    series = samples.job_samples(samples.without_parts(samples.run_samples(run)))
    keys_of_steps = {metric.key for metric in compared_metrics() if metric.scope is Scope.STEP}
    values = {key: _finite(numbers) for key, numbers in series.items() if key in keys_of_steps}
    steps = run.table(efficiency.by_step).drop_nulls("step")
    mfu = steps.group_by("window", "step").agg(pl.col(MFU).mean()).sort("window", "step")[MFU]
    values[MFU] = _finite(mfu.drop_nulls().to_numpy())
    return RunMetrics(_settings(run.manifest), {key: numbers for key, numbers in values.items() if numbers})


def label(metric: str) -> str:
    """Return the display name of a metric."""
    return _LABELS.get(metric) or metric_of(metric).label


def unit(metric: str) -> Unit:
    """Return the unit of a metric."""
    return metric_of(metric).unit


def explained_ratio(groups: Sequence[str], times: Sequence[float]) -> float:
    """Return the share of the variance of log(times) between groups, adjusted for their number; 0 where undefined.

    This is the adjusted R squared of a one-way analysis of variance (Wherry 1931): about 0 on average for groups that
    say nothing of the times, 1 where each group has one time.

    >>> explained_ratio(["a", "a", "b", "b"], [1.0, 1.0, 2.0, 2.0])
    1.0
    """
    logs, codes = np.log(np.asarray(times, np.float64)), np.unique(np.asarray(groups), return_inverse=True)[1]
    count, number = len(logs), int(codes.max(initial=-1)) + 1
    total = float(np.square(logs - logs.mean()).sum()) if count else 0.0
    if not 1 < number < count or total <= 0:
        return 0.0
    means = np.bincount(codes, logs) / np.bincount(codes)
    within = float(np.square(logs - means[codes]).sum())
    return max(0.0, 1 - within / (count - number) / (total / (count - 1)))


def _finite(values: np.ndarray) -> tuple[float, ...]:
    return tuple(float(value) for value in values if np.isfinite(value))


def _settings(manifest: Mapping[str, object]) -> dict[str, str]:
    fields = list(baseline.flat(manifest).items())[:MAX_SETTINGS]
    return {escaping.inert(name, MAX_VALUE): escaping.inert(_text(value), MAX_VALUE) for name, value in fields}


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
