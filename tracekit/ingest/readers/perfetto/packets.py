"""The packets of a Perfetto file as columns: what belongs to which sequence, and the time of each.

A sequence of packets states texts once and refers to them by number, until it is cleared: then a new generation begins.
See Perfetto's docs/design-docs/protozero and protos/perfetto/trace/trace_packet.proto.
"""

import functools
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.errors import BadTraceError
from tracekit.ingest.budget import Budget
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.wire import LENGTH, PADDING, Flags, Ints

_MAIN = 6  # BUILTIN_CLOCK_BOOTTIME
_FIRST_OWN, _PAST_OWN = 64, 128
_CLOCKS, _PRIMARY = 1, 2  # of ClockSnapshot
_ID, _TIME, _IS_INCREMENTAL, _UNIT = 1, 2, 3, 4  # of ClockSnapshot.Clock
_MOST_UNIT = 10**9
BEYOND_TIME = 1 << 62
"""Above each time in ns that is read: the sum of two smaller ones is an int64."""

MAX_BYTES = 2 << 30
"""Decompressed size of a file, or of the part of it that holds a trace."""
_CHUNK = 1 << 20  # packets decoded at a time
# The first fields of TracePacket: files of other formats in protobuf have other wire types there.
_LENGTH_FIELDS = (1, 2, 4, 5, 6, 7, 9, 11, 12)
_VARINT_FIELDS = (3, 8, 10, 13)


@dataclass(frozen=True, eq=False)
class Packets:
    """Packets in file order, columns of shape (n,).

    `at_ns` is on the trace's main clock. `sequence` and `generation` identify what an event refers to: generations are
    numbered through the file. `needs_state` flags packets that are void before their sequence was cleared. The spans of
    events, interned data and track descriptors are of `data`; begin and end are equal where a packet has none.
    """

    data: bytes
    begin: Ints
    end: Ints
    at_ns: Ints
    sequence: Ints
    generation: Ints
    void: Flags
    has_time: Flags
    event: tuple[Ints, Ints]
    interned: tuple[Ints, Ints]
    descriptor: tuple[Ints, Ints]
    defaults: tuple[Ints, Ints]
    damaged: int
    read_bytes: int
    total_bytes: int
    broken: str | None
    """Why decompression stopped early."""
    was_packed: bool
    """Whether packets were compressed in packets: then `data` is not the content of the file."""

    def of_sequence(self, number: int) -> "Packets":
        """Return the packets of one sequence."""
        rows = np.flatnonzero(self.sequence == number)
        spans = {name: tuple(edge[rows] for edge in getattr(self, name)) for name in _SPANS}
        columns = ("begin", "end", "at_ns", "sequence", "generation", "void", "has_time")
        return replace(self, **{name: getattr(self, name)[rows] for name in columns}, **spans)  # type: ignore[arg-type]


_SPANS = ("event", "interned", "descriptor", "defaults")


def is_perfetto(head: bytes) -> bool:
    """Return whether a file begins with packets of a Perfetto trace, by the wire types of their fields."""
    if head[:1] != b"\x0a":
        return False
    data = head[: 64 << 10] + bytes(PADDING)
    end = len(data) - PADDING
    starts, ends, intact = wire.split(data, F.PACKET, end)
    if not len(starts):  # the first packet is longer than what is known of the file
        starts, ends = np.array([2 + sum(byte >= 0x80 for byte in data[1:5])]), np.array([end])
    elif intact + 2 < end and data[intact] != F.PACKET << 3 | LENGTH:
        return False
    fields = wire.fields(data, starts[:16], ends[:16])
    first = fields.owner < max(len(starts) - 1, 1)
    number, kind = fields.tag >> 3, fields.tag & 7
    is_known = np.isin(number, _LENGTH_FIELDS) & (kind == LENGTH)
    is_known |= np.isin(number, _VARINT_FIELDS) & (kind == wire.VARINT)
    return bool((number >= F.CLOCK_SNAPSHOT).any()) and bool((is_known | (number > F.FLAGS))[first].all())


