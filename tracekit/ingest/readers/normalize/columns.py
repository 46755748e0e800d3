"""Events to columns, batch by batch: host slices, device work, allocator events, names of threads."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import compress, islice
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.normalize import event_categories, events, numbers
from tracekit.ingest.readers.normalize.events import Args, Event
from tracekit.ingest.readers.normalize.numbers import Ints

_COLLECTIVE_SLICE = re.compile(r"record_param_comms|(?:c10d|_c10d_functional)::|[A-Za-z]\w*:[a-z_]")
_MEMORY = "[memory]"
_END_OF_RECORDING = "Record Window End"
"""Name of the instant at which PyTorch's profiler stopped."""


@dataclass(frozen=True)
class CollectiveArgs:
    """What an event says of a collective: the row it belongs to and its arguments."""

    row: int
    args: Args


_Thread = tuple[str | None, str | None]
OpInputs = tuple[bytes, bytes, bytes, bytes]
"""Shapes, element types, values and strides of an op's inputs, each a JSON array as the file writes it."""
_NO_INPUTS: OpInputs = (b"", b"", b"", b"")
KernelDetails = tuple[bytes, bytes, str]
"""Grid and block of a kernel, each a JSON array as the file writes it; what a CUDA graph's annotation calls it."""
_NO_DETAILS: KernelDetails = (b"", b"", "")


def states_ranks(batch: list[Event]) -> bool:
    """Return whether nearly all slices of a batch name a rank in their arguments, as in a file merged of several."""
    args = [e.args for e in batch if isinstance(e, events.Slice | events.Exact) and e.args is not None]
    stated = sum(type(a.rank) is int or (type(a.rank) is str and a.rank.isdecimal()) for a in args)
    return stated > 0 and stated >= _ENOUGH_RANKS * len(args)


def count(into: Counter[tuple[str | None, str | None]], batch: list[Event]) -> None:
    """Add how many events of each (ph, cat) a batch holds."""
    for kind, kind_batch in _by_kind(batch).items():
        _count_kind(into, kind, kind_batch)


def _count_kind(into: Counter[tuple[str | None, str | None]], kind: type, batch: list[Any]) -> None:
    if kind is events.Other:
        non_empty = [e for e in batch if e is not events.EMPTY]
        into.update((_text(e.ph), _text(e.cat)) for e in non_empty)
        if empty := len(batch) - len(non_empty):
            into[None, None] += empty
        return
    try:
        seen = Counter([e.cat for e in batch])
    except TypeError:  # a list or object where a category should be
        stringify_names(batch)
        seen = Counter([e.cat for e in batch])
    for category, n in seen.items():
        into[events.PHASES[kind], _text(category)] += n


def stringify_names(batch: list[Event]) -> None:
    """Put text in place of lists and objects where an event's names should be."""
    for event in batch:
        for name in ("ph", "cat", "name", "pid", "tid"):
            value = getattr(event, name, None)
            if isinstance(value, list | dict):
                setattr(event, name, untrusted_json.to_text(value))


class Codes(dict[Any, int]):
    """Each distinct key to a number, counted from 0."""

    def __missing__(self, key: Any) -> int:
        self[key] = code = len(self)
        return code


