"""Nodes and edges of a dependency graph as tables: their columns and construction."""

from typing import Any, NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.time import host_state
from tracekit.model import columns, schema
from tracekit.model.sweep_line import Ints

HOST, WORK, WAIT = 0, 1, 2
"""A host call (on a CPU run also its compute), an activity, an event wait of a stream."""
STEP_END = "end of the step"
"""Kind and name of the host's node at which the last step of a CPU run ends, if that is after its last activity."""

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


_EVENT = "event"
_SLACK_NS = 3_000
_OF_NAME = ["window", "step", "name"]
_TIMES = ("start_ns", "end_ns")
_PLACE = [*_OF_NAME, "nth", "times"]
SHARED_WAITS_NODES = ("window", "rank", "node", "what", "step", "lane", "name", "launch", "start_ns", "end_ns")
"""The columns of nodes that `shared_waits` needs."""
SHARED_WAITS_COLUMNS = {**schema.columns("window rank"), **EDGE_COLUMNS}


_IF_MISSING = {
    **dict.fromkeys(("launch", "host_state", "room_ns"), -1),
    **dict.fromkeys(("launch_ns", "stall_ns", "paused_ns", "slowed_ns", "avoidable_ns", "avoidable_by"), 0),
    **dict.fromkeys(GAP_COLUMNS.values(), 0),
}


def number_nodes(table: pl.DataFrame) -> pl.DataFrame:
    """Nodes with all node columns, numbered; without launch, state or gap where these are missing."""
    series = [pl.Series("node", np.arange(table.height), pl.Int64)]
    for name, dtype in list(NODE_COLUMNS.items())[1:]:
        if name in table.columns:
            column = table.get_column(name).cast(dtype)
        else:
            column = pl.Series(name, [None], dtype).new_from_index(0, table.height)
        if name in _IF_MISSING:
            column = pl.Series(name, columns.to_ints(column, _IF_MISSING[name])).cast(dtype)
        series.append(pl.Series(name, columns.flags(column)) if name == "is_late" else column)
    return pl.DataFrame(series)


def gap_series(gap_ns: Ints) -> list[pl.Series]:
    """Return the columns of the host time before nodes: `gap_ns`, a column for each of `host_state.HOST_STATES`."""
    return [pl.Series(name, gap_ns[:, state], pl.Int64) for state, name in enumerate(GAP_COLUMNS.values())]


class NodeTable:
    """The ranks' nodes of a graph: a table in memory, or one in files of which columns are read when they are needed.

    Of many ranks the nodes take more memory than everything else; a change of the graph needs few of their columns.
    """

    def __init__(self, table: pl.DataFrame | pl.LazyFrame, height: int | None = None) -> None:
        """Wrap a table of `height` rows; where that is not known, the rows of one in files are counted."""
        self._table = table
        if height is None:
            height = table.height if isinstance(table, pl.DataFrame) else table.select(pl.len()).collect().item()
        self.height: int = height

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
        table = self._table.select(*columns, **named_columns)
        return table if isinstance(table, pl.DataFrame) else table.collect()

    def with_columns(self, *columns: Any, **named_columns: Any) -> "NodeTable":
        """Return the table with other columns, as pl.DataFrame.with_columns does."""
        return NodeTable(self._table.with_columns(*columns, **named_columns), self.height)

    def slice(self, first: int, count: int) -> "NodeTable":
        """Return `count` rows from the row `first` on."""
        return NodeTable(self._table.slice(first, count), count)

    def rows(self, numbers: Ints) -> pl.DataFrame:
        """Return some rows with all columns: those with the numbers `numbers`, shape (n,)."""
        return pl.DataFrame([self[name].gather(numbers) for name in self.columns])


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


def shared_waits(nodes: pl.DataFrame, edges: pl.DataFrame) -> pl.DataFrame:
    """Return inferred event waits that only other ranks show.

    `nodes` has the columns SHARED_WAITS_NODES, `edges` those of `trace_graph.edges`, window and rank. A wait between
    streams binds, and so can be inferred, only where the awaited work ends last: on a late rank, a collective waits for
    compute, on the others for its peers. Ranks run the same program: the same wait is at the same place (step, kernel,
    its number in the step by launch, and how often it runs there) of the other ranks, unless any of them started the
    waiting work before the awaited work had ended, or launched it first. Streams and threads may be numbered
    differently on each rank. Columns SHARED_WAITS_COLUMNS; one row per wait.
    """
    waits = edges.filter("inferred", pl.col("kind") == _EVENT).select("window", "rank", "waiting", "awaited")
    places = _places(nodes, waits)
    waiting, awaited = (
        places.select(
            "window",
            "rank",
            pl.col("node").alias(side),
            pl.col("place").alias(f"at_{side}"),
            *(pl.col(name).alias(f"{name.removesuffix('_ns')}_{side}") for name in ("lane", "launch", *_TIMES)),
        )
        for side in ("waiting", "awaited")
    )
    seen = waits.join(waiting, on=["window", "rank", "waiting"]).join(awaited, on=["window", "rank", "awaited"])
    pairs = seen.select("window", "at_waiting", "at_awaited").unique()
    on_ranks = pairs.join(waiting, on=["window", "at_waiting"]).join(awaited, on=["window", "rank", "at_awaited"])
    holds = (pl.col("end_awaited") <= pl.col("start_waiting") + _SLACK_NS) & (
        pl.col("launch_awaited") < pl.col("launch_waiting")
    )
    always = on_ranks.filter(holds.all().over("window", "at_waiting", "at_awaited"))
    between = always.filter(pl.col("lane_waiting") != pl.col("lane_awaited"))
    more = between.join(waits, on=["window", "rank", "waiting", "awaited"], how="anti", maintain_order="left")
    new_waits = more.with_columns(lag_ns=pl.lit(0, pl.Int64), kind=pl.lit(_EVENT), inferred=pl.lit(value=True))
    return schema.select(new_waits.sort("window", "rank", "waiting", "awaited"), SHARED_WAITS_COLUMNS)


def _places(nodes: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return the place of each piece of device work, as a number that is the same on all ranks.

    Only of work with the name and step of a node of a `waits` wait (waiting and awaited).
    """
    ends = pl.concat([waits.select("window", "rank", node=end) for end in ("waiting", "awaited")]).unique()
    launched = nodes.filter((pl.col("what") == WORK) & (pl.col("launch") >= 0))
    names = launched.join(ends, on=["window", "rank", "node"], how="semi").select(_OF_NAME).unique()
    work = launched.join(names, on=_OF_NAME, how="semi", nulls_equal=True).sort("window", "rank", "launch", "start_ns")
    of_rank = ["rank", *_OF_NAME]
    with_nth = work.with_columns(nth=pl.int_range(pl.len()).over(of_rank), times=pl.len().over(of_rank))
    return with_nth.select(
        "window", "rank", "node", "lane", "launch", "start_ns", "end_ns", place=pl.struct(_PLACE).rank("dense")
    )
