"""Predictions: lost time by checkpoint interval, memory by strategy, pipeline bubbles."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go

from tracekit.model import units
from tracekit.plan.memory import MemoryPlan
from tracekit.report.charts import style

SAVING, REPEATED, LOST = "saving", "work repeated after a failure", "total"
_COLOURS = {SAVING: "#0072B2", REPEATED: "#E69F00", LOST: "#D55E00"}
_MEMORY = {
    "weights": ("weight_bytes", "#0072B2"),
    "gradients": ("gradient_bytes", "#D55E00"),
    "optimizer": ("optimizer_bytes", "#009E73"),
    "buffers": ("buffer_bytes", "#CC79A7"),
    "activations": ("activation_bytes", "#E69F00"),
}
_SCHEDULES = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7")
_MARK = "rgba(128, 138, 150, 0.9)"


def lost_time(
    intervals_s: Sequence[float], lost: Mapping[str, Sequence[float]], *, marks: Mapping[str, float]
) -> go.Figure:
    """Return shares of time lost over the interval between checkpoints, each named share a curve.

    `marks` are intervals to mark, in s, by their names. The share axis ends at four times the least loss, or above the
    loss at a mark.
    """
    figure = go.Figure()
    for name, ratios in lost.items():
        figure.add_scatter(
            x=[interval / 60 for interval in intervals_s],
            y=[100 * ratio for ratio in ratios],
            name=name,
            mode="lines",
            line={"color": _COLOURS.get(name, _MARK), "width": 3 if name == LOST else 2},
            customdata=[
                [units.duration(interval * 1e9), units.share(ratio)]
                for interval, ratio in zip(intervals_s, ratios, strict=True)
            ],
            hovertemplate=f"{name}: %{{customdata[1]}}, saved every %{{customdata[0]}}<extra></extra>",
        )
    for number, (name, interval_s) in enumerate(sorted(marks.items(), key=lambda mark: mark[1])):
        figure.add_vline(x=interval_s / 60, line={"color": _MARK, "dash": "dot"})
        figure.add_annotation(
            x=math.log10(interval_s / 60),  # annotations, unlike lines, are placed by the logarithm
            y=1 - 0.09 * number,
            yref="paper",
            yanchor="top",
            xanchor="left",
            text=f" {name}",
            showarrow=False,
        )
    ends = [math.log10(interval / 60) for interval in (intervals_s[0], intervals_s[-1])]
    figure.update_xaxes(title="minutes between checkpoints", type="log", range=ends, dtick=1)
    # Up to four times the least loss, so that the minimum is visible, and so that the loss at each mark is.
    total = lost.get(LOST) or next(iter(lost.values()))
    marked = [np.interp(math.log(mark), np.log(intervals_s), total) for mark in marks.values() if mark > 0]
    top = 100 * min(1.0, max(4 * min(total, default=0.25), 1.15 * max(marked, default=0.0), 0.01))
    figure.update_yaxes(title="share of time lost", ticksuffix="%", range=[0, top])
    return style.with_style(figure, height_px=380)


def memory_by_strategy(plans: Mapping[str, MemoryPlan], *, device_bytes: float | None = None) -> go.Figure:
    """Return the memory of a rank under each strategy, stacked by use, with a line at the device's capacity."""
    figure = go.Figure()
    for name, (column, colour) in _MEMORY.items():
        sizes = [getattr(plan, column) or 0.0 for plan in plans.values()]
        if not any(sizes):
            continue
        style.add_bars(
            figure,
            plans,
            [size / 2**30 for size in sizes],
            name=name,
            colour=colour,
            customdata=[[units.size(size)] for size in sizes],
            hover=f"%{{y}}: {name} %{{customdata[0]}}",
        )
    if device_bytes is not None:
        line = {"color": _MARK, "dash": "dash"}
        figure.add_vline(x=device_bytes / 2**30, line=line)
        name = f"memory of the device, {units.size(device_bytes)}"
        figure.add_scatter(x=[None], y=[None], name=name, mode="lines", line=line)  # its entry in the legend
    device_gib = (device_bytes or 0) / 2**30
    max_gib = max([device_gib, *(plan.total_bytes / 2**30 for plan in plans.values())])
    figure.update_layout(barmode="stack")
    figure.update_xaxes(title="per rank", ticksuffix=" GiB", range=[0, 1.08 * max_gib])
    figure.update_yaxes(autorange="reversed")
    return style.with_style(figure, height_px=130 + 46 * len(plans))


def bubbles(micro_batches: Sequence[int], ratios: Mapping[str, Sequence[float]], *, selected: int) -> go.Figure:
    """Return the share of time that a pipeline is idle by the micro-batches of a step, a curve per schedule."""
    figure = go.Figure()
    for colour, (name, values) in zip(_SCHEDULES, ratios.items(), strict=False):
        figure.add_scatter(
            x=list(micro_batches),
            y=[100 * ratio for ratio in values],
            name=name,
            mode="lines",
            line={"color": colour, "width": 2.5},
            hovertemplate=f"{name}: %{{y:.1f}}% with %{{x}} micro-batches<extra></extra>",
        )
    figure.add_vline(x=selected, line={"color": _MARK, "dash": "dot"})
    figure.update_xaxes(title="micro-batches per step", type="log", tickvals=list(micro_batches))
    figure.update_yaxes(title="pipeline idle", ticksuffix="%", rangemode="tozero")
    return style.with_style(figure, height_px=340)
