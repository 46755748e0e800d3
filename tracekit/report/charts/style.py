"""What all figures share: colours, Plotly's configuration, backgrounds."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units

# The palette of Okabe and Ito, safe for colour blindness; a kind of work has the same colour everywhere.
COLOURS = {
    "compute": "#0072B2",
    "communication": "#D55E00",
    "waiting": "#E69F00",
    "memcpy": "#009E73",
    "memset": "#4FC3A1",
    "idle": "#C4C9D1",
    "phase": "#7D8796",
    "cpu_op": "#8FB4CE",
    "annotation": "#B9AFD4",
    "runtime": "#A9B0BA",
    "overhead": "#DDB765",
    "os_call": "#9CB8A4",
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
    "os_call": "OS call",
    "evidence": "finding",
}
LIGHT_KINDS = ("idle", "memset", "cpu_op", "annotation", "runtime", "overhead", "os_call", "evidence")
"""The kinds with a light colour, which needs dark text."""
PARTS = {
    "compute_ns": ("compute", "compute"),
    "exposed_communication_ns": ("exposed communication", "communication"),
    "exposed_copy_ns": ("exposed copy", "memcpy"),
    "idle_ns": ("idle", "idle"),
}
"""The columns that sum to a step's duration, each with its label and the kind whose colour it has."""

CAUSES = {
    "host": ("launch delay (host)", "#56B4E9"),
    "preparation": ("preparation", "#F0E442"),
    "contention": ("preparation delayed", "#8E7CC3"),
    "compute": ("waiting for compute", COLOURS["compute"]),
    "copy": ("copy", COLOURS["memcpy"]),
    "collective": ("data transfer", COLOURS["communication"]),
    "peer": ("waiting for a late rank", COLOURS["waiting"]),
    "device_stall": ("stalled device", "#A0522D"),
    "unknown": ("unknown", COLOURS["idle"]),
}
"""The causes of `analysis.causes`, each with its label and colour."""

