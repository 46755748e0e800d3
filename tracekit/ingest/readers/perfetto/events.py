"""The events of Perfetto's tracks as columns: slices, moments, counters, and the arguments of each."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.perfetto import packets as packet_columns
from tracekit.ingest.readers.perfetto import wire
from tracekit.ingest.readers.perfetto.packets import BEYOND_TIME, Interned, Packets
from tracekit.ingest.readers.perfetto.wire import FIXED64, LENGTH, VARINT, Flags, Ints

_OPEN = -1
_MOST_INTEGER = 1 << 53  # in a list


@dataclass(frozen=True, eq=False)
class Events:
    """Events in file order, columns of shape (n,).

    `name` and `category` (the first of several) are places in `names` and `categories`, -1 for none. `packet` is the
    row of the event's packet. `fields` are those of the events, for arguments and flows. `void` counts events that
    refer to what their sequence has not stated, or have no usable time. `dur_ns` is that of a complete event of Chrome,
    which is a slice by itself, else -1.
    """

    packets: Packets
    packet: Ints
    kind: Ints
    track: Ints
    at_ns: Ints
    dur_ns: Ints
    name: Ints
    category: Ints
    names: list[str]
    categories: list[str]
    fields: wire.Fields
    argument_names: Interned
    texts: Interned
    void: int


def of_packets(packets: Packets) -> Events:
    """Return the events of packets; those without state or time are counted and left out."""
    has_event = packets.event[1] > packets.event[0]
    usable = has_event & ~packets.void & packets.has_time & (packets.at_ns >= 0) & (packets.at_ns < BEYOND_TIME)
    rows = np.flatnonzero(usable)
    fields = wire.fields(packets.data, packets.event[0][rows], packets.event[1][rows])
    kinds = (F.CATEGORIES, F.NAMES, F.ARGUMENT_NAMES, F.TEXTS)
    interned = packet_columns.texts(packets, kinds)
    generation = packets.generation[rows]
    names, name = _texts(packets, fields, generation, interned[F.NAMES], F.NAME_IID, F.NAME)
    categories, category = _texts(packets, fields, generation, interned[F.CATEGORIES], F.CATEGORY_IID, F.CATEGORY)
    stated = fields.column(F.TRACK, missing=-1)
    track = np.where(stated == -1, _default_tracks(packets)[generation], stated)
    kind, dur_ns = _kinds(packets.data, fields)
    return Events(
        packets,
        rows,
        kind,
        track,
        packets.at_ns[rows],
        dur_ns,
        name,
        category,
        names,
        categories,
        fields,
        interned[F.ARGUMENT_NAMES],
        interned[F.TEXTS],
        int(np.count_nonzero(has_event) - len(rows)),
    )


_PHASES = {"B": F.BEGIN, "E": F.END, "X": F.BEGIN, "i": F.INSTANT, "I": F.INSTANT}
_MOST_DUR_US = 1 << 52


def _kinds(data: bytes, fields: wire.Fields) -> tuple[Ints, Ints]:
    """Return the types of events and the durations of complete ones; events of Chrome state a phase in place of it."""
    legacy = wire.fields(data, *fields.spans(F.LEGACY))
    phase, dur_us = legacy.column(F.PHASE), legacy.column(F.DURATION_US)
    stated = fields.column(F.TYPE)
    kind = stated.copy()
    for letter, event_type in _PHASES.items():
        kind[(stated == 0) & (phase == ord(letter))] = event_type
    is_complete = (stated == 0) & (phase == ord("X")) & (dur_us >= 0) & (dur_us < _MOST_DUR_US)
    return kind, np.where(is_complete, dur_us * 1000, _OPEN)


def _texts(
    packets: Packets, fields: wire.Fields, generation: Ints, interned: Interned, by_number: int, in_place: int
) -> tuple[list[str], Ints]:
    """Return texts, and the place of each event's: the first that it states by number, else in place, else -1."""
    rows = fields.where(by_number, VARINT)[::-1]
    place = np.full(len(fields.damaged), -1, np.int64)
    owner = fields.owner[rows]
    place[owner] = interned.find(generation[owner], fields.value[rows])
    texts = list(interned.texts)
    places = {text: i for i, text in enumerate(texts)}
    rows = fields.where(in_place, LENGTH)[::-1]
    stated = packet_columns.strings(packets.data, fields.value[rows], fields.value[rows] + fields.size[rows])
    for event, text in zip(fields.owner[rows].tolist(), stated, strict=True):
        if place[event] < 0:
            place[event] = places.setdefault(text, len(places))
    return list(places), place


