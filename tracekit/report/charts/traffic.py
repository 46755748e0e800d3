"""The bandwidth of messages by their size."""

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts.style import log_axis, with_style

ALGORITHM, BUS = "algorithm", "bus"
MAX_POINTS = 3000
# All of it is communication: colours show the kind of collective, symbols the group.
_OPS = {
    "all_reduce": "#D55E00",
    "all_gather": "#56B4E9",
    "reduce_scatter": "#E69F00",
    "all_to_all": "#CC79A7",
    "broadcast": "#009E73",
    "send_recv": "#F0E442",
}
_OTHER = "#7D8796"
_SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "x", "star", "hexagon")


def bandwidth(speeds: pl.DataFrame, kind: str = BUS) -> go.Figure:
    """Return the bandwidth of each message by its size on logarithmic axes, a colour per kind of collective.

    `speeds` is `analysis.traffic.speeds`; `kind` is ALGORITHM (size over time) or BUS (as nccl-tests counts it, which
    for all collectives compares with the link). Open markers are lower bounds: some ranks of their group
    have no trace. At most MAX_POINTS messages are drawn, sampled evenly from each collective and group.
    """
    column = f"{kind}_bytes_per_s"
    figure = go.Figure()
    share = min(1.0, MAX_POINTS / max(speeds.height, 1))
    groups = speeds["group"].unique().sort(nulls_last=True).to_list()
    key = ["op", "group", "is_whole"]
    for (op, group, is_whole), rows in speeds.sort(*key, "bytes").group_by(key, maintain_order=True):
        drawn = rows.gather_every(max(round(1 / share), 1))
        colour, symbol = _OPS.get(str(op), _OTHER), _SYMBOLS[groups.index(group) % len(_SYMBOLS)]
        figure.add_scatter(
            x=drawn["bytes"].to_list(),
            y=drawn[column].to_list(),
            mode="markers",
            name=_legend_name(str(op), group, rows["axis"][0], rows["group_size"][0]),
            marker={
                "color": colour,
                "symbol": symbol + ("" if is_whole else "-open"),
                "size": 8,
                "opacity": 0.65 if is_whole else 0.9,
            },
            customdata=[
                [units.size(size), units.rate(algorithm), units.rate(bus), units.duration(ns)]
                for size, algorithm, bus, ns in drawn.select(
                    "bytes", "algorithm_bytes_per_s", "bus_bytes_per_s", "transfer_ns"
                ).iter_rows()
            ],
            hovertemplate=f"<b>{escaping.escape(_op_name(str(op)))}</b> of %{{customdata[0]}} in %{{customdata[3]}}<br>"
            f"{'' if is_whole else 'at least '}%{{customdata[1]}} algorithm, %{{customdata[2]}} bus<extra></extra>",
        )
    figure.update_xaxes(title="message size", **log_axis(speeds["bytes"], units.size, base=2))
    figure.update_yaxes(title=f"{kind} bandwidth", **log_axis(speeds[column], units.rate))
    return with_style(figure, height_px=420)


def _legend_name(op: str, group: str | None, axis: str | None, size: int | None) -> str:
    where = axis or group
    parts = [
        escaping.escape(_op_name(op)),
        *([escaping.escape(where, 40)] if where else []),
        *([f"{size} ranks"] if size else []),
    ]
    return " · ".join(parts)


def _op_name(op: str) -> str:
    return op.replace("_", "-")
