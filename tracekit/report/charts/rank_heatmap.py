"""A heatmap of ranks and steps: slower steps, exposed communication or waiting."""

import plotly.graph_objects as go
import polars as pl

from tracekit.model import units
from tracekit.report.charts.style import COLOURS, with_style

SLOWER, EXPOSED, WAITED = "longer_ratio", "exposed_ratio", "waited_ratio"
MEASURES = {
    SLOWER: "step time relative to the median of all ranks",
    EXPOSED: "exposed communication",
    WAITED: "waiting for a late rank",
}
"""The columns that can be drawn, each with its label."""
MAX_CELLS = 4000
_SHADES = {EXPOSED: COLOURS["communication"], WAITED: COLOURS["waiting"]}
_QUICK, _SLOW, _PLAIN = "#0072B2", "#D55E00", "rgba(160, 168, 180, 0.25)"
_MIN_SCALE = 0.02  # the least value of the full colour


def step_heatmap(table: pl.DataFrame, measure: str = SLOWER) -> go.Figure:
    """Return a heatmap of ranks (rows) and steps (columns), coloured by `measure`, one of MEASURES.

    `table` is `analysis.communication.spread`, of one window. The customdata of a cell starts with its rank and step.
    With more than MAX_CELLS cells, a click does not select a cell.
    """
    steps = {step: place for place, step in enumerate(table["step"].unique().sort())}
    ranks = {rank: place for place, rank in enumerate(table["rank"].unique().sort())}
    rows = table.to_dicts()
    colours = _colours(table, measure)
    columns = [steps[row["step"]] for row in rows]
    place = {
        "y": [ranks[row["rank"]] for row in rows],
        "customdata": [[row["rank"], row["step"], _hover(row)] for row in rows],
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
    return with_style(figure, height_px=min(max(190, 130 + 26 * len(ranks)), 700))


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
    if measure == SLOWER:
        far = max(largest, _MIN_SCALE)
        return {"cmin": -far, "cmax": far, "colorscale": [[0, _QUICK], [0.5, _PLAIN], [1, _SLOW]]}
    return {"cmin": 0, "cmax": max(largest, _MIN_SCALE), "colorscale": [[0, _PLAIN], [1, _SHADES[measure]]]}


def _bar(measure: str) -> dict[str, object]:
    return {"tickformat": "+.0%" if measure == SLOWER else ".0%", "thickness": 14, "nticks": 5, "outlinewidth": 0}


def _hover(row: dict[str, int]) -> str:
    return (
        f"<b>rank {row['rank']}, step {row['step']}</b><br>{units.duration(row['duration_ns'])}, median of ranks "
        f"{units.duration(row['median_ns'])} ({row[SLOWER]:+.1%})<br>exposed communication "
        f"{units.share(row[EXPOSED])}, waiting for a late rank {units.share(row[WAITED])}"
    )
