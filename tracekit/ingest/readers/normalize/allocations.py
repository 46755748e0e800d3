"""Allocator events, each with the op it happened in."""

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.model.nesting import Ints

_HOST_MEMORY = 0


def table(memory: pl.DataFrame, host: Host, lanes: Ints, base_ns: int) -> pl.DataFrame:
    """Return the allocations table from the `[memory]` events of `event_tables.Events.memory`, by time."""
    rows = memory.filter(pl.col("delta_bytes").is_not_null()).sort("at_ns", maintain_order=True)
    at_ns = rows["at_ns"].to_numpy() + base_ns
    lane = lanes[rows["lane"].to_numpy()] if len(rows) else np.empty(0, np.int64)
    op = _innermost(host, lane, at_ns)
    context = host.context(op)
    step = host.steps.at(at_ns)
    steps = pl.Series("step", host.steps.step).gather(id_column(step)) if len(host.steps.step) else context[0]
    return rows.select(
        pl.Series("at_ns", at_ns),
        pl.when(pl.col("device_type") != _HOST_MEMORY).then(pl.col("device_id")).alias("device"),
        "address",
        "delta_bytes",
        "allocated_bytes",
        "reserved_bytes",
        id_column(op, "op_id"),
        steps,
        *context[1:],
    )


def _innermost(host: Host, lane: Ints, at_ns: Ints) -> Ints:
    """Return the innermost slice on a lane at each moment; -1 where there is none."""
    innermost = np.full(len(at_ns), -1, np.int64)
    first = np.searchsorted(host.lane, np.arange(int(host.lane.max()) + 2)) if len(host.lane) else np.zeros(1, np.int64)
    for which in np.unique(lane[lane >= 0]):
        if which + 1 >= len(first):
            continue
        begin, end = first[which], first[which + 1]
        on_lane = lane == which
        before = np.searchsorted(host.start_ns[begin:end], at_ns[on_lane], side="right")
        innermost[on_lane] = np.where(before > 0, begin + before - 1, -1)
    while len(host.lane):
        late = (innermost >= 0) & (host.end_ns[np.maximum(innermost, 0)] < at_ns)
        if not late.any():
            break
        innermost[late] = host.parent[innermost[late]]
    return innermost
