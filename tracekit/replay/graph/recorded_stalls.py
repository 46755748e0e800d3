"""Device stalls, clock drops and avoidable time as nodes and edges have them: delays of queued work, longer kernels."""

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time, device_counters
from tracekit.analysis.time import device_stalls
from tracekit.model import intervals
from tracekit.model.columns import flags, ids, rows_of
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints, distinct
from tracekit.model.trace import Trace
from tracekit.replay.graph.nodes import WORK, NodeTable

_AWAITED_NS = 1_000
"""Rounded clocks: work that a stalled kernel waited for ended at most this long after the device became idle."""


def delays(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a stall delays the start of each item (`dependencies.lane_items`), shape (n,).

    That is the first work after the stall on each stream, as far as it was queued by then.
    """
    delay_ns = np.zeros(items.height, np.int64)
    all_stalls = device_stalls.device_stalls(trace)
    if all_stalls.is_empty():
        return delay_ns
    stalls = all_stalls.filter(flags(all_stalls["is_recurring"]) & flags(all_stalls["kind"] == device_stalls.IDLE))
    if stalls.is_empty():
        return delay_ns
    spans, stalled = intervals.from_table(stalls), ids(stalls["device"])
    names = ("start_ns", "launched_ns", "device", "lane", "is_wait")
    start, launched, device, lane, is_wait = (items[name].to_numpy() for name in names)
    for lane_number in distinct(lane[~is_wait]):
        rows = np.flatnonzero((lane == lane_number) & ~is_wait)
        rows = rows[np.argsort(start[rows], kind="stable")]
        begin, end = spans[stalled == device[rows[0]]].T
        first = np.searchsorted(start[rows], end, side="left")
        has_work = first < len(rows)
        work = rows[first[has_work]]
        np.maximum.at(delay_ns, work, np.maximum(end[has_work] - np.maximum(begin[has_work], launched[work]), 0))
    return delay_ns


def pauses(trace: Trace, items: pl.DataFrame) -> Ints:
    """Time that each item (`dependencies.lane_items`) was paused while it ran, in ns, shape (n,)."""
    stalls = device_stalls.device_stalls(trace)
    if stalls.is_empty():
        return np.zeros(items.height, np.int64)
    paused = stalls.filter(flags(stalls["kind"] == device_stalls.PAUSED))
    return _of_items(items, paused["activity_id"], paused["dur_ns"])


def pauses_on_other_ranks(run: Run, nodes: NodeTable) -> list[pl.Series]:
    """Return the column paused_ns with the pauses that only the durations on other ranks show; [] without any."""
    paused = run.table(device_stalls.paused_kernels).filter(pl.col("kind") == device_stalls.PAUSED)
    if paused.is_empty():
        return []
    key = ["window", "rank", "ref", "what"]
    of_work = paused.select("window", "rank", ref="activity_id", what=pl.lit(WORK, pl.Int8), ns="dur_ns")
    joined = nodes.select(*key, "paused_ns").join(of_work, on=key, how="left", maintain_order="left")
    return [joined.select(pl.coalesce("ns", "paused_ns").alias("paused_ns")).to_series()]


def slowdowns(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a clock drop slows each item (`dependencies.lane_items`), shape (n,)."""
    slowed = device_counters.slowed_kernels(trace)
    return _of_items(items, slowed["activity_id"], slowed["excess_ns"])


def avoidable(trace: Trace, items: pl.DataFrame) -> dict[str, Ints]:
    """Return the time of each item (`dependencies.lane_items`) that could be avoided, and its cause; 0 for none."""
    work = avoidable_time.avoidable(trace)
    columns = {"avoidable_ns": "saved_ns", "avoidable_by": "cause"}
    return {name: _of_items(items, work["activity_id"], work[source]) for name, source in columns.items()}


def _of_items(items: pl.DataFrame, activity: pl.Series, values: pl.Series) -> Ints:
    """Return the value of each item's activity; 0 for waits, and where there is none."""
    row = rows_of(ids(activity), items["ref"].to_numpy())
    has_activity = (row >= 0) & ~items["is_wait"].to_numpy()
    by_item = np.zeros(items.height, np.int64)
    filled = values.fill_null(0) if values.null_count() else values
    by_item[has_activity] = filled.to_numpy()[row[has_activity]]
    return by_item


def with_delays(edges: pl.DataFrame, items: pl.DataFrame, delay_ns: Ints, first_item: int) -> pl.DataFrame:
    """Return waits of items (as nodes) with the delay of the waiting one, if the awaited one ended before it.

    The columns are those of `edges`; the delay, in ns, is added to lag_ns. Waits for launching calls stay: their
    lag is the delay after the call.
    """
    if not delay_ns.any():
        return edges
    waiting, awaited = edges["waiting"].to_numpy() - first_item, edges["awaited"].to_numpy() - first_item
    start, end = items["start_ns"].to_numpy(), items["end_ns"].to_numpy()
    lag = delay_ns[waiting]
    before = (awaited >= 0) & (end[np.maximum(awaited, 0)] <= start[waiting] - lag + _AWAITED_NS)
    return edges.with_columns(lag_ns=edges["lag_ns"].to_numpy() + np.where(before, lag, 0))
