"""Call trees as icicles: outermost frames at the top, each as wide as its time."""

import zlib
from collections.abc import Callable

import plotly.graph_objects as go
import polars as pl

from tracekit.model import escaping, units
from tracekit.report.charts import style

_MAX_NODES = 1500
_MIN_RATIO = 0.001
_WHOLE_RATIO = 0.99
_AROUND_PX, _LEVEL_PX, _SHOWN_LEVELS = 110, 24, 24
_COLOURS = ("#9CC3DF", "#F2B98E", "#A8D8C5", "#F3D48A", "#C9BEDF", "#E3B7CE")
"""Light ones, for dark labels: frames are told apart by them, and have the same one everywhere."""
_LABEL_LENGTH = 120


def icicle(tree: pl.DataFrame, title: str, in_units: Callable[[float], str] = units.duration) -> go.Figure:
    """Return a call tree (columns node, parent, name, count, self_ns, total_ns) as an icicle below one root.

    It starts at the innermost frame that holds nearly all of the time; those around it are in the bar above. Nodes of
    less than 0.1% of the time are left out, and beyond 1,500 nodes the shortest; a click shows one node whole. The
    values may be of another kind than time, shown by `in_units`.
    """
    whole_ns = int(tree.filter(parent=-1)["total_ns"].sum())
    if not whole_ns:
        return style.empty()
    shown = tree.filter(pl.col("total_ns") >= _MIN_RATIO * whole_ns)
    shown = shown.sort("total_ns", "node", descending=[True, False]).head(_MAX_NODES).sort("node")
    depth, level = _depth(shown), _branching(shown, whole_ns)
    around = depth[shown["node"].to_list().index(int(level))] if level != "all" else -1
    levels = min(max(depth, default=0) - around + 1, _SHOWN_LEVELS)
    labels = [escaping.escape(name, _LABEL_LENGTH) for name in shown["name"]]
    times = [
        f"{in_units(total)} ({units.share(total / whole_ns)}), {in_units(own)} itself, {count:,}×"
        for total, own, count in shown.select("total_ns", "self_ns", "count").iter_rows()
    ]
    figure = go.Figure(
        go.Icicle(
            ids=["all", *map(str, shown["node"])],
            labels=[escaping.escape(title, _LABEL_LENGTH), *labels],
            parents=["", *("all" if parent < 0 else str(parent) for parent in shown["parent"])],
            values=[whole_ns, *shown["total_ns"]],
            customdata=[in_units(whole_ns), *times],
            branchvalues="total",
            hovertemplate="%{label}<br>%{customdata}<extra></extra>",
            tiling={"orientation": "v"},
            marker={"line": {"width": 1}, "colors": [style.COLOURS["idle"], *map(_colour, shown["name"])]},
            level=level,
            maxdepth=_SHOWN_LEVELS,
            sort=True,
        )
    )
    figure.update_layout(uniformtext={"minsize": 10, "mode": "hide"})
    return style.with_style(figure, height_px=_AROUND_PX + _LEVEL_PX * levels)


def _branching(tree: pl.DataFrame, whole_ns: int) -> str:
    """Return the id of the innermost node that holds nearly all of the time: outer frames do not divide it."""
    holds = tree.filter(pl.col("total_ns") >= _WHOLE_RATIO * whole_ns)["node"]
    return "all" if holds.is_empty() else str(holds.max())


def _colour(name: str) -> str:
    return _COLOURS[zlib.crc32(name.encode("utf-8", "replace")) % len(_COLOURS)]


def _depth(tree: pl.DataFrame) -> list[int]:
    """Return how many frames are around each node; a parent comes before its children."""
    depth = {-1: -1}
    for node, parent in tree.select("node", "parent").iter_rows():
        depth[node] = depth[parent] + 1
    return [depth[node] for node in tree["node"]]
