"""Kineto trace files to Traces: one of a rank, or of each rank in a file that several were merged into."""

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl
from msgspec import Raw

from tracekit.errors import BadTraceError
from tracekit.ingest.readers import execution_trace
from tracekit.ingest.readers.execution_trace import ExecutionTrace, ExecutionTraces
from tracekit.ingest.readers.kineto.scan import Scan
from tracekit.ingest.readers.normalize import arrows, columns, event_tables, unknown_devices
from tracekit.ingest.readers.normalize.columns import CollectiveArgs, ColumnBuilder
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.events import HEAD, Event, Flow
from tracekit.ingest.readers.normalize.numbers import Clock
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.reader import Companion
from tracekit.model import schema, units
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.nesting import Ints
from tracekit.model.trace import Trace

_COMPLETE = 0.95


class JoinedInputs:
    """Execution traces of a process, and which operators of its profiler trace they have.

    Nodes and operators are joined by the id of their record function, which is unique in a process, and their names.
    """

    def __init__(self, companions: Sequence[Companion], rank: int | None = None) -> None:
        """Read the execution traces among the companions of a trace; those that cannot be read become issues.

        Of a file that several ranks were merged into, they are those of this `rank`.
        """
        self._rank = rank
        self._traces: list[ExecutionTrace] = []
        self._issues: list[str] = []
        self._op_count = self._joined_count = 0
        for companion in companions:
            if not isinstance(companion.reader, ExecutionTraces):
                continue
            try:
                trace = execution_trace.load(companion.path)
            except BadTraceError as error:
                self._issues.append(f"{error}.")
                continue
            self._traces.append(trace)
            if trace.is_truncated:
                ends_early = f"the execution trace ends early; its {trace.node_count:,} nodes were read."
                self._issues.append(f"{companion.path}: {ends_early}")

    def __bool__(self) -> bool:
        return bool(self._traces)

    @property
    def data_quality(self) -> pl.DataFrame:
        """Return the issues of the execution traces, once the trace was read; columns as DATA_QUALITY."""
        rows = [("bad_companion", issue, 0.0) for issue in self._issues]
        joined_ratio = self._joined_count / max(self._op_count, 1)
        if self and not self._op_count:
            message = "The operators of this trace have no record function ids, so the execution trace adds no shapes."
            rows.append(("unmatched_companion", message, 0.0))
        elif self and joined_ratio < _COMPLETE:
            message = (
                f"The execution trace has {self._joined_count:,} of {self._op_count:,} operators of this trace "
                f"({units.share(joined_ratio)}), by the ids of their record functions; the others get no "
                "shapes from it."
            )
            rows.append(("unmatched_companion", message, 0.0))
        return pl.DataFrame(rows, schema.DATA_QUALITY.schema, orient="row")

    @property
    def groups(self) -> list[Any]:
        """Return the process groups that the execution traces list, as torch.distributed states them."""
        return [group for trace in self._traces for group in trace.groups]

    def complete(self, batch: Sequence[Event]) -> None:
        """Add the inputs of operators that have none to a batch of events, in place."""
        for event in batch:
            args = getattr(event, "args", None)
            if args is None or not args.record_id or (self._rank is not None and args.rank != self._rank):
                continue
            self._op_count += 1
            trace = next((t for t in self._traces if t.has(args.record_id, getattr(event, "name", None))), None)
            if trace is None:
                continue
            self._joined_count += 1
            inputs = None if bytes(args.input_dims) else trace.inputs_of(args.record_id, event.name)  # type: ignore[union-attr]
            if inputs is not None:
                args.input_dims, args.input_type, args.inputs, args.input_strides = map(Raw, inputs)


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
    events = read_events(path, joined)
    further = pl.concat([_several_ranks(events), joined.data_quality])
    return build_trace(
        events, path, rank=rank, window=window, further=further, listed_groups=joined.groups
    ), events.counts


def read_events(path: str, joined: JoinedInputs | None = None) -> Events:
    """Read one Kineto JSON file: plain, gzip or zstd, of any layout, complete or not.

    Operators without inputs get those of `joined`. Raises BadTraceError if the file is missing, empty, not a trace, or
    has no complete event.
    """
    source = Scan(path)
    builder = ColumnBuilder()
    for batch in source:
        if joined:
            joined.complete(batch)
        if not builder.add(batch):
            exactly = source.redecode_exactly()
            if joined and exactly is not None:
                joined.complete(exactly)
            builder.add(batch if exactly is None else exactly)
    builder.finish()
    read = event_tables.of_columns(builder, source.header, damage=source.damage, read_bytes=source.read_bytes)
    find_flows = functools.cache(lambda: _flows(path))
    return arrows.with_launches(unknown_devices.read(read, find_flows), find_flows)


def _flows(path: str) -> pl.DataFrame:
    """Ends of arrows in a file, columns `arrows.FLOWS`."""
    ends = [event for batch in Scan(path, with_flows=True) for event in batch if isinstance(event, Flow)]
    columns_of = {
        "arrow": [f"{end.cat}/{end.id}" for end in ends],
        "is_head": [type(end) is HEAD for end in ends],
        "pid": [None if end.pid is None else str(end.pid) for end in ends],
        "tid": [None if end.tid is None else str(end.tid) for end in ends],
        "at_ns": Clock().ns([end.ts for end in ends]),
    }
    return pl.DataFrame(columns_of, schema=arrows.FLOWS)


def read_merged(path: str, *, window: int = 0) -> dict[int, Trace]:
    """Read a file into which the traces of several ranks were merged: a trace for each, by rank.

    Events without a rank are left out and counted in `data_quality`. Raises BadTraceError as `read` does.
    """
    events = read_events(path)
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
    events = read_events(path, joined)
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
