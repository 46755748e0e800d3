"""Diagnosis: each finding with its saving, fix, moment and evidence; the step without several; trust in the data."""

import plotly.graph_objects as go
import polars as pl
import streamlit as st

from dashboard import downloads, findings, moments, widgets
from dashboard.findings import Findings
from dashboard.pages.page import Page
from dashboard.run_store import OpenRun, tables
from dashboard.sections import data_trust, what_if
from dashboard.url_state import bind, bind_flag
from tracekit.model import units
from tracekit.report import charts, figures, headlines, html, html_fragments, phrases, rank_selection
from tracekit.report import json as report_json

BY_RANK, BY_STEP = "by rank", "by step"
TRUST, SAVINGS = "trust", what_if.SAVINGS
"""Parameters of the address that open the parts on the data and on all savings."""


def show(run: OpenRun) -> None:
    """Show how far to trust the data, the findings by saving, the step without some of them, and the breakdown."""
    by_key = findings.by_key(run.report.findings)
    quality = findings.of_families(run.report.findings, ("DATA",))
    widgets.html(html_fragments.data_quality(list(quality.values())))
    if st.toggle("What the trust in the data rests on", key=bind_flag(TRUST)):
        data_trust.show(run)
    widgets.html(html_fragments.numbers(run.result_of(html_fragments.headline_numbers)))
    what_if.bind_causes()
    _findings({key: finding for key, finding in by_key.items() if key not in quality}, run)
    if not run.table(tables.BREAKDOWN_BY_RANK).is_empty():
        what_if.show(run)
    table, step_times = _breakdown(run)
    _numbers(run, table, step_times)
    _notes(run)
    _report(run)


def _findings(performance: Findings, run: OpenRun) -> None:
    widgets.subheader("Findings")
    severe = {key: finding for key, finding in performance.items() if finding.severity.label != "info"}
    rest = {key: finding for key, finding in performance.items() if key not in severe}
    if not performance:
        cannot_judge = run.report.cannot_judge
        nothing_found = "No rule found anything in what was recorded."
        widgets.caption(nothing_found if cannot_judge is None else f"The rules on time did not run: {cannot_judge}")
    findings.show_all(severe or rest, run, what_if.tick)
    if severe and rest:
        with st.expander(f"{len(rest)} more for information"):
            findings.show_all(rest, run, what_if.tick)


def _breakdown(run: OpenRun) -> tuple[pl.DataFrame, go.Figure | None]:
    """Draw where the time goes; return the table drawn, and the figure of step times if steps are shown."""
    widgets.subheader("Where the time goes")
    note = run.result_of(phrases.step_note)
    if note is not None:
        widgets.caption(note)
    by_step, by_rank = run.table(tables.BREAKDOWN_BY_STEP).drop_nulls("step"), run.table(tables.STEPS_BY_RANK)
    if by_rank.is_empty():
        widgets.info("The traces contain no work to break down: no kernels, and no operators on a CPU run.")
        return by_rank, None
    drawn_ranks = run.result_of(rank_selection.drawn_ranks)
    if widgets.segments("Bars", "bars", (BY_RANK, BY_STEP)) == BY_RANK or by_step.is_empty():
        widgets.chart(charts.breakdown(by_rank, drawn_ranks), key="breakdown_by_rank")
        widgets.caption(run.result_of(figures.breakdown_caption))
        widgets.note(rank_selection.selection_note(run.run))
        return by_rank, None
    ranks = by_step["rank"].unique().sort().to_list()
    rank = st.selectbox("Rank", ranks, key=bind("rank", ranks), width=160) if len(ranks) > 1 else ranks[0]
    table = by_step.filter(by_step["rank"] == rank)
    widgets.chart(charts.breakdown(table), key="breakdown_by_step")
    return table, charts.step_times(by_step, drawn_ranks)


def _numbers(run: OpenRun, table: pl.DataFrame, step_times: go.Figure | None) -> None:
    if step_times is not None:
        widgets.subheader("Step times")
        widgets.chart(step_times, key="step_times")
        widgets.note(rank_selection.selection_note(run.run))
    if table.height:
        with st.expander("Where the time goes, in numbers"):
            display = table.drop("start_ns", "window" if table["window"].n_unique() == 1 else "start_ns")
            rows = table.rename({"duration_ns": "dur_ns"})
            moments.table(run.entry, rows, display, key=f"breakdown-{run.entry.name}")


def _notes(run: OpenRun) -> None:
    count = len(run.report.blind_spots) or len(run.report.notes)
    if count:
        with st.expander(f"{units.count(count, 'rule')} could not judge this run, or only part of it"):
            for note in run.report.notes:
                st.markdown("- " + widgets.plain(note))


def _report(run: OpenRun) -> None:
    """Offer the report as files."""
    formats = {"HTML": (html.render, "text/html"), "JSON": (report_json.render, "application/json")}
    with st.container(horizontal=True):
        for label, (render, mime) in formats.items():
            st.download_button(
                f"Report as {label}",
                lambda render=render: run.compute(lambda loaded: render(run.report, loaded).encode()),
                file_name=f"{downloads.name_of('report')}.{label.lower()}",
                mime=mime,
                key=f"report-{label}-{run.entry.name}",
                on_click="ignore",
            )


PAGE = Page.described_by(
    __doc__, "diagnosis", show, follows_recording=True, headline=lambda run: run.headline(headlines.verdict)
)
