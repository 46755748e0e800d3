"""Pickle -> plain containers, read as a stream, and nothing run: dicts, lists, tuples, text, numbers, truth values.

A pickle is a program. Its opcodes that import, call or build objects are refused by name before anything is done, and
so is what would make a small file fill the memory. What a snapshot holds most of never becomes a dict for long: rows
that repeat (`Rows`) go to columns, and stacks, lists of the same frames over and over, become one number each.
"""

import re
import struct
from array import array
from collections.abc import Callable, Sequence
from operator import itemgetter
from pickletools import opcodes
from typing import Any, BinaryIO, TypeAlias

from tracekit.errors import BadTraceError
from tracekit.readers import shapes
from tracekit.readers.rows import EVENT_KEY, FRAME_KEY, Event, Frames, Rows, Stack

_CHUNK_BYTES = 4 << 20
_MARGIN_BYTES = 1 << 16  # an opcode with its argument is read whole from the buffer; longer ones are refused
_MAX_TEXT_BYTES = 1 << 20
_MAX_INT_BYTES = 9  # an int64 or a uint64
_MAX_DEPTH = 64
_MAX_INTERNED = 1 << 18
_MAX_KNOWN = 1 << 20
_TIME_BYTES = 9  # of a time in µs with its opcode, which never comes again
_NAMES = {ord(op.code): op.name for op in opcodes}
# Keys that no pickle can hold: what became of a dict that went to columns.
_SPENT: Any = object()
_FRAME: Any = object()


_Layout: TypeAlias = Callable[[Sequence[Any]], tuple[Any, ...]]


