"""CUDA memory snapshot, a pickle -> plain containers, events by column, and stacks as numbers.

Most of a snapshot is events and stacks. Events go to columns (`EventColumns`), many at a time if they have the same
layout; a stack, which is the same list of frames in many events, becomes a number.
"""

import re
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import repeat
from operator import itemgetter
from typing import Any, TypeAlias

import numpy as np

from tracekit.errors import BadTraceError
from tracekit.ingest.pickle_machine import MARGIN_BYTES, MAX_INTERNED, SPENT, Machine, Readable
from tracekit.ingest.readers.memory_snapshot.interning import (
    EVENT_KEY,
    FRAME_KEY,
    Event,
    EventColumns,
    FrameTable,
    Stack,
)

_MAX_KNOWN = 1 << 20
_TIME_BYTES = 9  # of a time in µs with its opcode; times do not repeat
# A key that no pickle can contain: marks a dict that was replaced by the number of its frame.
_FRAME: Any = object()


# Patterns of events of a known layout, which are matched at once, not opcode by opcode.
_MOST_KEYS = 16
_MEMOIZE_OPCODE = b"\x94"

_REFERENCE = rb"(?:h.|j.{4})"
_PUT = rb"(?:\x94|q.|r.{4})?"
_SIZED = rb"(?:\x00|\x01.|\x02..|\x03.{3}|\x04.{4}|\x05.{5}|\x06.{6}|\x07.{7}|\x08.{8})"
_INTEGER = rb"K.|M..|J.{4}|\x8a" + _SIZED
_TEXT = rb"\x8c" + _SIZED + _PUT
# A list that continues in a second batch is read by opcodes.
_STACK = rb"\]%b\(%b+e(?!\()" % (_PUT, _REFERENCE)

_ONE_REFERENCE = re.compile(_REFERENCE, re.DOTALL)
_KNOWN_STACK = re.compile(rb"\](%b)\((%b+)e(?!\()" % (_PUT, _REFERENCE), re.DOTALL)
"""A list of references only, such as a stack of frames. Groups: the opcode that memoizes it, the references."""

_Layout: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]
_FIRST = itemgetter(0)


