"""Causes of compute gaps, linked to the communication gaps that caused them, and stall time by cause."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.communication import collective_instances, communication_gap_causes
from tracekit.analysis.communication import communication_gap_causes as causes
from tracekit.analysis.time import breakdown, host_state, launched_work
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "gap device step phase unit activity_id cause detail communication_gap collective_id collective_start_ns "
    "evidence confidence start_ns dur_ns"
)
CHAIN_COLUMNS = schema.columns(
    "communication_gap device step phase unit collective_id start_ns dur_ns host_ns preparation_ns contention_ns "
    "compute_ns copy_ns device_stall_ns unknown_ns waited_ns"
)

_ORDER = ("window", "rank", "device", "start_ns")

COMMUNICATION, COMPUTE = ("communication", "compute")
STALL_COLUMNS = schema.columns("window rank device step phase gap_kind cause detail pieces dur_ns")
_PLACE = ("device", "step", "phase", "cause", "detail")


@trace_fact
@memoize
def compute_gap_causes(trace: Trace) -> pl.DataFrame:
    """Pieces of each compute gap with their causes; the pieces of a gap sum to it.

    Columns COLUMNS: the first six as `compute_gaps`, communication_gap the number of the one whose cause the piece
    inherits, collective_id and collective_start_ns of the collective that ran or ends that gap; one row per piece.
    Until the last collective within a gap ends, the next compute is taken to wait for it, if it had been launched by
    then or starts within 20 µs: `collective` while one runs, else the cause of the communication gap. The rest is
    `host` while the next compute is not launched (detail: the host's state), `copy` while one runs, else `unknown`.
    Before all that, `device_stall` and `unknown` with detail queued are as for `gap_causes`: nothing of the program
    would keep the device idle then. Where the host synchronizes with the device while a collective runs, the cause is
    that collective (detail synchronize); where a copy runs, the copy. From the launch of a kernel on that the profiler
    lost, and that may have run in the gap, the cause is `unknown`, as far as no collective runs.
    """
    compute_gaps, before = launched_work.compute_gaps(trace), causes.gap_causes(trace)
    parts: list[pl.DataFrame] = []
    for device in breakdown.devices(trace):
        device_gaps = launched_work.on_device(trace, compute_gaps, device)
        if device_gaps.height:
            parts.append(
                _split(trace, device, device_gaps, launched_work.on_device(trace, before, device).sort("start_ns"))
            )
    return schema.concat(parts, COLUMNS)


@run_fact
def waits_for_peers(run: Run) -> pl.DataFrame:
    """Time of collectives in compute gaps until the last rank arrived; use ``run.table``.

    Columns window, rank, those of `compute_gap_causes` (cause `peer`, evidence instances), peer_rank (the last arrival
    among ranks with a trace; null where unknown); one row per piece, sorted by window, rank, device and start.
    """
    waiting, _ = _with_peers_apart(run)
    return waiting.sort(_ORDER).collect()


def sums_across(run: Run, by: Sequence[str]) -> pl.DataFrame:
    """Return `compute_gap_causes` of all ranks, with the `waits_for_peers` apart from their collectives, summed.

    Columns `by` (of those of `waits_for_peers`), pieces (rows), dur_ns; sorted by `by`.
    """
    both = pl.concat(_with_peers_apart(run))
    return both.group_by(by).agg(pl.len().cast(pl.Int64).alias("pieces"), pl.col("dur_ns").sum()).sort(by).collect()


def _with_peers_apart(run: Run) -> tuple[pl.LazyFrame, pl.LazyFrame]:
    """Waiting for peers and the rest of compute gaps, as `waits_for_peers`; lazy: ranks need not all fit in memory."""
    key = ["window", "instance"]
    last = run.table(collective_instances.instances).select(*key, pl.col("last_known_rank").alias("peer_rank"))
    waits = run.table(collective_instances.waits).join(last, on=key, how="left")
    waits = waits.select("window", "rank", pl.col("activity_id").alias("collective_id"), "wait_ns", "peer_rank")
    waits = waits.unique(["window", "rank", "collective_id"])
    pieces = run.scan(compute_gap_causes)
    joined = pieces.join(waits.lazy(), on=["window", "rank", "collective_id"], how="left", maintain_order="left")
    last_ns = pl.col("collective_start_ns") + pl.col("wait_ns").fill_null(0)
    peer_ns = pl.when(pl.col("cause") == causes.COLLECTIVE).then((last_ns - pl.col("start_ns")).clip(0)).fill_null(0)
    pieces_with_wait = joined.with_columns(pl.min_horizontal(peer_ns, "dur_ns").alias("peer_ns"))
    waiting = pieces_with_wait.filter(pl.col("cause") == causes.COLLECTIVE, pl.col("peer_ns") > 0).with_columns(
        dur_ns="peer_ns",
        cause=pl.lit(causes.PEER),
        evidence=pl.lit(causes.INSTANCES),
        confidence=pl.lit(causes.CONFIDENCES[causes.INSTANCES]),
    )
    rest = pieces_with_wait.with_columns(
        pl.col("start_ns") + pl.col("peer_ns"),
        pl.col("dur_ns") - pl.col("peer_ns"),
        pl.lit(None, pl.Int64).alias("peer_rank"),
    ).filter(pl.col("dur_ns") > 0)
    columns = ["window", "rank", *COLUMNS, "peer_rank"]
    return waiting.select(columns), rest.select(columns)


@trace_fact
@memoize
def chains(trace: Trace) -> pl.DataFrame:
    """Return each communication gap by cause, and how long compute then waited: preparation, gap, compute gap.

    Columns CHAIN_COLUMNS; host_ns to unknown_ns are the causes, which sum to dur_ns; one row per gap. waited_ns is the
    idle time of compute that waited for the gap's collective, for those that follow without a further gap (such as the
    next all-gather on the communicator; up to 20 µs between them is launch latency of the device), and within the gap
    itself. Removing the gap saves at most the smaller of dur_ns and waited_ns.
    """
    pieces = causes.gap_causes(trace)
    if pieces.is_empty():
        return schema.empty(CHAIN_COLUMNS)
    # Pieces are in order of their gap.
    _, first, gap = np.unique(pieces["gap"].to_numpy(), return_index=True, return_inverse=True)
    by_cause = pieces.select("device", "step", "phase", "unit", "collective_id", "start_ns", communication_gap="gap")
    dur_ns = pieces["dur_ns"].to_numpy()
    times = {f"{name}_ns": np.where((pieces["cause"] == name).to_numpy(), dur_ns, 0) for name in _CHAIN_CAUSES}
    sums = {name: np.bincount(gap, time_ns) for name, time_ns in (times | {"dur_ns": dur_ns}).items()}
    table = by_cause[first].hstack([pl.Series(name, values.astype(np.int64)) for name, values in sums.items()])
    # Time that compute waited for each communication gap: those of some length, each until the next one.
    idle = compute_gap_causes(trace)
    is_wait = (idle["cause"] == causes.COLLECTIVE).to_numpy() | idle["communication_gap"].is_not_null().to_numpy()
    device, idle_device = (columns.to_ints(rows["device"], -1) for rows in (table, idle))
    start, idle_start, idle_ns = table["start_ns"].to_numpy(), idle["start_ns"].to_numpy(), idle["dur_ns"].to_numpy()
    is_long = table["dur_ns"].to_numpy() > causes.NEAR_NS
    waited_ns = np.zeros(table.height, np.int64)
    for device_number in distinct(device):
        long = np.flatnonzero(is_long & (device == device_number))
        long = long[np.argsort(start[long], kind="stable")]
        waits = np.flatnonzero(is_wait & (idle_device == device_number))
        last = sweep_line.last_until(start[long], idle_start[waits])
        np.add.at(waited_ns, long[last[last >= 0]], idle_ns[waits][last >= 0])
    return schema.select(table.hstack([pl.Series("waited_ns", waited_ns)]), CHAIN_COLUMNS)


@trace_fact
def communication_gap_time(trace: Trace) -> pl.DataFrame:
    """Return communication gaps summed. Columns device, step, phase, cause, detail, pieces, dur_ns."""
    pieces, count = communication_gap_causes.gap_causes(trace), pl.len().cast(pl.Int64).alias("pieces")
    return pieces.group_by(_PLACE, maintain_order=True).agg(count, pl.col("dur_ns").sum())


@run_fact
def stalls_by_cause(run: Run) -> pl.DataFrame:
    """Stall time of each rank in each step, by kind of gap and cause; use ``run.table``.

    Columns STALL_COLUMNS; `gap_kind` is communication (no collective runs although more of the phase follow:
    `communication_gaps`) or compute (no compute: `compute_gaps`, with waiting for peers separated). One row per device,
    step, phase, gap_kind, cause and detail. The causes of one kind sum to its gaps exactly.
    """
    place = ("window", "rank", *_PLACE)
    quiet = run.table(communication_gap_time).with_columns(gap_kind=pl.lit(COMMUNICATION))
    idle = sums_across(run, place).with_columns(gap_kind=pl.lit(COMPUTE))
    both = pl.concat(schema.select(part, STALL_COLUMNS) for part in (quiet, idle))
    return both.sort("gap_kind", "window", "rank", "device", "step", "phase", "dur_ns", descending=[False] * 6 + [True])


@run_fact
def stalls_by_rank(run: Run) -> pl.DataFrame:
    """Return `stalls_by_cause` over all steps: columns rank, gap_kind, cause, pieces, dur_ns; use ``run.table``."""
    return _sum_by_rank(run.table(stalls_by_cause))


@run_fact
def idle_by_rank(run: Run) -> pl.DataFrame:
    """Compute part of `stalls_by_rank`, which needs fewer facts; use ``run.table``."""
    sums = sums_across(run, ("rank", "cause"))
    return _sum_by_rank(sums.with_columns(gap_kind=pl.lit(COMPUTE)))


_CHAIN_CAUSES = (
    causes.HOST, causes.PREPARATION, causes.CONTENTION, causes.COMPUTE, causes.COPY, causes.DEVICE_STALL, causes.UNKNOWN
)  # fmt: skip


class _Wait(NamedTuple):
    """When the compute that ends each gap was launched, and the collective that it waited for, if any."""

    launched_ns: Ints
    call: Ints
    until_ns: Ints
    near: Flags


def _split(trace: Trace, device: int | None, gaps: pl.DataFrame, before: pl.DataFrame) -> pl.DataFrame:
    work = launched_work.work_columns(trace, device)
    calls = causes.ActivitySpans.of(work, work.communicates)
    copies = work.spans[work.copies]
    quiet = intervals.from_table(before)
    idle = intervals.from_table(gaps)
    wait = _waits(work, gaps["activity_id"], calls, idle)
    known_until_ns = launched_work.known_until(trace, device, idle, wait.launched_ns)
    pieces = sweep_line.pieces(
        idle, wait.launched_ns, wait.until_ns, known_until_ns, calls.spans.ravel(), calls.launched_ns, copies.ravel(),
        quiet.ravel(), host_state.state_changes(trace), causes.stall_changes(trace, device),
    )  # fmt: skip
    now = pieces.start_ns
    stalled, queued = causes.stalled_at(trace, device, now)
    call, gap = sweep_line.running(calls.spans, now), sweep_line.running(quiet, now)
    state = host_state.state_at(trace, now)
    waits = now < wait.until_ns[pieces.span]
    awaited = wait.call[pieces.span]
    unlaunched = now < wait.launched_ns[pieces.span]
    copying = sweep_line.running(copies, now) >= 0
    blocked = host_state.is_synchronizing(state) if device is not None else state >= _IDLE_HOST
    unrecorded = (now >= known_until_ns[pieces.span]) & (call < 0)
    cause, evidence = causes.first_match(
        (unrecorded, causes.UNKNOWN, causes.NONE),
        (stalled, causes.DEVICE_STALL, causes.RECURRING),
        (queued, causes.UNKNOWN, causes.NONE),
        (waits & (call >= 0) & wait.near[pieces.span], causes.COLLECTIVE, causes.ADJACENT),
        (waits & (call >= 0), causes.COLLECTIVE, causes.RUNNING),
        (waits & (gap >= 0), causes.UNKNOWN, causes.NONE),  # replaced by the cause of the communication gap
        (waits & (now < sweep_line.at(calls.launched_ns, awaited, sweep_line.NEVER)), causes.HOST, causes.LAUNCH_TIME),
        (waits, causes.UNKNOWN, causes.NONE),
        (unlaunched & blocked & (call >= 0), causes.COLLECTIVE, causes.RUNNING),
        (unlaunched & blocked & copying & (device is not None), causes.COPY, causes.RUNNING),
        (unlaunched, causes.HOST, causes.LAUNCH_TIME),
        (copying, causes.COPY, causes.RUNNING),
    )
    inherits = waits & (call < 0) & (gap >= 0) & ~stalled & ~queued & ~unrecorded
    is_host = cause == causes.CAUSES.index(causes.HOST)
    synced = ~waits & (cause == causes.CAUSES.index(causes.COLLECTIVE)) & host_state.is_synchronizing(state)
    place = gaps.select("gap", "device", "step", "phase", "unit", "activity_id")
    detail = np.where(queued & ~unrecorded, causes.QUEUED, np.where(is_host | synced, state, -1))
    labels = causes.Labels(cause, detail, evidence)
    collective = np.where(cause == causes.CAUSES.index(causes.COLLECTIVE), call, -1)
    return _table(place, pieces, labels, calls, collective, before, np.where(inherits, gap, -1))


_IDLE_HOST = host_state.HOST_STATES.index(host_state.SYNCHRONIZE)
"""On a CPU run, a host in this state or a later one may be waiting for a running collective."""


def _waits(work: launched_work.WorkColumns, ended_by: pl.Series, calls: causes.ActivitySpans, idle: Spans) -> _Wait:
    row = columns.rows_of(work.id, columns.to_ints(ended_by, -1))
    launched_ns = sweep_line.at(work.launched_ns, row, sweep_line.NEVER)
    call = calls.ended_until(idle[:, 1])
    end_ns = sweep_line.at(calls.spans[:, 1], call, sweep_line.NEVER)
    near = idle[:, 1] - end_ns <= causes.NEAR_NS
    awaited = (end_ns > idle[:, 0]) & (near | (end_ns >= launched_ns))
    return _Wait(launched_ns, np.where(awaited, call, -1), np.where(awaited, end_ns, sweep_line.NEVER), near)


def _table(
    place: pl.DataFrame,
    pieces: sweep_line.Pieces,
    labels: causes.Labels,
    calls: causes.ActivitySpans,
    call: Ints,
    before: pl.DataFrame,
    row: Ints,
) -> pl.DataFrame:
    """Pieces with the running collective, or the cause of the communication gap's piece at `row` of `before`."""
    has = row >= 0
    texts = {"cause": causes.CAUSES, "detail": causes.DETAILS, "evidence": causes.EVIDENCES}
    codes = []
    for label, (name, values) in zip(labels, texts.items(), strict=True):
        code = columns.to_ints(before[name].cast(pl.Enum(values)).to_physical().cast(pl.Int64), -1)
        codes.append(np.where(has, sweep_line.at(code, row, -1), label))
    gap = sweep_line.at(before["gap"].to_numpy(), row, -1)
    gap_call = sweep_line.at(before["collective_id"].to_numpy(), row, -1)
    collective_id = np.where(has, gap_call, sweep_line.at(calls.id, call, -1))
    first, merged = causes.merge_adjacent(pieces, *codes, gap, collective_id)
    frame = causes.label_pieces(place, merged, causes.Labels(*(code[first] for code in codes)))
    starts = pl.DataFrame({"collective_id": calls.id, "collective_start_ns": calls.spans[:, 0]})
    called = columns.rows_or_nulls(starts, columns.rows_of(calls.id, collective_id[first]))
    return schema.select(frame.hstack([*called, columns.with_nulls(gap[first], "communication_gap")]), COLUMNS)


def _sum_by_rank(rows: pl.DataFrame) -> pl.DataFrame:
    sums = rows.group_by("rank", "gap_kind", "cause").agg(pl.col("pieces", "dur_ns").sum())
    return sums.sort("gap_kind", "rank", "cause")
