"""Ways from a row of a table to its moment on the timeline."""

from collections.abc import Mapping
from typing import Any

import polars as pl
import streamlit as st

from dashboard import facts, opened, parts
from dashboard.catalog import Entry
from tracekit import align
from tracekit.analysis import contents

FROM, TO, RANK = "from", "to", "rank"
"""Keys of the address: a part of the run in ns from its start, and the rank to look at."""
_AROUND = 2.0  # times the moment's own length is shown on each side


def table(entry: Entry, rows: pl.DataFrame, shown: pl.DataFrame, *, key: str) -> None:
    """Show a table whose rows lead to the timeline: `rows` has window, rank, start_ns and dur_ns of each of `shown`."""
    chosen = parts.frame(shown, on_select="rerun", selection_mode="single-row", key=key)
    picked = chosen["selection"]["rows"] if chosen else []
    row = rows.row(picked[0], named=True) if picked and picked[0] < rows.height else None
    label = "Show in the timeline" if row is None else f"Show rank {row['rank']}, step {row['step']} in the timeline"
    if st.button(label, key=f"{key}-show", disabled=row is None, help="Choose a row of the table first") and row:
        show(entry, row)


def show(entry: Entry, row: Mapping[str, Any]) -> None:
    """Turn to the timeline at a moment: window, rank, start_ns (on the clock of the rank's trace) and dur_ns."""
    parts.go_to("timeline", **part(entry, row))


def part(entry: Entry, row: Mapping[str, Any]) -> dict[str, int]:
    """Return the part of the run around a moment as the timeline's address tells it, and the rank."""
    held = opened.opened(entry)
    begins = facts.table(entry, contents.contents).filter(pl.col("window") == row["window"])
    with held.lock:
        offsets = held.run.offsets
    first_ns = align.shifted(begins.drop_nulls("first_ns"), offsets, ("first_ns",))["first_ns"].min()
    moment = pl.DataFrame({name: [row[name]] for name in ("window", "rank", "start_ns")})
    begin_ns = int(align.shifted(moment, offsets, ("start_ns",))["start_ns"].item()) - int(str(first_ns))
    around_ns = int(_AROUND * row["dur_ns"])
    return {FROM: max(begin_ns - around_ns, 0), TO: begin_ns + row["dur_ns"] + around_ns, RANK: row["rank"]}
