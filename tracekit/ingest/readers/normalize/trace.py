"""The events of a profiler to a Trace: lanes, ops, steps, activities, collectives, allocations, waits.

A trace without ProfilerStep has the iterations of its work as steps where it repeats.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize import activities as work
from tracekit.ingest.readers.normalize import collectives, data_quality, host_slices, numbers, odd_values
from tracekit.ingest.readers.normalize import steps as host_steps
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.events import Args
from tracekit.ingest.readers.normalize.host_slices import Host, id_column
from tracekit.ingest.readers.normalize.odd_values import OddValues, Slices
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import repetitions, schema
from tracekit.model.nesting import Ints
from tracekit.model.repetitions import Repetition
from tracekit.model.trace import LazyTrace, Trace

_MIN_ALIKE_RATIO = 0.75
"""Share of all distinct kernels that recur in each pass. In a stack of layers those before and after it do not recur:
on recordings of single steps the best repetition has 0.6 or less, on recordings of several steps 0.8 or more."""
_MIN_ALIKE_OF_TWO = 0.9
_MIN_ALIKE_WITHIN = 0.9
_MIN_COVERED_RATIO = 0.5
_MIN_NAMES = 5
"""With fewer distinct kernels a repetition is the inside of an op."""
_FROM_OR_TO_HOST = r"(?i)memcpy.*(dtoh|htod|devicetohost|hosttodevice)"

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


def build_trace(
    events: Events, path: str, *, rank: int, window: int, further: pl.DataFrame, listed_groups: Sequence[Any] = ()
) -> Trace:
    """Return the trace of `events`, with `further` data-quality issues; rarely used tables are built on access.

    `listed_groups` are process groups that the header may lack.
    """
    base_ns = _base_ns(events.header)
    odd = OddValues()
    timed = Slices(*(_with_times(frame, base_ns, odd) for frame in (events.host, events.device)))
    timed = odd_values.without_odd_values(timed, events.names, odd)
    slices, device = timed.host, timed.device
    threads, lanes = _lanes(events, slices)
    built = host_slices.build(slices, events.names, events.inputs, threads)
    work_end_ns = int((device["start_ns"] + device["dur_ns"]).max() or 0)  # type: ignore[arg-type]
    overlong = odd_values.overlong_calls(built, work_end_ns)
    if overlong.any():
        slices = odd_values.without_calls(slices, built, overlong, odd)
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
    built, activities = with_iterations(built, activities, lanes)
    activities = schema.ACTIVITIES.conform(activities)
    lanes = lanes.join(work.roles(activities), on="lane", how="left", maintain_order="left")
    lanes = schema.LANES.conform(lanes.with_columns(pl.col("role").fill_null("host")))
    timed_memory = events.memory.filter(pl.col("at_ns") != numbers.BAD)
    odd.bad_times += len(events.memory) - len(timed_memory)
    memory = timed_memory.filter(_IS_PLACED)
    odd.unplaced = len(timed_memory) - len(memory)
    memory = odd_values.within_recording(memory, memory["at_ns"].to_numpy() + base_ns, timed, odd)
    waited = _with_times(events.syncs, base_ns, odd)
    waited = odd_values.within_recording(waited, waited["start_ns"].to_numpy(), timed, odd)
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


def with_iterations(host: Host, activities: pl.DataFrame, lanes: pl.DataFrame) -> tuple[Host, pl.DataFrame]:
    """Return the host slices and activities of a recording without marked steps, in the iterations that are found.

    The work of the main lane, in order, is a sequence of kernel names; `activities` has column host_id, the slice that
    issued it. An iteration begins on the host with the outermost slice that issues its first kernel, and not the one
    before. Both are returned as they are if steps are marked or no iterations are found.
    """
    if len(host.steps.step):
        return host, activities
    work = _main_work(activities, lanes)
    name_codes = work["name"].rank("dense").cast(pl.Int64).to_numpy()
    repetition = repetitions.find(name_codes) if work.height else None
    if repetition is None or not _is_loop(work, repetition):
        return host, activities
    steps = _iteration_steps(host, work, repetition)
    if steps.on_device:
        step = steps.at(activities["start_ns"].to_numpy())
    else:
        host = replace(host, steps=steps, step=steps.at(host.start_ns))
        step = host.step_of(activities["host_id"])
    return replace(host, steps=steps), activities.with_columns(id_column(step, "step"))


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


def _main_work(activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the work whose order is the program's: of the stream that computes most; of a CPU run all compute.

    Work that was launched before the recording is left out, if launches were recorded.
    """
    computing = activities.filter(pl.col("kind") == "compute")
    streams = lanes.filter(pl.col("device").is_not_null()).select("lane")
    on_streams = computing.join(streams, on="lane", how="semi")
    work = computing
    if on_streams.height:
        busy = on_streams.group_by("lane").agg(pl.col("dur_ns").sum()).sort("dur_ns", "lane", descending=[True, False])
        work = activities.filter(pl.col("lane") == busy["lane"][0])
    launched = work.filter(pl.col("host_id").is_not_null())
    return (launched if launched.height else work).sort("start_ns", "id")


def _is_loop(work: pl.DataFrame, repetition: Repetition) -> bool:
    """Return whether passes are iterations of a loop, rather than layers of one model or a coincidence.

    Nearly all that the recording has recurs in each pass; or what is in the passes does, and each copies from or to the
    host, as an iteration takes its input or returns its result.
    """
    first = int(repetition.starts[0])
    inside = work[first : repetition.end]
    if inside["name"].n_unique() < _MIN_NAMES or inside.height < _MIN_COVERED_RATIO * work.height:
        return False
    if repetition.alike_ratio >= (_MIN_ALIKE_RATIO if repetition.count > 2 else _MIN_ALIKE_OF_TWO):
        return True
    copies = np.flatnonzero(work["name"].str.contains(_FROM_OR_TO_HOST).to_numpy())
    edges = np.append(repetition.starts, repetition.end)
    copying = np.diff(np.searchsorted(copies, edges)) > 0
    return repetition.alike_within_ratio >= _MIN_ALIKE_WITHIN and bool(copying.all())


def _iteration_steps(host: Host, work: pl.DataFrame, repetition: Repetition) -> Steps:
    """Return the iterations, counted from 0: on the host if launches were recorded, else on the device."""
    starts, numbers = repetition.starts, np.arange(repetition.count)
    busy_ns = work["dur_ns"].to_numpy()
    covered = float(busy_ns[starts[0] : repetition.end].sum() / max(busy_ns.sum(), 1))
    issued = work["host_id"]
    if issued.null_count():
        begin = work["start_ns"].to_numpy()
        after = begin[repetition.end] if repetition.end < len(begin) else (begin + busy_ns).max()
        on_device = True
    else:
        ids = issued.to_numpy()
        # Start of the outermost slice that issued each piece of work, but began after the one before did.
        before = np.append(np.iinfo(np.int64).min, host.start_ns[ids[:-1]])
        outermost = ids.copy()
        while True:
            above = host.parent[outermost]
            climbs = (above >= 0) & (host.start_ns[np.maximum(above, 0)] > before)
            if not climbs.any():
                break
            outermost = np.where(climbs, above, outermost)
        begin = np.maximum.accumulate(host.start_ns[outermost])
        after = begin[repetition.end] if repetition.end < len(begin) else host.end_ns.max() + 1
        on_device = False
    edges = np.append(begin[starts], after)
    return Steps(
        numbers, edges[:-1], edges[1:],
        alike_ratio=repetition.alike_ratio, covered_ratio=covered, on_device=on_device,
    )  # fmt: skip
