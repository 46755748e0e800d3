"""Communication: overlapped and exposed, bandwidth, waits between ranks; causes of gaps of compute and collectives."""

import math
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts import style
from tracekit.report.charts.style import CAUSES, COLOURS

COMMUNICATION_PARTS = {
    "hidden_ns": ("overlapped with compute", style.COLOURS["compute"]),
    "exposed_ns": ("exposed transfer", COLOURS["communication"]),
    "waited_ns": ("exposed, waiting for a late rank", COLOURS["waiting"]),
}
"""The parts of a rank's communication, each with its label and colour."""
ALGORITHM, BUS = "algorithm", "bus"
MAX_POINTS = 3000
MAX_MATRIX_RANKS = 64
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
_MOST_NUMBERED = 16
_SHADES = [[0, "rgba(230, 159, 0, 0.08)"], [1, "rgba(230, 159, 0, 0.55)"]]
"""From the page's own colour to one on which both dark and light text can be read."""
_UNKNOWN = "unknown rank"


def stall_causes(by_rank: pl.DataFrame, labels: Mapping[int, str] | None = None) -> go.Figure:
    """Return stacked bars of the gaps of one kind of work, one bar per rank, split by cause.

    `by_rank` is the part of one `of` (communication or compute) of `analysis.compute.stall_attribution.by_rank`.
    `labels` are the ranks to draw, each with a text for its label; by default all.
    """
    by_cause = style.of_ranks(by_rank, labels).pivot("cause", index="rank", values="dur_ns", aggregate_function="sum")
    rows = by_cause.fill_null(0).sort("rank")
    causes = {cause: about for cause, about in CAUSES.items() if cause in rows.columns and rows[cause].sum()}
    return style.stacked_parts(rows, causes, style.rank_names(rows["rank"], labels), showlegend=True)


def communication_parts(by_rank: pl.DataFrame, labels: Mapping[int, str] | None = None) -> go.Figure:
    """Return stacked bars of each rank's communication: overlapped, exposed transfer, exposed while waiting.

    `by_rank` is `analysis.communication.exposed_communication.by_rank`; `labels` as in `stall_causes`.
    """
    rows = style.of_ranks(by_rank, labels)
    return style.stacked_parts(rows, COMMUNICATION_PARTS, style.rank_names(rows["rank"], labels), showlegend=True)


def wait_matrix(waited: pl.DataFrame, ranks: Sequence[int]) -> go.Figure:
    """Matrix of which rank waits for which: a row per rank, a column per rank that others wait for.

    `waited` is `rank_timelines.wait_times`; a last column holds waits for an unknown rank. Of more than
    `MAX_MATRIX_RANKS` ranks, those that wait longest and those that are waited for longest are drawn.
    """
    peers = waited.filter(pl.col("waited_ns") > 0)["peer_rank"].drop_nulls().unique().sort().to_list()
    if len(ranks) > MAX_MATRIX_RANKS:
        ranks, peers = (_longest(waited, name) for name in ("rank", "peer_rank"))
    pair_ns = {(rank, peer): ns for rank, peer, ns in waited.select("rank", "peer_rank", "waited_ns").iter_rows()}
    columns: list[int | None] = [*peers, *([None] if any(peer is None for _, peer in pair_ns) else [])] or list(ranks)
    grid = [[pair_ns.get((rank, peer), 0) for peer in columns] for rank in ranks]
    longest_ms = max(pair_ns.values(), default=1) / 1e6
    factor, unit = style.time_unit(longest_ms)
    names = [_UNKNOWN if peer is None else f"rank {peer}" for peer in columns]
    figure = go.Figure()
    figure.add_heatmap(
        x=list(range(len(columns))),
        y=list(range(len(ranks))),
        z=[[factor * ns / 1e6 if ns else None for ns in line] for line in grid],
        customdata=[
            [f"rank {rank} waits {units.duration(ns)} for {name}" for name, ns in zip(names, line, strict=True)]
            for rank, line in zip(ranks, grid, strict=True)
        ],
        hovertemplate="%{customdata}<extra></extra>",
        hoverongaps=False,
        colorscale=_SHADES,
        zmin=0,
        zmax=factor * longest_ms,
        xgap=2,
        ygap=2,
        colorbar={"ticksuffix": f" {unit}", "thickness": 14, "nticks": 4, "outlinewidth": 0},
    )
    if len(ranks) <= _MOST_NUMBERED:
        _write_times(figure, grid)
    late, waiting = [f"for {name}" for name in names], [f"rank {rank} waits" for rank in ranks]
    for labels, axis in ((late, figure.layout.xaxis), (waiting, figure.layout.yaxis)):
        numbered = range(0, len(labels), math.ceil(len(labels) / (2 * _MOST_NUMBERED)))
        axis.update(tickvals=list(numbered), ticktext=[labels[place] for place in numbered])
    figure.update_xaxes(showgrid=False, fixedrange=True)
    figure.update_yaxes(range=[len(ranks) - 0.5, -0.5], ticks="", showgrid=False, fixedrange=True)
    return style.with_style(figure, height_px=min(130 + 40 * len(ranks), 760))


