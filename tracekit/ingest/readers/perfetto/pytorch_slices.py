"""Perfetto files of others: slices in the categories of PyTorch's profiler become the events of a Kineto trace."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import columns, event_categories, event_tables
from tracekit.ingest.readers.normalize import events as profiler_events
from tracekit.ingest.readers.normalize.trace import build_trace
from tracekit.ingest.readers.perfetto import events as event_columns
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.events import Arguments, Events
from tracekit.ingest.readers.perfetto.packets import Packets
from tracekit.ingest.readers.perfetto.wire import FIXED64, LENGTH, VARINT, Flags, Ints
from tracekit.ingest.readers.reader import TraceInfo
from tracekit.model import schema
from tracekit.model.manifest import MAX_RANKS
from tracekit.model.trace import Trace

_RANK = re.compile(r"\brank[ _-]?(\d{1,7})(?!\d)", re.I)
_MOST_PARENTS = 64
_MOST_NAME = 200


@dataclass(frozen=True)
class Track:
    """One track: process and thread ids as text, the name of the thread or track, and the rank if one is named."""

    process: str | None = None
    thread: str | None = None
    name: str | None = None
    rank: int | None = None


class Tracks:
    """Tracks by uuid."""

    def __init__(self, packets: Packets) -> None:
        rows = np.flatnonzero(packets.descriptor[1] > packets.descriptor[0])
        fields = wire.fields(packets.data, packets.descriptor[0][rows], packets.descriptor[1][rows])
        processes = wire.fields(packets.data, *fields.spans(F.PROCESS))
        threads = wire.fields(packets.data, *fields.spans(F.THREAD))
        columns = [
            fields.column(F.UUID).tolist(),
            fields.column(F.PARENT).tolist(),
            processes.column(F.PID, missing=-1).tolist(),
            threads.column(F.THREAD_PID, missing=-1).tolist(),
            threads.column(F.TID, missing=-1).tolist(),
            _names(packets, fields, F.TRACK_NAME, F.STATIC_NAME),
            _names(packets, processes, F.PROCESS_NAME),
            _names(packets, threads, F.THREAD_NAME),
        ]
        # A later descriptor of a track completes the earlier ones.
        self._stated: dict[int, tuple[int, int, int, int, str, str, str]] = {}
        for uuid, *stated in zip(*columns, strict=True):
            before = self._stated.get(uuid, (0, -1, -1, -1, "", "", ""))
            merged = (new if new not in (0, -1, "") else old for new, old in zip(stated, before, strict=True))
            self._stated[uuid] = tuple(merged)  # type: ignore[assignment]
        self._known: dict[int, Track] = {}

    def __getitem__(self, uuid: int) -> Track:
        """Return the track of a uuid; one that is not described has a thread of its own."""
        if uuid not in self._known:
            self._known[uuid] = self._track(uuid)
        return self._known[uuid]

    def _track(self, uuid: int) -> Track:
        thread = process = name = None
        rank, ancestor = None, uuid
        for _ in range(_MOST_PARENTS):
            if ancestor not in self._stated:
                break
            parent, pid, thread_pid, tid, track_name, process_name, thread_name = self._stated[ancestor]
            name = name or thread_name or track_name or None
            if tid >= 0 and thread is None:
                thread = str(tid)
            if process is None and max(thread_pid, pid) >= 0:
                process = str(max(thread_pid, pid))
            rank = _rank(process_name or track_name) if rank is None else rank
            ancestor = parent
        return Track(process, thread or f"track {uuid & (1 << 64) - 1}", name, rank)


def _names(packets: Packets, fields: wire.Fields, *numbers: int) -> list[str]:
    texts = [list(packet_columns.strings(packets.data, *fields.spans(number))) for number in numbers]
    return [next(filter(None, candidates), "") for candidates in zip(*texts, strict=True)]


def _rank(name: str) -> int | None:
    match = _RANK.search(name)
    return int(match[1]) if match and int(match[1]) < MAX_RANKS else None


_RECORD = "record with torch.profiler, or: tracekit record -- python train.py"
_BATCH = 1 << 14
_MOST_DEPTH, _MOST_ENTRIES = 8, 4096
_FLOWS = ((F.FLOW, FIXED64), (F.LAST_FLOW, FIXED64), (F.OLD_FLOW, VARINT), (F.OLD_LAST_FLOW, VARINT))
_EARLIER_EXPORT = frozenset({"step", "compute"})
_NAMES_OF_ROCPROFV3 = {"copy_bytes": "bytes", "queue": "stream"}


def traces(path: str, events: Events) -> Sequence[TraceInfo]:
    """Return the traces of a file: one for each rank that processes are named after, else one.

    Raises BadTraceError if no slice has a category of PyTorch's profiler.
    """
    is_known = _known(events) & (events.kind == F.BEGIN)
    if not is_known.any() or set(events.categories) >= _EARLIER_EXPORT:
        raise BadTraceError(f"{path}: {_what_it_is(events)}")
    tracks = Tracks(events.packets)
    ranks = sorted(
        {rank for uuid in np.unique(events.track[is_known]).tolist() if (rank := tracks[uuid].rank) is not None}
    )
    start_ns = int(events.at_ns[is_known].min())
    several = len(ranks) > 1
    return [TraceInfo(rank, start_ns=start_ns, shares_file=several) for rank in ranks or (None,)]


def trace(path: str, events: Events, info: TraceInfo, *, rank: int, window: int) -> Trace:
    """Return the trace of a file, or that of one rank of several."""
    tracks = Tracks(events.packets)
    is_of_rank = np.ones(len(events.kind), np.bool_)
    if info.shares_file:
        uuids, place = np.unique(events.track, return_inverse=True)
        is_of_rank = np.array([tracks[uuid].rank == info.rank for uuid in uuids.tolist()], np.bool_)[place]
    selected = is_of_rank & _known(events)
    slices = event_columns.slices(events)
    of_chosen = selected[slices.event]
    rows = replace(slices, event=slices.event[of_chosen], dur_ns=slices.dur_ns[of_chosen])
    moments = np.flatnonzero(selected & (events.kind == F.INSTANT))
    base_ns = int(events.at_ns[rows.event].min()) if len(rows.event) else 0
    # The number of the flow that each event begins or ends, 0 for none: a launch and its kernel share one.
    owner, flow = event_columns.flows(events, _FLOWS)
    number = np.zeros(len(events.kind), np.int64)
    number[owner] = np.unique(flow, return_inverse=True)[1] + 1 if len(flow) else flow
    converter = _Converter(events, tracks, event_columns.arguments(events, selected), number, base_ns)
    builder = columns.ColumnBuilder(has_several_ranks=False)
    for batch in converter.batches(rows, moments):
        builder.add(batch)
    builder.finish()
    header = {"baseTimeNanoseconds": base_ns}
    issues = pl.DataFrame(list(event_columns.issues(events, slices)), schema.DATA_QUALITY.schema, orient="row")
    built = build_trace(event_tables.of_columns(builder, header), path, rank=rank, window=window, further=issues)
    return built.replace(counters=counters(events, tracks, is_of_rank))


def counters(events: Events, tracks: Tracks, selected: Flags) -> pl.DataFrame:
    """Return the values of the chosen events that are of counters, columns as COUNTERS; by name and time.

    A counter is named after its track, with the unit that the track states. Values that count up from the one before
    are added up from 0.
    """
    rows = np.flatnonzero(selected & (events.kind == F.COUNTER))
    stated = events.fields.column(F.VALUE, VARINT)[rows].astype(np.float64)
    in_doubles = np.zeros(len(events.kind), np.bool_)
    in_doubles[events.fields.owner[events.fields.where(F.DOUBLE_VALUE, FIXED64)]] = True
    doubles = events.fields.column(F.DOUBLE_VALUE, FIXED64)[rows].view(np.float64)
    value = np.where(in_doubles[rows], doubles, stated)
    kinds = _kinds(events.packets)
    parts = []
    for uuid in np.unique(events.track[rows]).tolist():
        track_rows = rows[events.track[rows] == uuid]
        order = np.argsort(events.at_ns[track_rows], kind="stable")
        unit, factor, is_incremental = kinds.get(uuid, ("", 1, False))
        values = value[events.track[rows] == uuid][order] * factor
        name = (tracks[uuid].name or "counter")[:_MOST_NAME] + (f" [{unit}]" if unit else "")
        columns = {"at_ns": events.at_ns[track_rows][order], "value": np.cumsum(values) if is_incremental else values}
        parts.append(pl.DataFrame(columns).with_columns(name=pl.lit(name)).filter(pl.col("value").is_finite()))
    return schema.COUNTERS.conform(pl.concat(parts).sort("name", "at_ns")) if parts else schema.COUNTERS.empty()


def _known(events: Events) -> Flags:
    codes = [i for i, category in enumerate(events.categories) if event_categories.is_known(category)]
    return np.isin(events.category, codes)


def _what_it_is(events: Events) -> str:
    """A description of a file without PyTorch's slices, and what to do."""
    begun = events.category[(events.kind == F.BEGIN) & (events.category >= 0)]
    counted = Counter({events.categories[code]: n for code, n in enumerate(np.bincount(begun).tolist()) if n})
    if set(events.categories) >= _EARLIER_EXPORT:
        return (
            "this Perfetto trace was exported by an earlier version of tracekit, without tables; export the run again"
        )
    listed = ", ".join(repr(category)[:40] for category, _ in counted.most_common(4))
    categories = f"; its categories: {listed}" if listed else ""
    count = int(np.count_nonzero(events.kind == F.BEGIN))
    return f"this is a Perfetto trace without PyTorch events ({count:,} slices{categories}); {_RECORD}"


