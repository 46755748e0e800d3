"""Device stalls, clock drops and avoidable time as nodes and edges have them: delays of queued work, longer kernels."""

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time, clock_drops
from tracekit.analysis.time import device_stalls, paused_kernels
from tracekit.model import intervals
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.replay.graph.nodes import WORK

_AWAITED_NS = 1_000
"""Rounded clocks: work that a stalled kernel waited for ended at most this long after the device became idle."""


def delays(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a stall delays the start of each item (`dependencies.lane_items`), shape (n,).

    That is the first work after the stall on each stream, as far as it was queued by then.
    """
    delay_ns = np.zeros(items.height, np.int64)
    stalls = device_stalls.device_stalls(trace).filter("is_recurring", pl.col("kind") == device_stalls.IDLE)
    work = items.filter(~pl.col("is_wait")).sort("lane", "start_ns")
    for (device, _), lane_work in work.group_by("device", "lane", maintain_order=True):
        spans = intervals.from_table(stalls.filter(pl.col("device") == device))
        start, launched, item = (lane_work[name].to_numpy() for name in ("start_ns", "launched_ns", "item"))
        first = np.searchsorted(start, spans[:, 1], side="left")
        known = first < len(start)
        at, (begin, end) = first[known], spans[known].T
        np.maximum.at(delay_ns, item[at], np.maximum(end - np.maximum(begin, launched[at]), 0))
    return delay_ns


def pauses(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return for how long each item (`dependencies.lane_items`) was paused while it ran, shape (n,)."""
    paused = device_stalls.device_stalls(trace).filter(pl.col("kind") == device_stalls.PAUSED)
    return _of_items(items, paused.select("activity_id", ns="dur_ns"))


def with_pauses(run: Run, nodes: pl.DataFrame) -> pl.DataFrame:
    """Return the nodes of a run with the pauses that only the durations on other ranks show."""
    paused = run.run_table(paused_kernels.stalls).filter(pl.col("kind") == device_stalls.PAUSED)
    key = ["window", "rank", "ref", "what"]
    of_work = paused.select("window", "rank", ref="activity_id", what=pl.lit(WORK, pl.Int8), ns="dur_ns")
    joined = nodes.join(of_work, on=key, how="left", maintain_order="left")
    return joined.with_columns(pl.coalesce("ns", "paused_ns").alias("paused_ns")).select(nodes.columns)


def slowdowns(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a clock drop slows each item (`dependencies.lane_items`), shape (n,)."""
    return _of_items(items, clock_drops.slowed_kernels(trace).select("activity_id", ns="excess_ns"))


def avoidable(trace: Trace, items: pl.DataFrame) -> dict[str, Ints]:
    """Return the time of each item (`dependencies.lane_items`) that could be avoided, and its cause; 0 for none."""
    found = avoidable_time.avoidable(trace)
    columns = {"avoidable_ns": "saved_ns", "avoidable_by": "cause"}
    return {name: _of_items(items, found.select("activity_id", ns=of)) for name, of in columns.items()}


def _of_items(items: pl.DataFrame, times: pl.DataFrame) -> Ints:
    of_work = times.select("ns", ref="activity_id", is_wait=pl.lit(value=False))
    joined = items.select("ref", "is_wait").join(of_work, on=["ref", "is_wait"], how="left", maintain_order="left")
    return joined["ns"].fill_null(0).to_numpy()


def with_delays(edges: pl.DataFrame, items: pl.DataFrame, delay_ns: Ints, first_item: int) -> pl.DataFrame:
    """Return waits of items (as nodes) with the delay of the waiting one, if the awaited one ended before it.

    Waits for launching calls stay: their lag is the whole delay after the call.
    """
    waiting, awaited = edges["waiting"].to_numpy() - first_item, edges["awaited"].to_numpy() - first_item
    start, end = items["start_ns"].to_numpy(), items["end_ns"].to_numpy()
    lag = delay_ns[waiting]
    before = (awaited >= 0) & (end[np.maximum(awaited, 0)] <= start[waiting] - lag + _AWAITED_NS)
    return edges.with_columns(pl.col("lag_ns") + pl.Series(np.where(before, lag, 0), dtype=pl.Int64))
