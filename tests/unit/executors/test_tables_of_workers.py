"""Tables travel from a worker unchanged: empty ones, small ones, nested types; traces do not share a result."""

import polars as pl
import pytest

from tracekit.executors import worker_pool
from tracekit.model.source import Source
from tracekit.model.trace import Trace

SOURCE = Source(0, 0, "rank0.json", 1, Trace)
COLUMNS = {
    "rank": pl.Int64,
    "ranks": pl.List(pl.Int64),
    "name": pl.Categorical,
    "kind": pl.Enum(["compute", "memcpy"]),
    "shape": pl.Struct({"rows": pl.Int32, "names": pl.List(pl.String)}),
    "at": pl.Datetime("ns"),
}
TABLES = {
    "empty": pl.DataFrame(schema=COLUMNS),
    "no columns": pl.DataFrame(),
    "small": pl.DataFrame([[3, [1, 2], "a", "memcpy", {"rows": 1, "names": ["x"]}, None]], COLUMNS, orient="row"),
    "large": pl.DataFrame({"start_ns": range(5_000)}),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_table_arrives_as_it_was_measured(name):
    table = TABLES[name]
    for _ in range(2):
        (arrived,) = worker_pool.as_measured(SOURCE, worker_pool.pack([table])).tables
        assert arrived.schema == table.schema
        assert arrived.equals(table)


@pytest.mark.parametrize("name", ["empty", "small"])
def test_what_one_trace_does_to_its_table_does_not_reach_another(name):
    stream = worker_pool.pack([TABLES[name]])
    (changed,) = worker_pool.as_measured(SOURCE, stream).tables
    changed.insert_column(0, pl.Series("more", [1] * changed.height))
    (other,) = worker_pool.as_measured(SOURCE, stream).tables
    assert other.columns == [*COLUMNS]
