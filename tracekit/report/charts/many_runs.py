"""Many runs in one figure: a metric by step and by group, and settings against the step time as parallel coordinates.

Runs of one group have one colour. Beyond `MAX_GROUPS` groups, the smallest are one group, OTHERS.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import plotly.graph_objects as go
import polars as pl
from plotly.subplots import make_subplots

from tracekit.model import escaping, units
from tracekit.regression.history.trends import Group, Series
from tracekit.regression.metrics import BYTES, SHARE, Unit, metric_of
from tracekit.report import history
from tracekit.report.charts import style

MAX_GROUPS = 8
MAX_VALUES = 12
"""An axis of parallel coordinates with more distinct texts labels only as many."""
OTHERS = "other values"
_PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8E7CC3", "#8C6D31")
_OTHER_COLOUR = "#9AA3AE"
_MAX_NAME, _MAX_VALUE = 80, 24
_SPREAD = 0.5
"""Part of a group's column that its runs are spread over."""
_FEW = 8
"""Numbers with so few distinct values are evenly spaced, such as the powers of two of batch sizes."""
_BUNDLE = 0.03
"""Part of an axis over which lines through one value are spread, so that each can be seen."""
_MISSING = "not known"
_WIDE = 20
"""From this ratio of the largest to the smallest value on, an axis is logarithmic."""


