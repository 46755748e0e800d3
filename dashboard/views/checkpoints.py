"""Checkpoints: how long saves block training and last, what they are made of, what storage gave."""

import polars as pl
import streamlit as st

from dashboard import opened, parts
from dashboard.catalog import Entry
from tracekit import charts, markup
from tracekit.analysis import saves, stalls
from tracekit.reports import words

HOW_TO_RECORD = (
    "No checkpoint log lies beside the traces, or it tells of no save: record with tracekit record, or put "
    "tracekit.capture.record_save around a save."
)


def page(entry: Entry) -> None:
    """Draw all saves of a run, and the stages of the one that a person picks."""
    held = parts.begin(entry)
    if held is None:
        return
    with held.lock:
        tables = {survey.__name__: held.run.across(survey) for survey in (saves.each, saves.clocks, saves.stages)}
        made_of = held.run.across(stalls.parts)
    each = tables["each"]
    if each.is_empty():
        st.info(HOW_TO_RECORD)
        return
    _all(held, each, tables["clocks"])
    st.subheader("The stages of one save")
    longest = int(str(each["written_ns"].arg_max()))
    names = each["save"].to_list()
    chosen = st.selectbox(
        "Save", names, key=parts.kept("save", names, names[longest]), format_func=markup.inert, width=340
    )
    lines = tables["stages"].filter(pl.col("save") == chosen)
    parts.chart(charts.save_stages(lines), key="save_stages")
    st.caption("Stages take turns, tensor by tensor: a bar puts the time of each together, in order of first entry.")
    st.subheader("What it is made of, on the way that all ranks wait for")
    columns = ("clock", "kind", "rank", "stage", "dur_ns", pl.col("ratio").alias("time_ratio"))
    st.caption("Of the clock named: the time that training was blocked, or until all was written; shares of it.")
    parts.frame(words.readable(made_of.filter(pl.col("save") == chosen).select(columns), {}), key="save-parts")
    if st.button("Plan the interval between checkpoints with these numbers", key="checkpoints-plan"):
        parts.go_to("plan", **{"plan-measured": True})


def _all(held: opened.Opened, each: pl.DataFrame, clocks: pl.DataFrame) -> None:
    for number, found in enumerate(held.report.findings):
        if found.code.startswith("CKPT"):
            parts.finding(found, held, key=f"checkpoints-{number}")
    left, right = st.columns(2)
    with left:
        st.subheader("Training blocked, and all written")
        parts.chart(charts.save_clocks(each), key="save_clocks")
    with right:
        st.subheader("Durable write rate of each rank")
        if clocks["storage_bytes_per_s"].is_not_null().any():
            parts.chart(charts.save_bandwidth(clocks), key="save_bandwidth")
        else:
            st.caption("No save synced its files, so what storage gave is not known.")
