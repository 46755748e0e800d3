"""What two memory reports differ in: two snapshots of a program, or two runs."""

from typing import TYPE_CHECKING

import polars as pl

from tracekit.model import schema, units

if TYPE_CHECKING:
    from tracekit.report.memory import MemoryReport

_UNATTRIBUTED = "(allocated earlier, or without a stack)"
CATEGORY_COLUMNS = schema.columns("category bytes against_bytes change_bytes", category=pl.String)
OWNER_COLUMNS = schema.columns("op count against_count bytes against_bytes change_bytes", op=pl.String)


def tables(report: "MemoryReport", against: "MemoryReport") -> dict[str, pl.DataFrame]:
    """Return the change of the memory allocated at the peaks, by title: by category, and by who requested it.

    Columns CATEGORY_COLUMNS and OWNER_COLUMNS, largest change first; what did not change is left out. A change is
    positive where this report has more.
    """
    return {
        "Change of the memory at the peak, by what it is for": _difference(
            report.categories, against.categories, "category", CATEGORY_COLUMNS
        ),
        "Change of the memory at the peak, by who requested it": _difference(
            report.live_at_peak, against.live_at_peak, "op", OWNER_COLUMNS
        ),
    }


def headline(report: "MemoryReport", against: "MemoryReport") -> str:
    """Return how the peaks differ, in one sentence."""
    here, there = report.peak_allocated_bytes, against.peak_allocated_bytes
    if here is None or there is None:
        return "The peaks cannot be compared: one of them is not known."
    change = here - there
    if not change:
        return "The other has the same peak."
    return f"That is {units.size(abs(change))} {'more' if change > 0 else 'less'} than the {units.size(there)} of the other."


def _difference(here: pl.DataFrame, there: pl.DataFrame, key: str, columns: schema.ColumnTypes) -> pl.DataFrame:
    own, other = (_sums(rows, key) for rows in (here, there))
    renamed = other.rename({"bytes": "against_bytes", "count": "against_count"})
    joined = own.join(renamed, on=key, how="full", coalesce=True).with_columns(pl.col(pl.Int64).fill_null(0))
    changed = joined.with_columns(change_bytes=pl.col("bytes") - pl.col("against_bytes"))
    changed = changed.filter(pl.col("change_bytes") != 0).sort(
        pl.col("change_bytes").abs(), key, descending=[True, False]
    )
    return schema.conform(changed, columns)


def _sums(rows: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return count and bytes by owner; of a run, on the trace and device with the highest peak."""
    if rows.height and "window" in rows.columns:
        top = rows.sort("peak_bytes", descending=True, nulls_last=True, maintain_order=True)
        place = ["window", "rank", "device"]
        rows = rows.join(top.select(place).head(1), on=place, nulls_equal=True)
    named = rows.with_columns(pl.col(key).fill_null(_UNATTRIBUTED))
    return named.group_by(key).agg(pl.col("bytes", "count").sum().cast(pl.Int64))