@dataclass
class ColumnBuilder:
    """Columns that grow batch by batch."""

    clock: numbers.Clock = field(default_factory=numbers.Clock)
    counts: Counter[tuple[str | None, str | None]] = field(default_factory=Counter)
    has_several_ranks: bool | None = None
    unknown: int = 0
    unmatched: int = 0
    recorded_until_ns: int | None = None
    """When the profiler stopped, of several ranks the last; None where no event says so."""
    _names: Codes = field(default_factory=Codes)
    _threads: Codes = field(default_factory=Codes)
    thread_names: dict[tuple[str | None, str | None], str] = field(default_factory=dict)
    process_names: dict[str | None, str] = field(default_factory=dict)
    process_labels: dict[str | None, str] = field(default_factory=dict)
    _categories: Codes = field(default_factory=Codes)
    _kind_of_category: list[int] = field(default_factory=list)
    """The place of each category, every spelling that the file uses by itself."""
    inputs: Codes = field(default_factory=lambda: Codes({_NO_INPUTS: 0}))
    """Distinct inputs of ops, with their places in the host frame's `inputs`."""
    kernel_details: Codes = field(default_factory=lambda: Codes({_NO_DETAILS: 0}))
    """Distinct details of device work, with their places in the device frame's `details`."""
    _describes_collective: npt.NDArray[np.bool_] = field(default_factory=lambda: np.empty(0, np.bool_))
    _tables: tuple[list[dict[str, Any]], ...] = field(default_factory=lambda: ([], [], [], [], []))
    """Parts of the frames of host slices, device work, allocator events, waits and slices of unknown categories."""
    host_collectives: list[CollectiveArgs] = field(default_factory=list)
    device_collectives: list[CollectiveArgs] = field(default_factory=list)
    unknown_collectives: list[CollectiveArgs] = field(default_factory=list)
    _pairs: list[Any] = field(default_factory=list)
    _host_rows: int = 0
    _device_rows: int = 0
    _unknown_rows: int = 0

    def add(self, batch: list[Event]) -> bool:
        """Take the events of a batch; False, and nothing is taken, where their times must be parsed as text."""
        if self.has_several_ranks is None and batch:
            self.has_several_ranks = states_ranks(batch)
        try:
            parts = self._parts(batch)
        except TypeError:  # a list or object where a name should be
            stringify_names(batch)
            parts = self._parts(batch)
        if parts is None:
            return False
        self._append(*parts)
        return True

    def _parts(self, batch: list[Any]) -> tuple[dict[str, Any], ...] | None:
        by_kind = _by_kind(batch)
        slices = _of_kinds(events.SLICES, by_kind, batch)
        category, place = self._categorize([e.cat for e in slices])
        host = self._host_part(*_of_places(slices, place, 0, event_categories.FIRST_DEVICE))
        # A call may be a moment, but what a device does takes time.
        work = _of_places(slices, place, event_categories.FIRST_DEVICE, event_categories.SYNC)
        device = self._device_part(*work, without_dur_ns=numbers.BAD)
        syncs = self._sync_part(_of_places(slices, place, event_categories.SYNC, event_categories.UNUSED)[0])
        unknown = self._device_part(*_of_places(slices, place, event_categories.UNKNOWN, _ALL_PLACES))
        instants = _of_kinds(events.INSTANTS, by_kind, batch)
        memory = self._memory_part([e for e in instants if e.name == _MEMORY])
        stop_ns = self.clock.ns([e.ts for e in instants if e.name == _END_OF_RECORDING])
        halves = _of_kinds(events.HALVES, by_kind, batch)
        half_ns = self.clock.ns([e.ts for e in halves])
        if host is None or device is None or memory is None or syncs is None or unknown is None or half_ns is None:
            return None
        if stop_ns is None:
            return None
        for at_ns in stop_ns[stop_ns != numbers.BAD].tolist():
            self.recorded_until_ns = max(at_ns, self.recorded_until_ns or at_ns)
        self.unknown += int(np.count_nonzero(place == event_categories.UNKNOWN))
        self._pairs += halves
        self._take_names(by_kind.get(events.Metadata, ()))
        spellings = list(self._categories)
        for code, n in enumerate(np.bincount(category).tolist()):
            if n:
                self.counts[_SLICE_PHASE, _text(spellings[code])] += n
        for event_kind, kind_batch in by_kind.items():
            if event_kind not in events.SLICES:
                _count_kind(self.counts, event_kind, kind_batch)
        return host, device, memory, syncs, unknown

    def _take_names(self, metadata: Iterable[Any]) -> None:
        for event in metadata:
            args = event.args or _NO_ARGS
            if event.name == "thread_name" and args.name is not None:
                self.thread_names[_text(event.pid), _text(event.tid)] = str(args.name)
            elif event.name == "process_name" and args.name is not None:
                self.process_names[_text(event.pid)] = str(args.name)
            elif event.name == "process_labels" and args.labels is not None:
                self.process_labels[_text(event.pid)] = str(args.labels)

    def _categorize(self, categories: list[Any]) -> tuple[Ints, npt.NDArray[np.uint8]]:
        """Return the code of each slice's category, and its place."""
        codes = np.fromiter(map(self._categories.__getitem__, categories), np.int64, len(categories))
        for category in islice(self._categories, len(self._kind_of_category), None):
            self._kind_of_category.append(event_categories.kind_of(category))
        return codes, np.array(self._kind_of_category, np.uint8)[codes]

    def _common(self, batch: list[Any], *, without_dur_ns: int = 0) -> dict[str, Any] | None:
        start_ns = self.clock.ns([e.ts for e in batch])
        dur_ns = self.clock.ns([e.dur for e in batch], missing=without_dur_ns)
        if start_ns is None or dur_ns is None:
            return None
        return {
            "name": np.fromiter(map(self._names.__getitem__, [e.name for e in batch]), np.uint32, len(batch)),
            "lane": self._lanes(batch),
            "start_ns": start_ns,
            "dur_ns": dur_ns,
        } | self._ranks(batch)

    def _lanes(self, batch: list[Any]) -> npt.NDArray[np.int32]:
        threads = zip([e.pid for e in batch], [e.tid for e in batch], strict=True)
        return np.fromiter(map(self._threads.__getitem__, threads), np.int32, len(batch))

    def _ranks(self, batch: list[Any]) -> dict[str, Any]:
        if not self.has_several_ranks:
            return {}
        return {"rank": numbers.ints([None if e.args is None else e.args.rank for e in batch])}

    def _host_part(self, slices: list[Any], kind: npt.NDArray[np.uint8]) -> dict[str, Any] | None:
        part = self._common(slices)
        if part is None:
            return None
        part["start_ns"] = _with_marked_ns(part["start_ns"], slices)
        is_op, is_call = kind == event_categories.CPU_OP, kind == event_categories.RUNTIME
        ops, calls = np.flatnonzero(is_op), np.flatnonzero(is_call)
        op_args = [e.args or _NO_ARGS for e in compress(slices, is_op.tobytes())]
        called = [(e.args or _NO_ARGS).correlation or 0 for e in compress(slices, is_call.tobytes())]
        part |= {
            "kind": kind,
            "external_id": _scatter(len(slices), ops, _external_ids(op_args)),
            "sequence": _scatter(len(slices), ops, numbers.ids([a.sequence or 0 for a in op_args])),
            "forward_thread": _scatter(len(slices), ops, numbers.ids([a.forward_thread or 0 for a in op_args])),
            "inputs": self._input_codes(len(slices), ops, op_args),
            "correlation": _scatter(len(slices), calls, numbers.ids(called)),
        }
        candidates = self._may_describe_collective(part["name"])
        part["collective_args"] = [(i, slices[i].args) for i in candidates.tolist() if slices[i].args is not None]
        return part

    def _may_describe_collective(self, name_ids: npt.NDArray[np.uint32]) -> Ints:
        new = len(self._names) - len(self._describes_collective)
        if new:
            names = islice(reversed(self._names), new)
            latest = [isinstance(name, str) and _COLLECTIVE_SLICE.match(name) is not None for name in names]
            self._describes_collective = np.concatenate((self._describes_collective, np.array(latest[::-1], np.bool_)))
        return np.flatnonzero(self._describes_collective[name_ids])

    def _input_codes(self, length: int, rows: Ints, args: list[Args]) -> npt.NDArray[np.int32]:
        codes = np.zeros(length, np.int32)
        no = _NO_ARGS.inputs
        described = [
            i for i, a in enumerate(args) if not (a.input_dims is a.input_type is a.inputs is a.input_strides is no)
        ]
        if described:
            with_inputs = args if len(described) == len(args) else [args[i] for i in described]
            raw = ([getattr(a, name) for a in with_inputs] for name in _INPUTS)
            texts = zip(*(map(bytes, column) for column in raw), strict=True)
            codes[rows[described]] = np.fromiter(map(self.inputs.__getitem__, texts), np.int32, len(with_inputs))
        return codes

    def _device_part(
        self, slices: list[Any], place: npt.NDArray[np.uint8], *, without_dur_ns: int = 0
    ) -> dict[str, Any] | None:
        part = self._common(slices, without_dur_ns=without_dur_ns)
        if part is None:
            return None
        part["start_ns"] = _with_marked_ns(part["start_ns"], slices)
        args = [e.args or _NO_ARGS for e in slices]
        details = zip(
            [bytes(a.grid) for a in args],
            [bytes(a.block) for a in args],
            ["" if a.graph_node is None else _graph_annotation(a) for a in args],
            strict=True,
        )
        return (
            part
            | _columns(args, numbers.ints, "device", "stream")
            | _columns(args, numbers.moved_bytes, "bytes")
            | {
                "kind": place - np.uint8(event_categories.FIRST_DEVICE),  # of unknown slices: no kind
                "correlation": numbers.ids([a.correlation for a in args]),
                "external_id": _external_ids(args),
                "details": np.fromiter(map(self.kernel_details.__getitem__, details), np.int32, len(args)),
                "collective_args": [
                    (i, a) for i, a in enumerate(args) if a.collective is not None or a.group is not None
                ],
            }
        )

    def _memory_part(self, instants: list[Any]) -> dict[str, Any] | None:
        at_ns = self.clock.ns([e.ts for e in instants])
        if at_ns is None:
            return None
        args = [e.args or _NO_ARGS for e in instants]
        sizes = _columns(args, numbers.sizes, *_MEMORY_SIZES)
        places = _columns(args, numbers.ints, *_MEMORY_PLACES)
        return {"lane": self._lanes(instants), "at_ns": at_ns} | sizes | places | self._ranks(instants)

    def _sync_part(self, slices: list[Any]) -> dict[str, Any] | None:
        part = self._common(slices)
        if part is None:
            return None
        args = [e.args or _NO_ARGS for e in slices]
        streams = _columns(args, numbers.ints, "device", "stream", "awaited_stream")
        return part | streams | _columns(args, numbers.ids, "correlation", "awaited_correlation")

    def _append(
        self,
        host: dict[str, Any],
        device: dict[str, Any],
        memory: dict[str, Any],
        syncs: dict[str, Any],
        unknown: dict[str, Any],
    ) -> None:
        for part, rows, collectives in (
            (host, self._host_rows, self.host_collectives),
            (device, self._device_rows, self.device_collectives),
            (unknown, self._unknown_rows, self.unknown_collectives),
        ):
            collectives += [CollectiveArgs(rows + i, _by_itself(args)) for i, args in part.pop("collective_args")]
        self._host_rows += len(host["kind"])
        self._device_rows += len(device["kind"])
        self._unknown_rows += len(unknown["kind"])
        for parts, part in zip(self._tables, (host, device, memory, syncs, unknown), strict=True):
            if not parts or len(part["lane"]):
                parts.append(part)

    def finish(self) -> None:
        """Make slices of what began and ended in events of its own, after the last batch."""
        # Slices made of begin and end events, innermost first on each thread, and the number without a counterpart. An
        # end ends the last begun slice of its name, or of any name where it gives none.
        open_slices: dict[tuple[Any, Any], list[Any]] = {}
        slices: list[Event] = []
        unmatched = 0
        clock = numbers.Clock()
        for event in self._pairs:
            stack = open_slices.setdefault((str(event.pid), str(event.tid)), [])
            if type(event) in events.BEGINS:
                stack.append(event)
                continue
            index = next((i for i in reversed(range(len(stack))) if event.name in (None, stack[i].name)), None)
            if index is None:
                unmatched += 1
                continue
            unmatched += len(stack) - index - 1
            begin = stack[index]
            del stack[index:]
            start_ns, end_ns = (clock.one(e.ts) for e in (begin, event))
            dur = None if start_ns is None or end_ns is None else _us(end_ns - start_ns)
            ts = None if start_ns is None else _us(start_ns)
            slices.append(events.Slice(begin.cat, begin.name, begin.pid, begin.tid, ts, dur, begin.args or event.args))
        self.unmatched = unmatched + sum(map(len, open_slices.values()))
        if slices:
            counts = self.counts.copy()
            self.add(slices)
            self.counts = counts  # they were counted as B and E
        if not self._tables[0]:
            self.add([])

    def frames(self) -> tuple[pl.DataFrame, ...]:
        """Return host slices, device work, allocator events, waits and unknown slices, and let their parts go."""
        threads = self.threads()
        first = {thread: index for index, thread in reversed(list(enumerate(threads)))}
        index = np.array([first[thread] for thread in threads], np.int32)
        frames = []
        for parts in self._tables:
            frame = _frame(parts)
            if self.has_several_ranks and "rank" not in frame.columns:  # no event of these kinds
                frame = frame.with_columns(rank=pl.lit(None, pl.Int64))
            if len(first) < len(threads):  # a thread is written now as a number, now as text
                frame = frame.with_columns(pl.Series("lane", index[frame["lane"].to_numpy()]))
            frames.append(frame)
        return tuple(frames)

    def names(self) -> pl.Series:
        """Return the distinct names by the index that the frames' `name` holds; paths of Windows have slashes."""
        texts = ("?" if name is None else str(name) for name in self._names)
        return pl.Series("name", [_with_slashes(text) if "\\" in text else text for text in texts], dtype=pl.String)

    def threads(self) -> list[_Thread]:
        """Return process and thread ids, as text, by the index that the frames' `lane` holds."""
        return [(_text(pid), _text(tid)) for pid, tid in self._threads]


