"""Time breakdowns and the longest kernels or ops as bars, and step times as lines."""

import zlib
from collections.abc import Callable, Mapping, Sequence

import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from tracekit.model import escaping, kernel_names, units
from tracekit.report.charts import style

MAX_ROWS = 15
_LABEL_CHARACTERS = 40

_MAX_NODES = 1500
_MIN_RATIO = 0.001
_WHOLE_RATIO = 0.99
_AROUND_PX, _LEVEL_PX, _SHOWN_LEVELS = 110, 24, 24
_COLOURS = ("#9CC3DF", "#F2B98E", "#A8D8C5", "#F3D48A", "#C9BEDF", "#E3B7CE")
"""Light ones, for dark labels: they distinguish frames, and a frame has the same one everywhere."""
_LABEL_LENGTH = 120
_INK = "#1B2330"
_WIDTH_PX, _CHARACTER_PX, _LEAST_CHARACTERS = 760, 6.2, 4
"""The width of a figure in a narrow window, that of a character, and the fewest characters of a shortened label."""
_SAME, _MORE, _LESS = "#F1F1F1", "#E58A7B", "#7FB0DA"
"""The colours of frames that take as long, longer and less long than before: light ones likewise."""
_NOT_FOUND = "#A9B0BA"
"""Neither bright on a dark page nor dark on a light one."""
_FULL_CHANGE_RATIO = 0.5


def breakdown(summary: pl.DataFrame, ranks: Mapping[int, str] | None = None) -> go.Figure:
    """Return stacked bars of the time breakdown, one bar per row of a breakdown (per rank, or per step).

    `summary` has the columns of `analysis.breakdown` and rank; window, step and device label the bars where they
    differ. `ranks`, by default all, are those drawn, each with a text for its label.
    """
    summary = style.of_ranks(summary, ranks)
    labels = zip(_row_labels(summary), summary["rank"], strict=True)
    return _stack_parts(summary, [" · ".join(filter(None, (label, (ranks or {}).get(rank)))) for label, rank in labels])


def comparison(summaries: Mapping[str, pl.DataFrame]) -> go.Figure:
    """Return one stacked bar per run: the mean step, its parts averaged over all ranks and steps.

    `summaries` maps the name of a run to its breakdown by step.
    """
    means = [
        table.select(pl.col("duration_ns", *style.PARTS).mean().round().cast(pl.Int64)) for table in summaries.values()
    ]
    return _stack_parts(pl.concat(means), list(summaries))


def step_times(summary: pl.DataFrame, ranks: Mapping[int, str] | None = None) -> go.Figure:
    """Return step time over steps, one line per rank, from a breakdown by step; `ranks` as in `breakdown`."""
    figure = go.Figure()
    steps = style.of_ranks(summary.drop_nulls("step"), ranks).sort("rank", "step")
    count = steps["rank"].n_unique()
    # A rank is no kind of work and has none of their colours. The ends of the scale vanish on a dark or a light page.
    colours = sample_colorscale("Viridis", [0.3 + 0.5 * i / max(count - 1, 1) for i in range(count)])
    for colour, ((rank,), rows) in zip(colours, steps.group_by("rank", maintain_order=True), strict=True):
        figure.add_scatter(
            line={"color": colour},
            x=rows["step"].to_list(),
            y=(rows["duration_ns"] / 1e6).to_list(),
            name=style.rank_names([int(str(rank))], ranks)[0],
            mode="lines+markers",
            customdata=[[units.duration(ns)] for ns in rows["duration_ns"]],
            hovertemplate=f"rank {rank}, step %{{x}}<br>%{{customdata[0]}}<extra></extra>",
        )
    figure.update_xaxes(title="step", dtick=1 if steps["step"].n_unique() < 20 else None)
    figure.update_yaxes(title="step time", rangemode="tozero")
    style.scale_times(figure, "y")
    return style.with_style(figure, height_px=320)


