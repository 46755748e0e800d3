"""Goodput of a job over time: the share of each class of time, as a band."""

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.checkpoint.goodput import CLASSES
from tracekit.model import units
from tracekit.report.charts import style

# Okabe and Ito's, as elsewhere: green trains, warm colours are lost to failures and stalls, greys are between.
_COLOURS = {
    "productive": style.COLOURS["memcpy"],
    "lost": style.COLOURS["communication"],
    "save": style.COLOURS["compute"],
    "stall": style.COLOURS["waiting"],
    "warm_up": "#F0E442",
    "between": style.COLOURS["annotation"],
    "load": "#56B4E9",
    "start": style.COLOURS["evidence"],
    "stop": "#A0522D",
    "idle": style.COLOURS["idle"],
}
_TIME_UNITS = ((48 * 3600e9, 86_400e9, "days"), (2 * 3600e9, 3600e9, "h"), (120e9, 60e9, "min"), (0.0, 1e9, "s"))
"""Units of the axis: the least duration of the job in ns that each is for, its length in ns, and its name."""


def goodput_over_time(over_time: pl.DataFrame) -> go.Figure:
    """Band over a job's time: the share of each class in each part of `analysis.checkpoint.goodput.over_time`."""
    if over_time.is_empty():
        return style.empty()
    first_ns, last_ns = int(str(over_time["start_ns"].min())), int(str(over_time["end_ns"].max()))
    unit_ns, unit = next((size, name) for least, size, name in _TIME_UNITS if last_ns - first_ns >= least)
    figure = go.Figure()
    for kind in CLASSES:
        rows = over_time.filter(pl.col("class") == kind.key)
        if not rows["time_ns"].sum():
            continue
        part_ns = (rows["end_ns"] - rows["start_ns"]).clip(1)
        middle_ns = (rows["start_ns"] + rows["end_ns"]) / 2 - first_ns
        figure.add_bar(
            x=(middle_ns / unit_ns).to_list(),
            y=(100 * rows["time_ns"] / part_ns).to_list(),
            width=(part_ns / unit_ns).to_list(),
            name=kind.title,
            marker={"color": _COLOURS[kind.key], "line": {"width": 0}},
            customdata=[
                [units.long_duration((start_ns - first_ns) / 1e9), units.long_duration(time_ns / 1e9)]
                for start_ns, time_ns in rows.select("start_ns", "time_ns").rows()
            ],
            hovertemplate=f"<b>{kind.title}</b> %{{customdata[1]}}<br>from %{{customdata[0]}} on<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0)
    figure.update_xaxes(title=f"time since the first attempt began, {unit}", range=[0, (last_ns - first_ns) / unit_ns])
    figure.update_yaxes(title="share of time", range=[0, 100], ticksuffix="%")
    return style.with_style(figure, height_px=300)
