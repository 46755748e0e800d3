"""Kineto trace files to Traces: lanes, ops, steps, activities, collectives, allocations."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from tracekit.errors import BadTraceError
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
from tracekit.ingest.readers.kineto.header import distributed_info, read_header, stated_rank
from tracekit.ingest.readers.kineto.joined_inputs import JoinedInputs
from tracekit.ingest.readers.kineto.scan import Scan
from tracekit.ingest.readers.kineto.stream import Events
from tracekit.ingest.readers.reader import Companion, Reader, TraceInfo
from tracekit.model import environment, schema
from tracekit.model.nesting import Ints
from tracekit.model.trace import LazyTrace, Trace

_FIRST_TIME = re.compile(rb'"ts"\s*:\s*"?(\d+(?:\.\d+)?)')
_CATEGORY = re.compile(rb'"cat"\s*:\s*"([^"\\]{0,80})"')
_HOST_SLICE = re.compile(
    rb'"cat"\s*:\s*"(?:cpu_op|user_annotation|python_function|(?:cuda|hip)_(?:runtime|driver)|Operator|Runtime)"'
    rb'[^{}]{0,500}?"pid"\s*:\s*(\d{1,9})\s*[,}]'
)


class KinetoTraces(Reader):
    """Reads the JSON files of torch.profiler: plain, gzip or zstd, of one rank or merged of several."""

    name = "PyTorch profiler trace (Kineto JSON)"
    suffixes = (".json", ".json.gz", ".json.zst")
    contents = "all tables of a trace; of a merged file, a trace of each rank"

    def sniff(self, head: bytes, name: str) -> bool:
        """Return whether the file may be JSON, by its name or its first bytes; `traces` then searches for events."""
        return name.lower().endswith(self.suffixes) or head.lstrip()[:1] in (b"{", b"[") or b'"traceEvents"' in head

    def traces(self, path: str, head: bytes, *, is_complete: bool = True) -> Sequence[TraceInfo]:
        """Return the trace of a file, from its header and first event; a merged file is read to know its ranks."""
        header = read_header(path, head)
        if is_complete and not _states_known_category(head):
            _refuse_foreign_trace(path)
        info, start_ns = distributed_info(header), _start_ns(head, header)
        if not info and is_complete and columns.states_ranks(next(filter(None, Scan(path)), [])):
            merged = read_merged(path)
            if not merged:
                raise BadTraceError(f"{path}: its events state ranks, but none from 0 on; merge the traces again")
            return [
                TraceInfo(rank, start_ns=start_ns, shares_file=True, trace=trace)
                for rank, trace in sorted(merged.items())
            ]
        trace_id, job_id = header.get("trace_id"), header.get("tw_job")
        return [
            TraceInfo(
                rank=stated_rank(info.get("rank"), lowest=0),
                world_size=stated_rank(info.get("world_size"), lowest=1),
                job_id=job_id if isinstance(job_id, str) else None,
                start_ns=start_ns,
                recording_id=None if trace_id is None else str(trace_id),
                process_id=_process_id(head),
                environment=environment.environment(header),
            )
        ]

    def read(self, path: str, info: TraceInfo, *, rank: int, window: int) -> Trace:
        """Return the trace of a file, or of one rank of a merged file."""
        if info.shares_file:
            return read_merged(path, window=window)[rank]
        return read(path, rank=rank, window=window, companions=info.companions)


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
    issues = pl.DataFrame(list(joined.issues()), schema.DATA_QUALITY.schema, orient="row")
    further = pl.concat([_several_ranks(events), issues])
    return build_trace(
        events, path, rank=rank, window=window, further=further, listed_groups=joined.groups
    ), events.counts


def read_merged(path: str, *, window: int = 0) -> dict[int, Trace]:
    """Read a file into which the traces of several ranks were merged: a trace for each, by rank.

    Events without a rank are left out and counted in `data_quality`. Raises BadTraceError as `read` does.
    """
    events = stream.read_events(path)
    found = sorted(_ranks(events))
    rankless = sum(frame["rank"].null_count() for frame in (events.host, events.device) if "rank" in frame.columns)
    further = schema.DATA_QUALITY.empty()
    if rankless:
        message = f"{rankless:,} events of the merged file name no rank and were left out."
        row = ("rankless_events", message, rankless / sum(events.counts.values()))
        further = pl.DataFrame([row], schema.DATA_QUALITY.schema, orient="row")
    return {
        rank: build_trace(_of_rank(events, rank), path, rank=rank, window=window, further=further) for rank in found
    }


def counts(path: str) -> Counter[tuple[str | None, str | None]]:
    """Return how many events of each (ph, cat) a file holds, those included that no table needs.

    Raises BadTraceError as `read` does.
    """
    found: Counter[tuple[str | None, str | None]] = Counter()
    for batch in Scan(path):
        columns.count(found, batch)
    return found


def _start_ns(head: bytes, header: Mapping[str, Any]) -> int | None:
    """Return about when the recording began: the time of the first event in the file."""
    first = _FIRST_TIME.search(head)
    base_ns = header.get("baseTimeNanoseconds")
    base_ns = base_ns if isinstance(base_ns, int) and not isinstance(base_ns, bool) else 0
    if first is None:
        return None
    start_us = float(first[1])
    return base_ns + round(start_us * 1000) if start_us < numbers.MOST_NS else None


def _process_id(head: bytes) -> int | None:
    """Return the process id of the first host slice; kernels have a device's number in its place."""
    first = _HOST_SLICE.search(head)
    return None if first is None else int(first[1])