def read(path: str, part: tuple[int, int] | None = None) -> Packets:
    """Return the packets of a file, or of a part of its decompressed content (offset and size).

    Raises BadTraceError if the file cannot be read, is too large, or has no packet.
    """
    blocks = Blocks(path)
    data = _content(blocks, part)
    total = len(data) - PADDING
    starts, ends, intact = wire.split(data, F.PACKET, total, budget=blocks.budget)
    if not len(starts):
        raise BadTraceError(f"{path}: no packet of this Perfetto trace can be read; record it again")
    column = _columns(data, starts, ends)
    was_packed = bool(column["packed_end"].any() or column["zstd_end"].any())
    if was_packed:
        data, starts, ends = _unpack(data, starts, ends, column, budget=blocks.budget)
        column = _columns(data, starts, ends)
    generation, void = _generations(column["sequence"], column["flags"], column["cleared"])
    at_ns = on_main_clock(
        data,
        column["at_ns"],
        column["clock"],
        sequence=column["sequence"],
        generation=generation,
        defaults=(column["defaults"], column["defaults_end"]),
        snapshots=(column["snapshot"], column["snapshot_end"]),
    )
    return Packets(
        data,
        starts,
        ends,
        at_ns,
        column["sequence"],
        generation,
        void,
        column["has_time"].astype(np.bool_),
        event=(column["event"], column["event_end"]),
        interned=(column["interned"], column["interned_end"]),
        descriptor=(column["descriptor"], column["descriptor_end"]),
        defaults=(column["defaults"], column["defaults_end"]),
        damaged=int(column["damaged"].sum()),
        read_bytes=intact,
        total_bytes=total,
        broken=blocks.broken,
        was_packed=was_packed,
    )


def _content(blocks: Blocks, part: tuple[int, int] | None) -> bytes:
    first, size = part or (0, MAX_BYTES + 1)
    contents, seen = [], 0
    for block in blocks:
        inside = block[max(first - seen, 0) : max(first + size - seen, 0)]
        seen += len(block)
        if inside:
            contents.append(inside)
        if seen - first > MAX_BYTES and part is None:
            raise BadTraceError(
                f"{blocks.path}: more than {MAX_BYTES >> 30} GiB (decompressed); export fewer ranks: --ranks"
            )
        if seen >= first + size:
            break
    return b"".join((*contents, bytes(PADDING)))


def _unpack(
    data: bytes, starts: Ints, ends: Ints, column: Mapping[str, Ints], *, budget: Budget
) -> tuple[bytes, Ints, Ints]:
    """Return the packets with those that were compressed in a packet (zlib or zstd), in its place."""
    parts = []
    spans = (starts, ends, *(column[name] for name in ("packed", "packed_end", "zstd", "zstd_end")))
    for start, end, begin, past, zstd_begin, zstd_past in zip(*(edges.tolist() for edges in spans), strict=True):
        limit = budget.bytes_left + 1
        try:
            if past:
                piece = zlib.decompressobj().decompress(data[begin:past], limit)
            elif zstd_past:
                piece = _unzstd(data[zstd_begin:zstd_past], limit)
            else:
                packet = data[start:end]
                size, length = len(packet), bytearray()
                while size > 0x7F:
                    length.append(size & 0x7F | 0x80)
                    size >>= 7
                piece = bytes((F.PACKET << 3 | LENGTH, *length, size)) + packet
        except (zlib.error, OSError):
            continue
        budget.unpack(len(piece))
        parts.append(piece)
    joined = b"".join((*parts, bytes(PADDING)))
    return joined, *wire.split(joined, F.PACKET, len(joined) - PADDING, budget=budget)[:2]


def _unzstd(packed: bytes, limit: int) -> bytes:
    """Return at most `limit` decompressed bytes. Raises OSError if they are damaged."""
    import pyarrow as pa  # slow to import, and few traces are zstd

    with pa.CompressedInputStream(pa.BufferReader(packed), "zstd") as stream:
        return bytes(stream.read(limit))


def _columns(data: bytes, starts: Ints, ends: Ints) -> dict[str, Ints]:
    chunks = [_chunk(data, starts[i : i + _CHUNK], ends[i : i + _CHUNK]) for i in range(0, max(len(starts), 1), _CHUNK)]
    return {name: np.concatenate([chunk[name] for chunk in chunks]) for name in chunks[0]}


def _chunk(data: bytes, starts: Ints, ends: Ints) -> dict[str, Ints]:
    fields = wire.fields(data, starts, ends)
    columns = {
        "at_ns": fields.column(F.TIMESTAMP),
        "has_time": fields.column(F.TIMESTAMP, missing=-1) != -1,
        "clock": fields.column(F.CLOCK_ID),
        "sequence": fields.column(F.SEQUENCE),
        "flags": fields.column(F.FLAGS),
        "cleared": fields.column(F.CLEARED_STATE),
        "damaged": fields.damaged,
    }
    spans = {
        "event": F.TRACK_EVENT, "interned": F.INTERNED, "descriptor": F.DESCRIPTOR, "defaults": F.DEFAULTS,
        "snapshot": F.CLOCK_SNAPSHOT, "packed": F.COMPRESSED, "zstd": F.ZSTD_COMPRESSED,
    }  # fmt: skip
    for name, number in spans.items():
        columns[name], columns[f"{name}_end"] = fields.spans(number)
    return columns


