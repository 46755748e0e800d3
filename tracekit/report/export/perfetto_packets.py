"""The packets of a Perfetto trace, in the protobuf format of TrackEvent.

Field numbers are those of Perfetto's protos/perfetto/trace: trace_packet, track_event, track_descriptor, interned_data
and debug_annotation.
"""

from collections.abc import Mapping

import numpy as np

from tracekit.report import track_nesting
from tracekit.report.export import protobuf_wire as wire
from tracekit.report.export.protobuf_wire import Ints

BEGIN, END, COUNTER = track_nesting.BEGIN, track_nesting.END, 4  # TrackEvent.Type

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60  # of TracePacket
_CLEARED, _NEEDED = 1, 2  # TracePacket.SequenceFlags
_CATEGORY, _ANNOTATION, _TYPE, _NAME_IID, _TRACK, _VALUE, _FLOW, _LAST_FLOW = 3, 4, 9, 10, 11, 30, 47, 48  # TrackEvent
_ARGUMENT, _BOOL, _INT, _TEXT = 1, 2, 4, 17  # of DebugAnnotation
# Of TrackDescriptor:
_UUID, _NAME, _PROCESS, _PARENT, _COUNTER_KIND, _ORDERING, _PLACE, _MERGING = 1, 2, 3, 5, 8, 11, 12, 15
_PID, _PROCESS_NAME = 1, 6  # of ProcessDescriptor
_UNIT, _BYTES = 3, 3  # CounterDescriptor.Unit
_BY_PLACE, _NEVER = 3, 2  # ChildTracksOrdering, SiblingMergeBehavior
_CATEGORIES, _NAMES, _ARGUMENTS, _TEXTS = 1, 2, 3, 29  # of InternedData
_IID, _INTERNED_TEXT = 1, 2

_FLOW_BYTES = len(wire.fixed64_placeholder(_FLOW))


def process(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet of a process track, whose tracks stand in the order of their places."""
    described = wire.block(_PROCESS, wire.integer(_PID, pid), wire.text(_PROCESS_NAME, name))
    return _descriptor(uuid, described, wire.integer(_ORDERING, _BY_PLACE))


def track(uuid: int, parent: int, name: str, place: int, *, counts_bytes: bool = False) -> bytes:
    """Return the packet of a track of slices, or of a counter of bytes, that is never drawn as one with another."""
    kind = wire.block(_COUNTER_KIND, wire.integer(_UNIT, _BYTES)) if counts_bytes else b""
    ordered = wire.integer(_PLACE, place) + wire.integer(_MERGING, _NEVER)
    return _descriptor(uuid, wire.integer(_PARENT, parent), wire.text(_NAME, name), kind, ordered)


def _descriptor(uuid: int, *fields: bytes) -> bytes:
    return wire.block(_PACKET, wire.block(_DESCRIPTOR, wire.integer(_UUID, uuid), *fields))


class InternedTexts:
    """The texts of one sequence of packets, each written once and named by a number from then on."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {kind: {} for kind in (_CATEGORIES, _NAMES, _ARGUMENTS, _TEXTS)}

    def number(self, kind: int, text: str) -> int:
        """Return the number of a text among those of its kind, a field of InternedData."""
        known = self._known[kind]
        return known.setdefault(text, len(known) + 1)

    def packet(self, sequence: int) -> bytes:
        """Return the packet with which the sequence begins: all texts numbered so far."""
        entries = (
            wire.block(kind, wire.integer(_IID, number), wire.text(_INTERNED_TEXT, text))
            for kind, numbers in self._known.items()
            for text, number in numbers.items()
        )
        flags = wire.integer(_FLAGS, _CLEARED)
        return wire.block(_PACKET, wire.integer(_SEQUENCE, sequence), flags, wire.block(_INTERNED, *entries))


def begin(uuid: int, name: str, category: str, arguments: Mapping[str, object], texts: InternedTexts) -> bytes:
    """Return the fields of an event that begins a slice; arguments that are None are left out."""
    category_field = wire.integer(_CATEGORY, texts.number(_CATEGORIES, category))
    name_field = wire.integer(_NAME_IID, texts.number(_NAMES, name))
    rest = [_argument(key, value, texts) for key, value in arguments.items() if value is not None]
    return b"".join((wire.integer(_TYPE, BEGIN), wire.integer(_TRACK, uuid), category_field, name_field, *rest))


def end(uuid: int) -> bytes:
    """Return the fields of an event that ends the slice that began last on its track."""
    return wire.integer(_TYPE, END) + wire.integer(_TRACK, uuid)


def value(uuid: int) -> bytes:
    """Return the fields of a counter's event, with a placeholder for its value."""
    return wire.integer(_TYPE, COUNTER) + wire.integer(_TRACK, uuid) + wire.varint_placeholder(_VALUE)


def _argument(key: str, argument: object, texts: InternedTexts) -> bytes:
    if isinstance(argument, bool):
        field = wire.integer(_BOOL, argument)
    elif isinstance(argument, int):
        field = wire.integer(_INT, argument)
    else:
        field = wire.integer(_TEXT, texts.number(_TEXTS, str(argument)))
    return wire.block(_ANNOTATION, wire.integer(_ARGUMENT, texts.number(_ARGUMENTS, key)), field)


class PacketTemplates:
    """Packets of events that differ only in times, counter values and flows: encoded once, then copied."""

    def __init__(self, sequence: int) -> None:
        self._head = wire.integer(_SEQUENCE, sequence) + wire.integer(_FLAGS, _NEEDED)
        self._packets: list[bytes] = []
        self._time_at: list[int] = []

    def add(self, event: bytes, *, flows: int = 0, last_flows: int = 0) -> None:
        """Add the template of an event with so many outgoing and ending flows. Templates are numbered from 0."""
        gaps = wire.fixed64_placeholder(_FLOW) * flows + wire.fixed64_placeholder(_LAST_FLOW) * last_flows
        content = wire.varint_placeholder(_TIMESTAMP) + self._head + wire.block(_TRACK_EVENT, event, gaps)
        packet = wire.block(_PACKET, content)
        self._packets.append(packet)
        self._time_at.append(len(packet) - len(content) + 1)

    def fill(
        self,
        which: Ints,
        at_ns: Ints,
        *,
        values: Ints | None = None,
        flows: tuple[Ints, Ints, Ints] | None = None,
    ) -> bytes:
        """Return copies of templates, ``which[i]`` at the time ``at_ns[i]``, one after the other.

        `values` holds the values of counters. `flows` says of each flow which copy it is of (its index in `which`),
        how many flows of that copy come after it, and its number, not negative.
        """
        if not len(which):
            return b""
        everywhere = np.arange(len(which))
        length = np.array([len(packet) for packet in self._packets], np.int64)
        fillings = [(everywhere, np.array(self._time_at, np.int64)[which], wire.wide_varints(at_ns))]
        if values is not None:
            fillings.append((everywhere, length[which] - wire.WIDE, wire.wide_varints(values)))
        if flows is not None:
            copies, after, numbers = flows
            ends = length[which[copies]] - _FLOW_BYTES * after
            fillings.append((copies, ends - wire.FIXED, wire.fixed64s(numbers)))
        return wire.fill_templates(self._packets, which, fillings)
