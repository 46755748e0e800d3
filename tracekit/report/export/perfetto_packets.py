"""The packets of a Perfetto trace, in the protobuf format of TrackEvent."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)
from tracekit.report.export import protobuf_wire as wire
from tracekit.report.export.protobuf_wire import Bytes, Floats, Ints

_FLOW_BYTES = len(wire.fixed64_placeholder(F.FLOW))


def process(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet of a process track, whose tracks stand in the order of their places."""
    described = wire.block(F.PROCESS, wire.integer(F.PID, pid), wire.text(F.PROCESS_NAME, name))
    return _descriptor(uuid, described, wire.integer(F.ORDERING, F.BY_PLACE))


def track(uuid: int, parent: int, name: str, place: int, *, counts_bytes: bool = False) -> bytes:
    """Return the packet of a track of slices, or of a counter of bytes, that is never drawn as one with another."""
    kind = wire.block(F.COUNTER_KIND, wire.integer(F.UNIT, F.BYTES)) if counts_bytes else b""
    ordered = wire.integer(F.PLACE, place) + wire.integer(F.MERGING, F.NEVER)
    return _descriptor(uuid, wire.integer(F.PARENT, parent), wire.text(F.TRACK_NAME, name), kind, ordered)


def _descriptor(uuid: int, *fields: bytes) -> bytes:
    return wire.block(F.PACKET, wire.block(F.DESCRIPTOR, wire.integer(F.UUID, uuid), *fields))


class InternedTexts:
    """The texts of one sequence of packets, each written once and named by a number from then on."""

    def __init__(self) -> None:
        self._known: dict[int, dict[str, int]] = {
            kind: {} for kind in (F.CATEGORIES, F.NAMES, F.ARGUMENT_NAMES, F.TEXTS)
        }

    def number(self, kind: int, text: str) -> int:
        """Return the number of a text among those of its kind, a field of InternedData."""
        numbers = self._known[kind]
        return numbers.setdefault(text, len(numbers) + 1)

    def packet(self, sequence: int) -> bytes:
        """Return the packet with which the sequence begins: all texts numbered so far."""
        entries = (
            wire.block(kind, wire.integer(F.IID, number), wire.text(F.INTERNED_TEXT, text))
            for kind, numbers in self._known.items()
            for text, number in numbers.items()
        )
        flags = wire.integer(F.FLAGS, F.CLEARED)
        return wire.block(F.PACKET, wire.integer(F.SEQUENCE, sequence), flags, wire.block(F.INTERNED, *entries))


@dataclass(frozen=True)
class Placeholder:
    """An argument with a number that is filled in later: a double, or an integer of so many bytes."""

    width: int
    is_double: bool = False

    def field(self) -> bytes:
        """Return the field of the number: its tag and zeros."""
        return wire.fixed64_placeholder(F.DOUBLE) if self.is_double else wire.varint_placeholder(F.INT, self.width)

    def encode(self, values: Ints | Floats) -> Bytes:
        """Return numbers as they are filled in, shape (n, width)."""
        return wire.fixed64s(values) if self.is_double else wire.wide_varints(values.astype(np.int64), self.width)


def begin(
    uuid: int, name: str, category: str, arguments: Mapping[str, object], texts: InternedTexts, *, kind: int = F.BEGIN
) -> bytes:
    """Return the fields of an event that begins a slice, or of another kind; arguments that are None are left out.

    Placeholders must be the last arguments.
    """
    category_field = wire.integer(F.CATEGORY_IID, texts.number(F.CATEGORIES, category))
    name_field = wire.integer(F.NAME_IID, texts.number(F.NAMES, name))
    rest = [argument(key, value, texts) for key, value in arguments.items() if value is not None]
    return b"".join((wire.integer(F.TYPE, kind), wire.integer(F.TRACK, uuid), category_field, name_field, *rest))


def end(uuid: int) -> bytes:
    """Return the fields of an event that ends the slice that began last on its track."""
    return wire.integer(F.TYPE, F.END) + wire.integer(F.TRACK, uuid)


def value(uuid: int) -> bytes:
    """Return the fields of a counter's event, with a placeholder for its value."""
    return wire.integer(F.TYPE, F.COUNTER) + wire.integer(F.TRACK, uuid) + wire.varint_placeholder(F.VALUE)


def argument(key: str, content: object, texts: InternedTexts) -> bytes:
    """Return the field of an argument of an event: a bool, an int, a placeholder, or text."""
    if isinstance(content, Placeholder):
        field = content.field()
    elif isinstance(content, bool):
        field = wire.integer(F.BOOL, content)
    elif isinstance(content, int):
        field = wire.integer(F.INT, content)
    else:
        field = wire.integer(F.TEXT_IID, texts.number(F.TEXTS, str(content)))
    return wire.block(F.ANNOTATION, wire.integer(F.ARGUMENT_IID, texts.number(F.ARGUMENT_NAMES, key)), field)


@dataclass(frozen=True)
class Filling:
    """Numbers of one argument: of which copies of templates, and what is filled in, shape (n, width)."""

    argument: str
    copies: Ints
    content: Bytes


class PacketTemplates:
    """Packets of events that differ only in times, numbers and flows: encoded once, then copied."""

    def __init__(self, sequence: int) -> None:
        self._head = wire.integer(F.SEQUENCE, sequence) + wire.integer(F.FLAGS, F.NEEDED)
        self._packets: list[bytes] = []
        self._time_at: list[int] = []
        self._argument_at: dict[str, dict[int, int]] = {}
        """Offset of the number of a placeholder, by argument and template."""

    def add(
        self, event: bytes, *, arguments: Mapping[str, int] | None = None, flows: int = 0, last_flows: int = 0
    ) -> None:
        """Add the template of an event with so many outgoing and ending flows. Templates are numbered from 0.

        `arguments` has the bytes from the end of each placeholder's number to that of the event.
        """
        gaps = wire.fixed64_placeholder(F.FLOW) * flows + wire.fixed64_placeholder(F.LAST_FLOW) * last_flows
        content = wire.varint_placeholder(F.TIMESTAMP) + self._head + wire.block(F.TRACK_EVENT, event, gaps)
        packet = wire.block(F.PACKET, content)
        for name, after in (arguments or {}).items():
            self._argument_at.setdefault(name, {})[len(self._packets)] = len(packet) - len(gaps) - after
        self._packets.append(packet)
        self._time_at.append(len(packet) - len(content) + 1)

    def fill(
        self,
        which: Ints,
        at_ns: Ints,
        *,
        values: Ints | None = None,
        flows: tuple[Ints, Ints, Ints] | None = None,
        arguments: Iterable[Filling] = (),
    ) -> bytes:
        """Return copies of templates, ``which[i]`` at the time ``at_ns[i]``, one after the other.

        `values` holds the values of counters. `flows` says of each flow which copy it is of (its index in `which`),
        how many flows of that copy come after it, and its number, not negative. `arguments` are the numbers of
        placeholders.
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
        for filling in arguments:
            ends = np.zeros(len(self._packets), np.int64)
            offsets = self._argument_at[filling.argument]
            ends[list(offsets)] = list(offsets.values())
            fillings.append((filling.copies, ends[which[filling.copies]] - filling.content.shape[1], filling.content))
        return wire.fill_templates(self._packets, which, fillings)
