"""Columns and rows as arrays: on tables of a trace's size, a join or an expression costs ten to fifty times as much."""

import functools
import itertools

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags, Ints, distinct


def ids(column: pl.Series) -> Ints:
    """Return a column of ids, 0 or more and below 2**53, as an array; -1 where there is none.

    >>> ids(pl.Series([3, None])).tolist()
    [3, -1]
    """
    values = column.to_numpy()
    return np.asarray(np.where(np.isnan(values), -1, values) if column.null_count() else values, np.int64)


def flags(column: pl.Series) -> Flags:
    """Return a column of truth values as an array; false where there is none.

    >>> flags(pl.Series([True, None])).tolist()
    [True, False]
    """
    if not column.null_count():
        return column.to_numpy()
    return np.asarray(column.cast(pl.Int8).to_numpy() == 1, np.bool_)


def rows_of(keys: Ints, query_keys: Ints) -> Ints:
    """Return the first row of `keys` that has each query key; -1 where none has it.

    >>> rows_of(np.array([5, 3, 5]), np.array([3, 5, 9])).tolist()
    [1, 0, -1]
    """
    if not len(keys):
        return np.full(len(query_keys), -1, np.int64)
    order = None if (keys[1:] >= keys[:-1]).all() else np.argsort(keys, kind="stable")
    ordered = keys if order is None else keys[order]
    positions = np.minimum(np.searchsorted(ordered, query_keys), len(keys) - 1)
    rows = positions if order is None else order[positions]
    return np.asarray(np.where(ordered[positions] == query_keys, rows, -1), np.int64)


def last_rows(keys: Ints, times: Ints, query_keys: Ints, until: Ints) -> Ints:
    """Return the row of each query key, of 0 or more, with the largest time at or before `until`; -1 for none.

    >>> last_rows(np.array([7, 7, 8]), np.array([1, 5, 2]), np.array([7, 7, 9]), np.array([4, 5, 9])).tolist()
    [0, 1, -1]
    """
    if not len(keys):
        return np.full(len(query_keys), -1, np.int64)
    order = np.lexsort((times, keys))
    ranks = distinct(np.concatenate((times, until)))
    in_order = keys[order] * len(ranks) + np.searchsorted(ranks, times[order])
    last = np.searchsorted(in_order, query_keys * len(ranks) + np.searchsorted(ranks, until), side="right") - 1
    rows = order[np.maximum(last, 0)]
    return np.where((last >= 0) & (query_keys >= 0) & (keys[rows] == query_keys), rows, -1)


def starts_of_groups(*sorted_keys: Ints) -> Ints:
    """Return the first row of each group of equal, sorted keys, and last the number of rows: shape (groups + 1,).

    >>> starts_of_groups(np.array([1, 1, 4])).tolist()
    [0, 2, 3]
    """
    count = len(sorted_keys[0])
    if not count:
        return np.zeros(1, np.int64)
    changes = np.logical_or.reduce([key[1:] != key[:-1] for key in sorted_keys])
    return np.concatenate(([0], np.flatnonzero(changes) + 1, [count]))


def values_at(column: pl.Series, rows: Ints) -> pl.Series:
    """Return a column's values at some rows; null where the row is -1.

    >>> values_at(pl.Series("name", ["a", "b"]), np.array([1, -1])).to_list()
    ['b', None]
    """
    if (rows >= 0).all():
        return column[rows]
    nothing = pl.Series(column.name, [None], dtype=column.dtype)
    return pl.concat([column, nothing])[np.where(rows < 0, len(column), rows)]


def where(table: pl.DataFrame, which: Flags) -> pl.DataFrame:
    """Return the rows of a table that are in a mask, shape (rows,); the table itself if all are."""
    return table if which.all() else table[np.flatnonzero(which)]


def rows_by_key(keys: Ints) -> dict[int, Ints]:
    """Return the rows of each key, in order, by key in order.

    >>> {key: rows.tolist() for key, rows in rows_by_key(np.array([5, 3, 5])).items()}
    {3: [1], 5: [0, 2]}
    """
    order = np.argsort(keys, kind="stable")
    bounds = starts_of_groups(keys[order]).tolist()
    return {int(keys[order[first]]): order[first:until] for first, until in itertools.pairwise(bounds)}


def to_ints(column: pl.Series, value: int) -> Ints:
    """Return a column of integers as an array, `value` where it is null.

    >>> to_ints(pl.Series([3, None]), -1).tolist()
    [3, -1]
    """
    if not column.null_count():
        return column.to_numpy().astype(np.int64, copy=False)
    # As times, nulls become NaT, the least int64: a query that finds them takes ten times as long.
    values = column.cast(pl.Int64).cast(pl.Datetime("ns")).to_numpy().view(np.int64)
    return np.where(values == _NOT_A_TIME, value, values)


_NOT_A_TIME = np.iinfo(np.int64).min


def with_nulls(values: Ints, name: str) -> pl.Series:
    """Return an array of numbers from 0 as a column, null where a value is negative."""
    column = pl.Series(name, values, pl.Int64)
    return column.set(column < 0, None)


def rows_or_nulls(table: pl.DataFrame, rows: Ints) -> pl.DataFrame:
    """Return rows of a table by number, a row of nulls for -1."""
    if len(rows) and rows.min() < 0:
        table = pl.concat([table, _row_of_nulls(tuple(table.schema.items()))])
        rows = np.where(rows < 0, table.height - 1, rows)
    return table[rows]


@functools.cache
def _row_of_nulls(columns: tuple[tuple[str, pl.DataType], ...]) -> pl.DataFrame:
    return pl.DataFrame(schema=dict(columns)).clear(1)  # takes ten times as long as a query
