"""Overview: whether to worry, what it costs, what to change, where the time goes, and how far to trust it."""

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from dashboard import run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.time import summary as facts
from tracekit.report import charts, html, html_fragments
from tracekit.report import json as report_json
from tracekit.rules.report_cache.summary import is_data_quality
from tracekit.rules.rule import Finding, Severity

BY_RANK, BY_STEP = "by rank", "by step"


def page(entry: RunEntry) -> None:
    """Show the verdict, what there is to gain, the breakdown, the findings by impact, and the trust in the data."""
    run_store.follow(entry)
    held = widgets.begin(entry)
    if held is None:
        return
    keyed = widgets.finding_keys(held.report.findings)
    judged = {key: found for key, found in keyed.items() if not is_data_quality(found.code)}
    of_data = {key: found for key, found in keyed.items() if key not in judged}
    st.html(html_fragments.verdict(list(judged.values())) + html_fragments.data_quality(list(of_data.values())))
    st.html(html_fragments.numbers(html_fragments.headline_numbers(held.run)))
    gains = html_fragments.potential_savings(list(judged.values()), facts.step_time_ns(held.run))
    left, right = st.columns([3, 2]) if gains else (st.container(), None)
    with left:
        table, figure = _breakdown(entry)
    if right is not None:
        with right:
            st.subheader("What there is to gain")
            st.html(gains)
    _findings(judged, held)
    if of_data:
        st.subheader("About the data")
        _cards(of_data, held)
    _steps(entry, table, figure)
    _notes(held)
    _report(entry, held)


def _findings(judged: dict[str, Finding], held: run_store.OpenRun) -> None:
    st.subheader("Findings")
    grave = {key: found for key, found in judged.items() if found.severity > Severity.INFO}
    rest = {key: found for key, found in judged.items() if key not in grave}
    if not judged:
        st.caption("No rule fired on this run.")
    _cards(grave, held)
    if grave and rest:
        with st.expander(f"{len(rest)} more for information"):
            _cards(rest, held)
    else:
        _cards(rest, held)


def _cards(findings: dict[str, Finding], held: run_store.OpenRun) -> None:
    for key, found in findings.items():
        widgets.finding(found, held, key=key)


def _breakdown(entry: RunEntry) -> tuple[pl.DataFrame, go.Figure | None]:
    """Draw where the time goes; return the table drawn, and the figure that belongs below."""
    st.subheader("Where the time goes")
    by_step, by_rank = run_store.by_step(entry), run_store.by_rank(entry)
    if by_rank.is_empty():
        st.info("The traces hold no work to break down: no kernels, and no operators on a CPU run.")
        return by_rank, None
    bars = [BY_RANK, BY_STEP]
    choice = st.segmented_control("Bars", bars, key=widgets.bind("bars", bars), label_visibility="collapsed")
    if choice != BY_STEP or by_step.is_empty():
        widgets.chart(charts.breakdown(by_rank), key="breakdown_by_rank")
        return by_rank, None
    ranks = by_step["rank"].unique().sort().to_list()
    rank = st.selectbox("Rank", ranks, key=widgets.bind("rank", ranks), width=160) if len(ranks) > 1 else ranks[0]
    table = by_step.filter(by_step["rank"] == rank)
    widgets.chart(charts.breakdown(table), key="breakdown_by_step")
    return table, charts.step_times(by_step)


def _steps(entry: RunEntry, table: pl.DataFrame, figure: go.Figure | None) -> None:
    if figure is not None:
        st.subheader("Step times")
        widgets.chart(figure, key="step_times")
    if table.height:
        with st.expander("Where the time goes, in numbers"):
            shown = table.drop("start_ns", "window" if table["window"].n_unique() == 1 else "start_ns")
            widgets.frame(shown, key=f"breakdown-{entry.name}")


def _notes(held: run_store.OpenRun) -> None:
    count = len(held.report.notes)
    if count:
        with st.expander(f"{count} rule{'s' * (count > 1)} could not judge this run, or not wholly"):
            for note in held.report.notes:
                st.markdown("- " + widgets.plain(note))


def _report(entry: RunEntry, held: run_store.OpenRun) -> None:
    """Offer the whole report as files."""

    def page() -> bytes:
        with held.lock:
            return html.render(held.report, held.run).encode()

    def document() -> bytes:
        with held.lock:
            return report_json.render(held.report, held.run).encode()

    with st.container(horizontal=True):
        for label, made, mime in (("HTML", page, "text/html"), ("JSON", document, "application/json")):
            st.download_button(
                f"Report as {label}",
                made,
                file_name=f"report.{label.lower()}",
                mime=mime,
                key=f"report-{label}-{entry.name}",
                on_click="ignore",
            )
