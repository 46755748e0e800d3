"""The representative step that a verdict quotes: a real step, so that each number can be looked up in the trace."""

from typing import Any

import polars as pl

from tracekit.model import units

KEY = ("window", "rank", "step", "device")


def per_device(steps: pl.DataFrame, by: str) -> pl.DataFrame:
    """Return, for each rank and device, its step with the lower median of column `by`; of equal ones the earliest.

    `steps` has columns window, rank, step, device and `by`. Sorted by `by`, the highest first.
    """
    ordered = steps.sort(by, "window", "step", maintain_order=True)
    medians = ordered.group_by("rank", "device", maintain_order=True).agg(pl.all().get((pl.len() - 1) // 2))
    return medians.select(steps.columns).sort(by, "rank", "device", descending=[True, False, False])


def worst(steps: pl.DataFrame, by: str) -> dict[str, Any] | None:
    """Return the representative step of the rank and device where it is worst; None if there are no steps."""
    medians = per_device(steps, by)
    return None if medians.is_empty() else medians.row(0, named=True)


def describe(row: dict[str, Any]) -> str:
    """Return "the representative step (7) of rank 0", or "the trace of rank 0" where the trace has no steps."""
    rank = f"rank {row['rank']}"
    return f"the trace of {rank}" if row["step"] is None else f"the representative step ({row['step']}) of {rank}"


def describe_loss(row: dict[str, Any]) -> str:
    """Return "12 ms of 80 ms (15.0%) in the representative step (7) of rank 0", of lost_ns, lost_ratio, duration_ns."""
    lost, step = (units.duration(row[name]) for name in ("lost_ns", "duration_ns"))
    return f"{lost} of {step} ({units.share(row['lost_ratio'])}) in {describe(row)}"


def rows_of(table: pl.DataFrame, row: dict[str, Any]) -> pl.DataFrame:
    """Return the rows of a table in the window, rank, step and (if the table has it) device of `row`."""
    keys = [name for name in KEY if name in table.columns]
    return table.filter(pl.all_horizontal(pl.col(name).eq_missing(pl.lit(row[name], pl.Int64)) for name in keys))
