"""What rows of tables must state, and the bounds of their numbers: a damaged export may state anything."""

import math
from collections.abc import Mapping

import polars as pl

from tracekit.ingest.readers.normalize import numbers

_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "lanes": ("lane", "name"),
    "steps": ("start_ns", "end_ns"),
    "ops": ("id", "lane", "start_ns", "dur_ns"),
    "activities": ("id", "lane", "start_ns", "dur_ns"),
    "collectives": ("activity_id",),
    "groups": ("group", "ranks"),
    "allocations": ("at_ns", "delta_bytes"),
    "syncs": ("kind", "start_ns", "dur_ns"),
    "checkpoints": ("checkpoint", "operation", "stage"),
    "io_calls": ("name", "kind", "start_ns", "dur_ns"),
    "counters": ("at_ns", "name", "value"),
    "metrics": ("step", "name", "value"),
    "data_quality": ("kind", "message", "affected_ratio"),
}
_GRID = r"^\d{1,10}(x\d{1,10}){0,2}$"
_INT, _FLOAT = pl.Int64(), pl.Float64()
_MOST = 1 << 53
"""Of integers other than times: a double holds them exactly, and sums of a thousand fit an int64."""


def within(name: str, table: pl.DataFrame) -> tuple[pl.DataFrame, int]:
    """Return the rows of a table that state what each row must, and how many do not.

    A number counts as missing if it is not one, a duration also if it is negative, times and other integers also beyond
    what other readers accept; so does a text in place of a grid or block.
    """
    stated = (column for column, dtype in table.schema.items() if dtype in (_INT, _FLOAT) and column != "address")
    grids = (_grid(column) for column in ("grid", "block") if column in table.columns)
    bounded = table.with_columns(*map(_within_bounds, stated), *grids)
    rows = bounded.drop_nulls(_REQUIRED[name])
    return rows, table.height - rows.height


def _within_bounds(column: str) -> pl.Expr:
    lowest, highest = _bounds(column)
    value = pl.col(column)
    return pl.when(value.is_between(lowest, highest) & value.is_not_nan()).then(value).alias(column)


def _bounds(column: str) -> tuple[float, float]:
    if column == "dur_ns":
        return 0, numbers.MOST_DUR_NS
    if column.endswith(("at_ns", "start_ns", "end_ns")):
        return -numbers.MOST_NS, numbers.MOST_NS
    if column in ("value", "affected_ratio"):
        return -math.inf, math.inf
    return -_MOST, _MOST


def _grid(column: str) -> pl.Expr:
    return pl.when(pl.col(column).str.contains(_GRID)).then(column).alias(column)
