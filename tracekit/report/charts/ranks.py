"""The activity of all ranks on one clock, which shows which rank waits for which, and a heatmap of ranks and steps."""

from collections.abc import Mapping, Sequence
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
MAX_SPANS = 4000

OTHERS_LOSE, SLOWER, EXPOSED, WAITED = "lost_ratio", "longer_ratio", "exposed_ratio", "waited_ratio"
MEASURES = {
    OTHERS_LOSE: "time others lose to this rank",
    SLOWER: "step time against the median rank",
    EXPOSED: "exposed communication",
    WAITED: "waiting for a late rank",
}
"""The columns that can be drawn, each with its label. The first of those that a table has is the default."""
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
MAX_ROWS = 64
"""More ranks, or steps with more cells than MAX_CELLS, share a row or column of the heatmap."""
_QUICK, _SLOW, _PLAIN = "#0072B2", "#D55E00", "rgba(160, 168, 180, 0.25)"
_SHADES = {OTHERS_LOSE: _SLOW, EXPOSED: style.COLOURS["communication"], WAITED: style.COLOURS["waiting"]}
_MIN_SCALE = 0.02  # the least value of the full colour


def rank_activity(
    activity: pl.DataFrame, window: Window, *, origin_ns: int | None = None, labels: Mapping[int, str] | None = None
) -> go.Figure:
    """Activity of each rank in a window of the run's clock (ns), one row per rank and device.

    `activity` is `rank_timelines.states`. 0 ms on the axis is `origin_ns`, or the window's start. Of more
    than `MAX_SPANS` spans, adjacent ones too short to see are merged. `labels` are the ranks to draw, each with a text
    for its label; by default all.
    """
    activity = style.of_ranks(activity, labels)
    origin_ns = window[0] if origin_ns is None else origin_ns
    rows = activity.select("rank", "device").unique().sort("rank", "device").with_row_index("y")
    states = _thin(rank_timelines.within(activity, window), window)
    figure = go.Figure()
    for doing, (label, kind) in LABELS.items():
        spans = states.filter(pl.col("state") == doing).join(rows, on=["rank", "device"], nulls_equal=True)
        style.add_bars(
            figure,
            spans["y"],
            (spans["dur_ns"] / 1e6).round(6),
            base=((spans["start_ns"] - origin_ns) / 1e6).round(6),
            width=0.8,
            name=label,
            colour=style.COLOURS[kind],
            hovertext=[_hover(row, label) for row in spans.iter_rows(named=True)],
            hover="%{hovertext}",
        )
    several = rows["rank"].is_duplicated().any()
    devices = [f" gpu {device}" if several else "" for device in rows["device"]]
    names = [name + device for name, device in zip(style.rank_names(rows["rank"], labels), devices, strict=True)]
    figure.update_layout(barmode="overlay", dragmode="zoom")
    figure.update_xaxes(range=[(edge - origin_ns) / 1e6 for edge in window])
    style.scale_times(figure)
    style.label_all_rows(figure, names)
    return style.with_style(figure, height_px=130 + style.rows_px(rows.height))


