"""Communication: what of it is hidden, why it pauses, how fast messages move, and who waits for whom."""

import polars as pl
import streamlit as st

from dashboard import rule_families, run_facts, run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.communication import collective_instances, exposed_communication, traffic
from tracekit.analysis.compute import compute_gap_causes, stall_attribution
from tracekit.analysis.parallelism import rank_timelines
from tracekit.report import charts
from tracekit.sync import collective_matching

FAMILIES = ("COMM", "RANK")
FACTS = (
    collective_matching.calls,
    stall_attribution.communication_gap_time,
    compute_gap_causes.compute_gap_causes,
    *traffic.FACTS,
)
ALONE = "One rank has a trace, so nobody can be said to wait: put the traces of all ranks into one folder."


def page(entry: RunEntry) -> None:
    """Draw how the ranks of a run communicate, and list what they say to each other."""
    held = rule_families.begin(entry)
    if held is None:
        return
    with st.spinner("Measuring"):
        kinds = run_facts.across(entry, traffic.by_kind, FACTS)
    if kinds.is_empty():
        st.info("The traces hold no collective: a run on one rank, or one recorded without its communication.")
        _standing(entry, stall_attribution.COMPUTE)
        return
    rule_families.show(held, *FAMILIES)
    _hidden(entry)
    _standing(entry, stall_attribution.COMMUNICATION)
    _standing(entry, stall_attribution.COMPUTE)
    _speeds(entry)
    _waits(entry, held)
    _collectives(entry, kinds)


def _hidden(entry: RunEntry) -> None:
    st.subheader("How much of it is hidden")
    st.caption(
        "Communication in steps, of each rank: beside compute it costs nothing by itself. Waiting ends when the last "
        "rank that has a trace comes to the collective."
    )
    widgets.chart(
        charts.communication_parts(run_facts.across(entry, exposed_communication.by_rank)), key="communication-hidden"
    )


def _standing(entry: RunEntry, of: str) -> None:
    rows = run_facts.across(entry, stall_attribution.by_rank).filter(pl.col("gap_kind") == of)
    if of == stall_attribution.COMMUNICATION:
        st.subheader("Why no collective runs")
        told = "Gaps between the collectives of a phase, split by cause: the parts of a bar sum to the gaps, exactly."
    else:
        st.subheader("Why nothing computes")
        told = "All time in steps in which no kernel or operator computes, split by cause, exactly."
    st.caption(told + " Point at a part for its time and share.")
    if rows.is_empty():
        st.caption("There is no such gap.")
        return
    widgets.chart(charts.stall_causes(rows), key=f"communication-{of}")
    with st.expander("By phase and by what the host did"):
        each = run_facts.across(entry, stall_attribution.by_cause).filter(pl.col("gap_kind") == of)
        sums = each.group_by("phase", "cause", "detail").agg(pl.col("pieces", "dur_ns").sum())
        widgets.frame(sums.sort("dur_ns", descending=True), key=f"causes-of-{of}")


def _speeds(entry: RunEntry) -> None:
    st.subheader("Bandwidth against size")
    speeds = run_facts.across(entry, traffic.speeds)
    if speeds.is_empty():
        st.caption(
            "No message of known size took longer than the clocks' residual, or the trace tells no sizes: Data quality "
            "says what to record."
        )
        return
    st.caption(
        "Each mark is one collective. Algorithm bandwidth is its size over the time from the last arrival to the end; "
        "bus bandwidth is that by nccl-tests' factor, such as 2(n−1)/n for an all-reduce of n ranks, so that all "
        "collectives compare with the link. Small messages are slow because of latency. "
        + ("" if speeds["is_whole"].all() else "Open marks moved at least so fast: their groups lack traces.")
    )
    kinds = (charts.BUS, charts.ALGORITHM)
    kind = st.segmented_control(
        "Bandwidth", kinds, key=widgets.bind("bandwidth", kinds), label_visibility="collapsed", required=True
    )
    widgets.chart(charts.bandwidth(speeds, kind), key="communication-bandwidth")


def _waits(entry: RunEntry, held: run_store.OpenRun) -> None:
    st.subheader("Who waits for whom")
    if len(held.run.ranks) < 2:
        st.caption(ALONE)
        return
    waited = run_facts.across(entry, rank_timelines.wait_times)
    if waited.is_empty():
        st.caption("No rank stood still for another by more than the clocks' residual.")
        return
    st.caption(
        "Time in which a rank computes nothing and all its collectives wait for a rank that has not come: no moment "
        "counts twice. A strong column is a rank that the others wait for."
    )
    widgets.chart(charts.wait_matrix(waited, held.run.ranks), key="communication-waits")


def _collectives(entry: RunEntry, kinds: pl.DataFrame) -> None:
    st.subheader("Collectives")
    st.caption("Added up over ranks and steps, by what they are and how large; bandwidths are medians.")
    empty = [name for name in kinds.columns if kinds[name].null_count() == kinds.height]
    widgets.frame(kinds.drop(*empty, "is_whole", strict=False), key="collectives")
    by_rank = run_facts.across(entry, collective_instances.by_collective)
    if by_rank.height:
        with st.expander("By rank: who waited, who came last"):
            widgets.frame(by_rank, key="collectives-by-rank")
