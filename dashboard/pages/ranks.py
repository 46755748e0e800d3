"""Ranks and communication: who waits for whom, exposed communication, bandwidth, contention, pipeline and mesh."""

from collections.abc import Mapping

import polars as pl
import streamlit as st

from dashboard import findings, moments, rank_choice, widgets
from dashboard.pages.page import Needs, Page, Tab, lack_of
from dashboard.run_store import OpenRun, tables
from dashboard.sections import contention, parallelism
from dashboard.url_state import bind
from tracekit.model import units
from tracekit.model.intervals import Window
from tracekit.report import charts, headlines, quoted_moment, rank_selection

ALL_STEPS = "all"
ABOUT = {
    charts.OTHERS_LOSE: (
        "What the other ranks lose to this rank, as a share of the step, also where compute hides their waiting; at "
        "least the longest wait of one rank for it. The ranks that others lose most to are at the top."
    ),
    charts.SLOWER: (
        "The device window of the step against the median of the ranks. A rank that others wait for can have the "
        "shortest one: the waiting makes the others longer."
    ),
}
MAX_AWAITED = 8
WAITING_FOR = "waiting_for_"
NO_COLLECTIVE = "The traces contain no collective: the run had one rank, or was recorded without its communication."
GAPS = {
    tables.COMMUNICATION_GAPS: (
        "Why no collective runs",
        "Gaps between the collectives of a phase, split by cause; the parts of a bar add up to the gaps.",
    ),
    tables.COMPUTE_GAPS: (
        "Why nothing computes",
        "Time in steps in which no kernel or operator computes, split by cause; the parts add up to all of it.",
    ),
}


def show_waits(run: OpenRun) -> None:
    """Draw who waits for whom, over all steps and in the one that a person picks."""
    with widgets.measuring():
        activity, offsets = run.table(tables.RANK_STATES), run.table(tables.CLOCK_OFFSETS)
    findings.show_families(run, "RANK")
    _stragglers(run)
    culprits = _heatmap(run)
    widgets.subheader("One step, rank by rank")
    window, step = _choose_step(run)
    rows = activity.filter(window=window)
    span = run.remember(("step span", window, step), lambda run: tables.step_span(run, window, step))
    part = _choose_part(run, span, window, step)
    cell = st.session_state.get(f"ranks-cell-{run.entry.name}")
    drawn_ranks = rank_choice.choose(run, cell[:1] if cell else (), culprits)
    widgets.caption(
        f"{'all steps' if step is None else f'step {step}'} · {units.duration(span[1] - span[0])} from the first rank "
        f"that begins it to the last that ends it · {_clock_error(offsets, window)}"
    )
    widgets.chart(
        charts.rank_activity(rows, part, origin_ns=span[0], labels=drawn_ranks),
        key="ranks",
        config={**charts.CONFIG, "scrollZoom": True},
    )
    widgets.caption(
        "Drag to zoom, double-click to reset. A collective transfers data once its last rank has entered it; until "
        "then the other ranks wait. Overlapped communication is drawn as compute."
    )
    widgets.subheader("Time of this part by rank, and the ranks it waits for")
    totals = tables.rank_totals(rows, part)
    display = most_awaited(totals)
    waits = [name for name in display.columns if name.startswith(WAITING_FOR)]
    labels = {name: f"waiting for rank {name.removeprefix(WAITING_FOR).removesuffix('_ns')}" for name in waits}
    widgets.frame(display, key="ranks-totals", labels=labels)
    if len(totals.columns) > len(display.columns):
        widgets.caption(f"Only the {MAX_AWAITED} ranks with the longest waits for them have a column.")


def most_awaited(totals: pl.DataFrame) -> pl.DataFrame:
    """Return `rank_totals` with the columns of the `MAX_AWAITED` ranks that all ranks together wait longest for."""
    waits = {name: totals[name].sum() for name in totals.columns if name.startswith(WAITING_FOR)}
    longest = sorted(waits, key=lambda name: waits[name], reverse=True)[:MAX_AWAITED]
    return totals.drop(name for name in waits if name not in longest)


def _heatmap(run: OpenRun) -> Mapping[int, str]:
    """Draw ranks against steps; a click on a cell chooses its step below, and offers to show it in the timeline.

    Return the rank that others wait for longest and one that waits longest for it, with what each is.
    """
    by_step = run.table(tables.SPREAD_BY_STEP)
    if by_step.is_empty():
        widgets.caption("The traces mark no steps, so ranks cannot be compared step by step.")
        return {}
    windows = by_step["window"].unique().sort().to_list()
    window = st.session_state.get("window")
    counters = run.table(tables.DEVICE_COUNTERS)
    table = by_step.filter(window=window if window in windows else windows[0]).join(
        counters, on=["window", "rank", "step"], how="left", nulls_equal=True, maintain_order="left"
    )
    widgets.subheader("Ranks and steps")
    measure = widgets.segments("Colour", "colour", charts.measures(table))
    widgets.caption(ABOUT.get(measure, ""))
    clicked = widgets.clickable(charts.step_heatmap(table, measure), key=f"ranks-map-{run.entry.name}")
    _show_cell(run, table, clicked and clicked[:2])
    return culprits(table)


