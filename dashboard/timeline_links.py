"""Ways from a row of a table to its moment on the timeline."""

from collections.abc import Mapping
from typing import Any

import polars as pl
import streamlit as st

from dashboard import widgets
from dashboard.run_catalog import RunEntry


def table(entry: RunEntry, rows: pl.DataFrame, shown: pl.DataFrame, *, key: str) -> None:
    """Show a table whose rows lead to the timeline: `rows` has window, rank, start_ns and dur_ns of each of `shown`."""
    chosen = widgets.frame(shown, on_select="rerun", selection_mode="single-row", key=key)
    picked = chosen["selection"]["rows"] if chosen else []
    row = rows.row(picked[0], named=True) if picked and picked[0] < rows.height else None
    label = "Show in the timeline" if row is None else f"Show rank {row['rank']}, step {row['step']} in the timeline"
    if st.button(label, key=f"{key}-show", disabled=row is None, help="Choose a row of the table first") and row:
        show(entry, row)


def show(entry: RunEntry, row: Mapping[str, Any]) -> None:
    """Turn to the timeline at a moment: window, rank, start_ns (on the clock of the rank's trace) and dur_ns."""
    st.session_state[widgets.SHOWN_MOMENT] = {"run": entry.name} | {
        name: row[name] for name in ("window", "rank", "start_ns", "dur_ns")
    }
    widgets.go_to("timeline", **({"window": row["window"]} if row["window"] else {}))
