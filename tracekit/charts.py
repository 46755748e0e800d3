"""A table -> a Plotly figure. The one place for figures: dashboard, HTML report and notebooks show these.

Names come from traces and are not to be trusted: every string that reaches a figure goes through `markup.escape`,
because Plotly reads a subset of HTML in labels and hovers. Backgrounds are transparent and text has no colour of its
own, so that a figure fits a light page and a dark one.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from tracekit import markup, units
from tracekit.analysis import slices
from tracekit.intervals import Window
from tracekit.trace import Trace

# Okabe and Ito's palette, told apart with any colour vision; one kind of work has one colour everywhere.
COLOURS = {
    "compute": "#0072B2",
    "communication": "#D55E00",
    "memcpy": "#009E73",
    "memset": "#4FC3A1",
    "idle": "#C4C9D1",
    "phase": "#7D8796",
    "cpu_op": "#8FB4CE",
    "annotation": "#B9AFD4",
    "runtime": "#A9B0BA",
    "overhead": "#DDB765",
    "evidence": "#CC79A7",
}
KIND_LABELS = {
    "phase": "phase of the step",
    "memcpy": "copy",
    "memset": "memory set",
    "cpu_op": "host op",
    "annotation": "host annotation",
    "runtime": "runtime call",
    "overhead": "profiler overhead",
    "evidence": "finding",
}
PARTS = {
    "compute_ns": ("compute", "compute"),
    "exposed_communication_ns": ("exposed communication", "communication"),
    "exposed_copy_ns": ("exposed copy", "memcpy"),
    "idle_ns": ("idle", "idle"),
}
"""The columns that sum to a step's duration, each with its label and the kind whose colour it has."""

# The buttons are listed because one of Plotly's own sends the figure to its cloud.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "plotlyServerURL": "",
    "modeBarButtons": [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
}
"""Plotly's own configuration, the same wherever a figure is shown."""

MAX_SLICES = 5000
MAX_LABELS = 100
MAX_MARKS = 500
MAX_BANDS = 40
EVIDENCE_TRACK = "findings"

_PALE = ("idle", "memset", "cpu_op", "annotation", "runtime", "overhead", "evidence")
_EVIDENCE_PX = 31
_GRID = "rgba(128, 138, 150, 0.22)"
_ROW_PX = 22


def breakdown(summary: pl.DataFrame) -> go.Figure:
    """Return stacked bars of what the time goes into, one bar per row of a breakdown (per rank, or per step).

    `summary` has the columns of `analysis.breakdown` and rank; window, step and device label the bars where they
    differ.
    """
    return _stacked(summary, _row_labels(summary))


def comparison(summaries: Mapping[str, pl.DataFrame]) -> go.Figure:
    """Return one stacked bar per run: the mean step, its parts averaged over all ranks and steps.

    `summaries` maps the name of a run to its breakdown by step.
    """
    means = [table.select(pl.col("duration_ns", *PARTS).mean().round().cast(pl.Int64)) for table in summaries.values()]
    return _stacked(pl.concat(means), list(summaries))


def step_times(summary: pl.DataFrame) -> go.Figure:
    """Return step time over steps, one line per rank, from a breakdown by step."""
    figure = go.Figure()
    known = summary.filter(pl.col("step").is_not_null()).sort("rank", "step")
    colours = _shades(known["rank"].n_unique())
    for colour, ((rank,), rows) in zip(colours, known.group_by("rank", maintain_order=True), strict=True):
        figure.add_scatter(
            line={"color": colour},
            x=rows["step"].to_list(),
            y=(rows["duration_ns"] / 1e6).to_list(),
            name=f"rank {rank}",
            mode="lines+markers",
            customdata=[[units.duration(ns)] for ns in rows["duration_ns"]],
            hovertemplate=f"rank {rank}, step %{{x}}<br>%{{customdata[0]}}<extra></extra>",
        )
    figure.update_xaxes(title="step", dtick=1 if known["step"].n_unique() < 20 else None)
    figure.update_yaxes(title="step time", ticksuffix=" ms", rangemode="tozero")
    return _dressed(figure, height_px=320)


