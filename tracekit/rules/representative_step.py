"""The one step that a verdict quotes: a real step, so that every number can be found again in the trace."""

from typing import Any

import polars as pl

KEY = ("window", "rank", "step", "device")


def per_device(steps: pl.DataFrame, by: str) -> pl.DataFrame:
    """Return, for each rank and device, its step with the lower median of column `by`; of equals the earliest.

    `steps` has columns window, rank, step, device and `by`. Sorted by `by`, the highest first.
    """
    ordered = steps.sort(by, "window", "step", maintain_order=True)
    middle = ordered.group_by("rank", "device", maintain_order=True).agg(pl.all().get((pl.len() - 1) // 2))
    return middle.select(steps.columns).sort(by, "rank", "device", descending=[True, False, False])


def worst(steps: pl.DataFrame, by: str) -> dict[str, Any] | None:
    """Return the typical step of the rank and device whose typical step is worst; None where there are no steps."""
    each = per_device(steps, by)
    return None if each.is_empty() else each.row(0, named=True)


def describe(row: dict[str, Any]) -> str:
    """Return where a typical step is: "the typical step (7) on rank 0", or "the trace of rank 0" where unmarked."""
    where = f"rank {row['rank']}"
    return f"the trace of {where}" if row["step"] is None else f"the typical step ({row['step']}) of {where}"


def rows_of(table: pl.DataFrame, row: dict[str, Any]) -> pl.DataFrame:
    """Return the rows of a table that lie in the window, rank, step and (where the table has it) device of `row`."""
    keys = [name for name in KEY if name in table.columns]
    return table.filter(pl.all_horizontal(pl.col(name).eq_missing(pl.lit(row[name], pl.Int64)) for name in keys))