def _default_tracks(packets: Packets) -> Ints:
    """Track of events that state none, by generation; 0 where there is none."""
    rows = np.flatnonzero(packets.defaults[1] > packets.defaults[0])
    outer = wire.fields(packets.data, packets.defaults[0][rows], packets.defaults[1][rows])
    begin, end = outer.spans(F.TRACK_EVENT)
    tracks = np.zeros(int(packets.generation.max(initial=0)) + 1, np.int64)
    tracks[packets.generation[rows]] = wire.fields(packets.data, begin, end).column(F.TRACK)
    return tracks


# Slices --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Slices:
    """Slices: the event that begins each, and its duration; how many begins and ends have no other half."""

    event: Ints
    dur_ns: Ints
    unfinished: int
    stray_ends: int


def slices(events: Events) -> Slices:
    """Return the slices of all tracks: an end ends the slice that began last on its track.

    Events of a track are in order of time, at one time in order of the file. A complete event is a slice by itself.
    """
    complete = np.flatnonzero(events.dur_ns != _OPEN)
    rows = np.flatnonzero(((events.kind == F.BEGIN) | (events.kind == F.END)) & (events.dur_ns == _OPEN))
    rows = rows[np.lexsort((events.at_ns[rows], events.track[rows]))]
    begins = events.kind[rows] == F.BEGIN
    group = np.cumsum(np.diff(events.track[rows], prepend=0) != 0)
    stray = _stray_ends(group, begins)
    rows, begins, group = rows[~stray], begins[~stray], group[~stray]
    depth = _running_depth(group, begins)
    level = depth - begins  # of a slice: how many were open before it
    order = np.lexsort((level, group))
    first, second = order[:-1], order[1:]
    paired = begins[first] & ~begins[second] & (level[first] == level[second]) & (group[first] == group[second])
    begin, end = rows[first[paired]], rows[second[paired]]
    return Slices(
        np.concatenate((begin, complete)),
        np.concatenate((events.at_ns[end] - events.at_ns[begin], events.dur_ns[complete])),
        int(begins.sum()) - len(begin),
        int(stray.sum()),
    )


def _running_depth(group: Ints, begins: Flags) -> Ints:
    """Number of slices of the group that are open after each event."""
    total = np.cumsum(np.where(begins, 1, -1))
    first = np.flatnonzero(np.diff(group, prepend=-1))
    before = np.concatenate(([0], total[first[1:] - 1])) if len(first) else np.empty(0, np.int64)
    depth: Ints = total - np.repeat(before, np.diff(first, append=len(group)))
    return depth


def _stray_ends(group: Ints, begins: Flags) -> Flags:
    """Flag ends of groups in which no slice is open."""
    depth = _running_depth(group, begins)
    # Groups lie far apart: the lowest depth so far is that of the own group.
    shifted = depth - group * (len(group) + 1) * 2
    lowest = np.minimum.accumulate(np.minimum(shifted, -group * (len(group) + 1) * 2)) if len(group) else shifted
    before = np.concatenate((lowest[:1] * 0 + 1, lowest[:-1])) if len(group) else lowest
    new_group = np.diff(group, prepend=-1) != 0
    floor = np.where(new_group, -group * (len(group) + 1) * 2, before)
    return ~begins & (shifted < floor)


# Arguments -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Arguments:
    """Arguments of events, one a row: the event, the name (a place in `names`, -1 if not known), and the value.

    `field` is the field of DebugAnnotation that states the value: `value` is an integer, the bits of a double, or the
    place of a text in `texts`. `annotation` is where the whole argument begins and ends, for nested ones.
    """

    event: Ints
    name: Ints
    field: Ints
    value: Ints
    annotation: tuple[Ints, Ints]
    names: list[str]
    texts: list[str]

    def column(self, name: str, dtype: pl.DataType, place: Ints, count: int) -> pl.Series:
        """Return the argument of this name of `count` rows, the event e being row ``place[e]``; -1: not among them.

        A value of another type than the column's is null.
        """
        if name not in self.names:
            return pl.Series(name, [None] * count, dtype)
        rows = np.flatnonzero((self.name == self.names.index(name)) & (place[self.event] >= 0))
        return self.of_rows(name, dtype, rows, place, count)

    def of_rows(self, name: str, dtype: pl.DataType, rows: Ints, place: Ints, count: int) -> pl.Series:
        """Return a column as `column` does, of these rows of arguments."""
        fitting = rows[np.isin(self.field[rows], _FIELDS[dtype.base_type()])]
        values = self.value[fitting]
        if dtype == pl.String or dtype.base_type() is pl.List:
            column = pl.Series(self.texts, dtype=pl.String).gather(values)
            if dtype.base_type() is pl.List:
                column = pl.Series([_integers(text) for text in column], dtype=dtype, strict=True)
        elif dtype == pl.Float64:
            column = pl.Series(np.where(self.field[fitting] == F.DOUBLE, values.view(np.float64), values))
        else:
            column = pl.Series(values).cast(dtype)
        where = np.full(count, -1, np.int64)
        where[place[self.event[fitting]]] = np.arange(len(fitting))
        indices = pl.Series(where)
        return column.gather(pl.select(pl.when(indices >= 0).then(indices)).to_series()).alias(name).cast(dtype)


