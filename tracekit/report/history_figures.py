"""A metric of a history as a figure: its runs, its levels, its changes and drifts."""

from itertools import pairwise

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.regression.history.trends import Group, Series
from tracekit.report import charts, history

_SHORT_SHA = 8


def of_series(group: Group, series: Series) -> go.Figure:
    """Return one metric of a group over its runs, with the commit of each, its levels, and its changes marked."""
    rows = group.metrics.filter(pl.col("metric") == series.metric).select("run", "low", "high")
    runs = group.runs.join(rows, on="run", how="left", maintain_order="left")
    points = [
        charts.Point(
            None if np.isnan(value) else value,
            run["low"],
            run["high"],
            str(run["commit"])[:_SHORT_SHA] if run["commit"] else history.utc_minute(run["at_ns"])[:10],
            [
                history.utc_minute(run["at_ns"]),
                history.run_text(group.runs, number),
                *_verdict(run["passed"], run["failures"]),
            ],
            failed=run["passed"] is False,
        )
        for number, (run, value) in enumerate(zip(runs.iter_rows(named=True), series.values.tolist(), strict=True))
    ]
    marks = [
        charts.Mark(shift.first, history.change_text(shift.metric, shift.before, shift.after), shift.is_worse)
        for shift in series.shifts
    ]
    return charts.history(series.metric, points, _levels(series), marks)


def _levels(series: Series) -> list[charts.Level]:
    """Return the level between any two changes; where the metric drifted, from where to where."""
    levels = [charts.Level(drift.first, drift.past, drift.before, drift.after) for drift in series.drifts]
    edges = [0, *(shift.first for shift in series.shifts), len(series.values)]
    for first, past in pairwise(edges):
        known = series.values[first:past][np.isfinite(series.values[first:past])]
        if len(known) and not any(level.first < past and first < level.end for level in levels):
            median = float(np.median(known))
            levels.append(charts.Level(first, past, median, median))
    return levels


def _verdict(passed: bool | None, failures: list[str] | None) -> list[str]:
    if passed is None:
        return []
    return ["passed"] if passed else [f"failed: {', '.join(failures or [])}"]