def top_bars(
    table: pl.DataFrame, by: Sequence[str], *, measure: str = "total_ns", max_rows: int = MAX_ROWS
) -> go.Figure:
    """Return the `max_rows` rows of a table of kernels or ops with the largest `measure`, as bars.

    A row is named by its columns `by` and has the colour of its kind. Long names are shortened so that they stay
    distinct; the hover shows more of them.
    """
    most_of = table.filter(pl.col(measure) > 0).sort(measure, descending=True).head(max_rows)
    names = [
        " · ".join("unknown" if value is None else str(value) or "root" for value in row)
        for row in most_of.select(by).iter_rows()
    ]
    short = kernel_names.short_names(most_of["name"].drop_nulls().to_list()) if "name" in by else {}
    labels = [
        " · ".join(short.get(value, str(value) or "root") if value is not None else "unknown" for value in row)
        for row in most_of.select(by).iter_rows()
    ]
    bars = most_of.with_columns(pl.Series("_label", names, pl.String)).with_row_index("y")
    figure = go.Figure()
    for (kind,), rows in bars.group_by("kind", maintain_order=True):
        style.add_bars(
            figure,
            rows["y"],
            rows[measure] / 1e6,
            name=style.KIND_LABELS.get(str(kind), str(kind)),
            width=0.75,  # else Plotly takes the distance to the next of the same kind
            colour=style.COLOURS.get(str(kind), style.COLOURS["phase"]),
            customdata=[
                [escaping.escape(name, 160), units.duration(ns), f"{count:,}"]
                for name, ns, count in rows.select("_label", measure, "count").iter_rows()
            ],
            hover="<b>%{customdata[0]}</b><br>%{customdata[1]} in %{customdata[2]} calls",
        )
    figure.update_layout(barmode="overlay", showlegend=True)
    figure.update_xaxes(rangemode="tozero")
    style.scale_times(figure)
    style.label_all_rows(figure, labels, max_characters=_LABEL_CHARACTERS)
    return style.with_style(figure, height_px=130 + 24 * bars.height)


def icicle(
    tree: pl.DataFrame,
    title: str,
    in_units: Callable[[float], str] = units.duration,
    *,
    search: str = "",
    node: int | None = None,
) -> go.Figure:
    """Return a call tree (columns node, parent, name, count, self_ns, total_ns) as an icicle below one root.

    It starts at `node`, or else at the innermost frame that holds nearly all of the time; those around it are in the
    bar above. Nodes of less than 0.1% of the time are left out, and beyond 1,500 nodes the shortest; a click shows one
    node whole. The values may be of another kind than time, shown by `in_units`. With `search`, frames whose names
    contain this text have one colour and all others are grey.
    """
    whole_ns, nodes = _long_nodes(tree)
    if not whole_ns:
        return style.empty()
    times = [
        f"{in_units(total)} ({units.share(total / whole_ns)}), {in_units(self_total)} itself, {count:,}×"
        for total, self_total, count in nodes.select("total_ns", "self_ns", "count").iter_rows()
    ]
    about = pl.Series("about", times, pl.String)
    colours = [_found_colour(name, search) if search else _colour(name) for name in nodes["name"]]
    return _figure(nodes.with_columns(about), title, colours, total=(whole_ns, in_units(whole_ns)), node=node)


def difference_icicle(tree: pl.DataFrame, title: str, *, is_before: bool = False) -> go.Figure:
    """Return the difference of two call trees (`DIFFERENCE`) as an icicle, coloured by change.

    Frames are as wide as their time after, or before, so that stacks that are gone show; red ones take more time after,
    blue ones less: the fuller, the larger the change relative to the longer of both, full from a half.
    """
    side = "before" if is_before else "after"
    whole_ns, nodes = _long_nodes(tree.with_columns(pl.col(f"{side}_ns").alias("total_ns")))
    if not whole_ns:
        return style.empty()
    pairs = nodes.select("before_ns", "after_ns").rows()
    about = pl.Series("about", [_change(*pair) for pair in pairs], pl.String)
    totals = tree.filter(parent=-1).select(pl.col("before_ns", "after_ns").sum()).row(0)
    colours = [_change_colour(*pair) for pair in pairs]
    return _figure(nodes.with_columns(about), title, colours, total=(whole_ns, _change(*totals)))