class Unpickler(Machine):
    """One snapshot, read once by `read`. An event becomes an `Event`, a list of frames a `Stack` where possible."""

    expected = "the data of a memory snapshot"

    def __init__(self, file: Readable, path: str) -> None:
        """Read `file` from its beginning; messages name it `path`."""
        super().__init__(file)
        self.path = path
        self.frames = FrameTable()
        self.rows = EventColumns()
        self._swept = 0
        self._stacks_by_references: dict[bytes, Stack] = {}
        self._shape: re.Pattern[bytes] | None = None
        self._values: dict[bytes, tuple[Any, bool]] = {}
        self._layouts: dict[tuple[bytes, ...], _Layout] = {}
        self._keys: tuple[bytes, ...] = ()
        self._memoized_values: dict[bytes, Any] = {}
        self._decoded_values: dict[bytes, Any] = {}

    def fail(self, problem: str) -> Exception:
        """Return the error for a problem, with file and byte."""
        return BadTraceError(f"{self.path}: byte {self.read_bytes:,}: the snapshot {problem}; take another snapshot")

    def opcodes(self) -> dict[str, Callable[[], None]]:
        """Return the handlers of plain data; lists and dicts begin where a stack or an event may."""
        return super().opcodes() | {"EMPTY_LIST": self._empty_list, "EMPTY_DICT": self._empty_dict}

    def _empty_list(self) -> None:
        """Push a list; if it is a stack of known frames, its number."""
        match = _KNOWN_STACK.match(self._data, self._pos - 1)
        stack = self._stack_of_references(match[2]) if match else None
        if match is None or stack is None:
            self._stack.append([])
            return
        self._pos = match.end()
        self._stack.append(stack)
        if match[1]:
            self._put_as(match[1], stack)

    def _stack_of_references(self, run: bytes) -> Stack | None:
        """Return the number of a stack, by references to its frames; None if one is not a frame."""
        stack = self._stacks_by_references.get(run)
        if stack is None:
            frames = [self._get(int.from_bytes(raw[1:], "little")) for raw in _ONE_REFERENCE.findall(run)]
            if not all(_is_frame(frame) for frame in frames):
                return None
            stack = self._stacks_by_references[run] = self.frames.stack(array("i", (frame[_FRAME] for frame in frames)))
        return stack

    def _empty_dict(self) -> None:
        """Push a dict; or, if events of a known layout follow, all of them."""
        if self._shape is not None and self._add_events(self._shape):
            return
        self._stack.append({})

    def _add_events(self, shape: re.Pattern[bytes]) -> bool:
        """Push the events of this layout that begin here; False if there is none."""
        if self._keys and self._add_event_run(self._keys):
            return True
        scanner = shape.scanner(self._data, self._pos - 1)  # type: ignore[attr-defined]
        began, last = self._pos, len(self._data) - MARGIN_BYTES
        while match := scanner.match():
            keys = match.groups()[1::2]
            layout = self._layouts.get(keys) or self._layout(keys)
            if layout is None:
                break
            self._stack.append(self._add_event(match.groups(), layout))
            self._pos = match.end()
            if match[1] == _MEMOIZE_OPCODE:
                self._keys = keys  # the next events are read many at a time
                break
            if self._pos > last:
                break
        return self._pos > began

    def _add_event_run(self, keys: tuple[bytes, ...]) -> bool:
        """Push, as one range, all events with exactly these keys that begin here; False if there is none.

        Most of a large snapshot is such runs. One pattern splits them, and they are decoded column by column.
        """
        if len(self._memoized_values) > MAX_INTERNED:
            self._memoized_values.clear()
        scanner = _event_with_keys(keys).scanner(self._data, self._pos - 1)  # type: ignore[attr-defined]
        matches = list(iter(scanner.match, None))
        if not matches:
            return False
        columns = list(zip(*[match.groups() for match in matches], strict=True))
        at_us, address, size, stream, action, frames = self._layouts[keys](range(len(keys)))
        memoizable = [column for place, column in enumerate(columns) if place not in (at_us, address, size, stream)]
        self._memoize_events(len(matches), [column for column in memoizable if self._is_memoized(column)])
        times = _times(columns[at_us]) or self._column(columns[at_us])
        values = [times, *(self._column(columns[place]) for place in (address, size, stream, action))]
        self._stack.append(self.rows.add_many(values, list(map(self._stack_number, columns[frames]))))
        self._pos = matches[-1].end()
        return True

    def _is_memoized(self, column: Sequence[bytes]) -> bool:
        """Return whether values of a column are memoized (texts and stacks that are no references); decode these."""
        if not set(map(_FIRST, column)) & _MEMOIZED:
            return False
        memoized = self._memoized_values
        for raw in dict.fromkeys(column):  # in order, so that stacks are numbered by first occurrence
            if raw in memoized or raw[0] not in _MEMOIZED:
                continue
            memoized[raw] = self._intern(raw[2:-1]) if raw[0] == _SHORT_TEXT else self._stack_of_references(raw[3:-1])
            if memoized[raw] is None:
                raise TypeError("a stack of something other than frames")
        return True

    def _memoize_events(self, count: int, columns: Sequence[Sequence[bytes]]) -> None:
        """Memoize `count` events, each with its memoized values of these columns."""
        self._forget_events()
        puts = [map(self._memoized_values.get, column) for column in columns]
        rows = zip(repeat(SPENT, count), *puts, strict=True)
        self._memo.extend([value for row in rows for value in row if value is not None])
        self._swept = len(self._memo)

    def _column(self, column: Sequence[bytes]) -> list[Any]:
        """Return the values of a column."""
        plain = self._decoded_values
        values = list(map(plain.get, column))
        if None not in values:
            return values
        if len(plain) > _MAX_KNOWN:
            plain.clear()
        memoized = self._memoized_values
        for raw in {raw for raw in column if raw not in plain}:
            plain[raw] = memoized[raw] if raw in memoized else self._decode(raw)[0]
        return [plain[raw] for raw in column]

    def _stack_number(self, raw: bytes) -> int:
        frames = self._memoized_values.get(raw)
        if frames is None:
            frames = self._get(int.from_bytes(raw[1:], "little")) if raw[0] in _REFERENCES else self._decode(raw)[0]
        return frames if type(frames) is Stack else self.stack_of(frames)

    def _layout(self, keys: tuple[bytes, ...]) -> _Layout | None:
        """Return a function that picks the fields of an event from its values; None if the keys are not an event's."""
        names = [self._get(int.from_bytes(key[1:], "little")) for key in keys]
        if any(type(name) is not str for name in names) or not set(EventColumns.FIELDS) <= set(names):
            return None
        layout = self._layouts[keys] = itemgetter(*(names.index(name) for name in EventColumns.FIELDS))
        return layout

    def _add_event(self, groups: tuple[bytes, ...], layout: _Layout) -> Event:
        """Append the event in the groups of a layout's pattern."""
        decoded, memo = self._values, self._memo
        if groups[0]:
            self._put_as(groups[0], SPENT)
        values = []
        for raw in groups[2::2]:
            value, remembered = decoded.get(raw) or self._value(raw)
            if remembered:
                memo.append(value)
            values.append(value)
        *fields, frames = layout(values)
        return self.rows.add(fields, frames if type(frames) is Stack else self.stack_of(frames))

    def _value(self, raw: bytes) -> tuple[Any, bool]:
        """Return a value, and whether it is yet to be memoized; cache both if they can repeat."""
        value, put = self._decode(raw)
        decoded = (value, put == _MEMOIZE_OPCODE)
        if put and not decoded[1]:
            self._put_as(put, value)
        elif len(self._values) < _MAX_KNOWN and len(raw) != _TIME_BYTES:
            self._values[raw] = decoded
        return decoded

    def _decode(self, raw: bytes) -> tuple[Any, bytes]:
        """Return a value in a pattern's group, and the opcode that memoizes it, or nothing."""
        code = raw[0]
        if code in _INTEGERS:
            return int.from_bytes(raw[_INTEGERS[code] :], "little", signed=code in _SIGNED), b""
        if code in _REFERENCES:
            return self._get(int.from_bytes(raw[1:], "little")), b""
        if code == _SHORT_TEXT:
            end = 2 + raw[1]
            return self._intern(raw[2:end]), raw[end:]
        match = _KNOWN_STACK.match(raw)
        stack = self._stack_of_references(match[2]) if match else None
        if match is None or stack is None:
            raise TypeError("a stack of something other than frames")
        return stack, match[1]

    def _update(self, items: list[Any]) -> None:
        super()._update(items)
        target = self._stack[-1]
        if EVENT_KEY in target:
            self._stack[-1] = self._event(target)
        elif FRAME_KEY in target:
            self._frame(target)

    def _extend(self, target: Any, items: list[Any]) -> None:
        items = [self._event(item) if type(item) is dict and EVENT_KEY in item else item for item in items]
        if type(target) is list and items and type(items[0]) in (Event, range):
            self._events(target, items)
            self._forget_events()
        else:
            super()._extend(target, items)

    def _events(self, target: list[Any], items: list[Any]) -> None:
        """Store only the range of the rows: a list of events is a list of ranges."""
        first = items[0].start if type(items[0]) is range else items[0]
        past = int(first)
        for item in items:
            begin, end = (item.start, item.stop) if type(item) is range else (item, item + 1)
            if type(item) not in (Event, range) or begin != past:
                raise TypeError("events that are out of order or mixed with other items")
            past = end
        target.append(range(first, past))

    def _event(self, fields: dict[str, Any]) -> Event:
        stack = self.stack_of(fields.get("frames"))
        # An oom has the device's free memory in place of an address.
        fields.setdefault("addr", fields.get("device_free"))
        number = self.rows.add([fields.get(key) for key in EventColumns.FIELDS[:-1]], stack)
        self._shape = _dict_of_size(len(fields)) if len(fields) <= _MOST_KEYS else None
        fields.clear()
        fields[SPENT] = None
        return number

    def _frame(self, fields: Any) -> int:
        """Return the number of a frame, and replace its fields by it."""
        if type(fields) is not dict or FRAME_KEY not in fields:
            raise TypeError("a stack of something other than frames")
        number = self.frames.frame(fields)
        fields.clear()
        fields[_FRAME] = number
        return number

    def stack_of(self, frames: object) -> int:
        """Return the number of the stack in a value of `frames`; -1 if there is none."""
        if type(frames) is Stack:
            return frames
        if type(frames) is not list or not frames:
            return -1
        if type(frames[0]) is not Stack:
            numbers = array("i", (frame[_FRAME] if _is_frame(frame) else self._frame(frame) for frame in frames))
            frames[:] = [self.frames.stack(numbers)]
        return int(frames[0])

    def _forget_events(self) -> None:
        """Remove events that are in columns from the memo."""
        for number in range(self._swept, len(self._memo)):
            item = self._memo[number]
            if type(item) is Event or (type(item) is dict and SPENT in item):
                self._memo[number] = SPENT
        self._swept = len(self._memo)

    def _put_as(self, put: bytes, item: Any) -> None:
        """Memoize an item as the opcode in `put` states: MEMOIZE, BINPUT or LONG_BINPUT."""
        self._put(len(self._memo) if put == _MEMOIZE_OPCODE else int.from_bytes(put[1:], "little"), item)


