"""Contention: what shares the device, what goes slower for it, and the moments that lost most."""

import polars as pl
import streamlit as st

from dashboard import rule_families, run_facts, run_store, timeline_links, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.compute import collective_contention, concurrency, contention, contention_totals
from tracekit.report import charts, phrases
from tracekit.sync import collective_matching

FAMILIES = ("STREAM",)
FACTS = (collective_matching.calls, contention.device_count, *contention_totals.FACTS)
ON_CPU = (
    "This run was on the CPU: its threads share cores in ways that no trace tells. Contention is told of device "
    "streams; record on a GPU with ProfilerActivity.CUDA."
)
NOTHING = "No two kinds of work ran at the same time on any device, so nothing was slowed."


def page(entry: RunEntry) -> None:
    """Draw which work ran beside which other, and what that cost."""
    held = rule_families.begin(entry)
    if held is None:
        return
    if not run_facts.table(entry, contention.device_count)["devices"].sum():
        st.info(ON_CPU)
        return
    with st.spinner("Measuring"):
        pairs = run_facts.across(entry, collective_contention.all_pairs, FACTS)
    if pairs.is_empty():
        st.info(NOTHING)
        return
    rule_families.show(held, *FAMILIES)
    _pairs(pairs)
    _phases(entry)
    _give_way(entry)
    _moments(entry, held)


def _pairs(pairs: pl.DataFrame) -> None:
    st.subheader("How much slower, beside what")
    st.caption(
        "Each kind of work against the same work alone (same kernel, grid and shapes; collectives of one size), within "
        "one step where it ran alone in it. Bars are 95% intervals over steps and units; right of the line is slower."
    )
    if pairs["slowdown"].is_not_null().any():
        widgets.chart(charts.slowdowns(pairs), key="contention-slowdowns")
    else:
        st.caption(f"Nothing ran both alone and beside other work. {contention.RECORD.capitalize()}.")
    with st.expander("The same in numbers"):
        widgets.frame(pairs, key="contention-pairs")


def _phases(entry: RunEntry) -> None:
    by_phase = run_facts.across(entry, contention_totals.by_phase)
    kinds = [kind for kind in concurrency.KINDS if kind in by_phase["kind"]]
    st.subheader("What shares the device, by phase")
    of = st.segmented_control(
        "Work", kinds, key=widgets.bind("work", kinds), label_visibility="collapsed", required=True
    )
    st.caption("Time for which the chosen work ran beside another kind on other streams, of all ranks and steps.")
    widgets.chart(charts.concurrent_time(by_phase, of), key="contention-phases")


def _give_way(entry: RunEntry) -> None:
    st.subheader("Preparation that gives way")
    prepared = run_facts.table(entry, contention.preparation)
    known = prepared.drop_nulls("alone_ns")
    if known.is_empty():
        told = "No work prepares a collective" if prepared.is_empty() else "No preparation was ever seen alone"
        st.caption(f"{told}, so whether the main compute holds it up cannot be told.")
        return
    st.caption(
        "Small kernels before collectives (copies, casts, divides). On the line they take as long as alone; far above "
        "it the main compute holds them up, and with them the collective that they prepare."
    )
    widgets.chart(charts.delayed_preparation(prepared), key="contention-give-way")


def _moments(entry: RunEntry, held: run_store.OpenRun) -> None:
    st.subheader("The worst moments")
    rows = run_facts.across(entry, contention_totals.costliest_calls)
    if rows.is_empty():
        st.caption("No call took longer beside other work than alone.")
        return
    st.caption("Calls that took most longer than the same work alone. Choose a row to see it in the timeline.")
    shown = phrases.from_trace_start(rows, phrases.trace_starts(held.run))
    timeline_links.table(
        entry, rows, shown.drop("window") if shown["window"].n_unique() == 1 else shown, key="contention-at"
    )
