"""Contention: slowdown of concurrent work, what shares the device, the give-way effect, and the most delayed calls."""

import polars as pl
import streamlit as st

from dashboard import findings, moments, widgets
from dashboard.run_store import OpenRun, tables
from tracekit.report import charts, phrases

WITHOUT_DEVICE = (
    "No device activity was recorded. Contention is measured between device streams, and a trace does not record how "
    "threads share cores: if the run was on a GPU, record with ProfilerActivity.CUDA."
)
MAX_PAIRS = 500


def show(run: OpenRun) -> None:
    """Draw which work ran concurrently with which other work, and what that cost."""
    with widgets.measuring():
        pairs = run.table(tables.CONTENTION_PAIRS)
    if pairs.is_empty():
        return  # the headline says so
    findings.show_families(run, "STREAM")
    _slowdowns(run, pairs)
    _phases(run)
    _give_way(run)
    _moments(run)


def _slowdowns(run: OpenRun, pairs: pl.DataFrame) -> None:
    widgets.subheader("Slowdown by concurrent work")
    widgets.caption(
        "Each kind of work compared with the same work alone (same kernel, grid and shapes; collectives of one size), "
        "within one step if it ran alone there. Bars are 95% confidence intervals over steps and units; right of the "
        "line is slower."
    )
    if pairs["slowdown"].is_not_null().any():
        widgets.chart(charts.slowdowns(pairs), key="contention-slowdowns")
        if len(run.run.ranks) > charts.MAX_SLOWED_RANKS:
            widgets.caption(
                f"Of {len(run.run.ranks):,} ranks, {charts.MAX_SLOWED_RANKS} are drawn for each pair: those with the "
                "largest and the smallest slowdown, and others evenly between these."
            )
    else:
        widgets.caption(
            f"Nothing ran both alone and concurrently with other work. {tables.RECORD_CONTENTION.capitalize()}."
        )
    with st.expander("Slowdowns in numbers"):
        widgets.frame(_costliest(pairs), key="contention-pairs", full=pairs)


def _costliest(pairs: pl.DataFrame) -> pl.DataFrame:
    """Return the pairs to list: of many ranks those that lose most, as a table of all would be a megabyte."""
    if pairs.height <= MAX_PAIRS:
        return pairs
    widgets.caption(f"The {MAX_PAIRS} of {pairs.height:,} rows that lose most; the download contains all.")
    return pairs.sort("lost_ns", descending=True, nulls_last=True).head(MAX_PAIRS)


def _phases(run: OpenRun) -> None:
    by_phase = run.table(tables.CONTENTION_BY_PHASE)
    kinds = [kind for kind in tables.WORK_KINDS if kind in by_phase["kind"]]
    widgets.subheader("What shares the device, by phase")
    work = widgets.segments("Work", "work", kinds)
    widgets.caption("Time in which the chosen work ran concurrently with work on other streams; all ranks and steps.")
    widgets.chart(charts.concurrent_time(by_phase, work), key="contention-phases")


def _give_way(run: OpenRun) -> None:
    widgets.subheader("Give-way effect: preparation of collectives")
    prepared = run.table(tables.PREPARATION)
    if prepared.drop_nulls("alone_ns").is_empty():
        reason = "No kernel prepares a collective" if prepared.is_empty() else "No preparation ran alone"
        widgets.caption(f"{reason}, so the delay by the main compute stream cannot be measured.")
        return
    widgets.caption(
        "Small kernels before collectives (copies, casts, divides). On the line they take as long as alone. Far above "
        "it, the main compute stream delays them and the collective that they prepare."
    )
    widgets.chart(charts.delayed_preparation(prepared), key="contention-give-way")


def _moments(run: OpenRun) -> None:
    widgets.subheader("Most delayed calls")
    rows = run.table(tables.MOST_DELAYED_CALLS)
    if rows.is_empty():
        widgets.caption("No call took longer concurrently with other work than alone.")
        return
    widgets.caption(
        "The calls that lost the most time to concurrent work, compared with the same work alone. Select a row to show "
        "it in the timeline."
    )
    display = phrases.from_run_start(rows, run.table(tables.RUN_CLOCK))
    display = display.drop("window") if display["window"].n_unique() == 1 else display
    moments.table(run.entry, rows, display, key="contention-at")