def _generations(sequence: Ints, flags: Ints, cleared: Ints) -> tuple[Ints, Flags]:
    """Return the generation of each packet, numbered through the file, and whether the packet is void.

    A packet that needs its sequence's state is void before that was cleared for the first time.
    """
    clears = (flags & F.CLEARED != 0) | (cleared != 0)
    order = np.argsort(sequence, kind="stable")
    first = np.diff(sequence[order], prepend=sequence[order[:1]] - 1) != 0
    counted = np.cumsum(clears[order] | first)
    generation = np.empty(len(sequence), np.int64)
    generation[order] = counted
    begun = np.cumsum(clears[order])
    of_sequence = np.cumsum(first) - 1
    before = (begun - clears[order])[first][of_sequence]
    void = np.zeros(len(sequence), np.bool_)
    void[order] = (begun == before) & (flags[order] & F.NEEDED != 0)
    return generation, void


def texts(packets: Packets, kinds: tuple[int, ...]) -> "dict[int, Interned]":
    """Return the texts that the packets' sequences number, by kind (a field of InternedData)."""
    rows = np.flatnonzero(packets.interned[1] > packets.interned[0])
    outer = wire.fields(packets.data, packets.interned[0][rows], packets.interned[1][rows])
    return {kind: _read_interned(packets, outer, rows, kind) for kind in kinds}


@dataclass(frozen=True, eq=False)
class Interned:
    """Texts by generation and number."""

    keys: Ints
    places: Ints
    texts: list[str]

    def find(self, generation: Ints, number: Ints) -> Ints:
        """Return the place in `texts` of each text, -1 where it was never stated."""
        if not len(self.keys):
            return np.full(len(number), -1, np.int64)
        key = _key(generation, number)
        place = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where((self.keys[place] == key) & (number > 0) & (number < _MOST_NUMBERS), self.places[place], -1)


_MOST_NUMBERS = 1 << 36


def _key(generation: Ints, number: Ints) -> Ints:
    return generation * _MOST_NUMBERS + np.clip(number, 0, _MOST_NUMBERS - 1)


def _read_interned(packets: Packets, outer: wire.Fields, rows: Ints, kind: int) -> Interned:
    entry_rows = outer.where(kind, LENGTH)
    entries = wire.fields(packets.data, outer.value[entry_rows], outer.value[entry_rows] + outer.size[entry_rows])
    begin, end = entries.spans(F.INTERNED_TEXT)
    keys = _key(packets.generation[rows[outer.owner[entry_rows]]], entries.column(F.IID))
    order = np.argsort(keys, kind="stable")
    place_of: dict[str, int] = {}
    places = [place_of.setdefault(text, len(place_of)) for text in strings(packets.data, begin, end)]
    return Interned(keys[order], np.array(places, np.int64)[order], list(place_of))


def strings(data: bytes, begin: Ints, end: Ints) -> Iterator[str]:
    """Yield texts by where they are; what is not UTF-8 becomes '?'."""
    decode = functools.partial(str, encoding="utf-8", errors="replace")
    return (decode(data[a:b]) for a, b in zip(begin.tolist(), end.tolist(), strict=True))


def on_main_clock(
    data: bytes,
    at_ns: Ints,
    clock: Ints,
    *,
    sequence: Ints,
    generation: Ints,
    defaults: tuple[Ints, Ints],
    snapshots: tuple[Ints, Ints],
) -> Ints:
    """Return the times of packets on the main clock. Without a snapshot, all clocks are taken as equal."""
    clock = np.where(clock == 0, _default_clocks(data, generation, defaults), clock)
    rows = np.flatnonzero(snapshots[1] > snapshots[0])
    if not len(rows):
        return at_ns
    readings = _Snapshots(data, rows, *snapshots, sequence)
    at_ns = at_ns.copy()
    scoped = np.flatnonzero((clock >= _FIRST_OWN) & (clock < _PAST_OWN))
    key = _clock_key(clock[scoped], sequence[scoped])
    order = scoped[np.argsort(key, kind="stable")]
    edges = np.flatnonzero(np.diff(np.sort(key), prepend=-1, append=-1))
    for first, past in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        packets = order[first:past]
        at_ns[packets] = readings.own_times(at_ns[packets], packets, int(clock[packets[0]]), int(sequence[packets[0]]))
    is_global = (clock > 0) & (clock < _FIRST_OWN)
    for number in np.unique(clock[is_global]).tolist():
        at_ns[clock == number] = _add_offset(at_ns[clock == number], readings.offset(number))
    return at_ns