def _write_times(figure: go.Figure, grid: Sequence[Sequence[int]]) -> None:
    """Write the times into the cells, in the page's text colour: of a translucent cell, Plotly expects a white page."""
    cells = [(x, y, units.duration(ns)) for y, line in enumerate(grid) for x, ns in enumerate(line) if ns]
    xs, ys, texts = map(list, zip(*cells, strict=True)) if cells else ([], [], [])
    figure.add_scatter(x=xs, y=ys, text=texts, mode="text", hoverinfo="skip", showlegend=False)


def bandwidth(speeds: pl.DataFrame, kind: str = BUS) -> go.Figure:
    """Return the bandwidth of each message by its size on logarithmic axes, a colour per kind of collective.

    `speeds` is `traffic.speeds`; `kind` is ALGORITHM (size over time) or BUS (as nccl-tests counts it, which
    for all collectives compares with the link). Open markers are lower bounds: some ranks of their group
    have no trace. At most MAX_POINTS messages are drawn, sampled evenly from each collective and group.
    """
    column = f"{kind}_bytes_per_s"
    figure = go.Figure()
    share = min(1.0, MAX_POINTS / max(speeds.height, 1))
    groups = speeds["group"].unique().sort(nulls_last=True).to_list()
    key = ["op", "group", "is_whole"]
    for (op, group, is_whole), rows in speeds.sort(*key, "bytes").group_by(key, maintain_order=True):
        messages = rows.gather_every(max(round(1 / share), 1))
        colour, symbol = _OPS.get(str(op), _OTHER), _SYMBOLS[groups.index(group) % len(_SYMBOLS)]
        figure.add_scatter(
            x=messages["bytes"].to_list(),
            y=messages[column].to_list(),
            mode="markers",
            name=_legend_name(str(op), group, rows["axis"][0], rows["group_size"][0]),
            marker={
                "color": colour,
                "symbol": symbol + ("" if is_whole else "-open"),
                "size": 8,
                "opacity": 0.8 if is_whole else 0.9,
            },
            customdata=[
                [units.size(size), units.rate(algorithm), units.rate(bus), units.duration(ns)]
                for size, algorithm, bus, ns in messages.select(
                    "bytes", "algorithm_bytes_per_s", "bus_bytes_per_s", "transfer_ns"
                ).iter_rows()
            ],
            hovertemplate=f"<b>{escaping.escape(_op_name(str(op)))}</b> of %{{customdata[0]}} in %{{customdata[3]}}<br>"
            f"{'' if is_whole else 'at least '}%{{customdata[1]}} algorithm, %{{customdata[2]}} bus<extra></extra>",
        )
    figure.update_xaxes(title="message size", **style.log_axis(speeds["bytes"], units.size, base=2))
    figure.update_yaxes(title=f"{kind} bandwidth", **style.log_axis(speeds[column], units.rate))
    return style.with_style(figure, height_px=420)


def _longest(waited: pl.DataFrame, name: str) -> list[int]:
    sums = waited.drop_nulls(name).group_by(name).agg(pl.col("waited_ns").sum())
    longest = sums.sort("waited_ns", name, descending=[True, False]).head(MAX_MATRIX_RANKS // 2)
    return longest[name].sort().to_list()


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
