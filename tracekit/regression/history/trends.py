"""What became of each metric over the runs of one fingerprint, and what came with each change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.regression.history import change_points
from tracekit.regression.history.change_points import Drift
from tracekit.regression.history.store import History
from tracekit.regression.metrics import Metric, all_metrics, metric_of
from tracekit.regression.samples import Values

MIN_CHANGE_RATIO = 0.01
"""A smaller change of a series is none, relative or in points of a share: many runs resolve more than two do."""
MIN_CONTAINER_SHARE = 0.005
"""Nor is a change of a part below this share of the whole that contains it, such as of the step time."""
_NEIGHBOURS = 5  # runs on either side of a change whose findings and facts are compared
_OFTEN = 0.5


@dataclass(frozen=True)
class MetricShift:
    """A metric changed its level for good between the runs `last` and `first`, indexes into the group's runs."""

    metric: str
    last: int
    first: int
    before: float
    after: float
    is_worse: bool
    appeared: tuple[str, ...]
    """Ids of findings that most runs before it had not, and most runs after it have."""
    disappeared: tuple[str, ...]
    changed_facts: tuple[tuple[str, str | None, str | None], ...]
    """What the manifests of `last` and `first` say differently: field, before, after."""


@dataclass(frozen=True, eq=False)
class Series:
    """One metric over the runs of a group: `values` (n,) are medians; NaN where a run did not measure it."""

    metric: str
    values: Values
    shifts: tuple[MetricShift, ...]
    drifts: tuple[Drift, ...]
    """Their runs are indexes into the group's runs."""


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one fingerprint, in order of time, with what became of each metric.

    `runs`, `metrics` and `findings` are the history's tables of these runs; `identity` is what they agree in.
    """

    fingerprint: str
    identity: Mapping[str, str]
    runs: pl.DataFrame
    metrics: pl.DataFrame
    findings: pl.DataFrame
    series: tuple[Series, ...]


def groups(
    history: History, *, metrics: Sequence[str] | None = None, last: int | None = None, branch: str | None = None
) -> tuple[Group, ...]:
    """Return the runs by fingerprint, that of the latest run first, with all metrics or those named.

    `last` takes so many of the latest runs of each; `branch` those of one branch.
    """
    runs = history.runs if branch is None else history.runs.filter(pl.col("branch") == branch)
    dated_groups = []
    for (fingerprint,), rows in runs.group_by("fingerprint", maintain_order=True):
        latest = rows if last is None else rows.tail(last)
        dated_groups.append((int(latest["at_ns"][-1]), _group(history, str(fingerprint), latest, metrics)))
    return tuple(group for _, group in sorted(dated_groups, key=lambda pair: -pair[0]))


def latest_first(group: Group) -> tuple[MetricShift, ...]:
    """Return all changes of a group, the latest first."""
    shifts = [shift for series in group.series for shift in series.shifts]
    order = list(all_metrics())
    return tuple(sorted(shifts, key=lambda shift: (-shift.first, not shift.is_worse, order.index(shift.metric))))


def _group(history: History, fingerprint: str, runs: pl.DataFrame, metrics: Sequence[str] | None) -> Group:
    keys = runs.select("run")
    measured, findings, facts = (
        table.join(keys, on="run", how="semi") for table in (history.metrics, history.findings, history.facts)
    )
    identity_facts = facts.filter(pl.col("is_identity") & (pl.col("run") == runs["run"][-1]))
    values: dict[str, Values] = {}
    for key in all_metrics():
        rows = measured.filter(pl.col("metric") == key).select("run", "median")
        if rows.height:
            by_run = keys.join(rows, on="run", how="left", maintain_order="left")
            values[key] = by_run["median"].fill_null(float("nan")).to_numpy().astype(np.float64)
    medians = {key: float(np.nanmedian(series)) for key, series in values.items()}
    series = [
        _series(metric_of(key), medians_by_run, medians.get(metric_of(key).part_of or ""), runs, findings, facts)
        for key, medians_by_run in values.items()
        if metrics is None or key in metrics
    ]
    return Group(
        fingerprint,
        dict(identity_facts.select("field", "value").sort("field").iter_rows()),
        runs,
        measured,
        findings,
        tuple(series),
    )


def _series(
    metric: Metric, values: Values, total: float | None, runs: pl.DataFrame, findings: pl.DataFrame, facts: pl.DataFrame
) -> Series:
    measured = np.flatnonzero(np.isfinite(values))
    trend = change_points.trend(values[measured], min_change=_least_change(metric, values[measured], total))
    shifts = []
    for shift in trend.shifts:
        last, first = int(measured[shift.index - 1]), int(measured[shift.index])
        is_worse = metric.is_worse(shift.after - shift.before)
        # Ids of findings that came and that went with a change, each in order.
        before, after = (
            _shares(findings, runs["run"].slice(begin, count))
            for begin, count in ((max(0, first - _NEIGHBOURS), min(first, _NEIGHBOURS)), (first, _NEIGHBOURS))
        )
        came = sorted(finding for finding in after if after[finding] - before.get(finding, 0.0) > _OFTEN)
        went = sorted(finding for finding in before if before[finding] - after.get(finding, 0.0) > _OFTEN)
        appeared, disappeared = tuple(came), tuple(went)
        changed = _facts_changed(facts, str(runs["run"][last]), str(runs["run"][first]))
        shifts.append(
            MetricShift(metric.key, last, first, shift.before, shift.after, is_worse, appeared, disappeared, changed)
        )
    drifts = (
        Drift(int(measured[drift.first]), int(measured[drift.past - 1]) + 1, drift.before, drift.after)
        for drift in trend.drifts
    )
    return Series(metric.key, values, tuple(shifts), tuple(drifts))


def _least_change(metric: Metric, values: Values, total: float | None) -> float:
    """Return the smallest change that is one, in the metric's own unit; `total` is the median of what contains it."""
    if metric.is_share:
        return MIN_CHANGE_RATIO
    min_change = MIN_CHANGE_RATIO * abs(float(np.median(values))) if len(values) else 0.0
    return max(min_change, MIN_CONTAINER_SHARE * total) if total else min_change


def _shares(findings: pl.DataFrame, runs: pl.Series) -> dict[str, float]:
    rows = findings.filter(pl.col("run").is_in(runs.to_list())).group_by("finding").agg(pl.col("run").n_unique())
    return {finding: count / len(runs) for finding, count in rows.iter_rows()}


def _facts_changed(facts: pl.DataFrame, last: str, first: str) -> tuple[tuple[str, str | None, str | None], ...]:
    before, after = (
        dict(facts.filter(pl.col("run") == run).select("field", "value").iter_rows()) for run in (last, first)
    )
    fields = sorted(before.keys() | after.keys())
    return tuple((f, before.get(f), after.get(f)) for f in fields if before.get(f) != after.get(f))
