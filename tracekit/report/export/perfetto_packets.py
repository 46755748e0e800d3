"""Packets of a Perfetto trace: tracks, texts, and events that are encoded once and copied; fields by hand.

Wire format: the encoding guide of Protocol Buffers. Numbers that are filled in later have a fixed width: a varint may
be longer than it needs to be, up to ten bytes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.conventions import perfetto as F  # noqa: N812  (field numbers, constants all)

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

WIDE, NARROW = 10, 5
"""Bytes of a varint that is filled in later: any int64, or a number below NARROW_LIMIT."""
NARROW_LIMIT = 1 << 7 * NARROW
FIXED = 8
"""Bytes of a fixed64."""

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """Return a number as a varint, a negative one in two's complement of 64 bits.

    >>> varint(300).hex()
    'ac02'
    """
    value &= 2**64 - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*encoded, value))


def integer(field: int, value: int) -> bytes:
    """Return a field of an integer, bool or enum."""
    return varint(field << 3 | _VARINT) + varint(value)


def block(field: int, *parts: bytes) -> bytes:
    """Return a field that holds a message, of its encoded fields, or bytes.

    >>> block(1, integer(2, 5)).hex()
    '0a021005'
    """
    content = b"".join(parts)
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text_field(field: int, value: str) -> bytes:
    """Return a field of text; a lone surrogate, which UTF-8 has no bytes for, becomes '?'."""
    return block(field, value.encode("utf-8", "replace"))


def varint_placeholder(field: int, width: int = WIDE) -> bytes:
    """Return a field of an integer that is filled in later: its tag and `width` zeros."""
    return varint(field << 3 | _VARINT) + bytes(width)


def fixed64_placeholder(field: int) -> bytes:
    """Return a field of a fixed64 that is filled in later: its tag and FIXED zeros."""
    return varint(field << 3 | _FIXED64) + bytes(FIXED)


def wide_varints(values: Ints, width: int = WIDE) -> Bytes:
    """Return numbers as varints of `width` bytes, shape (n, width). NARROW bytes need 0 <= value < NARROW_LIMIT."""
    bits = values.astype(np.int64).view(np.uint64)[:, None] >> np.arange(0, 7 * width, 7, dtype=np.uint64)
    encoded = (bits & np.uint64(0x7F)).astype(np.uint8)
    encoded[:, :-1] |= 0x80
    return encoded


def fixed64s(values: Ints | Floats) -> Bytes:
    """Return numbers as fixed64 or double, shape (n, FIXED)."""
    kind = "<f8" if values.dtype.kind == "f" else "<i8"
    return np.ascontiguousarray(values.astype(kind)).view(np.uint8).reshape(-1, FIXED)


def fill_templates(templates: Sequence[bytes], which: Ints, fillings: Iterable[tuple[Ints, Ints, Bytes]]) -> bytes:
    """Return copies of templates, ``templates[which[i]]`` in order, with numbers filled in.

    A filling consists of the copies (rows of `which`), the offset in each, and the bytes, shape (n, width).
    """
    lengths = np.array([len(template) for template in templates], np.int64)
    begins = np.cumsum(lengths) - lengths
    sizes = lengths[which]
    starts = np.cumsum(sizes) - sizes
    total = int(sizes.sum())
    copies = np.frombuffer(b"".join(templates), np.uint8)[np.repeat(begins[which] - starts, sizes) + np.arange(total)]
    for rows, offsets, filling in fillings:
        copies[(starts[rows] + offsets)[:, None] + np.arange(filling.shape[1])] = filling
    return copies.tobytes()


_FLOW_BYTES = len(fixed64_placeholder(F.FLOW))


def process(uuid: int, pid: int, name: str) -> bytes:
    """Return the packet of a process track, whose tracks stand in the order of their places."""
    described = block(F.PROCESS, integer(F.PID, pid), text_field(F.PROCESS_NAME, name))
    return _descriptor(uuid, described, integer(F.ORDERING, F.BY_PLACE))


def track(uuid: int, parent: int, name: str, place: int, *, counts_bytes: bool = False) -> bytes:
    """Return the packet of a track of slices, or of a counter of bytes, that is never drawn as one with another."""
    kind = block(F.COUNTER_KIND, integer(F.UNIT, F.BYTES)) if counts_bytes else b""
    ordered = integer(F.PLACE, place) + integer(F.MERGING, F.NEVER)
    return _descriptor(uuid, integer(F.PARENT, parent), text_field(F.TRACK_NAME, name), kind, ordered)


def _descriptor(uuid: int, *fields: bytes) -> bytes:
    return block(F.PACKET, block(F.DESCRIPTOR, integer(F.UUID, uuid), *fields))


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
            block(kind, integer(F.IID, number), text_field(F.INTERNED_TEXT, text))
            for kind, numbers in self._known.items()
            for text, number in numbers.items()
        )
        flags = integer(F.FLAGS, F.CLEARED)
        return block(F.PACKET, integer(F.SEQUENCE, sequence), flags, block(F.INTERNED, *entries))


@dataclass(frozen=True)
class Placeholder:
    """An argument with a number that is filled in later: a double, or an integer of so many bytes."""

    width: int
    is_double: bool = False

    def field(self) -> bytes:
        """Return the field of the number: its tag and zeros."""
        return fixed64_placeholder(F.DOUBLE) if self.is_double else varint_placeholder(F.INT, self.width)

    def encode(self, values: Ints | Floats) -> Bytes:
        """Return numbers as they are filled in, shape (n, width)."""
        return fixed64s(values) if self.is_double else wide_varints(values.astype(np.int64), self.width)


def begin(
    uuid: int, name: str, category: str, arguments: Mapping[str, object], texts: InternedTexts, *, kind: int = F.BEGIN
) -> bytes:
    """Return the fields of an event that begins a slice, or of another kind; arguments that are None are left out.

    Placeholders must be the last arguments.
    """
    category_field = integer(F.CATEGORY_IID, texts.number(F.CATEGORIES, category))
    name_field = integer(F.NAME_IID, texts.number(F.NAMES, name))
    rest = [argument(key, value, texts) for key, value in arguments.items() if value is not None]
    return b"".join((integer(F.TYPE, kind), integer(F.TRACK, uuid), category_field, name_field, *rest))


def end(uuid: int) -> bytes:
    """Return the fields of an event that ends the slice that began last on its track."""
    return integer(F.TYPE, F.END) + integer(F.TRACK, uuid)


def value(uuid: int) -> bytes:
    """Return the fields of a counter's event, with a placeholder for its value."""
    return integer(F.TYPE, F.COUNTER) + integer(F.TRACK, uuid) + varint_placeholder(F.VALUE)


