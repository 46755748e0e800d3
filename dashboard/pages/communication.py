"""Communication: how much of it is exposed, why it stalls, its bandwidth, and which rank is waited for."""

import polars as pl
import streamlit as st

from dashboard import findings, widgets
from dashboard.pages.page import Needs, Page
from dashboard.run_store import OpenRun
from dashboard.url_state import bind
from tracekit.analysis.communication import collective_instances, exposed_communication, traffic
from tracekit.analysis.compute import compute_gap_causes, stall_attribution
from tracekit.analysis.parallelism import rank_timelines
from tracekit.report import charts

FACTS = (stall_attribution.communication_gap_time, compute_gap_causes.compute_gap_causes, *traffic.FACTS)
GAPS = {
    stall_attribution.COMMUNICATION: (
        "Why no collective runs",
        "Gaps between the collectives of a phase, split by cause; the parts of a bar add up to the gaps.",
    ),
    stall_attribution.COMPUTE: (
        "Why nothing computes",
        "Time in steps in which no kernel or operator computes, split by cause; the parts add up to all of it.",
    ),
}


def show(run: OpenRun) -> None:
    """Draw how the ranks communicate, and list the collectives."""
    with st.spinner("Measuring"):
        kinds = run.run_table(traffic.by_kind, FACTS)
    if kinds.is_empty():
        st.info("The traces contain no collective: the run had one rank, or was recorded without its communication.")
        _gaps(run, stall_attribution.COMPUTE)
        return
    findings.show_families(run, "COMM", "RANK")
    st.subheader("Exposed communication")
    st.caption(
        "Communication in steps by rank: overlapped with compute, exposed, and waiting. Waiting ends when the last "
        "rank with a trace enters the collective."
    )
    widgets.chart(charts.communication_parts(run.run_table(exposed_communication.by_rank)), key="communication-hidden")
    _gaps(run, stall_attribution.COMMUNICATION)
    _gaps(run, stall_attribution.COMPUTE)
    _bandwidth(run)
    _stragglers(run)
    _collectives(run, kinds)


def _gaps(run: OpenRun, of: str) -> None:
    rows = run.run_table(stall_attribution.by_rank).filter(gap_kind=of)
    title, about = GAPS[of]
    st.subheader(title)
    st.caption(f"{about} Hover over a part for its time and share.")
    if rows.is_empty():
        st.caption("There is no such gap.")
        return
    widgets.chart(charts.stall_causes(rows), key=f"communication-{of}")
    with st.expander("By phase and host activity"):
        causes = run.run_table(stall_attribution.by_cause).filter(gap_kind=of)
        sums = causes.group_by("phase", "cause", "detail").agg(pl.col("pieces", "dur_ns").sum())
        widgets.frame(sums.sort("dur_ns", descending=True), key=f"causes-of-{of}")


def _bandwidth(run: OpenRun) -> None:
    st.subheader("Bandwidth by message size")
    speeds = run.run_table(traffic.speeds)
    if speeds.is_empty():
        st.caption(
            "No message of known size took longer than the clock error, or the trace contains no sizes. The page Data "
            "quality shows how to record them."
        )
        return
    st.caption(
        "Each mark is one collective. Algorithm bandwidth is its size over the time from the last arrival to the end. "
        "Bus bandwidth multiplies it by the factor of nccl-tests, such as 2(n−1)/n for an all-reduce of n ranks, so "
        "that all collectives compare with the link. Latency limits small messages. "
        + ("" if speeds["is_whole"].all() else "Open marks are lower bounds: some ranks of their groups lack traces.")
    )
    kinds = (charts.BUS, charts.ALGORITHM)
    kind = st.segmented_control(
        "Bandwidth", kinds, key=bind("bandwidth", kinds), label_visibility="collapsed", required=True
    )
    widgets.chart(charts.bandwidth(speeds, kind), key="communication-bandwidth")


def _stragglers(run: OpenRun) -> None:
    st.subheader("Which ranks wait for which")
    if len(run.run.ranks) < 2:
        st.caption(
            "Only one rank has a trace, so waiting cannot be measured: put the traces of all ranks into one folder."
        )
        return
    waits = run.run_table(rank_timelines.wait_times)
    if waits.is_empty():
        st.caption("No rank waited for another for longer than the clock error.")
        return
    st.caption(
        "Time in which a rank (row) computes nothing and all its collectives wait for a late rank (column). Every "
        "moment counts once. A dark column is a straggler."
    )
    widgets.chart(charts.wait_matrix(waits, run.run.ranks), key="communication-waits")


def _collectives(run: OpenRun, kinds: pl.DataFrame) -> None:
    st.subheader("Collectives")
    st.caption("Sums over ranks and steps by collective, group and size; bandwidths are medians.")
    empty = [name for name in kinds.columns if kinds[name].null_count() == kinds.height]
    widgets.frame(kinds.drop(*empty, "is_whole", strict=False), key="collectives")
    by_rank = run.run_table(collective_instances.by_collective)
    if by_rank.height:
        with st.expander("By rank: waiting time and last arrivals"):
            widgets.frame(by_rank, key="collectives-by-rank")


PAGE = Page(
    "Communication",
    "communication",
    "exposed and overlapped communication, causes of gaps, bandwidth by message size, stragglers, and all collectives",
    show,
    Needs.WORK,
)
