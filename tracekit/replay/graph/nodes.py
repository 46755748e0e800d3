"""Nodes and edges of a dependency graph as tables: their columns and construction."""

from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph import host_time

HOST, WORK, WAIT = 0, 1, 2
"""A host call (on a CPU run also its compute), an activity, an event wait of a stream."""

NODE_COLUMNS: dict[str, type[pl.DataType] | pl.DataType] = {
    "node": pl.Int64, "what": pl.Int8, "ref": pl.Int64, "device": pl.Int64, "lane": pl.Int64, "kind": pl.String,
    "name": pl.String, "step": pl.Int64, "phase": pl.String, "unit": pl.String, "span": pl.String,
    "start_ns": pl.Int64, "end_ns": pl.Int64, "chain": pl.Int64, "chain_ns": pl.Int64, "launch": pl.Int64,
    "launch_ns": pl.Int64, "own_ns": pl.Int64, "host_state": pl.Int8, "call": pl.String,
    "recomputed": pl.Boolean, "kernel": pl.UInt64, "grid_id": pl.UInt64, "room_ns": pl.Int64, "is_late": pl.Boolean,
    "stall_ns": pl.Int64, "paused_ns": pl.Int64, "slowed_ns": pl.Int64,
    "avoidable_ns": pl.Int64, "avoidable_by": pl.Int64,
    "gap_ns": pl.Array(pl.Int64, host_time.STATE_COUNT),
}  # fmt: skip
EDGE_COLUMNS = {"waiting": pl.Int64, "awaited": pl.Int64, "lag_ns": pl.Int64, "kind": pl.String, "inferred": pl.Boolean}


class TraceGraph(NamedTuple):
    """Nodes and edges of a trace."""

    nodes: pl.DataFrame
    edges: pl.DataFrame


def number_nodes(every: pl.DataFrame) -> pl.DataFrame:
    """Return nodes with all node columns, numbered; without launch, state or gap where these are missing."""
    nothing = pl.lit([0] * host_time.STATE_COUNT, pl.Array(pl.Int64, host_time.STATE_COUNT))
    with_ids = every.with_columns(
        pl.int_range(pl.len()).cast(pl.Int64).alias("node"), pl.col("gap_ns").fill_null(nothing)
    )
    return schema.conform(with_ids, NODE_COLUMNS).with_columns(
        pl.col("launch", "host_state", "room_ns").fill_null(-1),
        pl.col("is_late").fill_null(value=False),
        pl.col("launch_ns", "stall_ns", "paused_ns", "slowed_ns", "avoidable_ns", "avoidable_by").fill_null(0),
    )


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
