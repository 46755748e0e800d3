"""Parallelism: the mesh, a pipeline's schedule with its bubbles, the balance of its stages, communication by axis."""

import polars as pl
import streamlit as st

from dashboard import findings, moments, widgets
from dashboard.run_store import OpenRun, tables
from dashboard.url_state import bind
from tracekit.model import units
from tracekit.report import charts

SOURCES = {
    "description": "named by the descriptions of the groups",
    "manifest": "those of run.json",
    "inferred": "inferred from the collectives of the groups",
}
"""How the axis of a group is known, in words."""
NO_AXIS = "The traces contain no groups of collectives or sends whose axis is known."
NO_PIPELINE = "The run has no spans of a schedule, and no sends and receives between stages."
NO_EXPERTS = "The run has no all-to-alls that bring tokens to experts."
NO_MESH = (
    "The traces do not state the ranks of any group along an axis, so the mesh is not known. State `mesh` in run.json."
)


def show_mesh(run: OpenRun) -> None:
    """Draw the mesh, and the communication of each axis."""
    findings.show_families(run, "TP")
    _mesh(pl.concat([run.table(tables.GROUP_AXES), run.table(tables.MESH_GROUPS)], how="diagonal"))
    _axes(run.table(tables.COMMUNICATION_BY_AXIS))


def lack_of_axes(run: OpenRun) -> str:
    """Why the run has no mesh to show, or ''."""
    axes = run.table(tables.GROUP_AXES)["axis"].drop_nulls().unique()
    if axes.len() > 1:
        return ""
    return f"Its groups have one axis, {axes[0]}." if axes.len() else NO_AXIS


def show_experts(run: OpenRun) -> None:
    """Draw how the tokens are divided among the ranks' experts, where their all-to-alls say so."""
    findings.show_families(run, "EP")
    widgets.subheader("Tokens of each rank's experts")
    widgets.chart(charts.expert_heatmap(run.table(tables.EXPERT_LOAD)), key="parallelism-experts")
    widgets.caption(
        "Bytes that the first all-to-all of a layer brings a rank, over the mean of its group; mean of steps."
    )
    pairs = run.table(tables.EXPERT_PAIRS)
    if pairs.is_empty():
        return
    widgets.subheader("Tokens between ranks")
    widgets.chart(charts.expert_pair_heatmap(pairs), key="parallelism-expert-pairs")
    widgets.caption(
        "Bytes of the first all-to-alls of all layers from rank to rank, over the mean of the group's pairs. "
        + _slowest_pair(run.table(tables.EXPERT_PAIR_TRANSFERS))
    )


def _slowest_pair(transfers: pl.DataFrame) -> str:
    timed = transfers.drop_nulls("bytes_per_s")
    if timed.is_empty():
        return "No transfer between two ranks takes longer than the clock error."
    rank, peer, rate = timed.select("rank", "peer", "bytes_per_s").row(0)
    return f"Slowest pair: from rank {rank} to rank {peer}, at least {units.rate(rate)}."


def _mesh(groups: pl.DataFrame) -> None:
    widgets.subheader("Mesh")
    figure = charts.mesh_map(groups)
    if not figure.data:
        widgets.info(NO_MESH)
        return
    widgets.chart(figure, key="parallelism-mesh")
    with_axis = groups.drop_nulls("axis")
    sources = [text for source, text in SOURCES.items() if source in with_axis["source"]]
    unknown = groups.height - with_axis.height
    widgets.caption(
        "Each row is an axis, each column a rank; ranks with the same number form one process group. "
        + (f"Axes are {', or '.join(sources)}. " if sources else "")
        + (f"Groups without a known axis: {unknown}." if unknown else "")
    )