def _add_offset(times: Ints, offset_ns: int) -> Ints:
    """Times plus an offset; BEYOND_TIME, which no event can have, where either is."""
    if abs(offset_ns) >= BEYOND_TIME:
        return np.full_like(times, BEYOND_TIME)
    is_time = (times > -BEYOND_TIME) & (times < BEYOND_TIME)
    return np.where(is_time, np.where(is_time, times, 0) + offset_ns, BEYOND_TIME)


def _clock_key(clock: Ints, sequence: Ints) -> Ints:
    return clock * (1 << 32) + np.clip(sequence, 0, (1 << 32) - 1)


def _default_clocks(data: bytes, generation: Ints, defaults: tuple[Ints, Ints]) -> Ints:
    """Clock that the sequence of each packet states as its default; 0 for none."""
    rows = np.flatnonzero(defaults[1] > defaults[0])
    stated = wire.fields(data, defaults[0][rows], defaults[1][rows]).column(F.CLOCK_ID)
    by_generation = np.zeros(int(generation.max(initial=0)) + 1, np.int64)
    by_generation[generation[rows]] = stated
    return by_generation[generation]


class _Snapshots:
    """Clock readings in file order: snapshot, clock, time, unit, and whether times count from the packet before."""

    def __init__(self, data: bytes, rows: Ints, begin: Ints, end: Ints, sequence: Ints) -> None:
        outer = wire.fields(data, begin[rows], end[rows])
        entries = outer.where(_CLOCKS, LENGTH)
        entries = entries[np.argsort(outer.owner[entries], kind="stable")]
        inner = wire.fields(data, outer.value[entries], outer.value[entries] + outer.size[entries])
        self.snapshot = outer.owner[entries]
        self.packet = rows[self.snapshot]
        self.clock = inner.column(_ID)
        self.is_incremental = inner.column(_IS_INCREMENTAL) != 0
        unit = inner.column(_UNIT)
        self.unit_ns = np.where((unit > 0) & (unit <= _MOST_UNIT), unit, 1)
        self.at_ns = inner.column(_TIME) * self.unit_ns
        primary = outer.column(_PRIMARY)
        self.main = int(primary[primary > 0][0]) if (primary > 0).any() else _MAIN
        key = _clock_key(np.clip(self.clock, 0, _PAST_OWN), sequence[self.packet])
        self._by_key = np.argsort(key, kind="stable")
        self._keys = key[self._by_key]
        self._offsets: dict[int, int] = {}

    def offset(self, clock: int) -> int:
        """The offset to add to times of a clock: by the first snapshot that has it and the main one, else 0."""
        if clock not in self._offsets:
            snapshots = self.snapshot[self.clock == clock]
            main = self.snapshot[self.clock == self.main]
            both = np.intersect1d(snapshots, main)
            readings = (self._reading(int(both[0]), number) for number in (self.main, clock)) if len(both) else (0, 0)
            main_ns, own_ns = readings
            self._offsets[clock] = main_ns - own_ns
        return self._offsets[clock]

    def own_times(self, stated: Ints, packets: Ints, clock: int, sequence: int) -> Ints:
        """Return the times of a sequence's packets on the main clock, from times on a clock of its own.

        Without a snapshot of that clock, they are taken as times on the main clock.
        """
        times = stated.copy()
        key = _clock_key(np.array([clock]), np.array([sequence]))[0]
        first, past = np.searchsorted(self._keys, [key, key + 1])
        readings = self._by_key[first:past]
        readings = readings[np.diff(self.snapshot[readings], append=-1) != 0]  # one of each snapshot
        edges = [*np.searchsorted(packets, self.packet[readings]).tolist(), len(packets)]
        for reading, (begin, end) in zip(readings.tolist(), pairwise(edges), strict=True):
            part = stated[begin:end] * self.unit_ns[reading]
            if self.is_incremental[reading]:
                part = np.cumsum(part) + self.at_ns[reading]
            times[begin:end] = _add_offset(part, self._to_main(reading))
        return times

    def _to_main(self, reading: int) -> int:
        """The offset to add to a clock of a sequence: by the clocks that the same snapshot relates it to."""
        clocks = self.clock[slice(*self._range(int(self.snapshot[reading])))]
        references = [self.main, *clocks[(clocks > 0) & (clocks < _FIRST_OWN)][:_FIRST_OWN].tolist()]
        for clock in references:
            if clock in clocks:
                at_ns = self._reading(int(self.snapshot[reading]), clock)
                return at_ns - int(self.at_ns[reading]) + self.offset(clock)
        return 0

    def _reading(self, snapshot: int, clock: int) -> int:
        first, past = self._range(snapshot)
        return int(self.at_ns[first:past][self.clock[first:past] == clock][0])

    def _range(self, snapshot: int) -> tuple[int, int]:
        first, past = np.searchsorted(self.snapshot, [snapshot, snapshot + 1]).tolist()
        return first, past
