"""Checkpoints: how long saves block training and last, what they are made of, what storage gave."""

import polars as pl
import streamlit as st

from dashboard import run_store, widgets
from dashboard.run_catalog import RunEntry
from tracekit.analysis.checkpoint import saves, stalls
from tracekit.model import escaping
from tracekit.report import charts, phrases

HOW_TO_RECORD = (
    "No checkpoint log lies beside the traces, or it tells of no save: record with tracekit record, or put "
    "tracekit.capture.record_save around a save."
)


def page(entry: RunEntry) -> None:
    """Draw all saves of a run, and the stages of the one that a person picks."""
    held = widgets.begin(entry)
    if held is None:
        return
    with held.lock:
        tables = {
            survey.__name__: held.run.run_table(survey) for survey in (saves.by_save, saves.by_rank, saves.stages)
        }
        made_of = held.run.run_table(stalls.parts)
    each = tables["each"]
    if each.is_empty():
        st.info(HOW_TO_RECORD)
        return
    _all(held, each, tables["clocks"])
    st.subheader("The stages of one save")
    longest = int(str(each["written_ns"].arg_max()))
    names = each["save"].to_list()
    chosen = st.selectbox(
        "Save", names, key=widgets.bind("save", names, names[longest]), format_func=escaping.inert, width=340
    )
    lines = tables["stages"].filter(pl.col("save") == chosen)
    widgets.chart(charts.save_stages(lines), key="save_stages")
    st.caption("Stages take turns, tensor by tensor: a bar puts the time of each together, in order of first entry.")
    st.subheader("What it is made of, on the way that all ranks wait for")
    columns = ("clock", "kind", "rank", "stage", "dur_ns", pl.col("ratio").alias("time_ratio"))
    st.caption("Of the clock named: the time that training was blocked, or until all was written; shares of it.")
    widgets.frame(
        phrases.from_trace_start(made_of.filter(pl.col("save") == chosen).select(columns), {}), key="save-parts"
    )
    if st.button("Plan the interval between checkpoints with these numbers", key="checkpoints-plan"):
        widgets.go_to("plan", **{"plan-measured": True})


def _all(held: run_store.OpenRun, each: pl.DataFrame, clocks: pl.DataFrame) -> None:
    for number, found in enumerate(held.report.findings):
        if found.code.startswith("CKPT"):
            widgets.finding(found, held, key=f"checkpoints-{number}")
    left, right = st.columns(2)
    with left:
        st.subheader("Training blocked, and all written")
        widgets.chart(charts.save_clocks(each), key="save_clocks")
    with right:
        st.subheader("Durable write rate of each rank")
        if clocks["storage_bytes_per_s"].is_not_null().any():
            widgets.chart(charts.save_bandwidth(clocks), key="save_bandwidth")
        else:
            st.caption("No save synced its files, so what storage gave is not known.")