_NO_ARGS = Args()
_INPUTS = ("input_dims", "input_type", "inputs", "input_strides")
_SLICE_PHASE = events.PHASES[events.Slice]
_MEMORY_PLACES = ("device_type", "device_id", "address")
_MEMORY_SIZES = ("delta_bytes", "allocated_bytes", "reserved_bytes")
_NULLABLE = frozenset({"rank", "device", "stream", "awaited_stream", "bytes", *_MEMORY_PLACES, *_MEMORY_SIZES})
_ENOUGH_RANKS = 0.9
_MOST_ANNOTATION = 1000
_ALL_PLACES = 256


def _us(ns: int) -> str:
    sign = "-" if ns < 0 else ""
    return f"{sign}{abs(ns) // 1000}.{abs(ns) % 1000:03d}"


def _by_kind(batch: list[Event]) -> dict[type, list[Any]]:
    by_kind: defaultdict[type, list[Any]] = defaultdict(list)
    for event in batch:
        by_kind[type(event)].append(event)
    return by_kind


def _of_kinds(kinds: frozenset[type], by_kind: dict[type, list[Any]], batch: list[Event]) -> list[Any]:
    """Return the events of some types, in file order."""
    present = by_kind.keys() & kinds
    if len(present) > 1:
        return [e for e in batch if type(e) in present]
    return by_kind[present.pop()] if present else []