@dataclass(frozen=True, eq=False)
class _Converter:
    """Makes the events of a Kineto trace, in µs from `base_ns`."""

    events: Events
    tracks: Tracks
    arguments: Arguments
    correlations: Ints
    base_ns: int

    def batches(self, slices: event_columns.Slices, moments: Ints) -> Iterator[list[Any]]:
        """Yield thread names, slices and moments, some at a time."""
        args = self._args()
        tracks = [self.tracks[uuid] for uuid in np.unique(self.events.track).tolist()]
        yield [
            profiler_events.from_object(
                {"ph": "M", "name": "thread_name", "pid": t.process, "tid": t.thread, "args": {"name": t.name}}
            )
            for t in tracks
            if t.name
        ]
        for first in range(0, len(slices.event), _BATCH):
            part = slice(first, first + _BATCH)
            pairs = zip(slices.event[part].tolist(), (slices.dur_ns[part] / 1000).tolist(), strict=True)
            yield [profiler_events.from_object(self._fields(i, args) | {"ph": "X", "dur": dur}) for i, dur in pairs]
        for first in range(0, len(moments), _BATCH):
            rows = moments[first : first + _BATCH].tolist()
            yield [profiler_events.from_object(self._fields(i, args) | {"ph": "i"}) for i in rows]

    def _fields(self, i: int, args: dict[int, dict[str, Any]]) -> dict[str, Any]:
        events, name = self.events, int(self.events.name[i])
        track = self.tracks[int(events.track[i])]
        event_args = args.get(i, {})
        if self.correlations[i] and "correlation" not in event_args:
            event_args = event_args | {"correlation": int(self.correlations[i])}
        return {
            "cat": events.categories[int(events.category[i])],
            "name": events.names[name] if name >= 0 else None,
            "pid": track.process,
            "tid": track.thread,
            "ts": (int(events.at_ns[i]) - self.base_ns) / 1000,
            "args": event_args,
        }

    def _args(self) -> dict[int, dict[str, Any]]:
        """Return the arguments of each event, by name."""
        by_event: dict[int, dict[str, Any]] = {}
        arguments = self.arguments
        columns = (arguments.event, arguments.name, arguments.field, arguments.value, *arguments.annotation)
        for event, name, field, value, begin, end in zip(*(column.tolist() for column in columns), strict=True):
            if name >= 0:
                key = _NAMES_OF_ROCPROFV3.get(arguments.names[name], arguments.names[name])
                by_event.setdefault(event, {})[key] = self._value(event, field, value, begin, end)
        return by_event

    def _value(self, event: int, field: int, value: int, begin: int, end: int) -> Any:
        if field in (F.TEXT, F.TEXT_IID):
            return _maybe_json(self.arguments.texts[value])
        if field == F.BOOL:
            return bool(value)
        if field == F.DOUBLE:
            return float(np.int64(value).view(np.float64))
        if field in (F.ARRAY, F.DICT, F.JSON):
            return self._nested_value(event, begin, end, 0)
        return value

    def _nested_value(self, event: int, begin: int, end: int, depth: int) -> Any:
        """Return the value of an argument with lists or objects inside."""
        data = self.events.packets.data
        fields = wire.fields(data, np.array([begin]), np.array([end]))
        entries: list[tuple[str, Any]] = []
        for tag, value, size in zip(fields.tag.tolist(), fields.value.tolist(), fields.size.tolist(), strict=True):
            number = tag >> 3
            if number in (F.ARRAY, F.DICT) and len(entries) < _MOST_ENTRIES and depth < _MOST_DEPTH:
                key = self._key(event, value, value + size) if number == F.DICT else ""
                entries.append((key, self._nested_value(event, value, value + size, depth + 1)))
            elif number == F.JSON:
                return _maybe_json(data[value : value + size].decode("utf-8", "replace"))
            elif number == F.TEXT and tag & 7 == LENGTH:
                return data[value : value + size].decode("utf-8", "replace")
            elif number == F.TEXT_IID:
                return self._interned_text(event, value)
            elif number in (F.BOOL, F.UINT, F.INT, F.POINTER):
                return value
            elif number == F.DOUBLE:
                return float(np.int64(value).view(np.float64))
        return dict(entries) if len(fields.where(F.DICT, LENGTH)) else [entry for _, entry in entries]

    def _interned_text(self, event: int, number: int) -> str | None:
        generation = self.events.packets.generation[self.events.packet[[event]]]
        place = int(self.events.texts.find(generation, np.array([number]))[0])
        return self.events.texts.texts[place] if place >= 0 else None

    def _key(self, event: int, begin: int, end: int) -> str:
        data = self.events.packets.data
        fields = wire.fields(data, np.array([begin]), np.array([end]))
        for row in fields.where(F.ARGUMENT_NAME, LENGTH).tolist():
            return data[fields.value[row] : fields.value[row] + fields.size[row]].decode("utf-8", "replace")
        generation = self.events.packets.generation[self.events.packet[[event]]]
        place = int(self.events.argument_names.find(generation, fields.column(F.ARGUMENT_IID))[0])
        return self.events.argument_names.texts[place] if place >= 0 else ""


