"""The protobuf wire format of many messages at once, as columns. Any bytes are accepted: what is damaged is counted.

Source: the encoding guide of Protocol Buffers. No protobuf library is used: those of Python make an object of each
message, which takes 10 times as long (docs/inputs.md).
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
PADDING = 16
"""Bytes that must follow the messages in a buffer."""
_MOST_VARINT = 10
_FEW = 24  # messages that are cheaper to decode one by one
_MOST_FIELDS = 1 << 22  # of a message that is decoded by itself; Perfetto splits its own long before


@dataclass(frozen=True, eq=False)
class Fields:
    """The fields of messages, each of shape (n,), in no particular order except that fields of one message keep theirs.

    `owner` is the index of the message, `number` that of the field, `kind` its wire type. `value` holds an integer (the
    64 bits of a fixed64 or double), or of a LENGTH field the offset of its `size` bytes. `damaged` flags messages that
    were read only in part, shape (messages,).
    """

    owner: Ints
    number: Ints
    kind: Ints
    value: Ints
    size: Ints
    damaged: Flags

    def where(self, number: int, kind: int) -> Ints:
        """Return the rows of the fields with this number and wire type."""
        return np.flatnonzero((self.number == number) & (self.kind == kind))

    def column(self, number: int, kind: int = VARINT, *, missing: int = 0) -> Ints:
        """Return a field's value for each message; of a field that repeats, the last."""
        found = np.full(len(self.damaged), missing, np.int64)
        rows = self.where(number, kind)
        found[self.owner[rows]] = self.value[rows]
        return found

    def spans(self, number: int) -> tuple[Ints, Ints]:
        """Return where a LENGTH field begins and ends in each message, 0 and 0 where it is missing."""
        begin, end = np.zeros((2, len(self.damaged)), np.int64)
        rows = self.where(number, LENGTH)
        begin[self.owner[rows]] = self.value[rows]
        end[self.owner[rows]] = self.value[rows] + self.size[rows]
        return begin, end


def split(data: bytes, number: int, end: int, begin: int = 0) -> tuple[Ints, Ints, int]:
    """Return where each message in the field `number` of one long message begins and ends, and how far it is intact.

    `data` holds PADDING bytes after `end`. Reading stops at the first byte that fits no field.
    """
    tag = number << 3 | LENGTH
    starts: list[int] = []
    ends: list[int] = []
    at = begin
    while at < end:
        is_wanted = data[at] == tag and tag < 0x80
        if is_wanted and data[at + 1] < 0x80:
            content = at + 2
            past = content + data[at + 1]
        else:
            field = _one_field(data, at, end)
            if field is None:
                break
            found, kind, value, size, past = field
            is_wanted, content = (found, kind) == (number, LENGTH), value
            if is_wanted:
                past = content + size
        if past > end:
            break
        if is_wanted:
            starts.append(content)
            ends.append(past)
        at = past
    return np.array(starts, np.int64), np.array(ends, np.int64), at


def fields(data: bytes, starts: Ints, ends: Ints) -> Fields:
    """Return the fields of the messages ``data[starts[i]:ends[i]]``. Takes time and memory in proportion to them.

    A message is damaged from a tag or length on that leads beyond its end, or an unknown wire type (groups).
    """
    raw = np.frombuffer(data, np.uint8)
    damaged = np.zeros(len(starts), np.bool_)
    parts: list[tuple[Ints, Ints, Ints, Ints, Ints]] = []
    at = starts.copy()
    left = np.flatnonzero(at < ends)
    while len(left) > _FEW:
        tag, after, tag_good = _varints(raw, at[left])
        number, kind = tag >> 3, tag & 7
        value, past, size, good = _values(raw, after, kind)
        good &= tag_good & (number > 0) & (number < 1 << 29) & (past <= ends[left]) & (past > after - 1)
        damaged[left[~good]] = True
        kept = left[good]
        parts.append((kept, number[good], kind[good], value[good], size[good]))
        at[kept] = past[good]
        left = kept[at[kept] < ends[kept]]
    parts.extend(_one_by_one(data, at, ends, left, damaged))
    columns = (np.concatenate([part[i] for part in parts]) if parts else np.empty(0, np.int64) for i in range(5))
    return Fields(*columns, damaged)


