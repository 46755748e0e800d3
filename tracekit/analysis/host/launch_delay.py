"""Launch delay: gaps that the host causes and its state in them, device reads, exposed copies, and launch queues."""

import itertools
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.host import call_trees
from tracekit.analysis.time import host_state, trace_columns
from tracekit.model import columns, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

GAP_COLUMNS = schema.columns(
    "gap device step phase unit name nth detail synced start_ns dur_ns stack after",
    synced=pl.Boolean, stack=pl.String, after=pl.String,
)  # fmt: skip
WAIT_COLUMNS = schema.columns("device step start_ns dur_ns")
READ_COLUMNS = schema.columns("step phase unit name start_ns dur_ns")

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


@trace_fact
def host_gaps(trace: Trace) -> pl.DataFrame:
    """Time of compute gaps that the host causes, by its state.

    Columns gap, device, step, phase, unit (as `compute_gaps`), name (of the compute that ends the gap), nth (its
    number among those of that name in its step, from 0, to find the same place in other steps), detail
    (`host_state.HOST_STATES`), synced (the device became idle while the host waited for it, rate limiters excluded),
    start_ns (of the first piece), dur_ns, stack (the function of the program in the middle of that time; where no
    stacks were recorded, an annotation of the program, in quotes, that has little else in it), after (on a CPU run,
    name of the op that ended last before it; else null); one row per gap and detail, two where a part is synced. By as
    much as the host had waited in the step, it could have launched earlier: what gaps last beyond that is not synced.
    """
    pieces = compute_gap_causes.compute_gap_causes(trace)
    is_host = (pieces["cause"] == communication_gap_causes.HOST).to_numpy()
    if not is_host.any():
        return schema.empty(GAP_COLUMNS)
    rows = _by_state(trace, pieces, np.flatnonzero(is_host))
    if not trace.on_device or not rows.synced.any():
        start_ns, dur_ns, row, synced = rows.start_ns, rows.dur_ns, np.arange(len(rows.gap)), rows.synced
    else:
        start_ns, dur_ns, row, synced = _split_by_wait(rows)
    place = columns.rows_of(places(trace)["activity_id"].to_numpy(), columns.to_ints(rows.table["activity_id"], -1))
    gaps = rows.table.hstack(columns.rows_or_nulls(places(trace)[["name", "nth"]], place))[row]
    location = call_trees.locations_at(trace, start_ns + dur_ns // 2)
    annotation = call_trees.pauses_in_annotations(trace, start_ns, dur_ns)
    return schema.select(
        gaps.hstack([
            pl.Series("start_ns", start_ns), pl.Series("dur_ns", dur_ns), pl.Series("synced", synced),
            location.zip_with(location.is_not_null(), annotation),
            _ops_before(trace, start_ns),
        ]),
        GAP_COLUMNS,
    )  # fmt: skip


def _ops_before(trace: Trace, start_ns: Ints) -> pl.Series:
    """Column after: on a CPU run, name of the op that ended last before each time; null where none did."""
    compute = trace.activities.filter(pl.lit(not trace.on_device), kind="compute").select(
        pl.col("start_ns") + pl.col("dur_ns"), after="name"
    )
    ends = compute.sort("start_ns", maintain_order=True)
    before = np.searchsorted(ends["start_ns"].to_numpy(), start_ns, side="right") - 1
    return columns.rows_or_nulls(ends.select("after"), before)["after"]


@dataclass(frozen=True, eq=False)
class _HostTime:
    """The host's time in compute gaps, by gap and state: arrays of shape (n,), in order of time.

    `table` has gap, device, step, phase, unit, activity_id and detail, `before_ns` is for how long the host had waited
    for the device when the gap began; `waits`: it does in this row; `synced`: it does in the gap, or did when it began.
    """

    table: pl.DataFrame
    gap: Ints
    start_ns: Ints
    dur_ns: Ints
    before_ns: Ints
    waits: Flags
    synced: Flags


def _by_state(trace: Trace, pieces: pl.DataFrame, rows: Ints) -> _HostTime:
    """Pieces in `rows` by gap and state, each from its first piece, with the sum of their time."""
    _, begins, gap = np.unique(pieces["gap"].to_numpy(), return_index=True, return_inverse=True)
    details = pieces["detail"].fill_null("")[rows]
    _, detail = np.unique(details.hash().to_numpy(), return_inverse=True)
    gap, waits = gap[rows], columns.flags(details == host_state.SYNCHRONIZE)
    _, first, group = np.unique(gap * len(rows) + detail, return_index=True, return_inverse=True)
    order = np.argsort(first, kind="stable")
    dur_ns = np.zeros(len(first), np.int64)
    np.add.at(dur_ns, group, pieces["dur_ns"].to_numpy()[rows])
    first = first[order]
    start_ns = pieces["start_ns"].to_numpy()
    idle_ns = start_ns[begins[gap[first]]]  # pieces of a gap are in order of time
    dry = host_state.state_at(trace, idle_ns - 1) == host_state.HOST_STATES.index(host_state.SYNCHRONIZE)
    table = pieces[["gap", "device", "step", "phase", "unit", "activity_id", "detail"]][rows[first]]
    before_ns, waiting = host_state.waited_ns(trace, idle_ns), np.isin(gap[first], gap[waits])
    return _HostTime(table, gap[first], start_ns[rows[first]], dur_ns[order], before_ns, waits[first], dry | waiting)


def _split_by_wait(rows: _HostTime) -> tuple[Ints, Ints, Ints, Flags]:
    """Return synced gaps in two parts: what the host's waits explain, and what lasts beyond; others as they are.

    Without its waits (before_ns, and in the gap) the host would be ahead by their sum over the step so far, less what
    earlier gaps have used of it. Start, duration, row and whether it is synced of each part, by gap and start.
    """
    order = np.lexsort((rows.start_ns, ~rows.waits, rows.gap))
    gap, dur_ns = rows.gap[order], rows.dur_ns[order]
    bounds = columns.starts_of_groups(gap)
    of_gap = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    before_ns = np.append(0, np.cumsum(dur_ns))[:-1]
    before_ns -= before_ns[bounds[:-1]][of_gap]
    explained_ns = _explained_ns(rows, order, bounds[:-1], of_gap)
    synced_ns = np.minimum(np.maximum(explained_ns[of_gap] - before_ns, 0), dur_ns)
    start_ns, beyond_ns = rows.start_ns[order] + synced_ns, dur_ns - synced_ns
    parts = (synced_ns > 0, beyond_ns > 0)
    part = np.concatenate([np.flatnonzero(has_part) for has_part in parts])
    is_synced = np.arange(len(part)) < parts[0].sum()
    start = np.where(is_synced, rows.start_ns[order][part], start_ns[part])
    dur = np.where(is_synced, synced_ns[part], beyond_ns[part])
    by_time = np.lexsort((start, gap[part]))
    return start[by_time], dur[by_time], order[part][by_time], is_synced[by_time]


def _explained_ns(rows: _HostTime, order: Ints, first: Ints, of_gap: Ints) -> Ints:
    """Time of each gap that the host's waits explain; 0 for one that is not synced. Shape (gaps,)."""
    dur_ns, waits = rows.dur_ns[order], rows.waits[order]
    total_ns, waited_ns = np.zeros(len(first), np.int64), rows.before_ns[order][first].copy()
    np.add.at(total_ns, of_gap, dur_ns)
    np.add.at(waited_ns, of_gap[waits], dur_ns[waits])
    start_ns = np.minimum.reduceat(rows.start_ns[order], first)
    explained_ns = np.zeros(len(first), np.int64)
    place = [columns.to_ints(rows.table[name], -1)[order][first] for name in ("device", "step")]
    synced = np.flatnonzero(rows.synced[order][first])
    synced = synced[np.lexsort((start_ns[synced], *(key[synced] for key in place)))]
    bounds = columns.starts_of_groups(*(key[synced] for key in place))
    for begin, end in itertools.pairwise(bounds.tolist()):  # the steps of a device
        gaps = synced[begin:end]
        ahead_ns = np.cumsum(waited_ns[gaps] - total_ns[gaps])
        left_ns = ahead_ns - np.minimum(np.minimum.accumulate(ahead_ns), 0)
        explained_ns[gaps] = np.append(0, left_ns[:-1]) + waited_ns[gaps] - left_ns
    return explained_ns


@trace_fact
def data_waits(trace: Trace) -> pl.DataFrame:
    """Time in which the host loads data, within the device windows of the steps.

    The first window begins with the recording: a rank that loads data then is late for its first collective. Columns
    device, step, start_ns, dur_ns; one row per span. The device may be busy with queued work meanwhile.
    """
    if not host_state.has_state(trace, host_state.DATA):
        return schema.empty(WAIT_COLUMNS)
    windows = trace_columns.windows(trace)
    is_first = pl.col("start_ns") == pl.col("start_ns").min().over("device")
    begin_ns = trace.ops["start_ns"].filter(pl.Series(host_state.is_launching(trace))).min()
    begins_ns = pl.when(is_first).then(pl.min_horizontal("start_ns", pl.lit(begin_ns, pl.Int64))).otherwise("start_ns")
    windows = windows.with_columns(start_ns=begins_ns)
    parts = [schema.empty(WAIT_COLUMNS)]
    for (device,), device_windows in windows.group_by("device", maintain_order=True):
        ordered = device_windows.sort("start_ns")
        spans = ordered.select("start_ns", "end_ns").to_numpy().astype(np.int64)
        pieces = sweep_line.pieces(spans, host_state.state_changes(trace))
        loads = host_state.state_at(trace, pieces.start_ns) == host_state.HOST_STATES.index(host_state.DATA)
        loading = ordered[pieces.span[loads]].select(
            "step",
            pl.lit(device, pl.Int64).alias("device"),
            pl.Series("start_ns", pieces.start_ns[loads], pl.Int64),
            pl.Series("dur_ns", (pieces.end_ns - pieces.start_ns)[loads], pl.Int64),
        )
        parts.append(schema.select(loading, WAIT_COLUMNS))
    return pl.concat(parts)


@trace_fact
def wait_counts(trace: Trace) -> pl.DataFrame:
    """Number of calls in which the host may wait for the device, such as aten::item, of the threads that launch work.

    Columns step, waits; one row per step.
    """
    waits = trace_columns.is_named(trace, host_state.SYNCHRONIZING) & host_state.is_launching(trace)
    return trace.ops.filter(pl.Series(waits)).group_by("step").agg(waits=pl.len().cast(pl.Int64)).sort("step")


@trace_fact
def device_reads(trace: Trace) -> pl.DataFrame:
    """Ops of forward and backward that read a device value onto the host, such as aten::item.

    Columns step, phase, unit, name, start_ns, dur_ns; one row per outermost such op of a thread that launches work.
    """
    reads = trace_columns.is_kind(trace, "cpu_op") & trace_columns.is_named(trace, host_state.SYNCHRONIZING)
    passes = trace_columns.is_phase(trace, conventions.FORWARD) | trace_columns.is_phase(trace, conventions.BACKWARD)
    rows = np.flatnonzero(reads & passes & host_state.is_launching(trace))
    if not len(rows):
        return schema.empty(READ_COLUMNS)
    ops = trace.ops[rows].filter(trace.in_steps)
    inner = ops.join(ops.select(pl.col("id").alias("parent_id")), on="parent_id", how="semi")
    return ops.join(inner.select("id"), on="id", how="anti").select(*READ_COLUMNS)


@memoize
def places(trace: Trace) -> pl.DataFrame:
    """Number of each compute activity among those of its name in its step and lane.

    Columns name, activity_id, nth (from 0).
    """
    is_compute = trace_columns.is_activity_kind(trace, "compute")
    lane, start, id_ = (trace.activities[name].to_numpy() for name in ("lane", "start_ns", "id"))
    rows = np.flatnonzero(is_compute & np.isin(lane, trace.lanes["lane"].to_numpy()))
    name, step = trace_columns.activity_names(trace)[1], trace_columns.activity_steps(trace)
    rows = rows[np.lexsort((id_[rows], start[rows], name[rows], lane[rows], step[rows]))]
    first = columns.starts_of_groups(step[rows], lane[rows], name[rows])
    nth = np.arange(len(rows)) - np.repeat(first[:-1], np.diff(first))
    return pl.DataFrame([
        trace.activities["name"][rows], pl.Series("activity_id", id_[rows]), pl.Series("nth", nth, pl.Int64)
    ])  # fmt: skip


@trace_fact(table=QUEUES)
def launch_queues(trace: Trace) -> pl.DataFrame:
    """Launch queue of each stream: columns as QUEUES, one row per stream with work, by device and stream.

    The queue grows by one when a launching call begins and shrinks when the activity starts. Empty on a CPU run.
    """
    if not trace.on_device:
        return QUEUES.empty()
    calls = trace.ops.select(launch_id="id", call_ns="start_ns", called_ns=pl.col("start_ns") + pl.col("dur_ns"))
    work = trace.activities.select("lane", "launch_id", "start_ns", "dur_ns")
    linked = work.join(calls, on="launch_id", how="left", maintain_order="left")
    lanes = trace.lanes.filter(pl.col("device").is_not_null()).select("lane", "device", "stream", "name")
    rows = []
    for (lane,), lane_work in linked.group_by("lane", maintain_order=True):
        launched, short = lane_work.drop_nulls("call_ns"), lane_work.filter(pl.col("dur_ns") < SHORT_NS)
        row: dict[str, object] = {"lane": lane, "activities": lane_work.height, "launched": launched.height}
        row |= {"short_ratio": short.height / lane_work.height, "short_ns": short["dur_ns"].sum()}
        rows.append(row | (_queue(launched) if launched.height else {}))
    queues = pl.DataFrame(rows, schema={"lane": pl.Int64, **_MEASURED}).join(lanes, on="lane")
    return QUEUES.conform(queues).sort("device", "stream", "name")


def by_stream(run: Run) -> pl.DataFrame:
    """Launch queues of all ranks for display: columns window, rank and those of QUEUES."""
    return run.table(launch_queues).sort("window", "rank", "device", "stream")


_MEASURED = {column.name: column.dtype for column in QUEUES.columns if column.name not in ("device", "stream", "name")}


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
