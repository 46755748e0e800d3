"""One trace in one window: its slices on its lanes, with the evidence of findings."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit import conventions
from tracekit.model import escaping, schema, units
from tracekit.model.intervals import Window
from tracekit.model.trace import Trace
from tracekit.report import trace_tracks, track_nesting
from tracekit.report.charts import style
from tracekit.report.charts.style import COLOURS

MAX_SLICES = 5000
MAX_LABELS = 100
MAX_MARKS = 500
MAX_BANDS = 40
EVIDENCE_TRACK = "findings"

MAX_DEPTH = 7
MAX_HOST_TRACKS = 3
PHASE_TRACK = "phases"
COLUMNS = schema.columns("track track_name depth kind name start_ns dur_ns step phase unit bytes count")
_HOST_KINDS = ("cpu_op", "annotation", "runtime", "overhead", "os_call")
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

    `evidence` rows (start_ns, dur_ns) of this trace get their own track and a band across the lanes. Where there
    are more than `max_slices`, neighbours too short to see are drawn as one and the axis title says so.
    """
    origin_ns = window[0] if origin_ns is None else origin_ns
    table, merged_below_ns = merge_short_slices(visible_slices(trace, window), window, max_slices=max_slices)
    marks = _place_slices(_marks(evidence, window), window, origin_ns).with_columns(y=pl.lit(0.0))
    rows = _rows(table, first_y=_EVIDENCE_PX / _ROW_PX if marks.height else 0.0)
    bars = _place_slices(table, window, origin_ns).join(rows, on=["track", "depth"])
    figure = go.Figure()
    if marks.height:
        _draw(figure, marks, kind="evidence")
        _band(figure, marks)
    for kind in (kind for kind in COLOURS if kind in set(bars["kind"])):
        _draw(figure, bars.filter(pl.col("kind") == kind), kind=kind)
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
    return style.with_style(figure, height_px=int(150 + _ROW_PX * (last_y + 1)))


def visible_slices(trace: Trace, window: Window, *, max_depth: int = MAX_DEPTH) -> pl.DataFrame:
    """Return the slices that touch `window`, with the track and the depth at which they are drawn.

    Columns COLUMNS, count 1; one row per slice. Tracks are numbered from the top: phases of the step, then the
    tracks of `report.trace_tracks`: all with device work, and the MAX_HOST_TRACKS busiest host threads that are no
    communication lanes. Python frames and slices deeper than `max_depth` are left out.
    """
    table = trace_tracks.slices(trace, ("lane", "step", "phase", "unit", "bytes"), window=window)
    collectives = trace.lanes.filter(pl.col("role") == "communication")["lane"].implode()
    is_host = pl.col("source") == "ops"
    # What a communication lane runs on the host is part of a collective, which has its own track.
    table = table.filter(
        (pl.col("source") == "activities")
        | (is_host & pl.col("kind").is_in(_HOST_KINDS) & ~pl.col("lane").is_in(collectives).fill_null(value=False))
    )
    host = table.filter(is_host).group_by("track").len().sort("len", "track", descending=[True, False])
    table = table.filter(~is_host | pl.col("track").is_in(host["track"].head(MAX_HOST_TRACKS).implode()))
    names = trace_tracks.tracks(trace, table).select("track", "track_name")
    slices = pl.concat([_phases(trace, window), table.join(names, on="track", maintain_order="left")], how="diagonal")
    slices = slices.with_columns(pl.lit(1, pl.Int64).alias("count"), pl.col("track").rank("dense").cast(pl.Int64) - 1)
    depth = track_nesting.rows(*(slices[name].to_numpy() for name in ("track", "start_ns", "dur_ns")))
    return (
        schema.conform(slices.with_columns(pl.Series("depth", depth)), COLUMNS)
        .filter(pl.col("depth") < max_depth)
        .sort("track", "start_ns", "depth")
    )


