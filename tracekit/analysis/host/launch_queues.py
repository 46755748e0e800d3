"""Launch queues: how much work is waiting on each stream, how late it starts, and how short it is."""

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

FULL_QUEUE = 1024
"""Launches that CUDA queues per stream before the launching call blocks."""
SHORT_NS = 10_000
_FLOAT = pl.Float64()

QUEUES = schema.table(
    "launch_queues",
    "device stream: the work that is launched and has not started",
    schema.column("device", "Device index."),
    schema.column("stream", "Stream number."),
    schema.column("name", "Name of the stream.", pl.String()),
    schema.column("activities", "Kernels, copies and memory sets on it."),
    schema.column("launched", "Those whose launch is recorded; the rest of the columns is of them."),
    schema.column("queue_mean", "Mean queue length over time: work whose launch has begun and that has not.", _FLOAT),
    schema.column("queue_p50", "Queue length that is not exceeded in half of the time."),
    schema.column("queue_max", "Longest queue."),
    schema.column("empty_ns", "Time without queued work, from the first launch to the last start."),
    schema.column("full_ns", f"Time with {FULL_QUEUE} or more queued: the next launch blocks."),
    schema.column("delay_p50_ns", "Median time from the end of the launching call to the start; 0 if it is earlier."),
    schema.column("delay_p95_ns", "95th percentile of it."),
    schema.column("short_ratio", f"Share of the activities that take less than {SHORT_NS // 1000} µs.", _FLOAT),
    schema.column("short_ns", "Their time."),
)


@trace_fact(table=QUEUES)
def launch_queues(trace: Trace) -> pl.DataFrame:
    """Return the launch queue of each stream: columns as QUEUES, one row per stream with work, by device and stream.

    The queue grows by one when a launching call begins and shrinks when the activity starts. Empty on a CPU run.
    """
    if not trace.on_device:
        return QUEUES.empty()
    calls = trace.ops.select(launch_id="id", call_ns="start_ns", called_ns=pl.col("start_ns") + pl.col("dur_ns"))
    work = trace.activities.select("lane", "launch_id", "start_ns", "dur_ns")
    linked = work.join(calls, on="launch_id", how="left", maintain_order="left")
    lanes = trace.lanes.filter(pl.col("device").is_not_null()).select("lane", "device", "stream", "name")
    rows = [_stream(lane, lane_work) for (lane,), lane_work in linked.group_by("lane", maintain_order=True)]
    if not rows:
        return QUEUES.empty()
    queues = pl.DataFrame(rows, schema={"lane": pl.Int64, **_MEASURED}).join(lanes, on="lane")
    return QUEUES.conform(queues).sort("device", "stream", "name")


def by_stream(run: Run) -> pl.DataFrame:
    """Return the launch queues of all ranks for display: columns window, rank and those of QUEUES."""
    return run.table(launch_queues).sort("window", "rank", "device", "stream")


_MEASURED = {column.name: column.dtype for column in QUEUES.columns if column.name not in ("device", "stream", "name")}


def _stream(lane: object, work: pl.DataFrame) -> dict[str, object]:
    launched = work.drop_nulls("call_ns")
    is_short = work["dur_ns"] < SHORT_NS
    row: dict[str, object] = {
        "lane": lane,
        "activities": work.height,
        "launched": launched.height,
        "short_ratio": is_short.mean(),
        "short_ns": work.filter(is_short)["dur_ns"].sum(),
    }
    return row | (_queue(launched) if launched.height else {})


def _queue(launched: pl.DataFrame) -> dict[str, object]:
    calls, starts = (np.sort(launched[name].to_numpy()) for name in ("call_ns", "start_ns"))
    at_ns = np.concatenate([calls, starts])
    change = np.concatenate([np.ones(len(calls), np.int64), np.full(len(starts), -1, np.int64)])
    order = np.argsort(at_ns, kind="stable")  # at the same time, the launch comes first
    length, lasts_ns = np.cumsum(change[order]), np.diff(at_ns[order], append=at_ns.max())
    whole_ns = int(lasts_ns.sum())
    by_length = np.argsort(length, kind="stable")
    half = np.searchsorted(np.cumsum(lasts_ns[by_length]), whole_ns / 2)
    delay_ns = np.sort(np.maximum(launched["start_ns"].to_numpy() - launched["called_ns"].to_numpy(), 0))
    p50, p95 = (int(delay_ns[int(np.ceil(share * len(delay_ns))) - 1]) for share in (0.5, 0.95))
    return {
        "queue_mean": float((length * lasts_ns).sum() / whole_ns) if whole_ns else 0.0,
        "queue_p50": int(length[by_length[half]]),
        "queue_max": int(length.max()),
        "empty_ns": int(lasts_ns[length <= 0].sum()),
        "full_ns": int(lasts_ns[length >= FULL_QUEUE].sum()),
        "delay_p50_ns": p50,
        "delay_p95_ns": p95,
    }