# The buttons are listed because one of Plotly's own sends the figure to its cloud.
CONFIG = {
    "displaylogo": False,
    "responsive": True,
    "plotlyServerURL": "",
    "modeBarButtons": [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d", "toImage"]],
}
"""Plotly's own configuration, the same wherever a figure is shown."""

_TIME_UNITS = ((1000.0, 1e-3, "s"), (1.0, 1.0, "ms"), (-1.0, 1e3, "µs"))
"""Units of time axes: the least time in ms that each is for, how many are 1 ms, and its name; the largest first."""
_LEGEND_PX, _BUTTONS_PX = 62, 34  # above the plot
_LEAST_PX, _MAX_ROWS_PX = 220, 1400
"""Of a figure with a row a name: in a narrow window, its legend takes several lines."""
_ROW_PX, _LEAST_ROW_PX, _WINDOW_PX = 30, 12, 760
"""The height of a row, the least that a label fits into, and that of all rows which a window shows."""
_FONT_PX = 13
_GRID = "rgba(128, 138, 150, 0.22)"


def with_style(figure: go.Figure, *, height_px: int) -> go.Figure:
    """Return a figure that fits any page: no background, no text colour, the legend on top."""
    # An icicle has no legend.
    listed = [trace for trace in figure.data if "showlegend" in trace]
    legend_traces = [trace for trace in listed if trace.showlegend or (trace.showlegend is None and trace.name)]
    figure.update_layout(
        height=height_px,
        margin={"l": 8, "r": 16, "t": _LEGEND_PX if legend_traces else _BUTTONS_PX, "b": 44},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        legend={"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "traceorder": "normal", "itemwidth": 30},
        hovermode="closest",
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "rgba(128, 138, 150, 0.7)", "activecolor": "#0072B2"},
        hoverlabel={"align": "left", "namelength": -1},
        font={"size": _FONT_PX},
    )
    # Plotly writes 12,000 ms as "12k ms".
    common = {"gridcolor": _GRID, "zeroline": False, "automargin": True}
    common |= {"exponentformat": "none", "separatethousands": True}
    figure.update_xaxes(common, ticklabelstandoff=4)
    figure.update_yaxes(common, ticklabelstandoff=8, title_standoff=20)
    return figure


def with_title(figure: go.Figure, title: str) -> go.Figure:
    """Return a figure with a title, which pages hide: it is for images, which are seen without their page."""
    text = escaping.escape(title)
    place = {"x": 0, "xref": "paper", "y": 1, "yref": "container", "yanchor": "top", "pad": {"t": 8}}
    return figure.update_layout(title={"text": text, "font": {"size": 13}, "automargin": False, **place})


def empty() -> go.Figure:
    """Return the figure of a table without rows: it says so, without axes."""
    figure = go.Figure().add_annotation(text="no data", showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return with_style(figure.update_xaxes(visible=False).update_yaxes(visible=False), height_px=160)


def add_bars(
    figure: go.Figure,
    rows: npt.ArrayLike,
    lengths: npt.ArrayLike,
    *,
    colour: str,
    hover: str,
    base: npt.ArrayLike | None = None,
    **options: Any,
) -> None:
    """Add horizontal bars, one in each of `rows`; `hover` is the template of their hovers."""
    # Plotly checks arrays as a whole, and lists value by value.
    figure.add_bar(
        orientation="h",
        y=np.asarray(rows),
        x=np.asarray(lengths),
        base=None if base is None else np.asarray(base),
        marker={"color": colour, "line": {"width": 0}},
        hovertemplate=f"{hover}<extra></extra>",
        **options,
    )


def with_labelled_rows(figure: go.Figure, names: Sequence[str], *, edge_px: int = 136, **layout: Any) -> go.Figure:
    """Return a figure of horizontal bars in ms, at 0, 1, 2 … from the top, with its rows labelled with `names`."""
    figure.update_layout({"barmode": "stack", "bargap": 0.28} | layout)
    figure.update_xaxes(rangemode="tozero")
    scale_times(figure)
    label_rows(figure, names)
    return with_style(figure, height_px=min(max(edge_px + rows_px(len(names)), _LEAST_PX), _MAX_ROWS_PX))


def stacked_parts(
    table: pl.DataFrame, parts: Mapping[str, tuple[str, str]], names: Sequence[str], **layout: Any
) -> go.Figure:
    """Return bars of the parts of each row, in ns, stacked: `parts` are columns, each with its label and colour."""
    figure = go.Figure()
    sums_ns = table.select(pl.sum_horizontal(*parts)).to_series()
    for column, (label, colour) in parts.items():
        hovers = [
            f"<b>{escaping.escape(name)}</b><br>{label} {units.duration(round(ns))} ({units.share(ns / (sum_ns or 1))})"
            for name, ns, sum_ns in zip(names, table[column], sums_ns, strict=True)
        ]
        lengths = (table[column] / 1e6).round(6)
        add_bars(figure, range(len(names)), lengths, name=label, colour=colour, hovertext=hovers, hover="%{hovertext}")
    return with_labelled_rows(figure, names, **layout)


def of_ranks(rows: pl.DataFrame, ranks: Iterable[int] | None) -> pl.DataFrame:
    """Return the rows of these ranks; of None all."""
    return rows if ranks is None else rows.filter(pl.col("rank").is_in(list(ranks)))


def rows_px(count: int) -> int:
    """Height of so many labelled rows: of many, each is as low as its label allows, so that a window shows all.

    >>> rows_px(8), rows_px(64)
    (240, 768)
    """
    return count * _row_px(count)


def _row_px(count: int) -> int:
    return min(max(_WINDOW_PX // max(count, 1), _LEAST_ROW_PX), _ROW_PX)


def scale_times(figure: go.Figure, axis: str = "x") -> None:
    """Give an axis of times in ms the unit of the largest: s from 1,000 ms on, µs below 1 ms.

    It scales the coordinates and bases of all traces, the annotations, and the range if the axis has one.

    >>> figure = go.Figure(go.Bar(x=[1500, 300], y=["a", "b"], orientation="h"))
    >>> scale_times(figure)
    >>> figure.data[0].x.tolist(), figure.layout.xaxis.ticksuffix
    ([1.5, 0.3], ' s')
    """
    axis_range = figure.layout[f"{axis}axis"].range
    factor, unit = time_unit(max(map(abs, axis_range)) if axis_range else _last_ms(figure, axis))
    for element in (*figure.data, *figure.layout.annotations) if factor != 1 else ():
        element[axis] = _scale(element[axis], factor)
        if "base" in element and element.base is not None:
            element.base = _scale(element.base, factor)
    axis_range = {"range": list(_scale(axis_range, factor))} if axis_range else {}
    figure.update_layout({f"{axis}axis": {"ticksuffix": f" {unit}"} | axis_range})


def time_unit(longest_ms: float) -> tuple[float, str]:
    """Factor from ms to the best unit for times up to `longest_ms`, and the unit.

    >>> time_unit(1500), time_unit(20), time_unit(0.2)
    ((0.001, 's'), (1.0, 'ms'), (1000.0, 'µs'))
    """
    return next((factor, unit) for least_ms, factor, unit in _TIME_UNITS if longest_ms >= least_ms)


def _last_ms(figure: go.Figure, axis: str) -> float:
    """Return the largest coordinate on an axis; of stacked bars the largest sum of a row."""
    rows = "y" if axis == "x" else "x"
    sums: dict[object, float] = {}
    for trace in figure.data:
        base = trace.base if trace.type == "bar" and trace.base is not None else 0.0
        ends = np.abs(np.array(trace[axis], float) + np.array(base, float)).tolist()
        for row, end in zip(trace[rows], ends, strict=True):
            before = sums.get(row, 0.0)
            sums[row] = before + end if figure.layout.barmode == "stack" else max(before, end)
    return max(sums.values(), default=0.0)


def _scale(values: Any, factor: float) -> Any:
    if isinstance(values, int | float):
        return round(values * factor, 9)
    return np.round(np.array(values, float) * factor, 9)


def label_all_rows(figure: go.Figure, names: Sequence[str], *, max_characters: int = 40) -> None:
    """Label the bars at 0, 1, 2 … of a figure with all `names`, the first on top, with an axis of fixed range."""
    figure.update_yaxes(
        range=[len(names) - 0.4, -0.6],
        tickvals=list(range(len(names))),
        ticktext=[escaping.escape(name, max_characters) for name in names],
        tickfont={"size": min(_row_px(len(names)) - 2, _FONT_PX)},
        showgrid=False,
        fixedrange=True,
    )


def label_rows(figure: go.Figure, names: Sequence[str], *, max_characters: int = 40) -> None:
    """Label the bars at 0, 1, 2 … of a figure with `names`, the first on top; of many names only every n-th.

    >>> figure = go.Figure()
    >>> label_rows(figure, [f"rank {number}" for number in range(512)])
    >>> figure.layout.yaxis.ticktext[:3]
    ('rank 0', 'rank 8', 'rank 16')
    """
    stride = max(1, -(-len(names) // _MOST_NAMES))
    figure.update_yaxes(
        autorange="reversed",
        tickvals=list(range(0, len(names), stride)),
        ticktext=[escaping.escape(name, max_characters) for name in names[::stride]],
        tickfont={"size": min(_row_px(len(names)) - 2, _FONT_PX)},
        showgrid=False,
        fixedrange=True,
    )


def rank_names(ranks: Iterable[int], about: Mapping[int, str] | None = None) -> list[str]:
    """Return the names of ranks with what `about` says of them.

    >>> rank_names([0, 7], {7: "most idle"})
    ['rank 0', 'rank 7 · most idle']
    """
    return [f"rank {rank}" + (f" · {text}" if (text := (about or {}).get(rank)) else "") for rank in ranks]


def log_axis(values: Iterable[float | None], write: Callable[[float], str], *, base: int = 10) -> dict[str, Any]:
    """Return a logarithmic axis for `values`: its range, and ticks at powers of `base` with units.

    >>> log_axis([30, 4000], str)["ticktext"]
    ['10', '20', '50', '100', '200', '500', '1000', '2000', '5000', '10000']
    """
    positive = [value for value in values if value is not None and value > 0] or [1]
    first, last = (round_to(math.log(edge(positive), base) + 1e-9 * sign) for edge, round_to, sign in _EDGES)
    last = max(last, first + 1)
    steps = (1, 2, 5) if base == 10 and last - first <= _FEW_POWERS else (1,)
    stride = max(1, -(-(last - first + 1) // _MOST_TICKS))
    ticks = [step * base**power for power in range(first, last, stride) for step in steps] + [base**last]
    # Plotly expects the range of a logarithmic axis as powers of ten.
    ends = [math.log10(base) * first - 0.03, math.log10(base) * last + 0.03]
    return {"type": "log", "range": ends, "tickvals": ticks, "ticktext": [write(tick) for tick in ticks]}


_EDGES = ((min, math.floor, 1), (max, math.ceil, -1))
_FEW_POWERS, _MOST_TICKS, _MOST_NAMES = 3, 12, 64


def mix_colours(first: str, second: str, ratio: float) -> str:
    """Return the colour at `ratio` between two, both as #RRGGBB.

    >>> mix_colours("#000000", "#FF0080", 0.5)
    '#800040'
    """
    pairs = zip(bytes.fromhex(first[1:]), bytes.fromhex(second[1:]), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * ratio):02X}" for a, b in pairs)