def _values(raw: Bytes, after: Ints, kind: Ints) -> tuple[Ints, Ints, Ints, Flags]:
    """Return the values behind tags: value, where the field ends, bytes of content, and whether it can be read."""
    value, past, good = _varints(raw, after)
    size = np.zeros(len(after), np.int64)
    of_length = kind == LENGTH
    good &= ~of_length | ((value >= 0) & (value < len(raw)))
    size[of_length & good] = value[of_length & good]
    value[of_length] = past[of_length]
    past = past + size
    for wire_type, width in ((FIXED64, 8), (FIXED32, 4)):
        rows = np.flatnonzero(kind == wire_type)
        if len(rows):
            value[rows] = _fixed(raw, after[rows], width)
            past[rows] = after[rows] + width
            good[rows] = True
    good &= np.isin(kind, (VARINT, FIXED64, LENGTH, FIXED32))
    return value, past, size, good


def _varints(raw: Bytes, at: Ints) -> tuple[Ints, Ints, Flags]:
    """Return varints, where each ends, and whether it ends within ten bytes."""
    value = np.zeros(len(at), np.uint64)
    past = at.copy()
    left = np.arange(len(at))
    last = len(raw) - 1
    for place in range(_MOST_VARINT):
        byte = raw[np.minimum(at[left] + place, last)]
        value[left] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        past[left] += 1
        left = left[byte >= 0x80]
        if not len(left):
            break
    good = np.ones(len(at), np.bool_)
    good[left] = False
    return value.view(np.int64), past, good


def _fixed(raw: Bytes, at: Ints, width: int) -> Ints:
    gathered = raw[np.minimum(at[:, None] + np.arange(width), len(raw) - 1)]
    wide = np.zeros((len(at), 8), np.uint8)
    wide[:, :width] = gathered
    return wide.view("<i8").astype(np.int64).reshape(-1)


def _one_by_one(
    data: bytes, at: Ints, ends: Ints, left: Ints, damaged: Flags
) -> list[tuple[Ints, Ints, Ints, Ints, Ints]]:
    parts = []
    for message in left.tolist():
        place, end = int(at[message]), int(ends[message])
        rows: list[tuple[int, int, int, int]] = []
        while place < end:
            field = _one_field(data, place, end)
            if field is None or len(rows) == _MOST_FIELDS:
                damaged[message] = True
                break
            rows.append(field[:4])
            place = field[4]
        if rows:
            columns = np.array(rows, np.int64).T
            parts.append((np.full(len(rows), message, np.int64), *columns))
    return parts


def _one_field(data: bytes, at: int, end: int) -> tuple[int, int, int, int, int] | None:
    """Return number, wire type, value, size and end of the field at a place; None if it is damaged."""
    tag, at = _one_varint(data, at)
    number, kind = tag >> 3, tag & 7
    value = size = 0
    if kind == VARINT:
        value, at = _one_varint(data, at)
        value = value - (1 << 64) if value >= 1 << 63 else value
    elif kind == LENGTH:
        size, at = _one_varint(data, at)
        value, at = at, at + size
    elif kind in (FIXED64, FIXED32):
        width = 8 if kind == FIXED64 else 4
        value, at = int.from_bytes(data[at : at + width], "little", signed=kind == FIXED64), at + width
    else:
        return None
    return (number, kind, value, size, at) if 0 < number < 1 << 29 and 0 <= at <= end else None


def _one_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return a varint and where it ends, beyond the data if it is longer than ten bytes."""
    value = 0
    for place in range(_MOST_VARINT):
        if at + place >= len(data):
            break
        byte = data[at + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & (1 << 64) - 1, at + place + 1
    return 0, len(data) + 1
