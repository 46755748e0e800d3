"""A metric over runs: its medians with their intervals, its levels, and where they changed."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from tracekit.model import escaping
from tracekit.regression.metrics import metric_of
from tracekit.report.charts.style import with_style

_LINE, _LEVEL, _WORSE, _BETTER, _FAILED = "#0072B2", "#7D8796", "#D55E00", "#009E73", "#D55E00"
_MOST_TICKS = 16
_MAX_TICK = 12


@dataclass(frozen=True)
class Point:
    """One run: median and interval in the metric's own unit, a short name for the axis, the lines of the hover."""

    value: float | None
    low: float | None
    high: float | None
    tick: str
    hover_lines: Sequence[str]
    failed: bool = False


@dataclass(frozen=True)
class Level:
    """The metric over the runs `first` to `past` (half-open): one level, or from one to another."""

    first: int
    end: int
    before: float
    after: float


@dataclass(frozen=True)
class Mark:
    """A change at run `index`, the first run with the new level, and its label."""

    index: int
    label: str
    is_worse: bool


def history(metric: str, points: Sequence[Point], levels: Sequence[Level], marks: Sequence[Mark]) -> go.Figure:
    """Return a metric over runs in order, evenly spaced. The customdata of a point is its number, from 0."""
    values = [point.value for point in points if point.value is not None]
    divisor, suffix = metric_of(metric).unit.scale(max((abs(value) for value in values), default=0.0))
    figure = go.Figure()
    for level in levels:
        figure.add_scatter(
            x=[level.first + 0.5, level.end + 0.5],
            y=[level.before / divisor, level.after / divisor],
            mode="lines",
            line={"color": _LEVEL, "width": 2, "dash": "solid" if level.before == level.after else "dash"},
            hoverinfo="skip",
            showlegend=False,
        )
    known = [(number, point) for number, point in enumerate(points) if point.value is not None]
    figure.add_scatter(
        x=[number + 1 for number, _ in known],
        y=[_scaled(point.value, divisor) for _, point in known],
        mode="markers+lines",
        line={"color": _LINE, "width": 1},
        marker={
            "size": 9,
            "color": [_FAILED if point.failed else _LINE for _, point in known],
            "symbol": ["x" if point.failed else "circle" for _, point in known],
        },
        error_y=_bars(known, divisor),
        unselected={"marker": {"opacity": 0.8}},  # a click selects one point without fading the others
        selected={"marker": {"size": 13}},
        customdata=[[number, _hover(metric, number, point)] for number, point in known],
        hovertemplate="%{customdata[1]}<extra></extra>",
        showlegend=False,
    )
    for mark in marks:
        colour = _WORSE if mark.is_worse else _BETTER
        figure.add_vline(
            x=mark.index + 0.5,
            line={"color": colour, "width": 1.5, "dash": "dot"},
            annotation={"text": escaping.escape(mark.label, 60), "font": {"color": colour}, "textangle": 0},
            annotation_position="top",
        )
    every = max(1, -(-len(points) // _MOST_TICKS))
    shown = range(0, len(points), every)
    figure.update_xaxes(
        tickvals=[number + 1 for number in shown],
        ticktext=[escaping.escape(points[number].tick, _MAX_TICK) for number in shown],
        range=[0.3, len(points) + 0.7],
    )
    figure.update_yaxes(ticksuffix=suffix)
    return with_style(figure, height_px=340)


def _bars(known: Sequence[tuple[int, Point]], divisor: float) -> dict[str, object]:
    above = [_scaled((p.high if p.high is not None else p.value or 0) - (p.value or 0), divisor) for _, p in known]
    below = [_scaled((p.value or 0) - (p.low if p.low is not None else p.value or 0), divisor) for _, p in known]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 3}


def _scaled(value: float | None, divisor: float) -> float:
    return round((value or 0.0) / divisor, 9)


def _hover(metric: str, number: int, point: Point) -> str:
    lines = [f"<b>{escaping.escape(metric_of(metric).text(point.value))}</b> run {number + 1}"]
    if point.low is not None and point.high is not None:
        lines.append(f"95% {metric_of(metric).text(point.low)} to {metric_of(metric).text(point.high)}")
    return "<br>".join([*lines, *(escaping.escape(text) for text in point.hover_lines)])