def culprits(table: pl.DataFrame) -> Mapping[int, str]:
    """Return the rank of `rank_timelines.spread` that others lose most to, and the rank that waits longest for it.

    Empty where nobody waits.
    """
    sums = table.group_by("rank").agg(pl.col("lost_ns", "awaited_ns").sum())
    awaited = sums.filter(pl.col("awaited_ns") > 0).sort("lost_ns", "rank", descending=[True, False])
    if awaited.is_empty():
        return {}
    rank = awaited["rank"][0]
    longest = table.filter(rank=rank).sort("awaited_ns", descending=True)["waiting_rank"][0]
    return {rank: "most awaited", longest: f"waits longest for rank {rank}"}


def _show_cell(run: OpenRun, table: pl.DataFrame, cell: tuple[int, ...] | None) -> None:
    key = f"ranks-cell-{run.entry.name}"
    if cell is None:
        st.caption("Click a cell to choose its step below, or to show it in the timeline.")
        st.session_state.pop(key, None)
        return
    rank, step = cell
    if st.session_state.get(key) != cell:
        st.session_state[key] = cell
        st.session_state["step"] = step
    row = table.filter(rank=rank, step=step)
    if row.height and st.button(f"Show rank {rank}, step {step} in the timeline", key="ranks-show"):
        waits = run.table(tables.WAIT_TIMES).filter(pl.col("peer_rank") == rank)
        waiting = waits.sort("waited_ns", "rank", descending=[True, False])["rank"].head(quoted_moment.MAX_WAITING)
        moment = row.rename({"duration_ns": "dur_ns"}).row(0, named=True)
        moments.show(run.entry, moment, ranks=[rank, *waiting] if len(waiting) else ())


def _choose_step(run: OpenRun) -> tuple[int, int | None]:
    by_step = run.table(tables.BREAKDOWN_BY_STEP).drop_nulls("step")
    windows = run.table(tables.BREAKDOWN_BY_RANK)["window"].unique().sort().to_list()
    median = run.result_of(tables.representative_step)
    choices = st.container(horizontal=True)
    window = widgets.choose_window(windows, choices)
    steps = by_step.filter(window=window)["step"].unique().sort().to_list()
    default = median["step"] if median and median["step"] in steps else ALL_STEPS
    options = [ALL_STEPS, *steps]
    choice = choices.selectbox("Step", options, key=bind("step", options, default), width=160)
    return window, None if choice == ALL_STEPS else choice


def _choose_part(run: OpenRun, span: Window, window: int, step: int | None) -> Window:
    divisor, unit = widgets.time_unit(span[1] - span[0])
    length = (span[1] - span[0]) / divisor
    edges = st.slider(
        f"Part drawn, {unit}",
        0.0,
        length,
        (0.0, length),
        step=length / 1000,
        key=f"ranks-part-{run.entry.name}-{window}-{step}",
    )
    left_ns, right_ns = (span[0] + round(edge * divisor) for edge in edges)
    return (left_ns, right_ns) if right_ns > left_ns else span


def _clock_error(offsets: pl.DataFrame, window: int) -> str:
    residuals = offsets.filter(window=window)["residual_ns"].drop_nulls()
    if residuals.is_empty():
        return "the clocks of the ranks could not be aligned, so no waiting is shown"
    return f"clocks of the ranks agree within {units.duration(int(residuals.max()))}"  # type: ignore[arg-type]  # whole ns


def _stragglers(run: OpenRun) -> None:
    widgets.subheader("Which ranks wait for which")
    if len(run.run.ranks) < 2:
        widgets.caption(
            "Only one rank has a trace, so waiting cannot be measured: put the traces of all ranks into one folder."
        )
        return
    waits = run.table(tables.WAIT_TIMES)
    if waits.is_empty():
        widgets.caption("No rank waited for another for longer than the clock error.")
        return
    widgets.caption(
        "Time in which a rank (row) computes nothing and all its collectives wait for a late rank (column). Every "
        "moment counts once. A straggler is a column with long times in most rows."
        + (" The ranks with the longest waits are drawn." if len(run.run.ranks) > charts.MAX_MATRIX_RANKS else "")
    )
    widgets.chart(charts.wait_matrix(waits, run.run.ranks), key="communication-waits")


def show_exposed(run: OpenRun) -> None:
    """Draw how much communication is exposed, and why nothing computes."""
    with widgets.measuring():
        has_collectives = not run.table(tables.COLLECTIVES).is_empty()
    findings.show_families(run, "COMM")
    if not has_collectives:
        widgets.info(NO_COLLECTIVE)
        _gaps(run, tables.COMPUTE_GAPS)
        return
    widgets.subheader("Exposed communication")
    widgets.caption(
        "Communication in steps by rank: overlapped with compute, exposed, and waiting. Waiting ends when the last "
        "rank with a trace enters the collective."
    )
    figure = charts.communication_parts(run.table(tables.EXPOSED_BY_RANK), run.result_of(rank_selection.drawn_ranks))
    widgets.chart(figure, key="communication-hidden")
    widgets.note(rank_selection.selection_note(run.run))
    _gaps(run, tables.COMPUTE_GAPS)
    _gaps(run, tables.COMMUNICATION_GAPS)


