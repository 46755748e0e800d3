"""Kernels that were ready, but started only in the last wave of blocks of a kernel on another stream."""

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.nodes import EDGE_COLUMNS, edge_table

RESOURCES = "resources"
_LATE_NS = 50_000
_LAUNCH_NS = 10_000
"""From the start of a launching call to the start of its kernel on an idle device."""
_LAST_WAVE_RATIO = 0.2
"""The blocks of a kernel that fills the device end in waves: in the last one, other kernels find room."""


def resource_waits(items: pl.DataFrame, known: pl.DataFrame, first_item: int) -> pl.DataFrame:
    """Return the waits of kernels for multiprocessors that a kernel of another stream occupied.

    `known` are the other waits between items, `first_item` the node of item 0. A kernel waited if it started 50 µs or
    more after its launch and the work before it on its stream, in the last 20% of an earlier-launched kernel. Edges as
    `trace_graph.edges`, of kind resources; the lag is negative, since it starts before the other ends.
    """
    parts = [pl.DataFrame(schema=EDGE_COLUMNS)]
    open_ = (pl.col("kind") == "compute") & pl.col("launch_id").is_not_null() & ~pl.col("is_wait")
    late = pl.col("start_ns") - pl.Series(_ready_ns(items, known, first_item)) > _LATE_NS
    kernels = items.with_columns(late=(open_ & late).fill_null(value=False)).filter(pl.col("kind") == "compute")
    for (_,), here in kernels.group_by("device", maintain_order=True):
        rows, on = _in_last_wave(here, here["late"].to_numpy())
        item, start, end = (here[name].to_numpy() for name in ("item", "start_ns", "end_ns"))
        lag = start[rows] - end[on]
        parts.append(edge_table(item[rows] + first_item, item[on] + first_item, RESOURCES, inferred=True, lag_ns=lag))
    return pl.concat(parts)


def _ready_ns(items: pl.DataFrame, known: pl.DataFrame, first_item: int) -> Ints:
    """Return when each item could have started, by its launch, its stream and its known waits."""
    start, end, previous = (items[name].to_numpy() for name in ("start_ns", "end_ns", "previous"))
    before = np.where(previous < 0, 0, end[np.maximum(previous, 0)])
    ready_ns = np.maximum(before, items["launched_ns"].to_numpy() + _LAUNCH_NS)
    on = known["awaited"].to_numpy() - first_item
    awaited_ns = np.where((known["kind"] == "start_order").to_numpy(), start[on], end[on])
    np.maximum.at(ready_ns, known["waiting"].to_numpy() - first_item, awaited_ns + known["lag_ns"].to_numpy())
    return np.asarray(ready_ns)


def _in_last_wave(kernels: pl.DataFrame, late: Flags) -> tuple[Ints, Ints]:
    """Return the late kernels, and the kernel of another lane in whose last wave each started."""
    start, end, lane, launched = (kernels[name].to_numpy() for name in ("start_ns", "end_ns", "lane", "launched_ns"))
    order = np.argsort(end, kind="stable")
    rows = np.flatnonzero(late)
    found = np.full(len(rows), -1, np.int64)
    for after in range(4):
        at = np.searchsorted(end[order], start[rows], side="right") + after
        on = order[np.minimum(at, len(order) - 1)]
        left_ns = end[on] - start[rows]
        in_wave = (at < len(order)) & (left_ns > 0) & (left_ns <= _LAST_WAVE_RATIO * (end[on] - start[on]))
        in_wave &= (lane[on] != lane[rows]) & (launched[on] <= launched[rows])
        found = np.where((found < 0) & in_wave, on, found)
    has = found >= 0
    return rows[has], found[has]
