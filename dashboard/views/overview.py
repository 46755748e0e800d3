"""Overview: whether to worry, what it costs, what to change, where the time goes."""

import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import charts
from tracekit.reports import fragments

BY_RANK, BY_STEP = "by rank", "by step"


def page(entry: Entry) -> None:
    """Show the verdict, the findings by impact, and the breakdown."""
    held = parts.open_or_say(entry)
    if held is None:
        return
    parts.heading(entry, held)
    st.html(fragments.verdict(held.report.findings))
    st.html(fragments.numbers(fragments.headline_numbers(held.run)))
    st.subheader("Findings")
    for key, found in parts.finding_keys(held.report.findings).items():
        parts.finding(found, held, key=key)
    if not held.report.findings:
        st.caption("No rule fired on this run.")
    _breakdown(entry)
    _notes(held)


def _breakdown(entry: Entry) -> None:
    st.subheader("Where the time goes")
    by_step, by_rank = opened.by_step(entry), opened.by_rank(entry)
    if by_rank.is_empty():
        st.info("The traces hold no work to break down: no kernels, and no operators on a CPU run.")
        return
    choice = st.segmented_control("Bars", [BY_RANK, BY_STEP], default=BY_RANK, label_visibility="collapsed")
    if choice == BY_STEP and by_step.height:
        ranks = by_step["rank"].unique().sort().to_list()
        rank = st.selectbox("Rank", ranks, key="breakdown_rank", width=160) if len(ranks) > 1 else ranks[0]
        table = by_step.filter(by_step["rank"] == rank)
        parts.chart(charts.breakdown(table), key="breakdown_by_step")
        parts.chart(charts.step_times(by_step), key="step_times")
    else:
        table = by_rank
        parts.chart(charts.breakdown(table), key="breakdown_by_rank")
    with st.expander("The same in numbers"):
        parts.frame(table.drop("start_ns", "window" if table["window"].n_unique() == 1 else "start_ns"))


def _notes(held: opened.Opened) -> None:
    if held.report.notes:
        st.subheader("Notes")
    for note in held.report.notes:
        st.markdown("- " + parts.plain(note))