def build_trace(
    events: Events, path: str, *, rank: int, window: int, further: pl.DataFrame, listed_groups: Sequence[Any] = ()
) -> Trace:
    """Return the trace of `events`, with `further` data-quality issues; rarely used tables are built on access.

    `listed_groups` are process groups that the header may lack.
    """
    base_ns = _base_ns(events.header)
    slices, device = (_timed(frame, base_ns) for frame in (events.host, events.device))
    threads, lanes = _lanes(events, slices)
    built = host_slices.build(slices, events.names, events.inputs, threads)
    ids = host_slices.first_of(built.row + 1, np.array([s.row + 1 for s in events.host_collectives], np.int64))
    slice_args = {int(at): s.args for at, s in zip(ids, events.host_collectives, strict=True) if at >= 0}
    undecided = pl.DataFrame(schema={"name": pl.String, "dur_ns": pl.Int64})
    if device.is_empty():
        activities, communication = work.on_host(built, slice_args)
    else:
        placed = work.streams(device, events.threads, len(lanes))
        lanes = pl.concat([lanes, work.lanes_of(placed)], how="diagonal_relaxed")
        kernel_args = {s.row: s.args for s in events.device_collectives}
        activities, communication, undecided = work.on_device(placed, events, built, kernel_args, slice_args)
    built, activities = iterations.with_iterations(built, activities, lanes)
    activities = schema.ACTIVITIES.conform(activities)
    lanes = lanes.join(work.roles(activities), on="lane", how="left", maintain_order="left")
    lanes = schema.LANES.conform(lanes.with_columns(pl.col("role").fill_null("host")))
    memory = events.memory.filter(pl.col("at_ns") != numbers.BAD)
    waited = _timed(events.syncs, base_ns)
    bad_times = sum(map(len, (events.host, events.device, events.memory))) - sum(map(len, (slices, device, memory)))
    found = data_quality.table(
        events, built.steps, bad_times=bad_times, undecided=undecided, busy_ns=int(activities["dur_ns"].sum())
    )
    collective_args: list[Args] = [s.args for s in (*events.device_collectives, *events.host_collectives)]
    groups = collectives.groups(events.header, collective_args, listed_groups)
    trace = Trace(
        rank=rank,
        window=window,
        path=path,
        lanes=lanes,
        steps=schema.STEPS.conform(device_windows.table(built.steps, activities, lanes)),
        activities=activities,
        groups=groups,
        data_quality=pl.concat([found, further]),
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
            "syncs": lambda: schema.SYNCS.conform(syncs.table(waited, events.names, built)),
        },
        deferred_bytes=built.size_bytes + int(memory.estimated_size()),
    )


