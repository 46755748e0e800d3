"""Hybrid parallelism: the mesh as a map, a pipeline's schedule in one step, its stages, communication by axis."""

from collections.abc import Mapping
from typing import Any

import plotly.graph_objects as go
import polars as pl
from plotly.colors import sample_colorscale

from tracekit.model import escaping, units
from tracekit.report.charts import style

BUBBLE = "bubble"
ACTIONS: Mapping[str, tuple[str, str]] = {
    "forward": ("forward", style.COLOURS["compute"]),
    "backward": ("backward", style.COLOURS["memcpy"]),
    "input_gradient": ("input gradient", style.COLOURS["memcpy"]),
    "weight_gradient": ("weight gradient", style.COLOURS["evidence"]),
}
"""The actions of a schedule, each with its label and colour."""
_HATCHED = {"shape": "/", "size": 5, "solidity": 0.25, "fgcolor": "rgba(128, 138, 150, 0.9)"}
_AXES = ("pp", "dp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
_WORLD = "world"
_MOST_TICKS = 32
MAX_MESH_BARS = 128
MAX_LOAD_ROWS = 64
_MOST_NUMBERED = 1200
"""With more actions, the micro-batches are not written into the bars."""
_STAGE_PARTS = {
    "forward_ns": ("forward", style.COLOURS["compute"]),
    "backward_ns": ("backward", style.COLOURS["memcpy"]),
    "bubble_ns": (BUBBLE, style.COLOURS["idle"]),
}


def pipeline_step(actions: pl.DataFrame, gaps: pl.DataFrame) -> go.Figure:
    """Return one step of a pipeline: ranks down, in the order of their stages, time across, micro-batches numbered.

    `actions` are those of `pipeline_stages.staged_actions` and `gaps` the idle times between them
    (`pipeline_bubbles.idle_gaps`), of one step and pipeline. The customdata of a bar starts with rank, start on the
    clock of the rank's trace, and duration, in ns.
    """
    if actions.is_empty():
        return style.empty()
    rows, origin_ns = _rows(actions), int(actions["start_ns"].min())  # type: ignore[arg-type]  # not empty
    figure = go.Figure()
    for action, (label, colour) in ACTIONS.items():
        bars = actions.filter(action=action).with_columns(dur_ns=pl.col("end_ns") - pl.col("start_ns"))
        if bars.height:
            numbers = bars["micro_batch"].to_list() if actions.height <= _MOST_NUMBERED else None
            options = (
                {} if numbers is None else {"text": numbers, "textposition": "inside", "insidetextanchor": "middle"}
            )
            _add(figure, bars.join(rows, on="rank"), origin_ns, label, colour, **options)
    idle = gaps.with_columns(dur_ns=pl.col("end_ns") - pl.col("start_ns")).filter(pl.col("dur_ns") > 0)
    if idle.height:
        _add(figure, idle.join(rows, on="rank"), origin_ns, BUBBLE, style.COLOURS["idle"])
        figure.data[-1].marker.pattern = _HATCHED
    figure.update_layout(barmode="overlay", dragmode="zoom", clickmode="event+select", uniformtext={"minsize": 8})
    figure.update_layout(uniformtext_mode="hide")
    style.scale_times(figure)
    style.label_all_rows(figure, rows.sort("y")["label"].to_list())
    return style.with_style(figure, height_px=130 + style.rows_px(rows.height))


def stage_balance(bubbles: pl.DataFrame) -> go.Figure:
    """Return forward, backward and bubble of each stage as stacked bars: means over the ranks and steps of a table.

    `bubbles` is `pipeline_bubbles.pipeline_bubbles`. A rank with several stages has its bubble in each of their bars.
    """
    if bubbles.is_empty():
        return style.empty()
    means = bubbles.group_by("stage").agg(pl.col(*_STAGE_PARTS).mean()).sort("stage")
    return style.stacked_parts(means, _STAGE_PARTS, [f"stage {stage}" for stage in means["stage"]])


def axis_communication(rows: pl.DataFrame) -> go.Figure:
    """Return the communication of each mesh axis, exposed and overlapped, as stacked bars: means over ranks, per step.

    `rows` is `axis_communication.by_axis`.
    """
    if rows.is_empty():
        return style.empty()
    per_step = pl.when(pl.col("steps") > 0).then("steps").otherwise(1)
    exposed_ns = pl.col("exposed_communication_ns")
    means = (
        rows.group_by("axis")
        .agg(
            (exposed_ns / per_step).mean().alias("exposed_ns"),
            ((pl.col("communication_ns") - exposed_ns) / per_step).mean().alias("hidden_ns"),
        )
        .sort("exposed_ns", "axis", descending=[True, False])
    )
    parts = {
        "exposed_ns": ("exposed", style.COLOURS["communication"]),
        "hidden_ns": ("overlapped with compute", style.COLOURS["compute"]),
    }
    return style.stacked_parts(means, parts, [axis or "unknown" for axis in means["axis"]])


def expert_heatmap(load: pl.DataFrame) -> go.Figure:
    """Return a heatmap of ranks (rows) and passes through a layer of experts (columns): load relative to the mean.

    `load` is `expert_load.expert_load`; the colour is the mean of load_ratio over steps, white where it is 1.
    """
    if load.is_empty():
        return style.empty()
    figure = _load_heatmap(load, "layer", "load_bytes", "rank {}, pass {}", "rank {}")
    title = "pass through a layer of experts"
    passes = 1 + int(load["layer"].max())  # type: ignore[arg-type]  # not empty
    return figure.update_xaxes(title=title, tick0=0, dtick=1 + passes // _MOST_TICKS)


def expert_pair_heatmap(pairs: pl.DataFrame) -> go.Figure:
    """Return a heatmap of what ranks (rows) send to the experts of ranks (columns): relative to the group's mean.

    `pairs` is `expert_pairs.expert_pairs`; the colour is the mean of load_ratio over steps, white where it is 1.
    """
    if pairs.is_empty():
        return style.empty()
    figure = _load_heatmap(pairs, "peer", "bytes", "rank {} to rank {}", "from rank {}")
    peers = pairs["peer"].unique().sort().to_list()
    ticks = list(range(0, len(peers), 1 + len(peers) // _MOST_TICKS))
    return figure.update_xaxes(
        title="to the experts of rank", tickvals=ticks, ticktext=[str(peers[tick]) for tick in ticks]
    )


def _load_heatmap(table: pl.DataFrame, column: str, size: str, name: str, row: str) -> go.Figure:
    """Return a heatmap of load_ratio: ranks down, the values of a column across; means over all other columns.

    Of more than MAX_LOAD_ROWS rows or columns, those with the most uneven load are drawn.
    """
    means = table.group_by("rank", column).agg(pl.col("load_ratio", size).mean()).sort("rank", column)
    means = _most_uneven(_most_uneven(means, "rank"), column)
    ranks, across = (means[key].unique().sort().to_list() for key in ("rank", column))
    far = max(0.02, float((means["load_ratio"] - 1).abs().max()))  # type: ignore[arg-type]  # not empty
    figure = go.Figure()
    figure.add_heatmap(
        x=[across.index(value) for value in means[column]],
        y=[ranks.index(rank) for rank in means["rank"]],
        z=means["load_ratio"].to_list(),
        zmin=1 - far,
        zmax=1 + far,
        colorscale=[[0, "#0072B2"], [0.5, "rgba(160, 168, 180, 0.25)"], [1, "#D55E00"]],
        customdata=[
            [name.format(rank, value), units.size(round(total))]
            for rank, value, total in means.select("rank", column, size).rows()
        ],
        hovertemplate="%{customdata[0]}<br>%{z:.2f} of the mean, %{customdata[1]}<extra></extra>",
        colorbar={"tickformat": ".1f", "thickness": 14, "nticks": 5, "outlinewidth": 0},
        xgap=1,
        ygap=1,
    )
    figure.update_xaxes(showgrid=False, fixedrange=True)
    style.label_all_rows(figure, [row.format(rank) for rank in ranks])
    return style.with_style(figure, height_px=130 + style.rows_px(len(ranks)))


def _most_uneven(means: pl.DataFrame, name: str) -> pl.DataFrame:
    uneven = means.group_by(name).agg((pl.col("load_ratio") - 1).abs().max())
    top = uneven.sort("load_ratio", name, descending=[True, False]).head(MAX_LOAD_ROWS)
    return means.join(top.select(name), on=name, how="semi", maintain_order="left")


def mesh_map(groups: pl.DataFrame) -> go.Figure:
    """Return the mesh as a map: axes down, ranks across; cells of one colour are one process group.

    `groups` is `group_axes.group_axes`; groups of all ranks, and those whose axis is unknown, are left out. The hover
    names the group's ranks.
    """
    merged = _merged_groups(groups)
    axes = sorted(merged, key=lambda axis: (_AXES.index(axis) if axis in _AXES else len(_AXES), axis))
    if not axes:
        return style.empty()
    last = max(ranks[-1] for of_axis in merged.values() for ranks in of_axis)
    if last >= MAX_MESH_BARS:
        return _mesh_cells({axis: merged[axis] for axis in axes}, last)
    figure = go.Figure()
    for y, axis in enumerate(axes):
        of_axis = merged[axis]
        colours = sample_colorscale("Viridis", [0.15 + 0.8 * i / max(len(of_axis) - 1, 1) for i in range(len(of_axis))])
        for number, ranks in enumerate(of_axis):
            hover = f"<b>{escaping.escape(axis)} group {number}</b><br>ranks {units.ranges(ranks)}"
            figure.add_bar(
                orientation="h", y=[y] * len(ranks), x=[0.94] * len(ranks), width=0.86,
                base=[rank - 0.47 for rank in ranks],
                marker={"color": colours[number], "line": {"width": 0}}, hovertemplate=f"{hover}<extra></extra>",
                text=[str(number)] * len(ranks), textposition="inside", insidetextanchor="middle", showlegend=False,
            )  # fmt: skip
    figure.update_layout(barmode="overlay", dragmode=False)
    return _with_mesh_axes(figure, axes, last)


def _mesh_cells(groups: Mapping[str, list[list[int]]], last: int) -> go.Figure:
    """Return the map of a large mesh as one heatmap: a bar for each rank and axis would take seconds to draw."""
    shades: list[list[float | None]] = [[None] * (last + 1) for _ in groups]
    hovers: list[list[str | None]] = [[None] * (last + 1) for _ in groups]
    for y, (axis, of_axis) in enumerate(groups.items()):
        for number, ranks in enumerate(of_axis):
            hover = f"<b>{escaping.escape(axis)} group {number}</b><br>ranks {escaping.inert(units.ranges(ranks), 200)}"
            for rank in ranks:
                shades[y][rank], hovers[y][rank] = number / max(len(of_axis) - 1, 1), f"rank {rank}: {hover}"
    figure = go.Figure()
    figure.add_heatmap(
        z=shades, customdata=hovers, hovertemplate="%{customdata}<extra></extra>", hoverongaps=False,
        colorscale="Viridis", zmin=-0.2, zmax=1.05, showscale=False, ygap=6,
    )  # fmt: skip
    return _with_mesh_axes(figure.update_layout(dragmode=False), list(groups), last)


def _with_mesh_axes(figure: go.Figure, axes: list[str], last: int) -> go.Figure:
    figure.update_xaxes(title="rank", showgrid=False, fixedrange=True, tick0=0, dtick=1 + last // _MOST_TICKS)
    style.label_all_rows(figure, axes)
    return style.with_style(figure, height_px=130 + 34 * len(axes))


def _merged_groups(groups: pl.DataFrame) -> dict[str, list[list[int]]]:
    """Return the ranks of each group by axis: groups that share ranks, such as pairs that send and receive, are one."""
    merged: dict[str, list[set[int]]] = {}
    for axis, ranks in groups.select("axis", "ranks").drop_nulls().rows():
        if axis != _WORLD and len(ranks) > 1:
            of_axis = merged.setdefault(axis, [])
            touched = [group for group in of_axis if group & set(ranks)]
            merged[axis] = [group for group in of_axis if group not in touched] + [set(ranks).union(*touched)]
    return {axis: sorted(map(sorted, of_axis)) for axis, of_axis in merged.items()}


def _rows(actions: pl.DataFrame) -> pl.DataFrame:
    """Return row, label and clock offset of each rank, ranks with the first stage on top."""
    stages = actions.group_by("rank").agg(pl.col("stage").unique().sort())
    offsets = actions.group_by("rank").agg((pl.col("trace_start_ns") - pl.col("start_ns")).first().alias("offset_ns"))
    ordered = stages.sort(pl.col("stage").list.first(), "rank").with_row_index("y").join(offsets, on="rank")
    labels = [f"{units.numbers('stage', s)} · rank {rank}" for rank, s in ordered.select("rank", "stage").rows()]
    return ordered.select("rank", "y", "offset_ns", pl.Series("label", labels, pl.String))


def _add(figure: go.Figure, bars: pl.DataFrame, origin_ns: int, label: str, colour: str, **options: Any) -> None:
    style.add_bars(
        figure,
        bars["y"],
        (bars["dur_ns"] / 1e6).round(6),
        base=((bars["start_ns"] - origin_ns) / 1e6).round(6),
        width=0.8,
        name=label,
        colour=colour,
        customdata=[
            [row["rank"], row["start_ns"] + row["offset_ns"], row["dur_ns"], _hover(row, label)]
            for row in bars.iter_rows(named=True)
        ],
        hover="%{customdata[3]}",
        **options,
    )


def _hover(row: Mapping[str, Any], label: str) -> str:
    if label == BUBBLE:
        return f"<b>{label}</b> {units.duration(row['dur_ns'])}<br>rank {row['rank']}, {row['phase']}"
    return (
        f"<b>{label} of micro-batch {row['micro_batch']}</b> {units.duration(row['dur_ns'])}<br>"
        f"stage {row['stage']}, rank {row['rank']}"
    )