@dataclass(frozen=True)
class ChartedRun:
    """A run to draw: its unique name, its group, and the metric of each recorded step in order."""

    name: str
    group: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Return the median over steps."""
        return float(median(self.values))


@dataclass(frozen=True)
class Axis:
    """An axis of parallel coordinates: its name, and the value of each run as text, None where it is not known.

    `unit` is that of numbers.
    """

    name: str
    values: tuple[str | None, ...]
    unit: Unit | None = None


_LINE, _LEVEL, _WORSE, _BETTER, _FAILED = "#0072B2", "#7D8796", "#D55E00", "#009E73", "#D55E00"
_MOST_TICKS = 16
_MAX_TICK = 12
_SHORT_SHA = 8

_Level: TypeAlias = tuple[int, int, float, float]
"""The first run and the end of a half-open range of runs, and the metric at both."""


def in_groups(values: Sequence[str]) -> list[str]:
    """Return the group of each run by its value: of more than MAX_GROUPS values the rarest are OTHERS.

    >>> in_groups(["ddp", "fsdp2"])
    ['ddp', 'fsdp2']
    """
    by_number = Counter(values).most_common()
    frequent = {value for value, _ in by_number[: MAX_GROUPS if len(by_number) <= MAX_GROUPS else MAX_GROUPS - 1]}
    return [value if value in frequent else OTHERS for value in values]


def metric_of_runs(runs: Sequence[ChartedRun], groups: Sequence[str], *, label: str, unit: Unit) -> go.Figure:
    """Return a metric of each run over its recorded steps, next to its median by group, on one axis.

    `groups` are all groups, also those without this metric, in the order of `sorted_values`: they decide the colours.
    The customdata of a point starts with the name of its run.
    """
    runs = [run for run in runs if run.values]
    if not runs:
        return style.empty()
    divisor, axis = _value_axis([value for run in runs for value in run.values], unit)
    figure = make_subplots(cols=2, shared_yaxes=True, column_widths=[0.62, 0.38], horizontal_spacing=0.03)
    columns = [group for group in groups if any(run.group == group for run in runs)]
    for number, group in enumerate(columns):
        group_runs = [run for run in runs if run.group == group]
        colour, name = _colour(groups, group), escaping.escape(group, _MAX_VALUE)
        _add_lines(figure, group_runs, divisor, unit, colour=colour, name=name)
        _add_medians(figure, group_runs, divisor, unit, colour=colour, name=name, column=number)
    longest = max(len(run.values) for run in runs)
    figure.update_xaxes(title="recorded step", row=1, col=1, **({"dtick": 1} if longest <= _FEW else {}))
    names = [escaping.escape(group, _MAX_VALUE) for group in columns]
    ends = [-0.6, len(columns) - 0.4]
    figure.update_xaxes(tickvals=list(range(len(columns))), ticktext=names, range=ends, row=1, col=2)
    figure.update_yaxes(axis)
    figure.update_yaxes(title=escaping.escape(label), row=1, col=1)
    return style.with_style(figure, height_px=320)


def parallel_coordinates(names: Sequence[str], groups: Sequence[str], axes: Sequence[Axis]) -> go.Figure:
    """Return a line per run through its value on each axis; the last axis is usually what the others may explain.

    The customdata of a point starts with the name of its run. Plotly's own parallel coordinates need WebGL and code
    that is made while it runs, which the dashboard's content security policy forbids.
    """
    if not names or not axes:
        return style.empty()
    figure = go.Figure()
    scales = [_axis_scale(axis) for axis in axes]
    ordered = sorted_values(groups)
    for group in ordered:
        members = [number for number, run_group in enumerate(groups) if run_group == group]
        xs, ys, data = [], [], []
        for number in members:
            hover = _hover(names[number], [f"{axis.name}: {axis.values[number] or _MISSING}" for axis in axes])
            xs += [*range(len(axes)), None]
            ys += [*(scale.places[number] for scale in scales), None]
            data += [(names[number], hover)] * (len(axes) + 1)
        figure.add_scatter(
            x=xs, y=ys, mode="lines+markers", name=escaping.escape(group, _MAX_VALUE), customdata=data,
            line={"color": _colour(ordered, group), "width": 1.5}, marker={"size": 5},
            hovertemplate="%{customdata[1]}<extra></extra>", opacity=0.8, showlegend=len(ordered) > 1,
            unselected={"marker": {"opacity": 0.8}},
        )  # fmt: skip
    for number, scale in enumerate(scales):
        figure.add_vline(x=number, line={"color": "rgba(128, 138, 150, 0.6)", "width": 1}, layer="below")
        is_last = number == len(axes) - 1
        side = {"xanchor": "right", "xshift": -4} if is_last and number else {"xanchor": "left", "xshift": 4}
        for place, text in scale.ticks:
            label = {"text": escaping.escape(text, _MAX_VALUE), "font": {"size": 11}, "showarrow": False}
            figure.add_annotation(label | side, x=number, y=place, yshift=9)
    figure.update_xaxes(
        tickvals=list(range(len(axes))), ticktext=[escaping.escape(axis.name, _MAX_VALUE) for axis in axes],
        range=[-0.08 * len(axes) / 4, (len(axes) - 1) + 0.08 * len(axes) / 4], side="top", fixedrange=True,
    )  # fmt: skip
    figure.update_yaxes(visible=False, range=[-0.16, 1.08], fixedrange=True)
    styled = style.with_style(figure, height_px=420)
    return styled.update_layout(legend={"y": -0.02, "yanchor": "top"}, margin={"t": 60, "b": 60})


def sorted_values(values: Iterable[str]) -> list[str]:
    """Return distinct values: numbers by size, then texts, then OTHERS."""
    return sorted(set(values), key=lambda value: (value == OTHERS, *_order(value)))


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
    _add_runs(
        figure, measured, [_run_hover(group, series.metric, run) for run in measured.iter_rows(named=True)], divisor
    )
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
        ticktext=[escaping.escape(_run_tick(run), _MAX_TICK) for run in ticks.iter_rows(named=True)],
        range=[0.3, runs.height + 0.7],
    )
    figure.update_yaxes(ticksuffix=suffix)
    return style.with_style(figure, height_px=340)


def _order(value: str) -> tuple[int, float, str]:
    number = _number(value)
    return (1, 0.0, value) if number is None else (0, number, value)


def _number(text: str | None) -> float | None:
    try:
        return float(text) if text is not None and text.strip("+-.0123456789eE") == "" else None
    except ValueError:
        return None


def _colour(groups: Sequence[str], group: str) -> str:
    return _OTHER_COLOUR if group == OTHERS else _PALETTE[groups.index(group) % len(_PALETTE)]


def _hover(name: str, lines: Sequence[str]) -> str:
    return "<br>".join([f"<b>{escaping.escape(name, _MAX_NAME)}</b>", *(escaping.escape(line) for line in lines)])


def _value_axis(values: Sequence[float], unit: Unit) -> tuple[float, dict[str, Any]]:
    """Divisor of values on an axis, and the axis: logarithmic where they span orders of magnitude."""
    if _is_wide(values) and unit is not SHARE:
        return 1.0, style.log_axis(values, unit.text, base=2 if unit is BYTES else 10)
    divisor, suffix = unit.scale(max(map(abs, values)))
    return divisor, {"ticksuffix": suffix, "rangemode": "tozero"}


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) >= _WIDE * min(values)


def _add_lines(
    figure: go.Figure, runs: Sequence[ChartedRun], divisor: float, unit: Unit, *, colour: str, name: str
) -> None:
    """Add the runs of a group over their steps, as one trace with gaps between runs."""
    xs: list[int | None] = []
    ys: list[float | None] = []
    data: list[tuple[str, str]] = []
    for run in runs:
        for step, value in enumerate(run.values, 1):
            xs.append(step)
            ys.append(round(value / divisor, 9))
            data.append((run.name, _hover(run.name, [f"{unit.text(value)} in recorded step {step}"])))
        xs.append(None)
        ys.append(None)
        data.append((run.name, ""))
    figure.add_scatter(
        x=xs, y=ys, mode="lines+markers" if max(len(run.values) for run in runs) <= MAX_VALUES else "lines",
        line={"color": colour, "width": 1.5}, marker={"size": 5}, name=name, legendgroup=name,
        customdata=data, hovertemplate="%{customdata[1]}<extra></extra>", showlegend=True, row=1, col=1,
        unselected={"marker": {"opacity": 1}},
    )  # fmt: skip


def _add_medians(
    figure: go.Figure, runs: Sequence[ChartedRun], divisor: float, unit: Unit, *, colour: str, name: str, column: int
) -> None:
    """Add the median of each run of a group as a point, and the median of these as a bar across the group's column."""
    ordered = sorted(runs, key=lambda run: (run.median, run.name))
    width = _SPREAD / max(len(ordered) - 1, 1)
    xs = [column + (width * number - _SPREAD / 2 if len(ordered) > 1 else 0.0) for number in range(len(ordered))]
    figure.add_scatter(
        x=xs, y=[round(run.median / divisor, 9) for run in ordered], mode="markers",
        marker={"color": colour, "size": 8}, name=name, legendgroup=name, showlegend=False,
        customdata=[(run.name, _hover(run.name, [f"median {unit.text(run.median)}"])) for run in ordered],
        hovertemplate="%{customdata[1]}<extra></extra>", unselected={"marker": {"opacity": 0.9}}, row=1, col=2,
    )  # fmt: skip
    middle = median(run.median for run in ordered)
    figure.add_scatter(
        x=[column - 0.4, column + 0.4], y=[round(middle / divisor, 9)] * 2, mode="lines",
        line={"color": colour, "width": 2}, name=name, legendgroup=name, showlegend=False, row=1, col=2,
        hovertemplate=f"{name}<br>median of {units.count(len(ordered), 'run')}: {unit.text(middle)}"
        "<extra></extra>",
    )  # fmt: skip


