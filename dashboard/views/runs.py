"""Runs: what there is, listed without loading any of it."""

from collections.abc import Sequence

import polars as pl
import streamlit as st

from dashboard import parts
from dashboard.catalog import Entry
from tracekit import markup

ROW_PX = 35
MAX_HEIGHT_PX = 740


def page(listed: Sequence[Entry]) -> None:
    """List the runs; a click on a row opens that run."""
    st.html(f'<div class="tk-title"><b>Runs</b><span>{len(listed):,} listed, none loaded for it</span></div>')
    table = pl.DataFrame(
        {
            "run": [markup.inert(entry.name) for entry in listed],
            "strategy": [entry.strategy or None for entry in listed],
            "model": [entry.model or None for entry in listed],
            "ranks": pl.Series([entry.world_size for entry in listed], dtype=pl.Int64),
            "trace files": [entry.files for entry in listed],
            "size": [entry.size_bytes / 2**20 for entry in listed],
            "recorded": pl.Series([entry.created_ns for entry in listed], dtype=pl.Int64).cast(pl.Datetime("ns")),
            "problem": [entry.problem for entry in listed],
        }
    )
    if not any(entry.problem for entry in listed):
        table = table.drop("problem")
    chosen = st.dataframe(
        table,
        hide_index=True,
        placeholder=parts.MISSING,
        on_select="rerun",
        selection_mode="single-row",
        column_config={
            "size": st.column_config.NumberColumn(format="%.1f MiB"),
            "recorded": st.column_config.DatetimeColumn("recorded (UTC)", format="YYYY-MM-DD HH:mm"),
        },
        height=min(ROW_PX * (len(listed) + 1) + 3, MAX_HEIGHT_PX),
        key="runs_table",
    )
    rows = chosen["selection"]["rows"]
    if rows and st.button("Open this run", type="primary"):
        parts.go_to("overview", run=listed[rows[0]].name)
