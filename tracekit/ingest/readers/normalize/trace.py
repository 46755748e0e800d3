"""The events of a profiler to a Trace: lanes, ops, steps, activities, collectives, allocations."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import activities as work
from tracekit.ingest.readers.normalize import (
    allocations,
    collectives,
    data_quality,
    host_slices,
    iterations,
    numbers,
    syncs,
)
from tracekit.ingest.readers.normalize import steps as host_steps
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.events import Args
from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.model.trace import LazyTrace, Trace


def build_trace(
    events: Events, path: str, *, rank: int, window: int, further: pl.DataFrame, listed_groups: Sequence[Any] = ()
) -> Trace:
    """Return the trace of `events`, with `further` data-quality issues; rarely used tables are built on access.

    `listed_groups` are process groups that the header may lack.
    """
    base_ns = _base_ns(events.header)
    slices, device = (_with_times(frame, base_ns) for frame in (events.host, events.device))
    threads, lanes = _lanes(events, slices)
    built = host_slices.build(slices, events.names, events.inputs, threads)
    ids = host_slices.first_of(built.row + 1, np.array([s.row + 1 for s in events.host_collectives], np.int64))
    slice_args = {index: s.args for index, s in zip(ids.tolist(), events.host_collectives, strict=True) if index >= 0}
    undecided = pl.DataFrame(schema={"name": pl.String, "dur_ns": pl.Int64})
    if device.is_empty():
        activities, communication = work.on_host(built, slice_args)
    else:
        device_rows = work.streams(device, events.threads, len(lanes))
        lanes = pl.concat([lanes, work.lanes_of(device_rows)], how="diagonal_relaxed")
        kernel_args = {s.row: s.args for s in events.device_collectives}
        activities, communication, undecided = work.on_device(device_rows, events, built, kernel_args, slice_args)
    built, activities = iterations.with_iterations(built, activities, lanes)
    activities = schema.ACTIVITIES.conform(activities)
    lanes = lanes.join(work.roles(activities), on="lane", how="left", maintain_order="left")
    lanes = schema.LANES.conform(lanes.with_columns(pl.col("role").fill_null("host")))
    memory = events.memory.filter(pl.col("at_ns") != numbers.BAD)
    waited = _with_times(events.syncs, base_ns)
    bad_times = sum(map(len, (events.host, events.device, events.memory))) - sum(map(len, (slices, device, memory)))
    issues = data_quality.table(
        events, built.steps, bad_times=bad_times, undecided=undecided, busy_ns=int(activities["dur_ns"].sum())
    )
    collective_args: list[Args] = [s.args for s in (*events.device_collectives, *events.host_collectives)]
    groups = collectives.groups(events.header, collective_args, listed_groups)
    names = events.names  # of the events, the tables that are built on access need only these
    trace = Trace(
        rank=rank,
        window=window,
        path=path,
        lanes=lanes,
        steps=schema.STEPS.conform(host_steps.device_windows(built.steps, activities, lanes)),
        activities=activities,
        groups=groups,
        data_quality=pl.concat([issues, further]),
        header=events.header,
    )
    return LazyTrace.of(
        trace,
        {
            "ops": lambda: schema.OPS.conform(built.table()),
            "collectives": lambda: schema.COLLECTIVES.conform(
                collectives.table(communication, built, slice_args, groups, rank)
            ),
            "allocations": lambda: schema.ALLOCATIONS.conform(allocations.table(memory, built, threads, base_ns)),
            "syncs": lambda: schema.SYNCS.conform(syncs.table(waited, names, built)),
        },
        deferred_bytes=built.size_bytes + int(memory.estimated_size()),
    )


def _base_ns(header: Mapping[str, Any]) -> int:
    base = header.get("baseTimeNanoseconds")
    try:
        number = float(base or 0)
    except (TypeError, ValueError, OverflowError):
        return 0
    exact = (
        int(base) if isinstance(base, int | str) and math.isfinite(number) and str(base).lstrip("-").isdigit() else None
    )
    if exact is None:
        exact = int(number) if math.isfinite(number) else 0
    return exact if abs(exact) < numbers.MOST_NS else 0


def _with_times(frame: pl.DataFrame, base_ns: int) -> pl.DataFrame:
    """Return the slices that have a usable time, on the clock of `base_ns`, with their place in the file as row."""
    usable = (frame["start_ns"] != numbers.BAD) & frame["dur_ns"].is_between(0, numbers.MOST_DUR_NS)
    rows = frame.with_columns(pl.Series("row", np.arange(len(frame), dtype=np.int64)), pl.col("start_ns") + base_ns)
    return rows if usable.all() else rows.filter(usable)


def _lanes(events: Events, slices: pl.DataFrame) -> tuple[Ints, pl.DataFrame]:
    """Return the lane of each thread, by index (-1: a thread without slices), and the host lanes."""
    used = np.unique(slices["lane"].to_numpy()) if len(slices) else np.empty(0, np.int64)
    lane_of = np.full(len(events.threads), -1, np.int64)
    lane_of[used] = np.arange(len(used))
    rows = []
    for lane, thread in enumerate(events.threads[int(i)] for i in used):
        pid, tid = thread
        rows.append(
            (lane, None, None, pid, tid, events.thread_names.get(thread, f"thread {'?' if tid is None else tid}"))
        )
    columns = [column for column in schema.LANES.schema.items() if column[0] != "role"]
    return lane_of, pl.DataFrame(rows, schema=columns, orient="row")
