"""Nodes and edges of a dependency graph as tables: their columns and construction."""

from typing import Any, NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state
from tracekit.model import columns
from tracekit.model.sweep_line import Ints

HOST, WORK, WAIT = 0, 1, 2
"""A host call (on a CPU run also its compute), an activity, an event wait of a stream."""

GAP_COLUMNS = {state: f"{state}_gap_ns" for state in host_state.HOST_STATES}
"""The column of the host time before a node in each state."""
NODE_COLUMNS: dict[str, type[pl.DataType] | pl.DataType] = {
    "node": pl.Int64, "what": pl.Int8, "ref": pl.Int64, "device": pl.Int64, "lane": pl.Int64, "kind": pl.String,
    "name": pl.String, "step": pl.Int64, "phase": pl.String, "unit": pl.String, "span": pl.String,
    "start_ns": pl.Int64, "end_ns": pl.Int64, "chain": pl.Int64, "chain_ns": pl.Int64, "launch": pl.Int64,
    "launch_ns": pl.Int64, "own_ns": pl.Int64, "host_state": pl.Int8, "call": pl.String,
    "recomputed": pl.Boolean, "kernel": pl.UInt64, "grid_id": pl.UInt64, "room_ns": pl.Int64, "is_late": pl.Boolean,
    "stall_ns": pl.Int64, "paused_ns": pl.Int64, "slowed_ns": pl.Int64,
    "avoidable_ns": pl.Int64, "avoidable_by": pl.Int64,
    **dict.fromkeys(GAP_COLUMNS.values(), pl.Int64),
}  # fmt: skip
EDGE_COLUMNS = {"waiting": pl.Int64, "awaited": pl.Int64, "lag_ns": pl.Int64, "kind": pl.String, "inferred": pl.Boolean}


class HostSpan(NamedTuple):
    """A span of time on the host of a rank, on the run's clock."""

    window: int
    rank: int
    start_ns: int
    end_ns: int
    stall: str = ""
    """The stall that the span is a part of: the same text in other recordings of the same job."""


class TraceGraph(NamedTuple):
    """Nodes and edges of a trace."""

    nodes: pl.DataFrame
    edges: pl.DataFrame


def number_nodes(table: pl.DataFrame) -> pl.DataFrame:
    """Return nodes with all node columns, numbered; without launch, state or gap where these are missing."""
    node = pl.Series("node", np.arange(table.height), pl.Int64)
    return node.to_frame().hstack([_node_column(table, name) for name in NODE_COLUMNS if name != "node"])


_IF_MISSING = {
    **dict.fromkeys(("launch", "host_state", "room_ns"), -1),
    **dict.fromkeys(("launch_ns", "stall_ns", "paused_ns", "slowed_ns", "avoidable_ns", "avoidable_by"), 0),
    **dict.fromkeys(GAP_COLUMNS.values(), 0),
}


def _node_column(table: pl.DataFrame, name: str) -> pl.Series:
    """Return a column of nodes with its type, and with its value for nodes without one, if there is such a value."""
    dtype, count = NODE_COLUMNS[name], table.height
    nothing = pl.Series(name, [None], dtype).new_from_index(0, count)
    column = table.get_column(name).cast(dtype) if name in table.columns else nothing
    if name in _IF_MISSING:
        return pl.Series(name, columns.to_ints(column, _IF_MISSING[name])).cast(dtype)
    return pl.Series(name, columns.flags(column)) if name == "is_late" else column


def gap_series(gap_ns: Ints) -> list[pl.Series]:
    """Return the columns of the host time before nodes: `gap_ns` by state (`host_state.HOST_STATES`), shape (n, 9)."""
    return [pl.Series(name, gap_ns[:, state], pl.Int64) for state, name in enumerate(GAP_COLUMNS.values())]


class NodeTable:
    """The ranks' nodes of a graph: a table in memory, or one in files of which columns are read when they are needed.

    Of many ranks the nodes take more memory than everything else; a change of the graph needs few of their columns.
    """

    def __init__(self, table: pl.DataFrame | pl.LazyFrame, height: int) -> None:
        """Wrap a table of `height` rows."""
        self._table = table
        self.height = height

    @classmethod
    def of(cls, table: pl.DataFrame | pl.LazyFrame) -> "NodeTable":
        """Wrap a table; the rows of one in files are counted."""
        return cls(table, table.height if isinstance(table, pl.DataFrame) else table.select(pl.len()).collect().item())

    def __len__(self) -> int:
        return self.height

    def __getitem__(self, name: str) -> pl.Series:
        """Return a column. Raises polars.exceptions.ColumnNotFoundError if there is none of this name."""
        return self._table[name] if isinstance(self._table, pl.DataFrame) else self.select(name).to_series()

    @property
    def columns(self) -> list[str]:
        """Return the names of the columns."""
        return self._table.collect_schema().names()

    def select(self, *columns: Any, **named_columns: Any) -> pl.DataFrame:
        """Return some columns or expressions, as pl.DataFrame.select does."""
        return _collect(self._table.select(*columns, **named_columns))

    def with_columns(self, *columns: Any, **named_columns: Any) -> "NodeTable":
        """Return the table with other columns, as pl.DataFrame.with_columns does."""
        return NodeTable(self._table.with_columns(*columns, **named_columns), self.height)

    def slice(self, first: int, count: int) -> "NodeTable":
        """Return `count` rows from the row `first` on."""
        return NodeTable(self._table.slice(first, count), count)

    def rows(self, numbers: Ints) -> pl.DataFrame:
        """Return some rows with all columns: those with the numbers `numbers`, shape (n,)."""
        return pl.DataFrame([self[name].gather(numbers) for name in self.columns])


def _collect(table: pl.DataFrame | pl.LazyFrame) -> pl.DataFrame:
    return table if isinstance(table, pl.DataFrame) else table.collect()


def edge_table(waiting: Ints, awaited: Ints, how: str, *, inferred: bool, lag_ns: Ints | int = 0) -> pl.DataFrame:
    """Return edges of one kind as a table."""
    count = len(waiting)
    return pl.DataFrame([
        pl.Series("waiting", waiting, pl.Int64),
        pl.Series("awaited", awaited, pl.Int64),
        pl.Series("lag_ns", np.broadcast_to(np.asarray(lag_ns, np.int64), count), pl.Int64),
        pl.Series("kind", [how], pl.String).new_from_index(0, count),
        pl.Series("inferred", np.full(count, inferred)),
    ])  # fmt: skip