def _stack_parts(parts: pl.DataFrame, labels: Sequence[str]) -> go.Figure:
    colours = {column: (label, style.COLOURS[kind]) for column, (label, kind) in style.PARTS.items()}
    return style.stacked_parts(parts, colours, labels)


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


def _long_nodes(tree: pl.DataFrame) -> tuple[int, pl.DataFrame]:
    """Return the time of all frames, and the nodes that are long enough to be drawn."""
    whole_ns = int(tree.filter(parent=-1)["total_ns"].sum())
    nodes = tree.filter(pl.col("total_ns") >= max(_MIN_RATIO * whole_ns, 1))
    return whole_ns, nodes.sort("total_ns", "node", descending=[True, False]).head(_MAX_NODES).sort("node")


def _figure(
    nodes: pl.DataFrame, title: str, colours: list[str], *, total: tuple[int, str], node: int | None = None
) -> go.Figure:
    """Return nodes (columns node, parent, name, total_ns, about) as an icicle below a root of `total`."""
    depth, level = _depth(nodes), str(node) if node in nodes["node"] else _branching(nodes, total[0])
    around = depth[nodes["node"].to_list().index(int(level))] if level != "all" else -1
    levels = min(max(depth, default=0) - around + 1, _SHOWN_LEVELS)
    labels = [escaping.escape(name, _LABEL_LENGTH) for name in nodes["name"]]
    drawn_ns = total[0] if level == "all" else nodes.filter(node=int(level))["total_ns"].item()
    room = [int(ns / max(drawn_ns, 1) * _WIDTH_PX / _CHARACTER_PX) - 1 for ns in nodes["total_ns"]]
    texts = [
        escaping.escape(name[: length - 1] + "…" if _LEAST_CHARACTERS <= length < len(name) else name, _LABEL_LENGTH)
        for name, length in zip(nodes["name"], room, strict=True)
    ]
    figure = go.Figure(
        go.Icicle(
            ids=["all", *map(str, nodes["node"])],
            labels=[escaping.escape(title, _LABEL_LENGTH), *labels],
            parents=["", *("all" if parent < 0 else str(parent) for parent in nodes["parent"])],
            values=[total[0], *nodes["total_ns"]],
            text=[escaping.escape(title, _LABEL_LENGTH), *texts],
            textinfo="text",
            textfont={"color": _INK},
            customdata=[total[1], *nodes["about"]],
            branchvalues="total",
            hovertemplate="%{label}<br>%{customdata}<extra></extra>",
            tiling={"orientation": "v"},
            leaf={"opacity": 1},
            marker={"line": {"width": 1}, "colors": [style.COLOURS["idle"], *colours]},
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


def _change(before_ns: int, after_ns: int) -> str:
    """Return both times and the change: "4 ms → 5 ms (+1 ms, +25%)"."""
    change_ns = after_ns - before_ns
    sign = "+" if change_ns > 0 else "−"
    ratio = f", {sign}{units.share(abs(change_ns) / before_ns)}" if before_ns else ", new"
    said = f"{sign}{units.duration(abs(change_ns))}{ratio}" if change_ns else "the same"
    return f"{units.duration(before_ns)} → {units.duration(after_ns)} ({said})"


def _change_colour(before_ns: int, after_ns: int) -> str:
    ratio = (after_ns - before_ns) / max(before_ns, after_ns, 1)
    full = min(abs(ratio) / _FULL_CHANGE_RATIO, 1)
    return style.mix_colours(_SAME, _MORE if ratio > 0 else _LESS, full)


def _colour(name: str) -> str:
    return _COLOURS[zlib.crc32(name.encode("utf-8", "replace")) % len(_COLOURS)]


def _found_colour(name: str, search: str) -> str:
    return style.COLOURS["waiting"] if search.casefold() in name.casefold() else _NOT_FOUND


def _depth(tree: pl.DataFrame) -> list[int]:
    """Number of frames around each node; a parent comes before its children."""
    depth = {-1: -1}
    for node, parent in tree.select("node", "parent").iter_rows():
        depth[node] = depth[parent] + 1
    return [depth[node] for node in tree["node"]]
