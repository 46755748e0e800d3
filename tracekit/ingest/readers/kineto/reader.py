"""Kineto trace files to Traces: lanes, ops, steps, activities, collectives, allocations."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from tracekit.ingest.readers.kineto import activities as work
from tracekit.ingest.readers.kineto import (
    allocations,
    collectives,
    columns,
    data_quality,
    device_windows,
    host_slices,
    iterations,
    numbers,
    stream,
    syncs,
)
from tracekit.ingest.readers.kineto.columns import CollectiveArgs
from tracekit.ingest.readers.kineto.events import Args
from tracekit.ingest.readers.kineto.joined_inputs import JoinedInputs
from tracekit.ingest.readers.kineto.scan import Scan
from tracekit.ingest.readers.kineto.stream import Events
from tracekit.ingest.readers.reader import Companion
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.nesting import Ints
from tracekit.model.trace import LazyTrace, Trace


def read(path: str, *, rank: int, window: int = 0, companions: Sequence[Companion] = ()) -> Trace:
    """Read one trace file; operators without shapes get those of the execution traces among the companions.

    A truncated or damaged file is read as far as possible; `data_quality` states what is missing. Raises BadTraceError
    if the file is missing, empty, not a trace, or has no complete event.
    """
    return read_counted(path, rank=rank, window=window, companions=companions)[0]


def read_counted(
    path: str, *, rank: int, window: int = 0, companions: Sequence[Companion] = ()
) -> tuple[Trace, Counter[tuple[str | None, str | None]]]:
    """Read one trace file as `read` does, and say how many events of each (ph, cat) were read."""
    joined = JoinedInputs(companions)
    events = stream.read_events(path, joined)
    further = pl.concat([_several_ranks(events), joined.data_quality])
    return build_trace(
        events, path, rank=rank, window=window, further=further, listed_groups=joined.groups
    ), events.counts


def read_merged(path: str, *, window: int = 0) -> dict[int, Trace]:
    """Read a file into which the traces of several ranks were merged: a trace for each, by rank.

    Events without a rank are left out and counted in `data_quality`. Raises BadTraceError as `read` does.
    """
    events = stream.read_events(path)
    further = _rankless(events)
    return {
        rank: build_trace(_of_rank(events, rank), path, rank=rank, window=window, further=further)
        for rank in sorted(_ranks(events))
    }


def read_of_merged(path: str, *, rank: int, window: int = 0, companions: Sequence[Companion] = ()) -> Trace:
    """Read the trace of one rank in a file that several were merged into, with execution traces of this rank.

    Raises BadTraceError as `read` does.
    """
    joined = JoinedInputs(companions, rank)
    events = stream.read_events(path, joined)
    further = pl.concat([_rankless(events), joined.data_quality])
    of_rank = _of_rank(events, rank)
    return build_trace(of_rank, path, rank=rank, window=window, further=further, listed_groups=joined.groups)


def _rankless(events: Events) -> pl.DataFrame:
    """Return the issue of events of a merged file that state no rank, columns as DATA_QUALITY."""
    frames = [frame for frame in (events.host, events.device) if "rank" in frame.columns]
    count = sum(len(frame) - int(_is_rank(frame["rank"]).sum()) for frame in frames)
    if not count:
        return schema.DATA_QUALITY.empty()
    message = f"{count:,} events of the merged file name no rank from 0 to {MAX_RANKS - 1:,} and were left out."
    row = ("rankless_events", message, count / sum(events.counts.values()))
    return pl.DataFrame([row], schema.DATA_QUALITY.schema, orient="row")


def counts(path: str) -> Counter[tuple[str | None, str | None]]:
    """Number of events of each (ph, cat) in a file, those included that no table needs.

    Raises BadTraceError as `read` does.
    """
    by_kind: Counter[tuple[str | None, str | None]] = Counter()
    for batch in Scan(path):
        columns.count(by_kind, batch)
    return by_kind


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
        steps=schema.STEPS.conform(device_windows.table(built.steps, activities, lanes)),
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


def _ranks(events: Events) -> set[int]:
    if not events.has_several_ranks:
        return set()
    ranks = pl.concat([events.host["rank"], events.device["rank"]])
    return set(ranks.filter(_is_rank(ranks)).unique().to_list())


def _is_rank(ranks: pl.Series) -> pl.Series:
    return ranks.is_between(0, MAX_RANKS - 1).fill_null(value=False)


def _of_rank(events: Events, rank: int) -> Events:
    host_rows, device_rows = (
        np.flatnonzero((frame["rank"] == rank).fill_null(value=False).to_numpy())
        for frame in (events.host, events.device)
    )
    info = events.header.get("distributedInfo")
    header = events.header
    if isinstance(info, dict):  # of one of the ranks: it lists only the groups that this rank is in
        header = {**header, "distributedInfo": {k: v for k, v in info.items() if k not in _OF_ONE_RANK}}
    return replace(
        events,
        header=header,
        host=events.host[host_rows],
        device=events.device[device_rows],
        memory=events.memory.filter(pl.col("rank") == rank),
        syncs=events.syncs.filter(pl.col("rank") == rank),
        host_collectives=_renumber(events.host_collectives, host_rows),
        device_collectives=_renumber(events.device_collectives, device_rows),
    )


_OF_ONE_RANK = ("rank", "pg_config", "pg_count")


def _renumber(collectives: list[CollectiveArgs], rows: Ints) -> list[CollectiveArgs]:
    place = {int(row): index for index, row in enumerate(rows)}
    return [CollectiveArgs(place[s.row], s.args) for s in collectives if s.row in place]


def _several_ranks(events: Events) -> pl.DataFrame:
    ranks = sorted(_ranks(events))
    if len(ranks) < 2:
        return schema.DATA_QUALITY.empty()
    message = f"The file holds events of {len(ranks)} ranks ({ranks[0]} to {ranks[-1]}), read as one: split it."
    return pl.DataFrame([("several_ranks", message, 1.0)], schema=schema.DATA_QUALITY.schema, orient="row")
