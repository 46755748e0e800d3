"""Moments of a run, such as the rows of evidence: each leads to its place in the timeline.

Where a rank waits for another, the timeline shows the late rank and those that wait for it folded, side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import streamlit as st

from dashboard import widgets
from dashboard.run_entry import RunEntry
from tracekit.report import quoted_moment

SHOWN = "shown_moment"
"""The state with the moment that the timeline opens: run, window, rank, start_ns, dur_ns and ranks."""
COLUMNS = ("window", "rank", "start_ns", "dur_ns")
_MOMENT = ("rank", "start_ns", "dur_ns")


def show(entry: RunEntry, row: Mapping[str, Any], *, ranks: Sequence[int] = (), **parameters: Any) -> None:
    """Open the timeline at a moment: rank, start_ns (on the clock of the rank's trace), dur_ns, and window (0).

    `ranks` are placed at its top, in this order; `parameters` are further choices of the page.
    """
    window = row.get("window") or 0
    place = {"run": entry.name, "window": window, "ranks": tuple(ranks) or (row["rank"],)}
    st.session_state[SHOWN] = place | {name: row[name] for name in _MOMENT}
    widgets.go_to("timeline", **({"window": window} if window else {}), **parameters)


def selected_row(rows: pl.DataFrame, selection: str) -> Mapping[str, Any] | None:
    """Return the row of a table that is selected in the state `selection`, if it has a moment."""
    state = st.session_state.get(selection) or {}
    numbers = state.get("selection", {}).get("rows", [])
    row = rows.row(numbers[0], named=True) if numbers and numbers[0] < rows.height else None
    return row if row is not None and None not in (row[name] for name in _MOMENT) else None


def name(row: Mapping[str, Any]) -> str:
    """Return a moment in words: "rank 3, step 5"."""
    step = row.get("step")
    return f"rank {row['rank']}" + ("" if step is None else f", step {step}")


def table(entry: RunEntry, rows: pl.DataFrame, cells: pl.DataFrame, *, key: str) -> None:
    """Show a table whose rows open the timeline: `rows` has the moment (COLUMNS, maybe step) of each row of `cells`."""
    selection = f"{key}-rows"
    place = st.container()  # above the table, which appears a moment later and would move the button away
    widgets.frame(cells, key=key, selection=selection)
    row = selected_row(rows, selection)
    label = "Show in the timeline" if row is None else f"Show {name(row)} in the timeline"
    if place.button(label, key=f"{key}-show", disabled=row is None, help="Select a row of the table first") and row:
        show(entry, row, ranks=quoted_moment.leading_ranks(rows, row))