def argument(key: str, content: object, texts: InternedTexts) -> bytes:
    """Return the field of an argument of an event: a bool, an int, a placeholder, or text."""
    if isinstance(content, Placeholder):
        field = content.field()
    elif isinstance(content, bool):
        field = integer(F.BOOL, content)
    elif isinstance(content, int):
        field = integer(F.INT, content)
    else:
        field = integer(F.TEXT_IID, texts.number(F.TEXTS, str(content)))
    return block(F.ANNOTATION, integer(F.ARGUMENT_IID, texts.number(F.ARGUMENT_NAMES, key)), field)


@dataclass(frozen=True)
class Filling:
    """Numbers of one argument: of which copies of templates, and what is filled in, shape (n, width)."""

    argument: str
    copies: Ints
    content: Bytes


class PacketTemplates:
    """Packets of events that differ only in times, numbers and flows: encoded once, then copied."""

    def __init__(self, sequence: int) -> None:
        self._head = integer(F.SEQUENCE, sequence) + integer(F.FLAGS, F.NEEDED)
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
        gaps = fixed64_placeholder(F.FLOW) * flows + fixed64_placeholder(F.LAST_FLOW) * last_flows
        content = varint_placeholder(F.TIMESTAMP) + self._head + block(F.TRACK_EVENT, event, gaps)
        packet = block(F.PACKET, content)
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
        fillings = [(everywhere, np.array(self._time_at, np.int64)[which], wide_varints(at_ns))]
        if values is not None:
            fillings.append((everywhere, length[which] - WIDE, wide_varints(values)))
        if flows is not None:
            copies, after, numbers = flows
            ends = length[which[copies]] - _FLOW_BYTES * after
            fillings.append((copies, ends - FIXED, fixed64s(numbers)))
        for filling in arguments:
            ends = np.zeros(len(self._packets), np.int64)
            offsets = self._argument_at[filling.argument]
            ends[list(offsets)] = list(offsets.values())
            fillings.append((filling.copies, ends[which[filling.copies]] - filling.content.shape[1], filling.content))
        return fill_templates(self._packets, which, fillings)
