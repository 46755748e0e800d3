"""Checkpoints: how long saves block training, their stages, critical path over the ranks, and durable write rate."""

import polars as pl
import streamlit as st

from dashboard import findings, widgets
from dashboard.pages.page import Page
from dashboard.run_store import OpenRun, tables
from dashboard.url_state import bind
from tracekit.model import escaping
from tracekit.report import charts, headlines

HOW_TO_RECORD = (
    "The run has no checkpoint log, or it contains no save: record with tracekit record, or wrap a save in "
    "tracekit.capture.record_save."
)


def show(run: OpenRun) -> None:
    """Draw all saves of a run, and the stages of the one that a person picks."""
    by_save = run.table(tables.SAVES)
    if by_save.is_empty():
        widgets.info(HOW_TO_RECORD)
        return
    findings.show_all(findings.of_families(run.report.findings, ("CKPT",)), run)
    _totals(by_save, run.table(tables.SAVES_BY_RANK))
    widgets.subheader("Stages of one save")
    longest = int(str(by_save["written_ns"].arg_max()))
    names = by_save["save"].to_list()
    save = st.selectbox("Save", names, key=bind("save", names, names[longest]), format_func=escaping.inert, width=340)
    widgets.chart(charts.save_stages(run.table(tables.SAVE_STAGES).filter(save=save)), key="save_stages")
    widgets.caption(
        "Stages alternate tensor by tensor: a bar adds up the time of each, in the order of their first entry."
    )
    widgets.subheader("Critical path of the save")
    widgets.caption("By clock (training blocked, or until all data was written): the stages that all ranks wait for.")
    columns = ("clock", "kind", "rank", "stage", "dur_ns", pl.col("ratio").alias("time_ratio"))
    parts = run.table(tables.SAVE_CRITICAL_PATH).filter(save=save).select(columns)
    widgets.frame(parts, key="save-parts")
    if st.button("Plan the checkpoint interval with these numbers", key="checkpoints-plan"):
        widgets.go_to("plan", **{"plan-measured": True})


def _totals(by_save: pl.DataFrame, clocks: pl.DataFrame) -> None:
    clocks_column, rates_column = st.columns(2)
    with clocks_column:
        widgets.subheader("Training blocked, and all data written")
        widgets.chart(charts.save_clocks(by_save), key="save_clocks")
    with rates_column:
        widgets.subheader("Durable write rate by rank")
        if clocks["storage_bytes_per_s"].is_not_null().any():
            widgets.chart(charts.save_bandwidth(clocks), key="save_bandwidth")
        else:
            widgets.caption("No save synced its files, so the write rate of the storage is unknown.")


PAGE = Page.described_by(__doc__, "checkpoints", show, headline=lambda run: run.headline(headlines.checkpoints))