def _of_places(
    slices: list[Any], place: npt.NDArray[np.uint8], first: int, end: int
) -> tuple[list[Any], npt.NDArray[np.uint8]]:
    inside = (place >= first) & (place < end)
    if inside.all():
        return slices, place
    return list(compress(slices, inside.tobytes())), place[inside]


def _by_itself(args: Args) -> Args:
    """Return arguments that no longer hold on to the bytes of the batch that they were decoded from."""
    for name in ("input_dims", "input_type", "inputs", "input_strides"):
        raw = getattr(args, name)
        if raw is not _NO_ARGS.inputs:
            setattr(args, name, raw.copy())
    args.grid = args.block = _NO_ARGS.grid  # by now in a column
    return args


def _with_marked_ns(start_ns: Ints, slices: list[Any]) -> Ints:
    return numbers.mark_ns(start_ns, [e.ts for e in slices]) if (start_ns == numbers.BAD).any() else start_ns


def _columns(args: list[Args], convert: Callable[[list[Any]], Ints], *names: str) -> dict[str, Ints]:
    return {name: convert(list(map(attrgetter(name), args))) for name in names}


def _graph_annotation(args: Args) -> str:
    """What torch.cuda's annotations of a graph call its kernel: the path of a module, else any text; "" for none."""
    stated = (args.module_fqn, args.annotation, args.name)
    return next((text[:_MOST_ANNOTATION] for text in stated if type(text) is str), "")


def _external_ids(args: list[Args]) -> Ints:
    ids = numbers.plain([a.external_id for a in args])
    if ids is not None:
        return ids
    return numbers.ids([a.external_id if a.external_id is not None else a.old_external_id for a in args])


def _scatter(length: int, places: Ints, ids: Ints) -> Ints:
    """Return an array with ids at some places and 0, which no profiler uses, at the others."""
    spread = np.zeros(length, np.int64)
    spread[places] = ids
    return spread


def _with_slashes(name: str) -> str:
    """The name of a Python function with slashes in the path of its file, as all that reads its parts expects."""
    path, place, function = name.partition(".py(")
    return path.replace("\\", "/") + place + function if place else name


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _frame(parts: list[dict[str, Any]]) -> pl.DataFrame:
    columns: dict[str, pl.Series] = {}
    for name in list(parts[0]):
        column = pl.Series(name, np.concatenate([part.pop(name) for part in parts]))
        if name in _NULLABLE and (missing := column == numbers.MISSING).any():
            column = column.set(missing, None)
        columns[name] = column
    parts.clear()
    return pl.DataFrame(columns)
