"""Columns as arrays, and rows of columns by number."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tracekit.model import columns, schema

IDS = st.lists(st.integers(-5, 30), unique=True, max_size=20)


@given(IDS, st.lists(st.integers(-5, 30), max_size=20))
def test_rows_of_ids_are_those_of_a_search_one_by_one(ids: list[int], wanted: list[int]) -> None:
    found = columns.rows_of(np.array(ids, np.int64), np.array(wanted, np.int64))
    assert found.tolist() == [ids.index(each) if each in ids else -1 for each in wanted]


@given(st.lists(st.none() | st.integers(0, 1 << 62), max_size=20))
def test_filled_replaces_nulls_only_and_keeps_large_numbers_exact(values: list[int | None]) -> None:
    filled = columns.to_ints(pl.Series(values, dtype=pl.Int64), -1)
    assert filled.dtype == np.int64
    assert filled.tolist() == [-1 if value is None else value for value in values]


KEYED_TIMES = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), max_size=12)


@given(KEYED_TIMES, KEYED_TIMES)
def test_the_last_row_of_a_key_until_a_time_is_that_of_a_search_one_by_one(
    rows: list[tuple[int, int]], wanted: list[tuple[int, int]]
) -> None:
    (keys, times), (wanted_keys, until) = (np.array(each, np.int64).reshape(-1, 2).T for each in (rows, wanted))
    found = columns.last_rows(keys, times, wanted_keys, until).tolist()
    for (key, at), row in zip(wanted, found, strict=True):
        before = [(time, number) for number, (of, time) in enumerate(rows) if of == key and time <= at]
        assert row == (max(before)[1] if before else -1)


def test_negative_rows_are_rows_of_nulls() -> None:
    table = pl.DataFrame({"name": ["a", "b"], "bytes": [1, 2]})
    found = columns.rows_or_nulls(table, np.array([1, -1, 0]))
    assert found.rows() == [("b", 2), (None, None), ("a", 1)]
    assert columns.rows_or_nulls(table.clear(), np.array([-1])).rows() == [(None, None)]
    assert columns.with_nulls(np.array([3, -1]), "gap").to_list() == [3, None]


def test_tables_are_put_below_each_other_and_none_make_an_empty_one() -> None:
    types = schema.columns("step name")
    part = pl.DataFrame({"step": [1], "name": ["a"]}, schema=types)
    assert schema.concat([], types).equals(schema.empty(types))
    assert schema.empty(types).schema == pl.Schema(types)
    assert schema.concat([part, part], types).rows() == [(1, "a"), (1, "a")]
