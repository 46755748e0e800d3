"""Pickle -> plain containers, read as a stream, and nothing run: dicts, lists, tuples, text, numbers, truth values.

A pickle is a program. Its opcodes that import, call or build objects are refused by name before anything is done, and
so is what would make a small file fill the memory.
"""

import struct
from collections.abc import Callable
from pickletools import opcodes
from typing import Any, BinaryIO

from tracekit.errors import BadTraceError

_CHUNK_BYTES = 4 << 20
MARGIN_BYTES = 1 << 16  # an opcode with its argument is read whole from the buffer; longer ones are refused
_MAX_TEXT_BYTES = 1 << 20
_MAX_INT_BYTES = 9  # an int64 or a uint64
_MAX_DEPTH = 64
MAX_INTERNED = 1 << 18
_NAMES = {ord(op.code): op.name for op in opcodes}
_STOP = ord(".")
SPENT: Any = object()
"""What stands in the memo for an item that is not there any more; no pickle can hold it."""


class Machine:
    """One pickle, read once by `read`. Raises BadTraceError where it is cut, damaged or more than plain containers."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        """Take a file to read from its beginning; `path` is how messages name it."""
        self.path = path
        self._file = file
        self._data = b""
        self._pos = 0
        self._before = 0  # bytes of the file before the buffer
        self._ended = False
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: list[Any] = []
        self._texts: dict[bytes, str] = {}

    def read(self) -> Any:
        """Return what the pickle holds: an event as an `Event`, a list of frames as a `Stack` where it could be."""
        handlers = _handlers(self)
        try:
            while True:
                if self._pos + MARGIN_BYTES > len(self._data):
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
        end = self._data.find(b"\n", self._pos, self._pos + MARGIN_BYTES)
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
            if len(self._texts) < MAX_INTERNED:
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
        """Push a list."""
        self._stack.append([])

    def empty_dict(self) -> None:
        """Push a dict."""
        self._stack.append({})

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

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise TypeError("items without a list")
        target.extend(items)

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

    def _put(self, number: int, item: Any) -> None:
        # Writers count on from 0. A number far ahead is how a small file makes a reader reserve gigabytes.
        if number != len(self._memo):
            raise self._bad(f"remembers an item as number {number:,} where {len(self._memo):,} comes next")
        self._memo.append(item)

    def _get(self, number: int) -> Any:
        if not 0 <= number < len(self._memo):
            raise self._bad(f"refers to item {number:,} of {len(self._memo):,}")
        found = self._memo[number]
        if found is SPENT:
            raise self._bad("refers to one event twice")
        return found


def _handlers(machine: Machine) -> list[Callable[[], None]]:
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


def _digits(line: bytes) -> int:
    if len(line) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(line)
