"""The protobuf wire format of many messages at once, as columns. Any bytes are accepted: what is damaged is counted.

Source: the encoding guide of Protocol Buffers. The protobuf library is not used: it refuses a truncated file entirely,
and to visit the objects that it makes takes as long as reading all tables does here (1.9 s of CPU time for 19 MB).
"""

import sys
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.ingest.budget import Budget

Ints: TypeAlias = npt.NDArray[np.int64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Bytes: TypeAlias = npt.NDArray[np.uint8]

VARINT, FIXED64, LENGTH, FIXED32 = 0, 1, 2, 5
_KNOWN_KINDS = np.isin(np.arange(8), (VARINT, FIXED64, LENGTH, FIXED32))
PADDING = 16
"""Bytes that must follow the messages in a buffer."""
_MOST_VARINT = 10
_FEW = 24  # messages that are cheaper to decode one by one
_MOST_FIELDS = 1 << 22  # of a message that is decoded by itself; Perfetto splits its own long before


@dataclass(frozen=True, eq=False)
class Fields:
    """The fields of messages, each of shape (n,), in no particular order except that fields of one message keep theirs.

    `owner` is the index of the message, `tag` the number of the field times 8 plus its wire type. `value` holds an
    integer (the 64 bits of a fixed64 or double), or of a LENGTH field the offset of its `size` bytes. `damaged` flags
    messages that were read only in part, shape (messages,).
    """

    owner: Ints
    tag: Ints
    value: Ints
    size: Ints
    damaged: Flags

    def where(self, number: int, kind: int) -> Ints:
        """Return the rows of the fields with this number and wire type."""
        return np.flatnonzero(self.tag == (number << 3 | kind))

    def column(self, number: int, kind: int = VARINT, *, missing: int = 0) -> Ints:
        """Return a field's value for each message; of a field that repeats, the last."""
        values = np.full(len(self.damaged), missing, np.int64)
        rows = self.where(number, kind)
        values[self.owner[rows]] = self.value[rows]
        return values

    def spans(self, number: int) -> tuple[Ints, Ints]:
        """Begin and end of a LENGTH field in each message, 0 and 0 where it is missing."""
        begin, end = np.zeros((2, len(self.damaged)), np.int64)
        rows = self.where(number, LENGTH)
        begin[self.owner[rows]] = self.value[rows]
        end[self.owner[rows]] = self.value[rows] + self.size[rows]
        return begin, end


def split(
    data: bytes, number: int, end: int, begin: int = 0, *, budget: Budget | None = None
) -> tuple[Ints, Ints, int]:
    """Begin and end of each message in the field `number` of one long message, and how far it is intact.

    `data` holds PADDING bytes after `end`. Reading stops at the first byte that fits no field.
    Raises OverBudgetError for more messages than the budget allows.
    """
    tag = number << 3 | LENGTH
    starts: list[int] = []
    ends: list[int] = []
    pos = begin
    most = sys.maxsize if budget is None else budget.objects_left
    while pos < end and len(starts) <= most:
        is_wanted = data[pos] == tag and tag < 0x80
        if is_wanted and data[pos + 1] < 0x80:
            content = pos + 2
            past = content + data[pos + 1]
        else:
            field = _one_field(data, pos, end)
            if field is None:
                break
            field_number, kind, value, size, past = field
            is_wanted, content = (field_number, kind) == (number, LENGTH), value
            if is_wanted:
                past = content + size
        if past > end:
            break
        if is_wanted:
            starts.append(content)
            ends.append(past)
        pos = past
    if budget is not None:
        budget.build(len(starts))
    return np.array(starts, np.int64), np.array(ends, np.int64), pos


def fields(data: bytes, starts: Ints, ends: Ints) -> Fields:
    """Return the fields of the messages ``data[starts[i]:ends[i]]``. Takes time and memory in proportion to them.

    A message is damaged from a tag or length on that leads beyond its end, or an unknown wire type (groups).
    """
    raw = np.frombuffer(data, np.uint8)
    damaged = np.zeros(len(starts), np.bool_)
    parts: list[_Part] = []
    pos = starts.copy()
    unread = np.flatnonzero(pos < ends)
    while len(unread) > _FEW:
        tag, after, good = _varints(raw, pos[unread])
        good &= (tag >= 8) & (tag < 1 << 32)
        value, past, size = _values(raw, after, tag & 7, good)
        good &= past <= ends[unread]
        if not good.all():
            damaged[unread[~good]] = True
            unread, tag, value, size, past = (column[good] for column in (unread, tag, value, size, past))
        parts.append((unread, tag, value, size))
        pos[unread] = past
        unread = unread[past < ends[unread]]
    parts.extend(_one_by_one(data, pos, ends, unread, damaged))
    owner, tag, value, size = (
        np.concatenate([part[i] for part in parts]) if parts else np.empty(0, np.int64) for i in range(4)
    )
    return Fields(owner, tag, value, size, damaged)


_Part: TypeAlias = tuple[Ints, Ints, Ints, Ints]


def _values(raw: Bytes, after: Ints, kind: Ints, good: Flags) -> tuple[Ints, Ints, Ints]:
    """Return value, end and size of content of the fields behind tags; clears `good` where there is none."""
    value, past, ends = _varints(raw, after)
    size = np.zeros(len(after), np.int64)
    of_length = np.flatnonzero(kind == LENGTH)
    sizes = value[of_length]
    fits = (sizes >= 0) & (sizes < len(raw))
    ends[of_length] &= fits
    size[of_length] = np.where(fits, sizes, 0)
    value[of_length] = past[of_length]
    past[of_length] += size[of_length]
    for wire_type, width in ((FIXED64, 8), (FIXED32, 4)):
        rows = np.flatnonzero(kind == wire_type)
        if len(rows):
            pos = after[rows]
            gathered = raw[np.minimum(pos[:, None] + np.arange(width), len(raw) - 1)]
            wide = np.zeros((len(pos), 8), np.uint8)
            wide[:, :width] = gathered
            value[rows] = wide.view("<i8").astype(np.int64).reshape(-1)
            past[rows] = after[rows] + width
            ends[rows] = True
    good &= ends & _KNOWN_KINDS[kind]
    return value, past, size


def _varints(raw: Bytes, pos: Ints) -> tuple[Ints, Ints, Flags]:
    """Return varints, where each ends, and whether it ends within ten bytes."""
    last = len(raw) - 1
    byte = raw[np.minimum(pos, last)]
    value = (byte & 0x7F).astype(np.uint64)
    past = pos + 1
    unread = np.flatnonzero(byte >= 0x80)
    for place in range(1, _MOST_VARINT):
        if not len(unread):
            break
        byte = raw[np.minimum(pos[unread] + place, last)]
        value[unread] |= (byte & 0x7F).astype(np.uint64) << np.uint64(7 * place)
        past[unread] += 1
        unread = unread[byte >= 0x80]
    good = np.ones(len(pos), np.bool_)
    good[unread] = False
    return value.view(np.int64), past, good


def _one_by_one(data: bytes, pos: Ints, ends: Ints, unread: Ints, damaged: Flags) -> list[_Part]:
    parts = []
    for message in unread.tolist():
        place, end = int(pos[message]), int(ends[message])
        rows: list[tuple[int, int, int]] = []
        while place < end:
            field = _one_field(data, place, end)
            if field is None or len(rows) == _MOST_FIELDS:
                damaged[message] = True
                break
            number, kind, value, size, place = field
            rows.append((number << 3 | kind, value, size))
        if rows:
            tag, value, size = np.array(rows, np.int64).T
            parts.append((np.full(len(rows), message, np.int64), tag, value, size))
    return parts


def _one_field(data: bytes, pos: int, end: int) -> tuple[int, int, int, int, int] | None:
    """Return number, wire type, value, size and end of the field at a place; None if it is damaged."""
    tag, pos = _one_varint(data, pos)
    number, kind = tag >> 3, tag & 7
    value = size = 0
    if kind == VARINT:
        value, pos = _one_varint(data, pos)
        value = value - (1 << 64) if value >= 1 << 63 else value
    elif kind == LENGTH:
        size, pos = _one_varint(data, pos)
        value, pos = pos, pos + size
    elif kind in (FIXED64, FIXED32):
        width = 8 if kind == FIXED64 else 4
        value, pos = int.from_bytes(data[pos : pos + width], "little", signed=kind == FIXED64), pos + width
    else:
        return None
    return (number, kind, value, size, pos) if 0 < number < 1 << 29 and 0 <= pos <= end else None


def _one_varint(data: bytes, pos: int) -> tuple[int, int]:
    """Return a varint and where it ends, beyond the data if it is longer than ten bytes."""
    value = 0
    for place in range(_MOST_VARINT):
        if pos + place >= len(data):
            break
        byte = data[pos + place]
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value & (1 << 64) - 1, pos + place + 1
    return 0, len(data) + 1