def _gaps(run: OpenRun, gap_kind: str) -> None:
    rows = run.table(tables.GAPS_BY_RANK).filter(gap_kind=gap_kind)
    title, about = GAPS[gap_kind]
    widgets.subheader(title)
    widgets.caption(f"{about} Hover over a part for its time and share.")
    if rows.is_empty():
        widgets.caption("There is no such gap.")
        return
    widgets.chart(charts.stall_causes(rows, run.result_of(rank_selection.drawn_ranks)), key=f"communication-{gap_kind}")
    widgets.note(rank_selection.selection_note(run.run))
    with st.expander("By phase and host activity"):
        causes = run.table(tables.GAPS_BY_CAUSE).filter(gap_kind=gap_kind)
        sums = causes.group_by("phase", "cause", "detail").agg(pl.col("pieces", "dur_ns").sum())
        widgets.frame(sums.sort("dur_ns", descending=True), key=f"causes-of-{gap_kind}")


def show_bandwidth(run: OpenRun) -> None:
    """Draw the bandwidth of collectives by message size, and list all collectives."""
    _bandwidth(run)
    _collectives(run, run.table(tables.COLLECTIVES))


def _bandwidth(run: OpenRun) -> None:
    widgets.subheader("Bandwidth by message size")
    speeds = _with_axes(run, run.table(tables.COLLECTIVE_SPEEDS))
    if speeds.is_empty():
        widgets.caption(
            "No message of known size took longer than the clock error, or the trace contains no sizes. The page "
            "Diagnosis shows how to record them."
        )
        return
    widgets.caption(
        "Each mark is one collective. Algorithm bandwidth is its size over the time from the last arrival to the end. "
        "Bus bandwidth multiplies it by the factor of nccl-tests, such as 2(n−1)/n for an all-reduce of n ranks, so "
        "that all collectives compare with the link. Latency limits small messages. "
        + ("" if speeds["is_whole"].all() else "Open marks are lower bounds: some ranks of their groups lack traces.")
    )
    kind = widgets.segments("Bandwidth", "bandwidth", (charts.BUS, charts.ALGORITHM))
    widgets.chart(charts.bandwidth(speeds, kind), key="communication-bandwidth")


def _with_axes(run: OpenRun, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of collectives with the mesh axis of each group, where it is known."""
    axes = run.table(tables.GROUP_AXES).drop_nulls(["group", "axis"]).unique("group", keep="none")
    with_axes = rows.join(axes.select("group", mesh_axis="axis"), on="group", how="left", maintain_order="left")
    return with_axes.with_columns(pl.coalesce("mesh_axis", "axis").alias("axis")).drop("mesh_axis")


def _collectives(run: OpenRun, kinds: pl.DataFrame) -> None:
    widgets.subheader("Collectives")
    widgets.caption("Sums over ranks and steps by collective, group and size; bandwidths are medians.")
    rows = _with_axes(run, kinds.drop("is_whole"))
    widgets.frame(
        rows,
        key="collectives",
        first=("op", "axis", "bytes", "total_ns", "exposed_ns", "waited_ns", "bus_bytes_per_s"),
        labels={"p50_ns": "median", "bytes": "size", "waited_ns": "waiting"},
    )
    by_rank = run.table(tables.COLLECTIVES_BY_RANK)
    if by_rank.height:
        with st.expander("By rank: waiting time and last arrivals"):
            widgets.frame(by_rank, key="collectives-by-rank")


PAGE = Page.described_by(
    __doc__,
    "ranks",
    families=("RANK", "ROLE", "COMM", "STREAM", "PIPE", "TP", "EP"),
    needs=Needs.WORK,
    tabs=(
        Tab("waiting", show_waits, headlines.ranks),
        Tab("exposed communication", show_exposed, headlines.communication),
        Tab("bandwidth", show_bandwidth, headlines.communication, lack_of(tables.COLLECTIVES, NO_COLLECTIVE)),
        Tab(
            "contention", contention.show, headlines.slowed_kind,
            lambda run: "" if run.table(tables.DEVICES)["devices"].sum() else contention.WITHOUT_DEVICE,
        ),
        Tab(
            "pipeline", parallelism.show_pipeline, headlines.parallelism,
            lack_of(tables.PIPELINE_BUBBLES, parallelism.NO_PIPELINE),
        ),
        Tab("mesh", parallelism.show_mesh, headlines.parallelism, parallelism.lack_of_axes),
        Tab(
            "experts", parallelism.show_experts, headlines.parallelism,
            lack_of(tables.EXPERT_LOAD, parallelism.NO_EXPERTS),
        ),
    ),
)  # fmt: skip