class Unpickler:
    """One pickle, read once by `read`. Raises BadTraceError where it is cut, damaged or more than plain containers."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self.path = path
        self.frames = Frames()
        self.rows = Rows()
        self._file = file
        self._data = b""
        self._pos = 0
        self._before = 0  # bytes of the file before the buffer
        self._ended = False
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._swept = 0
        self._texts: dict[bytes, str] = {}
        self._runs: dict[bytes, Stack] = {}
        self._shape: re.Pattern[bytes] | None = None
        self._values: dict[bytes, tuple[Any, bool]] = {}
        self._layouts: dict[tuple[bytes, ...], _Layout] = {}

    def read(self) -> Any:
        """Return what the pickle holds: an event as an `Event`, a list of frames as a `Stack` where it could be."""
        handlers = _handlers(self)
        try:
            while True:
                if self._pos + _MARGIN_BYTES > len(self._data):
                    self._fill()
                code = self._data[self._pos]
                self._pos += 1
                if code == _STOP:
                    return self._stack.pop()
                handlers[code]()
        except (IndexError, struct.error):
            raise self._bad("ends in the middle, or is damaged; take the snapshot again") from None
        except (OverflowError, TypeError, ValueError) as error:
            raise self._bad(f"holds what no memory snapshot holds ({error})") from None

    # The buffer -------------------------------------------------------------------------------------------------------
    def _fill(self) -> None:
        if self._ended:
            return
        chunk = self._file.read(_CHUNK_BYTES)
        self._ended = not chunk
        self._before += self._pos
        self._data = self._data[self._pos :] + chunk
        self._pos = 0

    def _take(self, count: int) -> bytes:
        while self._pos + count > len(self._data) and not self._ended:
            self._fill()
        taken = self._data[self._pos : self._pos + count]
        if len(taken) < count:
            raise IndexError
        self._pos += count
        return taken

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._pos, self._pos + _MARGIN_BYTES)
        if end < 0:
            raise IndexError
        line = self._data[self._pos : end]
        self._pos = end + 1
        return line

    def _bad(self, why: str) -> BadTraceError:
        return BadTraceError(f"{self.path}: byte {self._before + self._pos:,}: the snapshot {why}")

    # Opcodes ----------------------------------------------------------------------------------------------------------
    def refuse(self, code: int) -> Callable[[], None]:
        """Return what refuses an opcode, naming it and what it would have imported."""

        def refused() -> None:
            name = _NAMES.get(code, f"0x{code:02x}")
            wanted = ""
            if name in ("GLOBAL", "INST"):
                wanted = b".".join((self._line()[:99], self._line()[:99])).decode("utf-8", "replace")
            elif name == "STACK_GLOBAL":
                wanted = ".".join(str(part)[:99] for part in self._stack[-2:])
            raise self._bad(
                f"holds the opcode {name}{f' ({wanted})' if wanted else ''}, which is no plain data and could run code "
                "when unpickled: refused. Don't load this file; take a snapshot of your own"
            )

        return refused

    def nothing(self) -> None:
        """Do nothing."""

    def protocol(self) -> None:
        """Pass over the protocol's number: opcodes tell themselves what they are."""
        self._take(1)

    def frame(self) -> None:
        """Pass over the length of a frame: it only says how much to read ahead."""
        self._take(8)

    def mark(self) -> None:
        """Begin the items of a list, dict or tuple."""
        if len(self._marks) >= _MAX_DEPTH:
            raise self._bad(f"nests containers more than {_MAX_DEPTH} deep")
        self._marks.append(len(self._stack))

    def constant(self, value: object) -> Callable[[], None]:
        """Return what pushes a constant."""
        return lambda: self._stack.append(value)

    def integer(self, count: int, *, signed: bool) -> Callable[[], None]:
        """Return what pushes an integer of `count` bytes."""

        def push() -> None:
            end = self._pos + count
            self._stack.append(int.from_bytes(self._data[self._pos : end], "little", signed=signed))
            self._pos = end

        return push

    def long(self, count: int) -> Callable[[], None]:
        """Return what pushes an integer whose length stands in `count` bytes."""

        def push() -> None:
            size = int.from_bytes(self._take(count), "little")
            if size > _MAX_INT_BYTES:
                raise self._bad(f"declares an integer of {size:,} bytes")
            self._stack.append(int.from_bytes(self._take(size), "little", signed=True))

        return push

    def text(self, count: int) -> Callable[[], None]:
        """Return what pushes a text whose length stands in `count` bytes."""

        def push() -> None:
            size = int.from_bytes(self._take(count), "little")
            if size > _MAX_TEXT_BYTES:
                raise self._bad(f"declares a text of {size:,} bytes")
            self._stack.append(self._interned(self._take(size)))

        return push

    def _interned(self, raw: bytes) -> str:
        known = self._texts.get(raw)
        if known is None:
            known = raw.decode("utf-8", "replace")
            if len(self._texts) < _MAX_INTERNED:
                self._texts[raw] = known
        return known

    def double(self) -> None:
        """Push a float."""
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def written_int(self) -> None:
        """Push an integer, or a truth value, that is written out (protocol 0)."""
        line = self._line()
        self._stack.append(line == b"01" if line in (b"00", b"01") else _digits(line))

    def written_long(self) -> None:
        """Push an integer that is written out with an L (protocol 0)."""
        self._stack.append(_digits(self._line().rstrip(b"L")))

    def written_float(self) -> None:
        """Push a float that is written out (protocol 0)."""
        self._stack.append(float(self._line()))

    def written_text(self) -> None:
        """Push a text that is written out (protocol 0)."""
        self._stack.append(self._line().decode("raw-unicode-escape", "replace"))

    # Containers -------------------------------------------------------------------------------------------------------
    def empty_list(self) -> None:
        """Push a list; at once as one number if it is a stack of frames that were told before."""
        found = shapes.KNOWN_STACK.match(self._data, self._pos - 1)
        stack = self._known(found[2]) if found else None
        if found is None or stack is None:
            self._stack.append([])
            return
        self._pos = found.end()
        self._stack.append(stack)
        if found[1]:
            self._put_as(found[1], stack)

    def _known(self, run: bytes) -> Stack | None:
        """Return the number of a stack by a run of references; None where one of them is no frame."""
        known = self._runs.get(run)
        if known is None:
            told = [self._get(int.from_bytes(each[1:], "little")) for each in shapes.ONE_REFERENCE.findall(run)]
            if not all(_is_frame(each) for each in told):
                return None
            known = self._runs[run] = self.frames.stack(array("i", (each[_FRAME] for each in told)))
        return known

    def empty_dict(self) -> None:
        """Push a dict; or, at once, all the events that follow in a form that came before."""
        if self._shape is not None and self._known_events(self._shape):
            return
        self._stack.append({})

    def _known_events(self, shape: re.Pattern[bytes]) -> bool:
        """Push the events that begin here and have the shape; False where there is none."""
        scanner = shape.scanner(self._data, self._pos - 1)  # type: ignore[attr-defined]
        began, last = self._pos, len(self._data) - _MARGIN_BYTES
        while found := scanner.match():
            keys = found.groups()[1::2]
            layout = self._layouts.get(keys) or self._layout(keys)
            if layout is None:
                break
            self._stack.append(self._told(found.groups(), layout))
            self._pos = found.end()
            if self._pos > last:
                break
        return self._pos > began

    def _layout(self, keys: tuple[bytes, ...]) -> _Layout | None:
        """Return what picks the values of `Rows.FIELDS` from an event's; None where the keys are no event's."""
        names = [self._get(int.from_bytes(key[1:], "little")) for key in keys]
        if any(type(name) is not str for name in names) or not set(Rows.FIELDS) <= set(names):
            return None
        layout = self._layouts[keys] = itemgetter(*(names.index(name) for name in Rows.FIELDS))
        return layout

    def _told(self, groups: tuple[bytes, ...], layout: _Layout) -> Event:
        """Return the event that the groups of a shape tell."""
        known, memo = self._values, self._memo
        if groups[0]:
            self._put_as(groups[0], _SPENT)
        values = []
        for raw in groups[2::2]:
            value, remembered = known.get(raw) or self._value(raw)
            if remembered:
                memo.append(value)
            values.append(value)
        *told, frames = layout(values)
        return self.rows.add(told, frames if type(frames) is Stack else self.stack_of(frames))

    def _value(self, raw: bytes) -> tuple[Any, bool]:
        """Return a value, and whether it is still to be remembered; remember both if they can come again."""
        value, put = self._decoded(raw)
        told = (value, put == shapes.MEMOIZE)
        if put and not told[1]:
            self._put_as(put, value)
        elif len(self._values) < _MAX_KNOWN and len(raw) != _TIME_BYTES:
            self._values[raw] = told
        return told

    def _decoded(self, raw: bytes) -> tuple[Any, bytes]:
        """Return a value of a shape, and the opcode that puts it into the memo, or nothing."""
        code = raw[0]
        if code in _INTEGERS:
            return int.from_bytes(raw[_INTEGERS[code] :], "little", signed=code in _SIGNED), b""
        if code in _REFERENCES:
            return self._get(int.from_bytes(raw[1:], "little")), b""
        if code == _SHORT_TEXT:
            end = 2 + raw[1]
            return self._interned(raw[2:end]), raw[end:]
        found = shapes.KNOWN_STACK.match(raw)
        stack = self._known(found[2]) if found else None
        if found is None or stack is None:
            raise TypeError("a stack of what is no frame")
        return stack, found[1]

    def empty_tuple(self) -> None:
        """Push a tuple without items."""
        self._stack.append(())

    def tuple_of(self, count: int) -> Callable[[], None]:
        """Return what makes a tuple of the last items."""

        def push() -> None:
            self._stack[-count:] = [tuple(self._stack[-count:])]

        return push

    def marked_tuple(self) -> None:
        """Push a tuple of what came since the mark."""
        self._stack.append(tuple(self._marked()))

    def marked_list(self) -> None:
        """Push a list of what came since the mark."""
        items = self._marked()
        self._stack.append([])
        self._extend(self._stack[-1], items)

    def marked_dict(self) -> None:
        """Push a dict of what came since the mark."""
        items = self._marked()
        self._stack.append({})
        self._update(items)

    def append(self) -> None:
        """Append the last item to the list before it."""
        item = self._stack.pop()
        self._extend(self._stack[-1], [item])

    def appends(self) -> None:
        """Append what came since the mark to the list before it."""
        items = self._marked()
        self._extend(self._stack[-1], items)

    def set_item(self) -> None:
        """Set one item of the dict before it. Protocol 0 has no other way, so a dict may not be whole yet."""
        value, key = self._stack.pop(), self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise TypeError("items without a dict")
        self._stack[-1][key] = value

    def set_items(self) -> None:
        """Set the items since the mark in the dict before them."""
        self._update(self._marked())

    def _marked(self) -> list[Any]:
        first = self._marks.pop()
        items = self._stack[first:]
        del self._stack[first:]
        return items

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("items without a dict")
        target.update(zip(items[::2], items[1::2], strict=True))
        if EVENT_KEY in target:
            self._stack[-1] = self._event(target)
        elif FRAME_KEY in target:
            self._frame(target)

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise TypeError("items without a list")
        items = [self._event(item) if type(item) is dict and EVENT_KEY in item else item for item in items]
        if items and type(items[0]) is Event:
            self._events(target, items)
            self._sweep()
        else:
            target.extend(items)

    def _events(self, target: list[Any], items: list[Any]) -> None:
        """Keep only the range of the rows: a list of events is a list of ranges."""
        first, last = items[0], items[-1]
        if last - first + 1 != len(items) or not all(type(item) is Event for item in items):
            raise TypeError("events that are mixed with others, or told twice")
        target.append(range(first, last + 1))

    def _event(self, told: dict[str, Any]) -> Event:
        stack = self.stack_of(told.get("frames"))
        number = self.rows.add([told.get(key) for key in Rows.FIELDS[:-1]], stack)
        self._shape = shapes.of(len(told)) if len(told) <= shapes.MOST_KEYS else None
        told.clear()
        told[_SPENT] = None
        return number

    def _frame(self, told: Any) -> int:
        """Return the number of a frame, and keep nothing else of it."""
        if type(told) is not dict or FRAME_KEY not in told:
            raise TypeError("a stack of what is no frame")
        number = self.frames.frame(told)
        told.clear()
        told[_FRAME] = number
        return number

    def stack_of(self, frames: object) -> int:
        """Return the number of the stack that a value of `frames` stands for; -1 where it holds none."""
        if type(frames) is Stack:
            return frames
        if type(frames) is not list or not frames:
            return -1
        if type(frames[0]) is not Stack:
            numbers = array("i", (each[_FRAME] if _is_frame(each) else self._frame(each) for each in frames))
            frames[:] = [self.frames.stack(numbers)]
        return int(frames[0])

    # The memo ---------------------------------------------------------------------------------------------------------
    def memoize(self) -> None:
        """Remember the last item under the next number."""
        self._memo.append(self._stack[-1])

    def put(self, count: int) -> Callable[[], None]:
        """Return what remembers the last item under a number of `count` bytes."""
        return lambda: self._put(int.from_bytes(self._take(count), "little"), self._stack[-1])

    def get(self, count: int) -> Callable[[], None]:
        """Return what pushes what is remembered under a number of `count` bytes."""

        def push() -> None:
            end = self._pos + count
            self._stack.append(self._get(int.from_bytes(self._data[self._pos : end], "little")))
            self._pos = end

        return push

    def written_put(self) -> None:
        """Remember the last item under a number that is written out (protocol 0)."""
        self._put(_digits(self._line()), self._stack[-1])

    def written_get(self) -> None:
        """Push what is remembered under a number that is written out (protocol 0)."""
        self._stack.append(self._get(_digits(self._line())))

    def _put_as(self, put: bytes, item: Any) -> None:
        """Do what the opcode in `put` says: MEMOIZE, BINPUT or LONG_BINPUT."""
        self._put(len(self._memo) if put == shapes.MEMOIZE else int.from_bytes(put[1:], "little"), item)

    def _put(self, number: int, item: Any) -> None:
        # Writers count on from 0. A number far ahead is how a small file makes a reader reserve gigabytes.
        if number != len(self._memo):
            raise self._bad(f"remembers an item as number {number:,} where {len(self._memo):,} comes next")
        self._memo.append(item)

    def _get(self, number: int) -> Any:
        if not 0 <= number < len(self._memo):
            raise self._bad(f"refers to item {number:,} of {len(self._memo):,}")
        found = self._memo[number]
        if found is _SPENT:
            raise self._bad("refers to one event twice")
        return found

    def _sweep(self) -> None:
        """Forget the events that went to columns."""
        for number in range(self._swept, len(self._memo)):
            item = self._memo[number]
            if type(item) is Event or (type(item) is dict and _SPENT in item):
                self._memo[number] = _SPENT
        self._swept = len(self._memo)


