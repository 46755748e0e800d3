"""Communication: exposed communication, causes of gaps, bandwidth by message size, stragglers, and all collectives."""

import polars as pl
import streamlit as st

from dashboard import findings, widgets
from dashboard.pages.page import Needs, Page
from dashboard.run_store import OpenRun, tables
from tracekit.report import charts, headlines, rank_selection

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


def show(run: OpenRun) -> None:
    """Draw how the ranks communicate, and list the collectives."""
    with st.spinner("Measuring"):
        kinds = run.table(tables.COLLECTIVES)
    if kinds.is_empty():
        widgets.info(
            "The traces contain no collective: the run had one rank, or was recorded without its communication."
        )
        _gaps(run, tables.COMPUTE_GAPS)
        return
    findings.show_families(run, "COMM", "RANK")
    widgets.subheader("Exposed communication")
    widgets.caption(
        "Communication in steps by rank: overlapped with compute, exposed, and waiting. Waiting ends when the last "
        "rank with a trace enters the collective."
    )
    figure = charts.communication_parts(run.table(tables.EXPOSED_BY_RANK), run.result_of(rank_selection.drawn_ranks))
    widgets.chart(figure, key="communication-hidden")
    widgets.note(rank_selection.selection_note(run.run))
    _stragglers(run)
    _gaps(run, tables.COMPUTE_GAPS)
    _gaps(run, tables.COMMUNICATION_GAPS)
    _bandwidth(run)
    _collectives(run, kinds)


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


def _bandwidth(run: OpenRun) -> None:
    widgets.subheader("Bandwidth by message size")
    speeds = _with_axes(run, run.table(tables.COLLECTIVE_SPEEDS))
    if speeds.is_empty():
        widgets.caption(
            "No message of known size took longer than the clock error, or the trace contains no sizes. The page Data "
            "quality shows how to record them."
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


def _with_axes(run: OpenRun, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows of collectives with the mesh axis of each group, as on the page Parallelism, where it is known."""
    axes = run.table(tables.GROUP_AXES).drop_nulls(["group", "axis"]).unique("group", keep="none")
    with_axes = rows.join(axes.select("group", mesh_axis="axis"), on="group", how="left", maintain_order="left")
    return with_axes.with_columns(pl.coalesce("mesh_axis", "axis").alias("axis")).drop("mesh_axis")


def _collectives(run: OpenRun, kinds: pl.DataFrame) -> None:
    widgets.subheader("Collectives")
    widgets.caption("Sums over ranks and steps by collective, group and size; bandwidths are medians.")
    rows = _with_axes(run, kinds.drop("is_whole"))
    last = ("algorithm_bytes_per_s", "bus_bytes_per_s")
    display = widgets.drop_empty(rows.select(pl.exclude(*last, "dtype"), "dtype", *last))
    widgets.frame(display, key="collectives", labels={"p50_ns": "median", "bytes": "size", "waited_ns": "waiting"})
    by_rank = run.table(tables.COLLECTIVES_BY_RANK)
    if by_rank.height:
        with st.expander("By rank: waiting time and last arrivals"):
            widgets.frame(by_rank, key="collectives-by-rank")


PAGE = Page.described_by(
    __doc__, "communication", show, Needs.WORK, headline=lambda run: run.headline(headlines.communication)
)
