"""Moments of a run, such as the rows of evidence: each leads to its place in the timeline.

Where a rank waits for another, the timeline shows the late rank and those that wait for it folded, side by side.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
import streamlit as st

from dashboard import widgets
from dashboard.run_entry import RunEntry
from tracekit.report import phrases

SHOWN = "shown_moment"
"""The state with the moment that the timeline opens: run, window, rank, start_ns, dur_ns and ranks."""
COLUMNS = ("window", "rank", "start_ns", "dur_ns")
MAX_WAITING = 7


def show(entry: RunEntry, row: Mapping[str, Any], *, ranks: Sequence[int] = ()) -> None:
    """Open the timeline at a moment: rank, start_ns (on the clock of the rank's trace), dur_ns, and window (0).

    `ranks` are placed at its top, in this order.
    """
    window = row.get("window") or 0
    place = {"run": entry.name, "window": window, "ranks": tuple(ranks)}
    st.session_state[SHOWN] = place | {name: row[name] for name in ("rank", "start_ns", "dur_ns")}
    widgets.go_to("timeline", **({"window": window} if window else {}))


def late_and_waiting(rows: pl.DataFrame, row: Mapping[str, Any] | None = None) -> tuple[int, ...]:
    """Return the late rank of a row of evidence, by default of the longest, and the ranks that wait for it longest.

    Empty where the rows name no late rank.
    """
    column = next((name for name in phrases.LATE_RANK_COLUMNS if name in rows.columns), None)
    timed = rows.drop_nulls([column, "rank", "dur_ns"]) if column else rows.clear()
    if column is None or timed.is_empty() or (row is not None and row[column] is None):
        return ()
    late = row[column] if row is not None else timed.sort("dur_ns", descending=True)[column][0]
    waits = timed.filter(pl.col(column) == late, pl.col("rank") != late)
    longest = waits.group_by("rank").agg(pl.col("dur_ns").max()).sort("dur_ns", "rank", descending=[True, False])
    row_rank = [row["rank"]] if row is not None and row["rank"] != late else []
    return tuple(dict.fromkeys([int(late), *row_rank, *longest["rank"].head(MAX_WAITING).to_list()]))


def selected_row(rows: pl.DataFrame, selection: str) -> Mapping[str, Any] | None:
    """Return the row of a table that is selected in the state `selection`, if it has a moment."""
    state = st.session_state.get(selection) or {}
    numbers = state.get("selection", {}).get("rows", [])
    row = rows.row(numbers[0], named=True) if numbers and numbers[0] < rows.height else None
    return row if row is not None and None not in (row["rank"], row["start_ns"], row["dur_ns"]) else None


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
        show(entry, row, ranks=late_and_waiting(rows, row))
