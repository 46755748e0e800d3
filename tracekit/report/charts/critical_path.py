"""The critical path of a step: ranks down, time across, one bar per part."""

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts import style

HOST_COLOUR = "#56B4E9"
COLOURS = {
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
    for kind, colour in COLOURS.items():
        kind_bars = placed_bars.filter(kind=kind)
        if kind_bars.height:
            _add(figure, kind_bars, kind, colour)
    figure.update_layout(barmode="overlay", dragmode="zoom", clickmode="event+select")
    style.scale_times(figure)
    style.label_all_rows(figure, [f"rank {rank}" for rank in ranks])
    return style.with_style(figure, height_px=140 + 34 * len(ranks))


def _add(figure: go.Figure, bars: pl.DataFrame, kind: str, colour: str) -> None:
    labels = [escaping.escape(name, 80) for name in bars["name"]]
    times = bars.select("rank", "trace_start_ns", "dur_ns").rows()
    style.add_bars(
        figure,
        bars["y"],
        (bars["dur_ns"] / 1e6).to_list(),
        colour=colour,
        hover=f"rank %{{customdata[0]}} · {kind}<br>%{{customdata[3]}}<br>%{{customdata[4]}}",
        name=style.KIND_LABELS.get(kind, kind),
        base=(bars["from_ns"] / 1e6).to_list(),
        width=0.72,
        customdata=[[*time, label, units.duration(time[2])] for time, label in zip(times, labels, strict=True)],
    )