_WHOLE = [F.UINT, F.INT, F.POINTER]
_TEXTS = [F.TEXT, F.TEXT_IID, F.JSON]
_FIELDS = {pl.Int64: _WHOLE, pl.Boolean: [F.BOOL], pl.Float64: [F.DOUBLE, *_WHOLE], pl.String: _TEXTS, pl.List: _TEXTS}


def _integers(text: str) -> list[int] | None:
    """A list of integers that a text states as JSON; None for another text."""
    try:
        numbers = untrusted_json.parse(text)
    except ValueError:
        return None
    is_valid = isinstance(numbers, list) and all(type(n) is int and abs(n) < _MOST_INTEGER for n in numbers)
    return numbers if is_valid else None


def arguments(events: Events, selected: Flags) -> Arguments:
    """Return the arguments of the chosen events."""
    data, generation = events.packets.data, events.packets.generation[events.packet]
    rows = events.fields.where(F.ANNOTATION, LENGTH)
    rows = rows[selected[events.fields.owner[rows]]]
    owner, begin = events.fields.owner[rows], events.fields.value[rows]
    end = begin + events.fields.size[rows]
    fields = wire.fields(data, begin, end)
    names, name = _texts(
        events.packets, fields, generation[owner], events.argument_names, F.ARGUMENT_IID, F.ARGUMENT_NAME
    )
    texts, text = _texts(events.packets, fields, generation[owner], events.texts, F.TEXT_IID, F.TEXT)
    field, value = np.zeros((2, len(owner)), np.int64)
    for number, kind in [(F.DOUBLE, FIXED64), *((n, VARINT) for n in (F.BOOL, F.UINT, F.INT, F.POINTER))]:
        matching = fields.where(number, kind)
        field[fields.owner[matching]], value[fields.owner[matching]] = number, fields.value[matching]
    field[text >= 0], value[text >= 0] = F.TEXT, text[text >= 0]
    for number in (F.DICT, F.ARRAY, F.JSON):
        field[fields.owner[fields.where(number, LENGTH)]] = number
    return Arguments(owner, name, field, value, (begin, end), names, texts)


def flows(events: Events, numbers: Sequence[tuple[int, int]]) -> tuple[Ints, Ints]:
    """Return events and the flows that they state in fields of these numbers and wire types."""
    rows = np.concatenate([events.fields.where(number, kind) for number, kind in numbers])
    return events.fields.owner[rows], events.fields.value[rows]


def issues(events: Events, slices: Slices) -> Iterator[tuple[str, str, float]]:
    """Yield the kind, message and affected share of each issue."""
    packets = events.packets
    if packets.broken or packets.read_bytes < packets.total_bytes:
        why = packets.broken or f"{packets.read_bytes:,} of {packets.total_bytes:,} bytes can be read"
        lost = 1 - packets.read_bytes / max(packets.total_bytes, 1)
        yield "truncated", f"The Perfetto file is damaged or truncated: {why}.", lost
    lost_events = events.void + packets.damaged
    if lost_events:
        share = lost_events / max(len(events.kind) + lost_events, 1)
        message = f"{lost_events:,} events of the Perfetto file cannot be read or lack their state and were left out."
        yield "damaged_events", message, share
    unmatched = slices.unfinished + slices.stray_ends
    if unmatched:
        message = f"{unmatched:,} begin or end events lack their counterpart and were ignored."
        yield "unmatched_pairs", message, unmatched / max(len(events.kind), 1)
