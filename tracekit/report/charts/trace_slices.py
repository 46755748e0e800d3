"""One trace in one window: its slices on its lanes, with the evidence of findings."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.time import slices
from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.model.trace import Trace
from tracekit.report.charts.style import COLOURS, KIND_LABELS, LIGHT_KINDS, with_style

MAX_SLICES = 5000
MAX_LABELS = 100
MAX_MARKS = 500
MAX_BANDS = 40
EVIDENCE_TRACK = "findings"

_EVIDENCE_PX = 31
_ROW_PX = 22


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
    table, merged_below_ns = slices.merge_short_slices(slices.slices(trace, window), window, max_slices=max_slices)
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
        ticktext=[escaping.escape(name, 42) for name in ticks.values()],
        range=[last_y + 0.7, -0.7],
        fixedrange=True,
        showgrid=False,
    )
    return with_style(figure, height_px=int(150 + _ROW_PX * (last_y + 1)))


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
        text=[escaping.escape(name, 40) if show else "" for name, show in zip(drawn["name"], labelled, strict=True)],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        constraintext="inside",
        insidetextfont={"color": "#10151c" if kind in LIGHT_KINDS else "#ffffff", "size": 11},
        customdata=[[escaping.escape(row["name"], 160), _hover(row)] for row in drawn.iter_rows(named=True)],
        hovertemplate="<b>%{customdata[0]}</b><br>%{customdata[1]}<extra></extra>",
    )


def _hover(row: Mapping[str, Any]) -> str:
    lines = [f"{units.duration(row['dur_ns'])} from {row['begin_ms']:,.3f} ms"]
    if row["count"] > 1:
        lines.append(f"{row['count']:,} slices too short to see apart, the first named here")
    placed = [f"step {row['step']}"] if row["step"] is not None else []
    placed += [escaping.escape(row["phase"])] if row["phase"] else []
    placed += [f"unit {escaping.escape(row['unit'] or 'root', 80)}"] if row["unit"] is not None else []
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
