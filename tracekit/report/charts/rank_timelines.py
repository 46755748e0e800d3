"""The activity of all ranks on one clock: one row per rank shows which rank waits for which."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.parallelism import rank_timelines
from tracekit.model import escaping, units
from tracekit.model.intervals import Window
from tracekit.report.charts import style

LABELS = {
    rank_timelines.COMPUTE: ("compute", "compute"),
    rank_timelines.TRANSFER: ("exposed transfer", "communication"),
    rank_timelines.WAITING: ("waiting for a late rank", "waiting"),
    rank_timelines.COPY: ("exposed copy", "memcpy"),
}
"""The legend text of each activity, and the kind of work whose colour it has."""
MAX_SPANS = 6000
_ROW_PX = 30


def rank_activity(activity: pl.DataFrame, window: Window, *, origin_ns: int | None = None) -> go.Figure:
    """Return what each rank does in a window of the run's clock (ns), one row per rank and device.

    `doings` has the columns of `analysis.lockstep`. 0 ms on the axis is `origin_ns`, or the window's start. Of more
    than `MAX_SPANS` spans, adjacent ones too short to see are merged.
    """
    origin_ns = window[0] if origin_ns is None else origin_ns
    rows = activity.select("rank", "device").unique().sort("rank", "device").with_row_index("y")
    shown = _thin(rank_timelines.within(activity, window), window)
    figure = go.Figure()
    for doing, (label, kind) in LABELS.items():
        drawn = shown.filter(pl.col("state") == doing).join(rows, on=["rank", "device"], nulls_equal=True)
        style.add_bars(
            figure,
            drawn["y"],
            (drawn["dur_ns"] / 1e6).round(6),
            base=((drawn["start_ns"] - origin_ns) / 1e6).round(6).to_list(),
            width=0.8,
            name=label,
            colour=style.COLOURS[kind],
            customdata=[[_hover(row, label)] for row in drawn.iter_rows(named=True)],
            hover="%{customdata[0]}",
        )
    several = rows["rank"].is_duplicated().any()
    names = [f"rank {row['rank']}" + (f" gpu {row['device']}" if several else "") for row in rows.iter_rows(named=True)]
    figure.update_layout(barmode="overlay", dragmode="zoom")
    figure.update_xaxes(range=[(edge - origin_ns) / 1e6 for edge in window], ticksuffix=" ms")
    style.label_all_rows(figure, names)
    return style.with_style(figure, height_px=130 + _ROW_PX * rows.height)


def _thin(shown: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Return at most MAX_SPANS spans: adjacent spans of one activity are merged over increasingly long gaps."""
    of = ["window", "rank", "device"]
    ordered = shown.sort(*of, "start_ns")
    quantum_ns = max((window[1] - window[0]) // 4000, 1)
    while ordered.height > MAX_SPANS and quantum_ns < window[1] - window[0]:
        past_ns = (pl.col("start_ns") + pl.col("dur_ns")).shift().over(of)
        far = (pl.col("start_ns") - past_ns > quantum_ns).fill_null(value=True)
        short = pl.max_horizontal("dur_ns", pl.col("dur_ns").shift().over(of)) <= quantum_ns
        other = (pl.col("state") != pl.col("state").shift().over(of)).fill_null(value=True) & ~short
        run = (far | other).cum_sum()
        most = pl.col("dur_ns").arg_max()
        ordered = (
            ordered.group_by(run.alias("_run"), maintain_order=True)
            .agg(
                pl.col(*of).first(),
                pl.col("state", "op", "unit", "peer_rank").get(most),
                pl.col("start_ns").first(),
                (pl.col("start_ns") + pl.col("dur_ns")).last().alias("_end_ns"),
            )
            .with_columns(dur_ns=pl.col("_end_ns") - pl.col("start_ns"))
            .drop("_run", "_end_ns")
        )
        quantum_ns *= 2
    return ordered


def _hover(row: Mapping[str, Any], label: str) -> str:
    lines = [f"<b>{label}</b> {units.duration(row['dur_ns'])}"]
    what = [escaping.escape(row["op"].replace("_", "-"))] if row["op"] else []
    what += [f"unit {escaping.escape(row['unit'] or 'root', 80)}"] if row["unit"] is not None else []
    what += [f"rank {row['peer_rank']} arrives last"] if row["peer_rank"] is not None else []
    return "<br>".join([*lines, " · ".join(what)] if what else lines)
