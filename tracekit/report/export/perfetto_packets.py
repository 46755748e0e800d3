"""The packets of a Perfetto trace, in the protobuf format of TrackEvent.

Field numbers are those of Perfetto's protos/perfetto/trace: trace_packet, track_event, track_descriptor, interned_data
and debug_annotation.
"""

from collections.abc import Mapping

import numpy as np

from tracekit.report import track_nesting
from tracekit.report.export import protobuf_wire
from tracekit.report.export.protobuf_wire import Ints

BEGIN, END, COUNTER = track_nesting.BEGIN, track_nesting.END, 4  # TrackEvent.Type

_PACKET = 1  # of Trace
_TIMESTAMP, _SEQUENCE, _TRACK_EVENT, _INTERNED, _FLAGS, _DESCRIPTOR = 8, 10, 11, 12, 13, 60  # of TracePacket
_CLEARED, _NEEDED = 1, 2  # TracePacket.SequenceFlags
_CATEGORY, _ANNOTATION, _TYPE, _NAME_IID, _TRACK, _VALUE, _FLOW, _LAST_FLOW = 3, 4, 9, 10, 11, 30, 47, 48  # TrackEvent
_ARGUMENT, _BOOL, _INT, _TEXT = 1, 2, 4, 17  # of DebugAnnotation
_UUID, _NAME, _PROCESS, _PARENT, _COUNTER_KIND, _ORDERING, _PLACE, _MERGING = (
    1,
    2,
    3,
    5,
    8,
    11,
    12,
    15,
)  # TrackDescriptor
_PID, _PROCESS_NAME = 1, 6  # of ProcessDescriptor
_UNIT, _BYTES = 3, 3  # CounterDescriptor.Unit
_BY_PLACE, _NEVER = 3, 2  # ChildTracksOrdering, SiblingMergeBehavior
_CATEGORIES, _NAMES, _ARGUMENTS, _TEXTS = 1, 2, 3, 29  # of InternedData
_IID, _INTERNED_TEXT = 1, 2

_FLOW_BYTES = len(protobuf_wire.fixed64_placeholder(_FLOW))


