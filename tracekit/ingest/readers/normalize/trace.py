"""The events of a profiler to a Trace: lanes, ops, steps, activities, collectives, allocations, waits.

A trace without ProfilerStep has the iterations of its work as steps where it repeats.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import activities as work
from tracekit.ingest.readers.normalize import (
    collectives,
    data_quality,
    host_slices,
    iterations,
    numbers,
    odd_durations,
    odd_times,
    odd_units,
    odd_values,
    range_steps,
)
from tracekit.ingest.readers.normalize import steps as host_steps
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.events import Args
from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.ingest.readers.normalize.odd_slices import OddValues, Slices
from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.model.trace import LazyTrace, Trace

_HOST_MEMORY = 0
_IS_PLACED = (pl.col("device_type") == _HOST_MEMORY) | pl.all_horizontal(
    pl.col("device_type", "device_id").is_not_null()
)

STREAM_WAIT, EVENT, STREAM, CONTEXT = "stream_wait", "event", "stream", "context"
_SYNC_KINDS = {
    "Stream Wait Event": STREAM_WAIT,
    "Event Sync": EVENT,
    "Stream Sync": STREAM,
    "Context Sync": CONTEXT,
}
_UNKNOWN_STREAM = (1 << 31) - 1  # CUPTI's value, as is -1

_MAX_PASSES = 8
"""Wrong durations within each other that are left out; a file could nest as many as it has events."""


def build_trace(
    events: Events, path: str, *, rank: int, window: int, further: pl.DataFrame, listed_groups: Sequence[Any] = ()
) -> Trace:
    """Return the trace of `events`, with `further` data-quality issues; rarely used tables are built on access.

    `listed_groups` are process groups that the header may lack.
    """
    base_ns = _base_ns(events.header)
    odd = OddValues()
    timed = Slices(*(_with_times(frame, base_ns, odd) for frame in (events.host, events.device)))
    until_ns = None if events.recorded_until_ns is None else events.recorded_until_ns + base_ns
    timed = odd_values.without_odd_values(timed, events.names, odd, until_ns)
    slices, device = timed.host, timed.device
    odd.untimed_work = events.device.height if device.is_empty() else 0
    threads, lanes = _lanes(events, slices)
    built = host_slices.build(slices, events.names, events.inputs, threads, _lost_steps(events, slices))
    work_end_ns = int((device["start_ns"] + device["dur_ns"]).max() or 0)  # type: ignore[arg-type]
    # What is wrong within a wrong slice shows once that one is gone. Durations in ms are rounded, so that slices cross.
    for _ in range(_MAX_PASSES if odd.host_scale <= 1 else 0):
        overlong = odd_durations.overlong_calls(built, work_end_ns)
        if not overlong.any():
            break
        slices = odd_durations.without_calls(slices, built, overlong, odd)
        threads, lanes = _lanes(events, slices)
        built = host_slices.build(slices, events.names, events.inputs, threads, _lost_steps(events, slices))
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
    timed_memory = events.memory.filter(pl.col("at_ns") != numbers.BAD)
    odd.bad_times += len(events.memory) - len(timed_memory)
    memory = timed_memory.filter(_IS_PLACED)
    odd.unplaced = len(timed_memory) - len(memory)
    memory = odd_times.within_recording(memory, memory["at_ns"].to_numpy() + base_ns, timed, odd)
    built, activities = range_steps.with_range_steps(built, activities, events.names, events.header)
    built, activities = iterations.with_iterations(
        built, activities, lanes, memory.with_columns(pl.col("at_ns") + base_ns)
    )
    activities = schema.ACTIVITIES.conform(activities)
    lanes = lanes.join(work.roles(activities), on="lane", how="left", maintain_order="left")
    lanes = schema.LANES.conform(lanes.with_columns(pl.col("role").fill_null("host")))
    waited = odd_units.with_scaled_durations(_with_times(events.syncs, base_ns, odd), odd.device_scale)
    waited = odd_times.within_recording(waited, waited["start_ns"].to_numpy(), timed, odd)
    issues = data_quality.table(
        events, built.steps, odd=odd, undecided=undecided, busy_ns=int(activities["dur_ns"].sum())
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
            "allocations": lambda: schema.ALLOCATIONS.conform(allocation_table(memory, built, threads, base_ns)),
            "syncs": lambda: schema.SYNCS.conform(sync_table(waited, names, built)),
        },
        deferred_bytes=built.size_bytes + int(memory.estimated_size()),
    )


def _lost_steps(events: Events, slices: pl.DataFrame) -> Ints:
    """Numbers of the profiler's steps whose marks are in the file, but not among the slices that are used."""
    numbers_of_names = events.names.str.extract(r"^ProfilerStep#([0-9]{1,15})$").cast(pl.Int64)
    if len(slices) == len(events.host) or not numbers_of_names.count():
        return np.empty(0, np.int64)
    stated, marked = (numbers_of_names.gather(frame["name"]).drop_nulls() for frame in (events.host, slices))
    return np.setdiff1d(stated.to_numpy(), marked.to_numpy())


