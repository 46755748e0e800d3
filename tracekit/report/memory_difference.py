"""What two memory reports differ in: two snapshots of a program, or two runs."""

import polars as pl

from tracekit.model import schema, units

_UNATTRIBUTED = "(allocated earlier, or without a stack)"
CATEGORY_COLUMNS = schema.columns("category bytes against_bytes change_bytes", category=pl.String)
OWNER_COLUMNS = schema.columns("op count against_count bytes against_bytes change_bytes", op=pl.String)


def tables(
    categories: pl.DataFrame, owners: pl.DataFrame, *, other_categories: pl.DataFrame, other_owners: pl.DataFrame
) -> dict[str, pl.DataFrame]:
    """Return the change of the memory allocated at the peaks, by title: by category, and by who requested it.

    The arguments are the categories and live blocks at the peak of this report and the other.

    Columns CATEGORY_COLUMNS and OWNER_COLUMNS, largest change first; what did not change is left out. A change is
    positive where this report has more.
    """
    return {
        "Change of the memory at the peak, by what it is for": _difference(
            categories, other_categories, "category", CATEGORY_COLUMNS
        ),
        "Change of the memory at the peak, by who requested it": _difference(owners, other_owners, "op", OWNER_COLUMNS),
    }


def headline(here_bytes: int | None, there_bytes: int | None) -> str:
    """Difference of the peaks in one sentence."""
    if here_bytes is None or there_bytes is None:
        return "The peaks cannot be compared: one of them is not known."
    change, other_size = here_bytes - there_bytes, units.size(there_bytes)
    if not change:
        return "The other has the same peak."
    return f"That is {units.size(abs(change))} {'more' if change > 0 else 'less'} than the {other_size} of the other."


def _difference(table: pl.DataFrame, other: pl.DataFrame, key: str, columns: schema.ColumnTypes) -> pl.DataFrame:
    sums, other = (_sums(rows, key) for rows in (table, other))
    renamed = other.rename({"bytes": "against_bytes", "count": "against_count"})
    joined = sums.join(renamed, on=key, how="full", coalesce=True).with_columns(pl.col(pl.Int64).fill_null(0))
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
    filled = rows.with_columns(pl.col(key).fill_null(_UNATTRIBUTED))
    return filled.group_by(key).agg(pl.col("bytes", "count").sum().cast(pl.Int64))