def timeline(
    trace: Trace,
    window: Window,
    *,
    evidence: pl.DataFrame | None = None,
    origin_ns: int | None = None,
    max_slices: int = MAX_SLICES,
) -> go.Figure:
    """Return the slices of one trace in one window (ns) on its lanes: work on top, the host below.

    0 ms on the axis is `origin_ns`, or the window's start.

    `evidence` rows (start_ns, dur_ns) of this trace get a track of their own and a band across the lanes. Where there
    are more than `max_slices`, neighbours too short to see are drawn as one and the axis title says so.
    """
    origin_ns = window[0] if origin_ns is None else origin_ns
    table, merged_below_ns = slices.thin(slices.slices(trace, window), window, max_slices=max_slices)
    marks = _placed(_marks(evidence, window), window, origin_ns).with_columns(y=pl.lit(0.0))
    rows = _rows(table, first_y=_EVIDENCE_PX / _ROW_PX if marks.height else 0.0)
    drawn = _placed(table, window, origin_ns).join(rows, on=["track", "depth"])
    figure = go.Figure()
    if marks.height:
        _draw(figure, marks, kind="evidence")
        _band(figure, marks)
    for kind in (kind for kind in COLOURS if kind in set(drawn["kind"])):
        _draw(figure, drawn.filter(pl.col("kind") == kind), kind=kind)
    _mark_steps(figure, trace, window, origin_ns)
    ticks = dict(
        rows.sort("y").unique("track", keep="first", maintain_order=True).select("y", "track_name").iter_rows()
    )
    ticks |= {0.0: EVIDENCE_TRACK} if marks.height else {}
    last_y = max([0.0, *rows["y"]])
    figure.update_layout(barmode="overlay", dragmode="zoom", uniformtext={"minsize": 9, "mode": "hide"})
    figure.update_xaxes(
        range=[(edge - origin_ns) / 1e6 for edge in window],
        title={"text": _caption(table, merged_below_ns), "font": {"size": 12}},
        ticksuffix=" ms",
    )
    figure.update_yaxes(
        tickvals=list(ticks),
        ticktext=[markup.escape(name, 42) for name in ticks.values()],
        range=[last_y + 0.7, -0.7],
        fixedrange=True,
        showgrid=False,
    )
    return _dressed(figure, height_px=int(150 + _ROW_PX * (last_y + 1)))


