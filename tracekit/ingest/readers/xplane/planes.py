"""The planes of an XPlane profile: named lines of events with statistics, decoded as columns.

Format: xplane.proto of github.com/openxla/xla (third_party/tsl/tsl/profiler/protobuf). A line begins at timestamp_ns,
since 1970; its events are offset from it in ps. Names of events and statistics are stated once, with an id.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.normalize import numbers
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.wire import LENGTH, VARINT, Fields, Ints

MAX_BYTES = 2 << 30
_PLANES = 1
_NAME, _LINES, _EVENT_NAMES, _STAT_NAMES = 2, 3, 4, 5  # of a plane
_KEY, _VALUE = 1, 2  # of an entry of a map
_LINE_ID, _LINE_NAME, _TIMESTAMP_NS, _EVENTS, _DISPLAY_NAME = 1, 2, 3, 4, 11
_METADATA_ID, _OFFSET_PS, _DURATION_PS, _STATS, _OCCURRENCES = 1, 2, 3, 4, 5
_STAT_ID, _UNSIGNED, _SIGNED, _TEXT, _REFERENCE = 1, 3, 4, 5, 7
_MOST_NAME = 4096
_PS_PER_NS = 1000

Stat: TypeAlias = int | str
_Span: TypeAlias = tuple[int, int]


@dataclass(frozen=True)
class Event:
    """An event of a line; times in ns, the start since 1970."""

    name: str
    start_ns: int
    dur_ns: int
    stats: Mapping[str, Stat]


@dataclass(frozen=True)
class Line:
    """A thread of a host, or a stream or summary of a device."""

    id: int
    name: str
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Plane:
    """A host or device, such as "/device:TPU:0"; `lines` are decoded by `read_lines`."""

    name: str
    _data: bytes
    _fields: Fields
    _names: Mapping[int, str]
    _stat_names: Mapping[int, str]

    def read_lines(self, wanted: frozenset[str]) -> Iterator[Line]:
        """Yield the lines, with those statistics of their events that are wanted."""
        rows = self._fields.where(_LINES, LENGTH)
        starts, sizes = self._fields.value[rows], self._fields.size[rows]
        lines = wire.fields(self._data, starts, starts + sizes)
        names = zip(_texts(self._data, lines, _DISPLAY_NAME), _texts(self._data, lines, _LINE_NAME), strict=True)
        ids, bases = lines.column(_LINE_ID).tolist(), lines.column(_TIMESTAMP_NS).tolist()
        events = lines.where(_EVENTS, LENGTH)
        for place, (display_name, name) in enumerate(names):
            of_line = events[lines.owner[events] == place]
            begin = lines.value[of_line]
            read = self._events(begin, begin + lines.size[of_line], bases[place], wanted)
            yield Line(ids[place], display_name or name, tuple(read))

    def _events(self, begin: Ints, end: Ints, base_ns: int, wanted: frozenset[str]) -> Iterator[Event]:
        fields = wire.fields(self._data, begin, end)
        stats = self._stats(fields, wanted)
        is_sum = np.zeros(len(begin), np.bool_)  # of many events, without a time
        is_sum[fields.owner[fields.where(_OCCURRENCES, VARINT)]] = True
        columns = (fields.column(number).tolist() for number in (_METADATA_ID, _OFFSET_PS, _DURATION_PS))
        for place, (name, offset_ps, dur_ps) in enumerate(zip(*columns, strict=True)):
            start_ns = base_ns + offset_ps // _PS_PER_NS
            end_ns = base_ns + (offset_ps + dur_ps) // _PS_PER_NS
            if is_sum[place] or dur_ps < 0 or not abs(start_ns) < numbers.MOST_NS > abs(end_ns):
                continue
            yield Event(self._names.get(name, f"event {name}"), start_ns, end_ns - start_ns, stats.get(place, {}))

    def _stats(self, events: Fields, wanted: frozenset[str]) -> dict[int, dict[str, Stat]]:
        """The wanted statistics of events, by the place of the event."""
        ids = {number: name for number, name in self._stat_names.items() if name in wanted}
        rows = events.where(_STATS, LENGTH)
        if not ids or not len(rows):
            return {}
        fields = wire.fields(self._data, events.value[rows], events.value[rows] + events.size[rows])
        kinds = fields.column(_STAT_ID)
        chosen = np.flatnonzero(np.isin(kinds, list(ids)))
        unsigned, signed, reference = (fields.column(n) for n in (_UNSIGNED, _SIGNED, _REFERENCE))
        text_begin, text_end = fields.spans(_TEXT)
        owners = events.owner[rows]
        by_event: dict[int, dict[str, Stat]] = {}
        for place in chosen.tolist():
            value: Stat = int(unsigned[place] or signed[place])
            if text_end[place] > text_begin[place]:
                value = _text(self._data, (int(text_begin[place]), int(text_end[place])))
            elif reference[place]:
                value = self._stat_names.get(int(reference[place]), "")
            by_event.setdefault(int(owners[place]), {})[ids[int(kinds[place])]] = value
        return by_event


def read(path: str) -> tuple[list[Plane], str]:
    """Return the planes of a file, and why it was not read to its end; "" if it was.

    Raises BadTraceError if it is no file, or too large.
    """
    blocks = Blocks(path)
    content = bytearray()
    for block in blocks:
        content += block
        if len(content) > MAX_BYTES:
            raise BadTraceError(f"{path}: more than {MAX_BYTES >> 30} GiB (decompressed); record fewer steps")
    size = len(content)
    data = bytes(content) + bytes(wire.PADDING)
    starts, ends, read_bytes = wire.split(data, _PLANES, size, budget=blocks.budget)
    problem = blocks.broken or (f"it ends early or is damaged after {read_bytes:,} bytes" if read_bytes < size else "")
    planes = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        fields = wire.fields(data, np.array([start]), np.array([end]))
        blocks.budget.build(len(fields.tag))
        name = next(iter(_texts(data, fields, _NAME)), "")
        names = _map_names(data, fields, _EVENT_NAMES)
        planes.append(Plane(name, data, fields, names, _map_names(data, fields, _STAT_NAMES)))
    return planes, problem


def _map_names(data: bytes, plane: Fields, number: int) -> dict[int, str]:
    """The names in a map from ids to metadata, whose second field is the name."""
    rows = plane.where(number, LENGTH)
    entries = wire.fields(data, plane.value[rows], plane.value[rows] + plane.size[rows])
    described = wire.fields(data, *entries.spans(_VALUE))
    return dict(zip(entries.column(_KEY).tolist(), _texts(data, described, _NAME), strict=True))


def _texts(data: bytes, fields: Fields, number: int) -> list[str]:
    begin, end = fields.spans(number)
    return [_text(data, span) for span in zip(begin.tolist(), end.tolist(), strict=True)]


def _text(data: bytes, span: _Span) -> str:
    return data[span[0] : min(span[1], span[0] + _MOST_NAME)].decode("utf-8", "replace")