def process(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet of a process track, whose tracks stand in the order of their places."""
    described = protobuf_wire.block(_PROCESS, protobuf_wire.integer(_PID, pid), protobuf_wire.text(_PROCESS_NAME, name))
    return _descriptor(uuid, described, protobuf_wire.integer(_ORDERING, _BY_PLACE))


def track(uuid: int, parent: int, name: str, place: int, *, counts_bytes: bool = False) -> bytes:
    """Return the packet of a track of slices, or of a counter of bytes, that is never drawn as one with another."""
    kind = protobuf_wire.block(_COUNTER_KIND, protobuf_wire.integer(_UNIT, _BYTES)) if counts_bytes else b""
    ordered = protobuf_wire.integer(_PLACE, place) + protobuf_wire.integer(_MERGING, _NEVER)
    return _descriptor(uuid, protobuf_wire.integer(_PARENT, parent), protobuf_wire.text(_NAME, name), kind, ordered)


def _descriptor(uuid: int, *fields: bytes) -> bytes:
    return protobuf_wire.block(_PACKET, protobuf_wire.block(_DESCRIPTOR, protobuf_wire.integer(_UUID, uuid), *fields))


class InternedTexts:
    """The texts of one sequence of packets, each written once and named by a number from then on."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {kind: {} for kind in (_CATEGORIES, _NAMES, _ARGUMENTS, _TEXTS)}

    def category(self, text: str) -> int:
        """Return the number of a category."""
        return self._number(_CATEGORIES, text)

    def name(self, text: str) -> int:
        """Return the number of the name of a slice."""
        return self._number(_NAMES, text)

    def argument(self, text: str) -> int:
        """Return the number of the name of an argument."""
        return self._number(_ARGUMENTS, text)

    def text(self, text: str) -> int:
        """Return the number of the text that an argument holds."""
        return self._number(_TEXTS, text)

    def packet(self, sequence: int) -> bytes:
        """Return the packet with which the sequence begins: all texts numbered so far."""
        entries = (
            protobuf_wire.block(kind, protobuf_wire.integer(_IID, number), protobuf_wire.text(_INTERNED_TEXT, text))
            for kind, numbers in self._known.items()
            for text, number in numbers.items()
        )
        flags = protobuf_wire.integer(_FLAGS, _CLEARED)
        return protobuf_wire.block(
            _PACKET, protobuf_wire.integer(_SEQUENCE, sequence), flags, protobuf_wire.block(_INTERNED, *entries)
        )

    def _number(self, kind: int, text: str) -> int:
        known = self._known[kind]
        return known.setdefault(text, len(known) + 1)


def begin(uuid: int, name: str, category: str, arguments: Mapping[str, object], texts: InternedTexts) -> bytes:
    """Return the fields of an event that begins a slice; arguments that are None are left out."""
    head = protobuf_wire.integer(_TYPE, BEGIN) + protobuf_wire.integer(_TRACK, uuid)
    named = protobuf_wire.integer(_CATEGORY, texts.category(category)) + protobuf_wire.integer(
        _NAME_IID, texts.name(name)
    )
    return (
        head + named + b"".join(_argument(key, value, texts) for key, value in arguments.items() if value is not None)
    )


def end(uuid: int) -> bytes:
    """Return the fields of an event that ends the slice that began last on its track."""
    return protobuf_wire.integer(_TYPE, END) + protobuf_wire.integer(_TRACK, uuid)


def value(uuid: int) -> bytes:
    """Return the fields of a counter's event, with a placeholder for its value."""
    return (
        protobuf_wire.integer(_TYPE, COUNTER)
        + protobuf_wire.integer(_TRACK, uuid)
        + protobuf_wire.varint_placeholder(_VALUE)
    )


def _argument(key: str, argument: object, texts: InternedTexts) -> bytes:
    if isinstance(argument, bool):
        field = protobuf_wire.integer(_BOOL, argument)
    elif isinstance(argument, int):
        field = protobuf_wire.integer(_INT, argument)
    else:
        field = protobuf_wire.integer(_TEXT, texts.text(str(argument)))
    return protobuf_wire.block(_ANNOTATION, protobuf_wire.integer(_ARGUMENT, texts.argument(key)), field)


class PacketTemplates:
    """Packets of events that differ only in times, counter values and flows: encoded once, then copied."""

    def __init__(self, sequence: int) -> None:
        self._head = protobuf_wire.integer(_SEQUENCE, sequence) + protobuf_wire.integer(_FLAGS, _NEEDED)
        self._packets: list[bytes] = []
        self._time_at: list[int] = []

    def add(self, event: bytes, *, flows: int = 0, last_flows: int = 0) -> int:
        """Return the number of the template of an event with so many outgoing and ending flows."""
        gaps = (
            protobuf_wire.fixed64_placeholder(_FLOW) * flows
            + protobuf_wire.fixed64_placeholder(_LAST_FLOW) * last_flows
        )
        content = (
            protobuf_wire.varint_placeholder(_TIMESTAMP) + self._head + protobuf_wire.block(_TRACK_EVENT, event, gaps)
        )
        packet = protobuf_wire.block(_PACKET, content)
        self._packets.append(packet)
        self._time_at.append(len(packet) - len(content) + 1)
        return len(self._packets) - 1

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
        fillings = [(everywhere, np.array(self._time_at, np.int64)[which], protobuf_wire.wide_varints(at_ns))]
        if values is not None:
            fillings.append((everywhere, length[which] - protobuf_wire.WIDE, protobuf_wire.wide_varints(values)))
        if flows is not None:
            copies, after, numbers = flows
            fillings.append(
                (
                    copies,
                    length[which[copies]] - _FLOW_BYTES * after - protobuf_wire.FIXED,
                    protobuf_wire.fixed64s(numbers),
                )
            )
        return protobuf_wire.fill_templates(self._packets, which, fillings)