def _stacked(parts: pl.DataFrame, labels: Sequence[str]) -> go.Figure:
    figure = go.Figure()
    places = list(range(len(labels)))
    for column, (label, kind) in PARTS.items():
        figure.add_bar(
            orientation="h",
            y=places,
            x=(parts[column] / 1e6).to_list(),
            name=label,
            marker={"color": COLOURS[kind], "line": {"width": 0}},
            customdata=[
                [markup.escape(text), units.duration(ns), units.share(ns / whole if whole else 0.0)]
                for text, ns, whole in zip(labels, parts[column], parts["duration_ns"], strict=True)
            ],
            hovertemplate="<b>%{customdata[0]}</b><br>" + label + " %{customdata[1]} (%{customdata[2]})<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.28)
    figure.update_xaxes(ticksuffix=" ms", rangemode="tozero")
    figure.update_yaxes(
        autorange="reversed",
        tickvals=places,
        ticktext=[markup.escape(text, 40) for text in labels],
        showgrid=False,
        fixedrange=True,
    )
    return _dressed(figure, height_px=min(136 + 30 * len(labels), 1400))


def _row_labels(summary: pl.DataFrame) -> list[str]:
    names = ["rank"]
    names += ["window"] if "window" in summary.columns and summary["window"].n_unique() > 1 else []
    names += ["device"] if _drives_several_devices(summary) else []
    names += ["step"] if summary["step"].is_not_null().any() else []
    if len(names) > 1 and summary["rank"].n_unique() == 1:
        names.remove("rank")
    return [
        " · ".join(f"{n} {value}" for n, value in zip(names, row, strict=True)) for row in summary.select(names).rows()
    ]


def _drives_several_devices(summary: pl.DataFrame) -> bool:
    return "device" in summary.columns and bool(
        (summary.group_by("rank").agg(pl.col("device").n_unique())["device"] > 1).any()
    )


def _shades(count: int) -> list[str]:
    # Not the colours of the kinds: a rank is no kind of work.
    return list(sample_colorscale("Viridis", [0.9 * i / max(count - 1, 1) for i in range(count)]))


def _rows(table: pl.DataFrame, *, first_y: float) -> pl.DataFrame:
    """Return track, track_name, depth and y: each depth of each track is a row, with some air between tracks."""
    rows = table.select("track", "track_name", "depth").unique().sort("track", "depth").with_row_index("row")
    return rows.select("track", "track_name", "depth", y=pl.col("row") + pl.col("track") * 0.4 + first_y)


def _marks(evidence: pl.DataFrame | None, window: Window) -> pl.DataFrame:
    """Return the rows of `evidence` that can be shown in the window, with the columns that a slice has."""
    if evidence is None or not {"start_ns", "dur_ns"} <= set(evidence.columns):
        return pl.DataFrame(schema=slices.COLUMNS)
    ends_ns = pl.col("start_ns") + pl.col("dur_ns")
    inside = evidence.filter(pl.col("start_ns") < window[1], ends_ns > window[0])
    longest = inside.sort("dur_ns", descending=True).head(MAX_MARKS)
    named = longest if "name" in longest.columns else longest.with_columns(name=pl.lit("evidence"))
    counted = named.with_columns(count=pl.lit(1))
    return counted.select(
        (pl.col(name) if name in counted.columns else pl.lit(None)).cast(dtype).alias(name)
        for name, dtype in slices.COLUMNS.items()
    )


def _placed(table: pl.DataFrame, window: Window, origin_ns: int) -> pl.DataFrame:
    """Return the slices with begin_ms, base_ms and length_ms on the axis; the last two clipped to the window."""
    left_ns = pl.col("start_ns").clip(lower_bound=window[0])
    right_ns = (pl.col("start_ns") + pl.col("dur_ns")).clip(upper_bound=window[1])
    return table.with_columns(
        begin_ms=(pl.col("start_ns") - origin_ns) / 1e6,
        base_ms=((left_ns - origin_ns) / 1e6).round(6),
        length_ms=((right_ns - left_ns) / 1e6).round(6),
    )


def _draw(figure: go.Figure, drawn: pl.DataFrame, *, kind: str) -> None:
    labelled = drawn["dur_ns"].rank("ordinal", descending=True) <= MAX_LABELS
    figure.add_bar(
        orientation="h",
        base=drawn["base_ms"].to_list(),
        x=drawn["length_ms"].to_list(),
        y=drawn["y"].to_list(),
        width=0.88,
        name=KIND_LABELS.get(kind, kind),
        marker={"color": COLOURS[kind], "line": {"width": 0}},
        text=[markup.escape(name, 40) if show else "" for name, show in zip(drawn["name"], labelled, strict=True)],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        constraintext="inside",
        insidetextfont={"color": "#10151c" if kind in _PALE else "#ffffff", "size": 11},
        customdata=[[markup.escape(row["name"], 160), _detail(row)] for row in drawn.iter_rows(named=True)],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
    )


def _detail(row: Mapping[str, Any]) -> str:
    lines = [f"{units.duration(row['dur_ns'])} from {row['begin_ms']:,.3f} ms"]
    if row["count"] > 1:
        lines.append(f"{row['count']:,} slices too short to see apart, the first named here")
    placed = [f"step {row['step']}"] if row["step"] is not None else []
    placed += [markup.escape(row["phase"])] if row["phase"] else []
    placed += [f"unit {markup.escape(row['unit'] or 'root', 80)}"] if row["unit"] is not None else []
    placed += [units.size(row["bytes"])] if row["bytes"] else []
    return "<br>".join([*lines, " · ".join(placed)] if placed else lines)


def _band(figure: go.Figure, marks: pl.DataFrame) -> None:
    for base_ms, length_ms in marks.select("base_ms", "length_ms").head(MAX_BANDS).iter_rows():
        figure.add_vrect(
            x0=base_ms,
            x1=base_ms + length_ms,
            fillcolor=COLOURS["evidence"],
            opacity=0.16,
            line_width=0,
            layer="below",
        )


def _mark_steps(figure: go.Figure, trace: Trace, window: Window, origin_ns: int) -> None:
    inside = trace.steps.filter(pl.col("start_ns").is_between(*window, closed="left"), pl.col("step").is_not_null())
    if inside.height < 2:
        return
    for step, start_ns in inside.select("step", "start_ns").iter_rows():
        figure.add_vline(
            x=(start_ns - origin_ns) / 1e6,
            line={"width": 1, "dash": "dot", "color": "rgba(128, 138, 150, 0.9)"},
            annotation={"text": f"step {step}", "yref": "paper", "y": 0.0, "yanchor": "bottom", "xanchor": "left"},
        )


def _caption(table: pl.DataFrame, merged_below_ns: int) -> str:
    if not merged_below_ns:
        return ""
    return (
        f"{int(table['count'].sum()):,} slices drawn as {table.height:,}: neighbours shorter than "
        f"{units.duration(merged_below_ns)} are merged; choose a shorter window to see them apart"
    )


def _dressed(figure: go.Figure, *, height_px: int) -> go.Figure:
    figure.update_layout(
        height=height_px,
        margin={"l": 8, "r": 16, "t": 62, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal", "itemwidth": 30},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128, 138, 150, 0.7)", "activecolor": "#0072B2"},
        hoverlabel={"align": "left", "namelength": -1},
        font={"size": 13},
    )
    figure.update_xaxes(gridcolor=_GRID, zeroline=False, automargin=True)
    figure.update_yaxes(gridcolor=_GRID, zeroline=False, automargin=True, ticklabelstandoff=8)
    return figure