@dataclass(frozen=True)
class _Scale:
    """Where each run crosses an axis, from 0 to 1, and the labelled places."""

    places: list[float]
    ticks: list[tuple[float, str]]


def _axis_scale(axis: Axis) -> _Scale:
    numbers = [_number(value) for value in axis.values]
    is_numeric = all((number is None) == (value is None) for number, value in zip(numbers, axis.values, strict=True))
    present = [number for number in numbers if number is not None]
    if present and is_numeric and (axis.unit is not None or len(set(present)) > _FEW):
        return _linear(axis, numbers, present)
    return _evenly_spaced(axis)


def _linear(axis: Axis, numbers: Sequence[float | None], present: Sequence[float]) -> _Scale:
    is_log = axis.unit is not None and _is_wide(present)
    scaled, back = (math.log10, lambda level: 10.0**level) if is_log else (float, float)
    low, high = scaled(min(present)), scaled(max(present))
    width = (high - low) or 1.0
    text = axis.unit.text if axis.unit is not None else "{:,.6g}".format
    levels = [low + width * part / 4 for part in range(5)] if high > low else [low]
    ticks = [((level - low) / width, text(back(level))) for level in levels]
    places = [_LOWEST if number is None else (scaled(number) - low) / width for number in numbers]
    return _Scale(places, [*ticks, *([(_LOWEST, _MISSING)] if None in numbers else [])])


_LOWEST = -0.12
"""Where a run without a value crosses an axis."""


def _evenly_spaced(axis: Axis) -> _Scale:
    distinct = sorted_values({value for value in axis.values if value is not None})
    count = max(len(distinct) - 1, 1)
    place = {value: number / count if len(distinct) > 1 else 0.5 for number, value in enumerate(distinct)}
    runs_at = Counter(axis.values)
    seen: Counter[str | None] = Counter()
    places = []
    for value in axis.values:
        share = (seen[value] + 0.5) / runs_at[value] - 0.5
        seen[value] += 1
        places.append((_LOWEST if value is None else place[value]) + _BUNDLE * share)
    labelled = distinct[:: max(1, -(-len(distinct) // MAX_VALUES))]
    ticks: Mapping[str, float] = {value: place[value] for value in labelled}
    missing = [(_LOWEST, _MISSING)] if None in axis.values else []
    return _Scale(places, [*((position, value) for value, position in ticks.items()), *missing])


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


def _run_tick(run: Mapping[str, Any]) -> str:
    return str(run["commit"])[:_SHORT_SHA] if run["commit"] else history.utc_minute(run["at_ns"])[:10]


def _run_hover(group: Group, metric: str, run: Mapping[str, Any]) -> str:
    text = metric_of(metric).text
    lines = [history.utc_minute(run["at_ns"]), history.run_text(group.runs, run["number"])]
    if run["passed"] is not None:
        lines.append("passed" if run["passed"] else f"failed: {', '.join(run['failures'] or [])}")
    interval = [] if run["low"] is None or run["high"] is None else [f"95% {text(run['low'])} to {text(run['high'])}"]
    head = f"<b>{escaping.escape(text(run['value']))}</b> run {run['number'] + 1}"
    return "<br>".join([head, *interval, *map(escaping.escape, lines)])
