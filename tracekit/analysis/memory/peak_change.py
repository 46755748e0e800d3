"""What the memory allocated at two peaks differs in: of two snapshots of a program, or of two runs."""

import polars as pl

from tracekit.model import schema

_UNATTRIBUTED = "(allocated earlier, or without a stack)"
CATEGORY_COLUMNS = schema.columns("category bytes against_bytes change_bytes", category=pl.String)
OWNER_COLUMNS = schema.columns("op count against_count bytes against_bytes change_bytes", op=pl.String)


def by_category(categories: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Change of each category of memory, columns CATEGORY_COLUMNS, the largest first; what is the same is left out.

    A change is positive where there is more than in the other.
    """
    return _difference(categories, other, "category", CATEGORY_COLUMNS)


def by_owner(owners: pl.DataFrame, other: pl.DataFrame) -> pl.DataFrame:
    """Change of what each op requested, as `by_category`, columns OWNER_COLUMNS."""
    return _difference(owners, other, "op", OWNER_COLUMNS)


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