def sync_table(syncs: pl.DataFrame, names: pl.Series, host: Host) -> pl.DataFrame:
    """Return the rows of the syncs table; events with other names are ignored."""
    rows = syncs.with_columns(names.gather(syncs["name"]).alias("called")).filter(
        pl.col("called").is_in(list(_SYNC_KINDS))
    )
    return rows.select(
        id_column(_calls_of_syncs(host, rows["correlation"]), "call_id"),
        pl.col("called").replace_strict(_SYNC_KINDS, return_dtype=pl.String).alias("kind"),
        "start_ns",
        "dur_ns",
        "device",
        *(
            pl.when(pl.col(name).is_between(0, _UNKNOWN_STREAM - 1)).then(pl.col(name)).alias(name)
            for name in ("stream", "awaited_stream")
        ),
        id_column(_calls_of_syncs(host, rows["awaited_correlation"]), "record_id"),
    )


def allocation_table(memory: pl.DataFrame, host: Host, lanes: Ints, base_ns: int) -> pl.DataFrame:
    """Return the allocations table from the `[memory]` events of `event_tables.Events.memory`, by time."""
    rows = memory.filter(pl.col("delta_bytes").is_not_null()).sort("at_ns", maintain_order=True)
    at_ns = rows["at_ns"].to_numpy() + base_ns
    lane = lanes[rows["lane"].to_numpy()] if len(rows) else np.empty(0, np.int64)
    # The innermost slice on the lane at each moment; -1 where there is none.
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
    context = host.context(innermost)
    step = host.steps.at(at_ns)
    steps = pl.Series("step", host.steps.step).gather(id_column(step)) if len(host.steps.step) else context[0]
    return rows.select(
        pl.Series("at_ns", at_ns),
        pl.when(pl.col("device_type") != _HOST_MEMORY).then(pl.col("device_id")).alias("device"),
        "address",
        "delta_bytes",
        "allocated_bytes",
        "reserved_bytes",
        id_column(innermost, "op_id"),
        steps,
        *context[1:],
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


def _with_times(frame: pl.DataFrame, base_ns: int, odd: OddValues) -> pl.DataFrame:
    """Return the slices that have a usable time, on the clock of `base_ns`, with their place in the file as row."""
    usable = (frame["start_ns"] != numbers.BAD) & frame["dur_ns"].is_between(0, numbers.MOST_DUR_NS)
    rows = frame.with_columns(pl.Series("row", np.arange(len(frame), dtype=np.int64)), pl.col("start_ns") + base_ns)
    odd.bad_times += len(frame) - int(usable.sum())
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


def _calls_of_syncs(host: Host, correlation: pl.Series) -> Ints:
    """Runtime call of each correlation id; -1 for none."""
    return host.find("runtime", "correlation", np.maximum(correlation.to_numpy(), 0))
