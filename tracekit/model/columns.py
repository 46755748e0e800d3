"""Columns as arrays, and rows of columns by number. Each costs a fraction of a query of a small table."""

import numpy as np
import numpy.typing as npt
import polars as pl

Ints = npt.NDArray[np.int64]


def filled(column: pl.Series, value: int) -> Ints:
    """Return a column of integers as an array, `value` where it is null."""
    known = column.set(column.is_null(), value) if column.null_count() else column
    return known.to_numpy().astype(np.int64, copy=False)


def with_nulls(values: Ints, name: str) -> pl.Series:
    """Return an array of numbers from 0 as a column, null where a value is negative."""
    column = pl.Series(name, values, pl.Int64)
    return column.set(column < 0, None)


def rows_of(ids: Ints, wanted: Ints) -> Ints:
    """Return the row of each of `wanted` among the unique `ids`, in any order; -1 for none.

    >>> rows_of(np.array([7, 3, 5]), np.array([5, 4, 7])).tolist()
    [2, -1, 0]
    """
    if not len(ids):
        return np.full(len(wanted), -1, np.int64)
    order = np.argsort(ids, kind="stable")
    row = order[np.minimum(np.searchsorted(ids[order], wanted), len(ids) - 1)]
    return np.where(ids[row] == wanted, row, -1)


def rows_or_nulls(table: pl.DataFrame, rows: Ints) -> pl.DataFrame:
    """Return rows of a table by number, a row of nulls for -1."""
    if len(rows) and rows.min() < 0:
        table = pl.concat([table, table.clear(1)])
        rows = np.where(rows < 0, table.height - 1, rows)
    return table[rows]