def show_pipeline(run: OpenRun) -> None:
    """Draw one step of the pipeline, its stages, and their times."""
    findings.show_families(run, "PIPE")
    bubbles = run.table(tables.PIPELINE_BUBBLES)
    widgets.subheader("Pipeline, one step")
    place = _choose(bubbles)
    step_bubbles = bubbles.filter(**place)
    actions, gaps = (run.table(table).filter(**place) for table in (tables.PIPELINE_ACTIONS, tables.PIPELINE_GAPS))
    _numbers(step_bubbles)
    clicked = widgets.clickable(charts.pipeline_step(actions, gaps), key=f"parallelism-step-{run.entry.name}")
    if clicked is None:
        widgets.caption(
            "Numbers are micro-batches; hatched is bubble: the rank runs no action of its stages. Drag to zoom, "
            "click a bar to show it in the timeline."
        )
    elif st.button(f"Show rank {clicked[0]} in the timeline", key="parallelism-show"):
        moment = {"rank": clicked[0], "start_ns": clicked[1], "dur_ns": clicked[2], "window": place["window"]}
        moments.show(run.entry, moment)
    widgets.subheader("Stages, mean of all steps")
    widgets.chart(charts.stage_balance(bubbles), key="parallelism-stages")
    widgets.caption("A stage with more forward and backward time than the others makes all of them wait.")
    columns = [name for name in step_bubbles.columns if name not in _HIDDEN]
    rows = step_bubbles.rename({"duration_ns": "dur_ns"})
    moments.table(run.entry, rows, step_bubbles.select(columns), key="parallelism-bubbles")


_HIDDEN = ("window", "iteration", "pipeline", "start_ns", "stages", "pipeline_ranks", "ideal_duration_ns", "step")


def _choose(bubbles: pl.DataFrame) -> dict[str, int]:
    """Let a person pick window, step and replica; return those that the run has, as filters."""
    choices = st.container(horizontal=True)
    window = widgets.choose_window(bubbles["window"].unique().sort().to_list(), choices)
    place = {"window": window}
    for name, label in (("step", "Step"), ("iteration", "Repetition"), ("pipeline", "Pipeline")):
        values = bubbles.filter(**place)[name].drop_nulls().unique().sort().to_list()
        if len(values) > 1:
            default = values[len(values) // 2] if name == "step" else values[0]
            place[name] = choices.selectbox(label, values, key=bind(name, values, default), width=160)
        elif values:
            place[name] = values[0]
    return place


def _numbers(bubbles: pl.DataFrame) -> None:
    ranks = bubbles.unique("rank")
    formula = ranks["formula_bubble_ratio"].drop_nulls()
    widgets.numbers(
        {
            "Bubble, mean of ranks": units.share(float(ranks["bubble_ratio"].mean() or 0)),  # type: ignore[arg-type]
            "Schedule's own, with these stages": units.share(float(ranks["ideal_bubble_ratio"].mean() or 0)),  # type: ignore[arg-type]
            "Formula, equal stages": units.share(float(formula[0])) if len(formula) else "—",
            "Micro-batches": str(ranks["micro_batches"].max()),
            "Duration": units.duration(int(ranks["duration_ns"].max() or 0)),  # type: ignore[arg-type]  # whole ns
        }
    )


def _axes(by_axis: pl.DataFrame) -> None:
    widgets.subheader("Communication by axis, per step")
    widgets.chart(charts.axis_communication(by_axis), key="parallelism-axes")
    widgets.caption(
        "Bars are means over ranks; the table has each rank. Exposed: the rank computes nothing while it communicates."
    )
    summed = ("communication_ns", "exposed_communication_ns", "bytes", "calls")
    steps = pl.when(pl.col("steps") > 0).then("steps").otherwise(1)
    per_step = by_axis.with_columns(pl.col(summed) / steps).rename({"confidence": "confidence_ratio"})
    labels = {"confidence_ratio": "confidence", "calls": "calls per step"}
    widgets.frame(per_step.with_columns(pl.col("calls").round(1)), key="parallelism-axis-table", labels=labels)
