"""What replay and plans predict: a step's critical path, savings, checkpoints, pipelines and memory."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.plan.memory import MemoryPlan
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes.cause import Kind
from tracekit.report.charts import style

_COLOURS = {
    Kind.COMMUNICATION: style.COLOURS["communication"],
    Kind.STRAGGLERS: style.COLOURS["waiting"],
    Kind.CONTENTION: style.CAUSES["contention"][1],
    Kind.HOST: style.CAUSES["host"][1],
    Kind.COMPUTE: style.COLOURS["compute"],
}
_TEXT_PX = 116
_WIDTH = 0.7  # else Plotly takes the distance to the next bar of the same colour
_SEVERAL = ("several causes", style.COLOURS["evidence"])

HOST_COLOUR = "#56B4E9"
PATH_COLOURS = {
    "compute": style.COLOURS["compute"],
    "communication": style.COLOURS["communication"],
    "memcpy": style.COLOURS["memcpy"],
    "memset": style.COLOURS["memset"],
    "host": HOST_COLOUR,
    "idle": style.COLOURS["idle"],
    "unrecorded": style.COLOURS["phase"],
}
"""The kinds of parts of a path, each with its colour."""
_MAX_BARS = 1500

SAVING, REPEATED, LOST = "saving", "work repeated after a failure", "total"
_PLAN_COLOURS = {SAVING: "#0072B2", REPEATED: "#E69F00", LOST: "#D55E00"}
_MEMORY = {
    "weights": ("weight_bytes", "#0072B2"),
    "gradients": ("gradient_bytes", "#D55E00"),
    "optimizer": ("optimizer_bytes", "#009E73"),
    "buffers": ("buffer_bytes", "#CC79A7"),
    "activations": ("activation_bytes", "#E69F00"),
}
_SCHEDULES = ("#D55E00", "#E69F00", "#0072B2", "#009E73", "#CC79A7")
_MARK = "rgba(128, 138, 150, 0.9)"


def potential_savings(ranked: pl.DataFrame) -> go.Figure:
    """Return the potential saving per step of each cause by itself, as bars in the order of the table.

    `ranked` is `report.what_if.as_table`. The colour says what a cause is about, a paler bar has less confidence.
    """
    rows = list(ranked.iter_rows(named=True))
    figure = go.Figure()
    for label, colour in dict.fromkeys(map(_kind, ranked["cause"])):
        own_rows = [(position, row) for position, row in enumerate(rows) if _kind(row["cause"])[0] == label]
        style.add_bars(
            figure,
            [position for position, _ in own_rows],
            [row["saved_ns"] / 1e6 for _, row in own_rows],
            name=label,
            width=_WIDTH,
            colour=colour,
            marker_opacity=[0.3 + 0.7 * row["confidence"] for _, row in own_rows],
            text=[f"{units.duration(row['saved_ns'])} · {units.share(row['saved_ratio'])}" for _, row in own_rows],
            textposition="outside",
            cliponaxis=False,
            customdata=[[_hover(row)] for _, row in own_rows],
            hover="%{customdata[0]}",
        )
    max_ms = max((row["saved_ns"] for row in rows), default=0) / 1e6
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(title="potential saving per step", range=[0, 1.02 * max_ms or 1])
    style.scale_times(figure)
    style.label_all_rows(figure, ranked["cause"].to_list())
    figure = style.with_style(figure, height_px=140 + 28 * len(rows))
    return figure.update_layout(margin_r=_TEXT_PX)  # the text behind the longest bar, however narrow the figure is


def savings_by_rank(by_rank: pl.DataFrame, cause: str, labels: Mapping[int, str] | None = None) -> go.Figure:
    """Replayed step time of each rank: the remaining time without a cause and the saving, stacked.

    `by_rank` is that of one saving in `savings.by_rank`, `cause` the name of its cause, or of several. `labels` are the
    ranks to draw, each with a text for its label; by default all.
    """
    by_rank = style.of_ranks(by_rank, labels)
    left_ns = by_rank.select(pl.min_horizontal("without_ns", "replayed_ns"))["without_ns"]
    parts = {"remaining": (left_ns, style.COLOURS["idle"]), "saved": (by_rank["saved_ns"].clip(0), _kind(cause)[1])}
    figure = go.Figure()
    for label, (times_ns, colour) in parts.items():
        style.add_bars(
            figure,
            range(by_rank.height),
            times_ns / 1e6,
            name=label,
            colour=colour,
            customdata=[[_rank_hover(row)] for row in by_rank.iter_rows(named=True)],
            hover="%{customdata[0]}",
        )
    figure.update_xaxes(title="replayed step")
    return style.with_labelled_rows(figure, style.rank_names(by_rank["rank"], labels), edge_px=150)


def path_parts(parts: pl.DataFrame, start_ns: int, *, max_parts: int = _MAX_BARS) -> pl.DataFrame:
    """Return parts of a path to draw: at most `max_parts`, the shortest joined to those before them on their rank.

    `parts` has columns rank, kind, name, start_ns, dur_ns and others, and tiles the path. Parts that are too short to
    see are dropped if there are still too many. Times count from `start_ns`.
    """
    key = pl.struct("rank", "kind")
    joined = parts if parts.height <= max_parts else _join_parts(parts, key.ne_missing(key.shift(1)).cum_sum())
    longest = joined.sort("dur_ns", descending=True).head(max_parts).sort("start_ns")
    return longest.with_columns(from_ns=pl.col("start_ns") - start_ns)


def _join_parts(parts: pl.DataFrame, number: pl.Expr) -> pl.DataFrame:
    """Return neighbours of one number as one part, named by the longest of them."""
    longest = pl.col("name").sort_by("dur_ns", descending=True).first()
    other_columns = [name for name in parts.columns if name not in ("name", "dur_ns")]
    grouped = parts.group_by(number.alias("_number"), maintain_order=True)
    return grouped.agg(pl.col(other_columns).first(), longest, pl.col("dur_ns").sum()).select(parts.columns)


def critical_path(parts: pl.DataFrame, start_ns: int) -> go.Figure:
    """Return the path as bars in the row of the rank that owns each part; lines connect consecutive parts.

    `parts` has columns rank, kind, name, start_ns (on the run's clock), dur_ns, and trace_start_ns (the same time on
    the clock of the rank's trace). The customdata of a bar starts with rank, trace_start_ns and dur_ns.
    """
    if parts.is_empty():
        return style.empty()
    bars = path_parts(parts, start_ns)
    ranks = bars["rank"].unique().sort().to_list()
    placed_bars = bars.with_columns(y=pl.col("rank").replace_strict(ranks, range(len(ranks)), return_dtype=pl.Int64))
    figure = go.Figure()
    ends = placed_bars.select("y", x=pl.col("from_ns") / 1e6)
    figure.add_scatter(
        x=ends["x"].to_list(), y=ends["y"].to_list(), mode="lines", hoverinfo="skip", showlegend=False,
        line={"shape": "hv", "width": 1, "color": style.COLOURS["phase"]},
    )  # fmt: skip
    for kind, colour in PATH_COLOURS.items():
        kind_bars = placed_bars.filter(kind=kind)
        if kind_bars.height:
            _add(figure, kind_bars, kind, colour)
    figure.update_layout(barmode="overlay", dragmode="zoom", clickmode="event+select")
    style.scale_times(figure)
    style.label_all_rows(figure, [f"rank {rank}" for rank in ranks])
    return style.with_style(figure, height_px=140 + style.rows_px(len(ranks)))


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
            line={"color": _PLAN_COLOURS.get(name, _MARK), "width": 3 if name == LOST else 2},
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
            list(plans),
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


def _kind(name: str) -> tuple[str, str]:
    kind = next((cause.kind for cause in causes.all_causes() if cause.name == name), None)
    return _SEVERAL if kind is None else (kind.value, _COLOURS[kind])


def _hover(row: dict[str, object]) -> str:
    caveat = f"<br>less certain: {escaping.escape(str(row['caveat']), 160)}" if row["caveat"] else ""
    return (
        f"<b>without {escaping.escape(str(row['cause']))}</b>: step time "
        f"{units.duration(int(str(row['without_ns'])))}<br>saving {units.duration(int(str(row['saved_ns'])))} "
        f"({units.share(float(str(row['saved_ratio'])))}), confidence {float(str(row['confidence'])):.0%}{caveat}"
    )


def _rank_hover(row: dict[str, int]) -> str:
    return (
        f"<b>rank {row['rank']}</b>: {units.duration(row['replayed_ns'])}, without it "
        f"{units.duration(row['without_ns'])}<br>saving {units.duration(row['saved_ns'])}"
    )


def _add(figure: go.Figure, bars: pl.DataFrame, kind: str, colour: str) -> None:
    labels = [escaping.escape(name, 80) for name in bars["name"]]
    times = bars.select("rank", "trace_start_ns", "dur_ns").rows()
    style.add_bars(
        figure,
        bars["y"],
        bars["dur_ns"] / 1e6,
        colour=colour,
        hover=f"rank %{{customdata[0]}} · {kind}<br>%{{customdata[3]}}<br>%{{customdata[4]}}",
        name=style.KIND_LABELS.get(kind, kind),
        base=bars["from_ns"] / 1e6,
        width=0.72,
        customdata=[[*time, label, units.duration(time[2])] for time, label in zip(times, labels, strict=True)],
    )