def _thin(states: pl.DataFrame, window: Window) -> pl.DataFrame:
    """Return at most MAX_SPANS spans: adjacent spans of one activity are merged over increasingly long gaps."""
    key = ["window", "rank", "device"]
    ordered = states.sort(*key, "start_ns")
    quantum_ns = max((window[1] - window[0]) // 4000, 1)
    while ordered.height > MAX_SPANS and quantum_ns < window[1] - window[0]:
        past_ns = (pl.col("start_ns") + pl.col("dur_ns")).shift().over(key)
        far = (pl.col("start_ns") - past_ns > quantum_ns).fill_null(value=True)
        short = pl.max_horizontal("dur_ns", pl.col("dur_ns").shift().over(key)) <= quantum_ns
        other = (pl.col("state") != pl.col("state").shift().over(key)).fill_null(value=True) & ~short
        run = (far | other).cum_sum()
        longest = pl.col("dur_ns").arg_max()
        ordered = (
            ordered.group_by(run.alias("_run"), maintain_order=True)
            .agg(
                pl.col(*key).first(),
                pl.col("state", "op", "unit", "peer_rank").get(longest),
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
    labels = {name: label for name, label in (MEASURES | COUNTERS).items() if name in table.columns}
    if OTHERS_LOSE in labels and not table[OTHERS_LOSE].sum():
        del labels[OTHERS_LOSE]  # nobody waits: all cells would be alike
    return {name: label for name, label in labels.items() if table[name].count()}


def step_heatmap(table: pl.DataFrame, measure: str = SLOWER) -> go.Figure:
    """Return a heatmap of ranks (rows) and steps (columns), coloured by `measure`, one of `measures`.

    `table` is `rank_timelines.spread`, of one window, and may have the columns of `device_counters`. The ranks that
    others lose most to are at the top, where this is drawn and of many ranks; otherwise ranks are in order. Of many
    ranks or steps, neighbours share a row or column, and the cell shows the one with the highest value (of clocks the
    lowest). The customdata of a cell starts with its rank and step. Steps without the counter have no cell.
    """
    ranks = _rank_rows(table, measure)
    steps = _bins(table["step"].unique().sort().to_list(), max(MAX_CELLS // max(len(ranks), 1), 1))
    table = table.drop_nulls(measure)
    colours = _colours(table, measure)
    cells = _cells(table, measure, ranks, steps)
    figure = go.Figure()
    figure.add_bar(
        orientation="h",
        base=[column - 0.48 for column in cells["column"]],
        x=[0.96] * cells.height,
        y=cells["row"].to_list(),
        width=0.92,
        marker={
            "color": cells[measure].to_list(), "line": {"width": 0}, **colours,
            "colorbar": _bar(measure, cells[measure]), "showscale": True,
        },
        customdata=[
            [cell["rank"], cell["step"], _cell_hover(cell) + _bin_hover(cell, measure, ranks, steps)]
            for cell in cells.iter_rows(named=True)
        ],
        hovertemplate="%{customdata[2]}<extra></extra>",
        showlegend=False,
    )  # fmt: skip
    figure.update_layout(barmode="overlay", clickmode="event+select", dragmode=False)
    _ticks(figure.update_xaxes, steps, "step", [-0.5, len(steps) - 0.5])
    _ticks(figure.update_yaxes, ranks, "rank", [len(ranks) - 0.5, -0.5])
    return style.with_style(figure, height_px=min(max(190, 130 + 26 * len(ranks)), 700))


def _rank_rows(table: pl.DataFrame, measure: str) -> list[list[int]]:
    """Ranks of each row of the heatmap: a rank that others lose time to shares its row with none."""
    ranks: list[int] = table["rank"].unique().sort().to_list()
    if OTHERS_LOSE not in table.columns or (measure != OTHERS_LOSE and len(ranks) <= MAX_ROWS):
        return _bins(ranks, MAX_ROWS)
    sums = table.group_by("rank").agg(pl.col(OTHERS_LOSE).sum()).sort(OTHERS_LOSE, "rank", descending=[True, False])
    culprits_first: list[int] = sums["rank"].to_list()
    single_count = len(ranks) if len(ranks) <= MAX_ROWS else MAX_ROWS // 2
    rest = sorted(culprits_first[single_count:])
    return [[rank] for rank in culprits_first[:single_count]] + _bins(rest, MAX_ROWS - single_count or 1)


def _bins(values: Sequence[int], max_bins: int) -> list[list[int]]:
    """Return sorted values in at most so many lists of neighbours.

    >>> _bins([0, 1, 2, 5, 6], 3)
    [[0, 1], [2, 5], [6]]
    """
    size = max(1, -(-len(values) // max_bins))
    return [list(values[first : first + size]) for first in range(0, len(values), size)]


def _cells(table: pl.DataFrame, measure: str, ranks: list[list[int]], steps: list[list[int]]) -> pl.DataFrame:
    """Return the row of `table` that each cell shows, with the columns row and column."""
    places = {"row": ("rank", ranks), "column": ("step", steps)}
    placed_rows = table.with_columns(
        pl.col(name)
        .replace_strict({value: i for i, values in enumerate(bins) for value in values}, return_dtype=pl.Int64)
        .alias(place)
        for place, (name, bins) in places.items()
    )
    is_highest_first = measure != device_metrics.SM_CLOCK
    ordered = placed_rows.sort(measure, "rank", "step", descending=[is_highest_first, False, False])
    return ordered.unique(list(places), keep="first", maintain_order=True).sort("column", "row")


def _ticks(update: object, places: list[list[int]], title: str, window: list[float]) -> None:
    stride = max(1, -(-len(places) // 32))
    ticks = list(enumerate(units.ranges(values) for values in places))[::stride]
    update(  # type: ignore[operator]
        title=title,
        tickvals=[place for place, _ in ticks],
        ticktext=[text for _, text in ticks],
        range=window,
        showgrid=False,
        fixedrange=True,
    )


def _colours(table: pl.DataFrame, measure: str) -> dict[str, object]:
    largest = float(str(table[measure].abs().max() or 0.0))
    if measure in COUNTERS:
        smallest = min(float(str(table[measure].min() or 0.0)), (1 - _LEAST_SPREAD_RATIO) * largest)
        ends = [_SLOW, _PLAIN] if measure == device_metrics.SM_CLOCK else [_PLAIN, _SLOW]
        return {"cmin": smallest, "cmax": max(largest, smallest + 1), "colorscale": [[0, ends[0]], [1, ends[1]]]}
    if measure == SLOWER:
        far = max(largest, _MIN_SCALE)
        return {"cmin": -far, "cmax": far, "colorscale": [[0, _QUICK], [0.5, _PLAIN], [1, _SLOW]]}
    return {"cmin": 0, "cmax": max(largest, _MIN_SCALE), "colorscale": [[0, _PLAIN], [1, _SHADES[measure]]]}


def _bar(measure: str, values: pl.Series) -> dict[str, object]:
    places = 0 if values.abs().ge(0.05).any() else 1  # below it, five marks of whole percents would repeat some
    ticks = {"tickformat": f"+.{places}%" if measure == SLOWER else f".{places}%"}
    if measure in COUNTERS:
        ticks = {"tickformat": ",.0f", "ticksuffix": _SUFFIXES[measure]}
    return {**ticks, "thickness": 14, "nticks": 5, "outlinewidth": 0}


def _bin_hover(cell: dict[str, Any], measure: str, ranks: list[list[int]], steps: list[list[int]]) -> str:
    """Ranks and steps that share a cell, if there are several."""
    shared = (("ranks", ranks[cell["row"]]), ("steps", steps[cell["column"]]))
    texts = [f"{name} {units.ranges(values)}" for name, values in shared if len(values) > 1]
    which = "lowest" if measure == device_metrics.SM_CLOCK else "highest"
    return f"<br>{which} of {', '.join(texts)}" if texts else ""


def _cell_hover(row: dict[str, Any]) -> str:
    counters = [f"{row[name]:,.0f}{_SUFFIXES[name]}" for name in COUNTERS if row.get(name) is not None]
    counters += [escaping.escape(reason) for reason in row.get(device_metrics.THROTTLE_REASONS) or ()]
    return (
        f"<b>rank {row['rank']}, step {row['step']}</b><br>{_lost_hover(row)}"
        f"{units.duration(row['duration_ns'])}, median of ranks "
        f"{units.duration(row['median_ns'])} ({row[SLOWER]:+.1%})<br>exposed communication "
        f"{units.share(row[EXPOSED])}, waiting for a late rank {units.share(row[WAITED])}"
        f"{'<br>GPU: ' if counters else ''}{', '.join(counters)}"
    )


def _lost_hover(row: dict[str, Any]) -> str:
    lost = f"others lose {units.duration(row['lost_ns'])} to it<br>" if row.get("lost_ns") else ""
    if not row.get("awaited_ns"):
        return lost
    return f"{lost}rank {row['waiting_rank']} waits longest for it: {units.duration(row['awaited_ns'])}<br>"
