"""A metric of a history as a figure: its runs, its levels, its changes and drifts."""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping
from tracekit.regression.history.trends import Group, Series
from tracekit.regression.metrics import metric_of
from tracekit.report import history
from tracekit.report.charts import style

_LINE, _LEVEL, _WORSE, _BETTER, _FAILED = "#0072B2", "#7D8796", "#D55E00", "#009E73", "#D55E00"
_MOST_TICKS = 16
_MAX_TICK = 12
_SHORT_SHA = 8

_Level: TypeAlias = tuple[int, int, float, float]
"""The first run and the end of a half-open range of runs, and the metric at both."""


def of_series(group: Group, series: Series) -> go.Figure:
    """Return one metric of a group over its runs, with the commit of each, its levels, and its changes marked.

    Runs are evenly spaced. The customdata of a point starts with the number of its run, from 0.
    """
    rows = group.metrics.filter(pl.col("metric") == series.metric).select("run", "low", "high")
    runs = group.runs.join(rows, on="run", how="left", maintain_order="left")
    runs = runs.with_columns(value=pl.Series(series.values).fill_nan(None)).with_row_index("number")
    measured = runs.drop_nulls("value")
    divisor, suffix = metric_of(series.metric).unit.scale(max(map(abs, measured["value"]), default=0.0))
    figure = go.Figure()
    for first, end, before, after in _levels(series):
        figure.add_scatter(
            x=[first + 0.5, end + 0.5],
            y=[before / divisor, after / divisor],
            mode="lines",
            line={"color": _LEVEL, "width": 2, "dash": "solid" if before == after else "dash"},
            hoverinfo="skip",
            showlegend=False,
        )
    _add_runs(figure, measured, [_hover(group, series.metric, run) for run in measured.iter_rows(named=True)], divisor)
    for shift in series.shifts:
        colour = _WORSE if shift.is_worse else _BETTER
        label = escaping.escape(history.change_text(shift.metric, shift.before, shift.after), 60)
        figure.add_vline(
            x=shift.first + 0.5,
            line={"color": colour, "width": 1.5, "dash": "dot"},
            annotation={"text": label, "font": {"color": colour}, "textangle": 0},
            annotation_position="top",
        )
    ticks = runs.gather_every(max(1, -(-runs.height // _MOST_TICKS)))
    figure.update_xaxes(
        tickvals=[number + 1 for number in ticks["number"]],
        ticktext=[escaping.escape(_tick(run), _MAX_TICK) for run in ticks.iter_rows(named=True)],
        range=[0.3, runs.height + 0.7],
    )
    figure.update_yaxes(ticksuffix=suffix)
    return style.with_style(figure, height_px=340)


def _levels(series: Series) -> list[_Level]:
    """Return the level between any two changes; where the metric drifted, from where to where."""
    levels: list[_Level] = [(drift.first, drift.past, drift.before, drift.after) for drift in series.drifts]
    edges = [0, *(shift.first for shift in series.shifts), len(series.values)]
    for first, past in pairwise(edges):
        finite = series.values[first:past][np.isfinite(series.values[first:past])]
        if len(finite) and not any(begin < past and first < end for begin, end, *_ in levels):
            median = float(np.median(finite))
            levels.append((first, past, median, median))
    return levels


def _add_runs(figure: go.Figure, runs: pl.DataFrame, hovers: list[str], divisor: float) -> None:
    """Add a point for each run, with the interval of its median; a failed run is a cross."""
    failed = [passed is False for passed in runs["passed"]]
    value = runs["value"]
    above, below = runs["high"].fill_null(value) - value, value - runs["low"].fill_null(value)
    ys, above_ys, below_ys = ([round(number / divisor, 9) for number in column] for column in (value, above, below))
    figure.add_scatter(
        x=[number + 1 for number in runs["number"]],
        y=ys,
        mode="markers+lines",
        line={"color": _LINE, "width": 1},
        marker={
            "size": 9,
            "color": [_FAILED if is_failed else _LINE for is_failed in failed],
            "symbol": ["x" if is_failed else "circle" for is_failed in failed],
        },
        error_y={
            "type": "data",
            "symmetric": False,
            "array": above_ys,
            "arrayminus": below_ys,
            "thickness": 1,
            "width": 3,
        },
        unselected={"marker": {"opacity": 0.8}},  # a click selects one point without fading the others
        selected={"marker": {"size": 13}},
        customdata=list(zip(runs["number"], hovers, strict=True)),
        hovertemplate="%{customdata[1]}<extra></extra>",
        showlegend=False,
    )


def _tick(run: Mapping[str, Any]) -> str:
    return str(run["commit"])[:_SHORT_SHA] if run["commit"] else history.utc_minute(run["at_ns"])[:10]


def _hover(group: Group, metric: str, run: Mapping[str, Any]) -> str:
    text = metric_of(metric).text
    lines = [history.utc_minute(run["at_ns"]), history.run_text(group.runs, run["number"])]
    if run["passed"] is not None:
        lines.append("passed" if run["passed"] else f"failed: {', '.join(run['failures'] or [])}")
    interval = [] if run["low"] is None or run["high"] is None else [f"95% {text(run['low'])} to {text(run['high'])}"]
    head = f"<b>{escaping.escape(text(run['value']))}</b> run {run['number'] + 1}"
    return "<br>".join([head, *interval, *map(escaping.escape, lines)])