def merge_short_slices(table: pl.DataFrame, window: Window, *, max_slices: int) -> tuple[pl.DataFrame, int]:
    """Return at most about `max_slices` slices, and the duration in ns below which neighbours were merged (0: none).

    Slices of one track, depth and kind that are shorter than a share of the window too narrow to see become one, from
    the first start to the last end, with their number in `count`. The share doubles until the rest fits.
    """
    if table.height <= max_slices:
        return table, 0
    quantum_ns = max((window[1] - window[0]) // 20_000, 1)
    merged = _merge(table, quantum_ns)
    while merged.height > max_slices and quantum_ns < window[1] - window[0]:
        quantum_ns *= 2
        merged = _merge(table, quantum_ns)
    return merged, quantum_ns


def _phases(trace: Trace, window: Window) -> pl.DataFrame:
    phase = pl.col("name").str.strip_prefix(conventions.SPAN_PREFIX)
    spans = trace.ops.filter(pl.col("kind") == "annotation", phase.is_in(conventions.PHASES), phase != pl.col("name"))
    return trace_tracks.touching(spans, window).select(
        pl.lit(-1, pl.Int64).alias("track"),
        pl.lit(PHASE_TRACK).alias("track_name"),
        phase.alias("name"),
        pl.lit("phase").alias("kind"),
        *("start_ns", "dur_ns", "step", "phase", "unit"),
    )


def _merge(table: pl.DataFrame, quantum_ns: int) -> pl.DataFrame:
    short = pl.col("dur_ns") < quantum_ns
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    merged = (
        table.filter(short)
        .with_columns((pl.col("start_ns") // quantum_ns).alias("bin"), end_ns.alias("end_ns"))
        .group_by("track", "track_name", "depth", "kind", "bin")
        .agg(
            pl.col("name", "step", "phase", "unit").first(),
            pl.col("bytes", "count").sum(),
            pl.col("start_ns").min(),
            pl.col("end_ns").max(),
        )
        .with_columns((pl.col("end_ns") - pl.col("start_ns")).alias("dur_ns"))
    )
    return pl.concat([table.filter(~short), schema.conform(merged, COLUMNS)]).sort("track", "start_ns", "depth")


def _rows(table: pl.DataFrame, *, first_y: float) -> pl.DataFrame:
    """Return track, track_name, depth and y: each depth of each track is a row, with some air between tracks."""
    rows = table.select("track", "track_name", "depth").unique().sort("track", "depth").with_row_index("row")
    return rows.select("track", "track_name", "depth", y=pl.col("row") + pl.col("track") * 0.4 + first_y)


def _marks(evidence: pl.DataFrame | None, window: Window) -> pl.DataFrame:
    """Return the rows of `evidence` that can be shown in the window, with the columns that a slice has."""
    if evidence is None or not {"start_ns", "dur_ns"} <= set(evidence.columns):
        return pl.DataFrame(schema=COLUMNS)
    ends_ns = pl.col("start_ns") + pl.col("dur_ns")
    inside = evidence.filter(pl.col("start_ns") < window[1], ends_ns > window[0])
    longest = inside.sort("dur_ns", descending=True).head(MAX_MARKS)
    named_rows = longest if "name" in longest.columns else longest.with_columns(name=pl.lit("evidence"))
    return schema.conform(named_rows.with_columns(count=pl.lit(1)), COLUMNS)


def _place_slices(table: pl.DataFrame, window: Window, origin_ns: int) -> pl.DataFrame:
    """Return the slices with begin_ms, base_ms and length_ms on the axis; the last two clipped to the window."""
    left_ns = pl.col("start_ns").clip(lower_bound=window[0])
    right_ns = (pl.col("start_ns") + pl.col("dur_ns")).clip(upper_bound=window[1])
    return table.with_columns(
        begin_ms=(pl.col("start_ns") - origin_ns) / 1e6,
        base_ms=((left_ns - origin_ns) / 1e6).round(6),
        length_ms=((right_ns - left_ns) / 1e6).round(6),
    )


def _draw(figure: go.Figure, bars: pl.DataFrame, *, kind: str) -> None:
    labelled = bars["dur_ns"].rank("ordinal", descending=True) <= MAX_LABELS
    style.add_bars(
        figure,
        bars["y"],
        bars["length_ms"],
        base=bars["base_ms"],
        width=0.88,
        name=style.KIND_LABELS.get(kind, kind),
        colour=COLOURS[kind],
        text=[escaping.escape(name, 40) if show else "" for name, show in zip(bars["name"], labelled, strict=True)],
        textposition="inside",
        insidetextanchor="start",
        textangle=0,
        constraintext="inside",
        insidetextfont={"color": "#10151c" if kind in style.LIGHT_KINDS else "#ffffff", "size": 11},
        customdata=[[escaping.escape(row["name"], 160), _hover(row)] for row in bars.iter_rows(named=True)],
        hover="<b>%{customdata[0]}</b><br>%{customdata[1]}",
    )


def _hover(row: Mapping[str, Any]) -> str:
    lines = [f"{units.duration(row['dur_ns'])} at {row['begin_ms']:,.3f} ms"]
    if row["count"] > 1:
        lines.append(f"{row['count']:,} short slices merged; the name is that of the first")
    details = [f"step {row['step']}"] if row["step"] is not None else []
    details += [escaping.escape(row["phase"])] if row["phase"] else []
    details += [f"unit {escaping.escape(row['unit'] or 'root', 80)}"] if row["unit"] is not None else []
    details += [units.size(row["bytes"])] if row["bytes"] else []
    return "<br>".join([*lines, " · ".join(details)] if details else lines)


def _band(figure: go.Figure, marks: pl.DataFrame) -> None:
    for base_ms, length_ms in marks.select("base_ms", "length_ms").head(MAX_BANDS).iter_rows():
        figure.add_vrect(
            x0=base_ms, x1=base_ms + length_ms, fillcolor=COLOURS["evidence"], opacity=0.16, line_width=0, layer="below"
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
        f"{int(table['count'].sum()):,} slices drawn as {table.height:,}: neighbours shorter than<br>"
        f"{units.duration(merged_below_ns)} are merged; choose a shorter window to see each slice"
    )