_STOP, _SHORT_TEXT = b".\x8c"
_INTEGERS = {ord("K"): 1, ord("M"): 1, ord("J"): 1, 0x8A: 2}
"""Opcodes of integers, and where the digits begin."""
_SIGNED = b"J\x8a"
_REFERENCES = b"hj"


def _handlers(machine: Unpickler) -> list[Callable[[], None]]:
    known: dict[str, Callable[[], None]] = {
        "PROTO": machine.protocol, "FRAME": machine.frame, "MARK": machine.mark,
        "NONE": machine.constant(None), "NEWTRUE": machine.constant(True), "NEWFALSE": machine.constant(False),
        "BININT": machine.integer(4, signed=True), "BININT1": machine.integer(1, signed=False),
        "BININT2": machine.integer(2, signed=False), "LONG1": machine.long(1), "LONG4": machine.long(4),
        "BINFLOAT": machine.double, "SHORT_BINUNICODE": machine.text(1), "BINUNICODE": machine.text(4),
        "BINUNICODE8": machine.text(8), "INT": machine.written_int, "LONG": machine.written_long,
        "FLOAT": machine.written_float, "UNICODE": machine.written_text,
        "EMPTY_LIST": machine.empty_list, "EMPTY_DICT": machine.empty_dict, "EMPTY_TUPLE": machine.empty_tuple,
        "LIST": machine.marked_list, "DICT": machine.marked_dict, "TUPLE": machine.marked_tuple,
        "TUPLE1": machine.tuple_of(1), "TUPLE2": machine.tuple_of(2), "TUPLE3": machine.tuple_of(3),
        "APPEND": machine.append, "APPENDS": machine.appends, "SETITEM": machine.set_item,
        "SETITEMS": machine.set_items, "MEMOIZE": machine.memoize, "PUT": machine.written_put,
        "BINPUT": machine.put(1), "LONG_BINPUT": machine.put(4), "GET": machine.written_get,
        "BINGET": machine.get(1), "LONG_BINGET": machine.get(4),
    }  # fmt: skip
    return [known.get(_NAMES.get(code, ""), machine.refuse(code)) for code in range(256)]


def _is_frame(told: object) -> bool:
    return type(told) is dict and _FRAME in told


def _digits(line: bytes) -> int:
    if len(line) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(line)