def _base_ns(header: Mapping[str, Any]) -> int:
    base = header.get("baseTimeNanoseconds")
    try:
        number = float(base or 0)
    except (TypeError, ValueError):
        return 0
    exact = (
        int(base) if isinstance(base, int | str) and math.isfinite(number) and str(base).lstrip("-").isdigit() else None
    )
    if exact is None:
        exact = int(number) if math.isfinite(number) else 0
    return exact if abs(exact) < numbers.MOST_NS else 0


def _timed(frame: pl.DataFrame, base_ns: int) -> pl.DataFrame:
    """Return the slices that have a usable time, on the clock of `base_ns`, with their place in the file as row."""
    usable = (frame["start_ns"] != numbers.BAD) & frame["dur_ns"].is_between(0, numbers.MOST_DUR_NS)
    placed = frame.with_columns(pl.Series("row", np.arange(len(frame), dtype=np.int64)), pl.col("start_ns") + base_ns)
    return placed if usable.all() else placed.filter(usable)


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


def _states_known_category(head: bytes) -> bool:
    categories = {found[1].decode("utf-8", "replace") for found in _CATEGORY.finditer(head)}
    return any(map(columns.is_known_category, categories))


def _refuse_foreign_trace(path: str) -> None:
    """Raise BadTraceError if a file has slices, but no event of a category that PyTorch writes."""
    found: Counter[tuple[str | None, str | None]] = Counter()
    for batch in Scan(path):
        columns.count(found, batch)
        if any(columns.is_known_category(category) for _, category in found):
            return
    slices = Counter({category: n for (phase, category), n in found.items() if phase in ("X", "B", "b")})
    if not slices:
        return
    categories = [repr(category)[:40] for category, _ in slices.most_common(4) if category]
    listed = f"; its categories: {', '.join(categories)}" if categories else ""
    raise BadTraceError(
        f"{path}: this is a Chrome trace without PyTorch events ({slices.total():,} slices{listed}); record with "
        "torch.profiler, or: tracekit record -- python train.py"
    )


def _ranks(events: Events) -> set[int]:
    if not events.has_several_ranks:
        return set()
    ranks = pl.concat([events.host["rank"], events.device["rank"]]).drop_nulls().unique().to_list()
    return {rank for rank in ranks if rank >= 0}


def _of_rank(events: Events, rank: int) -> Events:
    host_rows, device_rows = (
        np.flatnonzero((frame["rank"] == rank).fill_null(value=False).to_numpy())
        for frame in (events.host, events.device)
    )
    return replace(
        events,
        host=events.host[host_rows],
        device=events.device[device_rows],
        memory=events.memory.filter(pl.col("rank") == rank),
        syncs=events.syncs.filter(pl.col("rank") == rank),
        host_collectives=_moved(events.host_collectives, host_rows),
        device_collectives=_moved(events.device_collectives, device_rows),
    )


def _moved(collectives: list[CollectiveArgs], rows: Ints) -> list[CollectiveArgs]:
    place = {int(row): index for index, row in enumerate(rows)}
    return [CollectiveArgs(place[s.row], s.args) for s in collectives if s.row in place]


def _several_ranks(events: Events) -> pl.DataFrame:
    found = sorted(_ranks(events))
    if len(found) < 2:
        return schema.DATA_QUALITY.empty()
    message = f"The file holds events of {len(found)} ranks ({found[0]} to {found[-1]}), read as one: split it."
    return pl.DataFrame([("several_ranks", message, 1.0)], schema=schema.DATA_QUALITY.schema, orient="row")