def _maybe_json(text: str) -> Any:
    """Return a list that a text states as JSON, as converters of Chrome traces write them; else the text."""
    if not text.startswith("["):
        return text
    try:
        return untrusted_json.parse(text)
    except ValueError:
        return text


def _kinds(packets: Packets) -> dict[int, tuple[str, int, bool]]:
    """Return unit, factor of the values, and whether they count up from the one before, of each counter by track."""
    rows = np.flatnonzero(packets.descriptor[1] > packets.descriptor[0])
    tracks = wire.fields(packets.data, packets.descriptor[0][rows], packets.descriptor[1][rows])
    begin, end = tracks.spans(F.COUNTER_KIND)
    described = np.flatnonzero(end > begin)
    fields = wire.fields(packets.data, begin[described], end[described])
    names = packet_columns.strings(packets.data, *fields.spans(F.UNIT_NAME))
    columns = (
        tracks.column(F.UUID)[described].tolist(),
        fields.column(F.UNIT).tolist(),
        fields.column(F.UNIT_FACTOR).tolist(),
        fields.column(F.IS_INCREMENTAL).tolist(),
    )
    return {
        uuid: (name[:_MOST_NAME] or F.UNITS.get(unit, ""), factor or 1, bool(incremental))
        for uuid, unit, factor, incremental, name in zip(*columns, names, strict=True)
    }
