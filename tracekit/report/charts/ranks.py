"""The activity of all ranks on one clock, which shows which rank waits for which, and a heatmap of ranks and steps."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.parallelism import rank_timelines
from tracekit.conventions import device_metrics
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

SLOWER, EXPOSED, WAITED = "longer_ratio", "exposed_ratio", "waited_ratio"
MEASURES = {
    SLOWER: "step time relative to the median of all ranks",
    EXPOSED: "exposed communication",
    WAITED: "waiting for a late rank",
}
"""The columns of every run that can be drawn, each with its label."""
COUNTERS = {
    device_metrics.SM_CLOCK: "SM clock",
    device_metrics.TEMPERATURE: "temperature",
    device_metrics.POWER: "power",
}
"""Counters of the GPUs that can be drawn where they were recorded."""
_SUFFIXES = {device_metrics.SM_CLOCK: " MHz", device_metrics.TEMPERATURE: " °C", device_metrics.POWER: " W"}
_LEAST_SPREAD_RATIO = 0.1
"""Counters that differ by less than this share of the largest one get less than the full range of colours."""
MAX_CELLS = 4000
_SHADES = {EXPOSED: style.COLOURS["communication"], WAITED: style.COLOURS["waiting"]}
_QUICK, _SLOW, _PLAIN = "#0072B2", "#D55E00", "rgba(160, 168, 180, 0.25)"
_MIN_SCALE = 0.02  # the least value of the full colour


def rank_activity(activity: pl.DataFrame, window: Window, *, origin_ns: int | None = None) -> go.Figure:
    """Return what each rank does in a window of the run's clock (ns), one row per rank and device.

    `activity` is `rank_timelines.states`. 0 ms on the axis is `origin_ns`, or the window's start. Of more
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
    return style.with_style(figure, height_px=130 + 30 * rows.height)


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


def measures(table: pl.DataFrame) -> dict[str, str]:
    """Return the columns of a table that `step_heatmap` can draw, each with its label."""
    recorded = {name: label for name, label in COUNTERS.items() if name in table.columns and table[name].count()}
    return MEASURES | recorded


def step_heatmap(table: pl.DataFrame, measure: str = SLOWER) -> go.Figure:
    """Return a heatmap of ranks (rows) and steps (columns), coloured by `measure`, one of `measures`.

    `table` is `exposed_communication.spread`, of one window, and may have the columns of `device_counters`. The
    customdata of a cell starts with its rank and step. Steps without the counter have no cell. With more
    than MAX_CELLS cells, a click does not select a cell.
    """
    steps = {step: place for place, step in enumerate(table["step"].unique().sort())}
    ranks = {rank: place for place, rank in enumerate(table["rank"].unique().sort())}
    table = table.drop_nulls(measure)
    rows = table.to_dicts()
    colours = _colours(table, measure)
    columns = [steps[row["step"]] for row in rows]
    place = {
        "y": [ranks[row["rank"]] for row in rows],
        "customdata": [[row["rank"], row["step"], _cell_hover(row)] for row in rows],
        "hovertemplate": "%{customdata[2]}<extra></extra>",
        "showlegend": False,
    }
    values = table[measure].to_list()
    figure = go.Figure()
    if table.height <= MAX_CELLS:
        base = [each - 0.48 for each in columns]
        marker = {"color": values, "line": {"width": 0}, **colours, "colorbar": _bar(measure), "showscale": True}
        figure.add_bar(orientation="h", base=base, x=[0.96] * len(rows), width=0.92, marker=marker, **place)
    else:
        scale = {"zmin": colours["cmin"], "zmax": colours["cmax"], "colorscale": colours["colorscale"]}
        figure.add_heatmap(x=columns, z=values, colorbar=_bar(measure), **scale, **place)
    figure.update_layout(barmode="overlay", clickmode="event+select", dragmode=False)
    _ticks(figure.update_xaxes, steps, "step", [-0.5, len(steps) - 0.5])
    _ticks(figure.update_yaxes, ranks, "rank", [len(ranks) - 0.5, -0.5])
    return style.with_style(figure, height_px=min(max(190, 130 + 26 * len(ranks)), 700))


def _ticks(update: object, places: dict[int, int], title: str, window: list[float]) -> None:
    every = max(1, -(-len(places) // 32))
    named = list(places.items())[::every]
    update(  # type: ignore[operator]
        title=title,
        tickvals=[place for _, place in named],
        ticktext=[str(value) for value, _ in named],
        range=window,
        showgrid=False,
        fixedrange=True,
    )


def _colours(table: pl.DataFrame, measure: str) -> dict[str, object]:
    largest = float(str(table[measure].abs().max() or 0.0))
    if measure in COUNTERS:
        least = min(float(str(table[measure].min() or 0.0)), (1 - _LEAST_SPREAD_RATIO) * largest)
        ends = [_SLOW, _PLAIN] if measure == device_metrics.SM_CLOCK else [_PLAIN, _SLOW]
        return {"cmin": least, "cmax": max(largest, least + 1), "colorscale": [[0, ends[0]], [1, ends[1]]]}
    if measure == SLOWER:
        far = max(largest, _MIN_SCALE)
        return {"cmin": -far, "cmax": far, "colorscale": [[0, _QUICK], [0.5, _PLAIN], [1, _SLOW]]}
    return {"cmin": 0, "cmax": max(largest, _MIN_SCALE), "colorscale": [[0, _PLAIN], [1, _SHADES[measure]]]}


def _bar(measure: str) -> dict[str, object]:
    ticks = {"tickformat": "+.0%" if measure == SLOWER else ".0%"}
    if measure in COUNTERS:
        ticks = {"tickformat": ",.0f", "ticksuffix": _SUFFIXES[measure]}
    return {**ticks, "thickness": 14, "nticks": 5, "outlinewidth": 0}


def _cell_hover(row: dict[str, Any]) -> str:
    counters = [f"{row[name]:,.0f}{_SUFFIXES[name]}" for name in COUNTERS if row.get(name) is not None]
    counters += [escaping.escape(reason) for reason in row.get(device_metrics.THROTTLE_REASONS) or ()]
    return (
        f"<b>rank {row['rank']}, step {row['step']}</b><br>{units.duration(row['duration_ns'])}, median of ranks "
        f"{units.duration(row['median_ns'])} ({row[SLOWER]:+.1%})<br>exposed communication "
        f"{units.share(row[EXPOSED])}, waiting for a late rank {units.share(row[WAITED])}"
        f"{'<br>GPU: ' if counters else ''}{', '.join(counters)}"
    )