_SHORT_TEXT, _EMPTY_LIST = b"\x8c]"
_TIME = b"\x8a\x07"
_MEMOIZED = frozenset((_SHORT_TEXT, _EMPTY_LIST))
_INTEGERS = {ord("K"): 1, ord("M"): 1, ord("J"): 1, 0x8A: 2}
"""Opcodes of integers, and the offset of their digits."""
_SIGNED = b"J\x8a"
_REFERENCES = b"hj"


def _times(column: Sequence[bytes]) -> "array[int]":
    """Return integers of 7 bytes, each after its opcode and length; nothing if some have another form."""
    data = np.frombuffer(b"".join(column), np.uint8)
    if set(map(len, column)) != {_TIME_BYTES} or not (data.reshape(-1, _TIME_BYTES)[:, :2] == tuple(_TIME)).all():
        return array("q")
    digits = data.reshape(-1, _TIME_BYTES)[:, 2:]
    wide = np.empty((len(column), 8), np.uint8)
    wide[:, :7] = digits
    wide[:, 7] = np.where(digits[:, 6] > 127, 255, 0)
    return array("q", wide.tobytes())


def _is_frame(value: object) -> bool:
    return type(value) is dict and _FRAME in value


@lru_cache(maxsize=64)
def _event_with_keys(keys: tuple[bytes, ...]) -> re.Pattern[bytes]:
    """Return the pattern of one such dict with exactly these keys. Groups: each value.

    All values are memoized by _MEMOIZE_OPCODE, as the standard library's pickler writes since protocol 4.
    """
    text = rb"\x8c" + _SIZED + _MEMOIZE_OPCODE
    stack = rb"\]\x94\((?:%b)++e(?!\()" % _REFERENCE
    value = b"|".join((_REFERENCE, _INTEGER, text, stack))
    return re.compile(rb"\}\x94\(" + b"".join(re.escape(key) + b"(" + value + b")" for key in keys) + b"u", re.DOTALL)


@lru_cache
def _dict_of_size(keys: int) -> re.Pattern[bytes]:
    """Return the pattern of a dict with `keys` keys that are references.

    Groups: the opcode that memoizes it; then each key and its value: a reference, an integer, a short text or a list of
    references.
    """
    pair = rb"(%b)(%b)" % (_REFERENCE, b"|".join((_REFERENCE, _INTEGER, _TEXT, _STACK)))
    return re.compile(rb"\}(%b)\(%bu" % (_PUT, pair * keys), re.DOTALL)
