"""Pickle -> plain containers, read as a stream: dicts, lists, tuples, text, numbers, booleans. Nothing is executed.

A pickle is a program. Opcodes that import, call or build objects are refused by name before anything is done, and so
is what would make a small file fill the memory. A subclass may give more opcodes a harmless meaning.
"""

import struct
from collections.abc import Callable
from pickletools import opcodes
from typing import Any, Protocol

_CHUNK_BYTES = 4 << 20
MARGIN_BYTES = 1 << 16  # an opcode with its argument is read whole from the buffer; longer ones are refused
_MAX_INT_BYTES = 9  # an int64 or a uint64
MAX_INTERNED = 1 << 18
_NAMES = {ord(op.code): op.name for op in opcodes}
_STOP = ord(".")
SPENT: Any = object()
"""Stands in the memo for an item that was removed; no pickle can contain it."""


class PickleError(ValueError):
    """A pickle that is truncated, damaged or not plain data. The message is a predicate, such as "is truncated"."""


class Readable(Protocol):
    """What a pickle is read from."""

    def read(self, size: int, /) -> bytes:
        """Return the next `size` bytes, less at the end."""


class Machine:
    """One pickle, read once by `read`. Raises `fail` if it is truncated, damaged or more than plain data."""

    max_text_bytes = 1 << 20
    max_depth = 64
    expected = "plain data"
    """What the pickle should contain, for messages."""

    def __init__(self, file: Readable) -> None:
        """Read `file` from its beginning."""
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
        """The content of the pickle."""
        by_name = self.opcodes()
        handlers = [by_name.get(_NAMES.get(code, "")) or self.refuse(code) for code in range(256)]
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
            raise self.fail("is truncated or damaged") from None
        except PickleError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            raise self.fail(f"is damaged, or is not {self.expected} ({error})") from None

    def fail(self, problem: str) -> Exception:
        """Return the error for a problem, such as "is truncated or damaged"."""
        return PickleError(problem)

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
        data = self._data[self._pos : self._pos + count]
        if len(data) < count:
            raise IndexError
        self._pos += count
        return data

    def _line(self) -> bytes:
        end = self._data.find(b"\n", self._pos, self._pos + MARGIN_BYTES)
        if end < 0:
            raise IndexError
        line = self._data[self._pos : end]
        self._pos = end + 1
        return line

    @property
    def read_bytes(self) -> int:
        """Number of bytes of the file that are read."""
        return self._before + self._pos

    # Opcodes ----------------------------------------------------------------------------------------------------------
    def refuse(self, code: int) -> Callable[[], None]:
        """Return a handler that refuses an opcode, and names it and what it would have imported."""

        def raise_refusal() -> None:
            name = _NAMES.get(code, f"0x{code:02x}")
            target = ""
            if name in ("GLOBAL", "INST"):
                target = b".".join((self._line()[:99], self._line()[:99])).decode("utf-8", "replace")
            elif name == "STACK_GLOBAL":
                target = ".".join(str(part)[:99] for part in self._stack[-2:])
            raise self.fail(
                f"has the opcode {name}{f' ({target})' if target else ''}, which is not {self.expected} and could run "
                "code when unpickled: refused. Do not load this file"
            )

        return raise_refusal

    def skip(self, count: int) -> Callable[[], None]:
        """Return a handler that skips `count` bytes."""

        def skip() -> None:
            self._take(count)

        return skip

    def mark(self) -> None:
        """Begin the items of a list, dict or tuple."""
        if len(self._marks) >= self.max_depth:
            raise self.fail(f"nests containers more than {self.max_depth} deep")
        self._marks.append(len(self._stack))

    def push(self, make: Callable[[], Any]) -> Callable[[], None]:
        """Return a handler that pushes what `make` returns."""
        return lambda: self._stack.append(make())

    def integer(self, count: int, *, signed: bool) -> Callable[[], None]:
        """Return a handler that pushes an integer of `count` bytes."""

        def push() -> None:
            end = self._pos + count
            self._stack.append(int.from_bytes(self._data[self._pos : end], "little", signed=signed))
            self._pos = end

        return push

    def _long(self, count: int) -> int:
        size = int.from_bytes(self._take(count), "little")
        if size > _MAX_INT_BYTES:
            raise self.fail(f"declares an integer of {size:,} bytes")
        return int.from_bytes(self._take(size), "little", signed=True)

    def text(self, count: int) -> Callable[[], None]:
        """Return a handler that pushes a text whose length is in the next `count` bytes."""
        return lambda: self._stack.append(self._intern(self._chunk(count)))

    def _chunk(self, count: int) -> bytes:
        size = int.from_bytes(self._take(count), "little")
        if size > self.max_text_bytes:
            raise self.fail(f"declares a text of {size:,} bytes")
        return self._take(size)

    def _intern(self, raw: bytes) -> str:
        text = self._texts.get(raw)
        if text is None:
            text = raw.decode("utf-8", "replace")
            if len(self._texts) < MAX_INTERNED:
                self._texts[raw] = text
        return text

    # Containers -------------------------------------------------------------------------------------------------------
    def tuple_of(self, count: int) -> Callable[[], None]:
        """Return a handler that pushes a tuple of the last `count` items."""

        def push() -> None:
            self._stack[-count:] = [tuple(self._stack[-count:])]

        return push

    def marked_list(self) -> None:
        """Push a list of the items since the mark."""
        items = self._pop_to_mark()
        self._stack.append([])
        self._extend(self._stack[-1], items)

    def marked_dict(self) -> None:
        """Push a dict of the items since the mark."""
        items = self._pop_to_mark()
        self._stack.append({})
        self._update(items)

    def append(self) -> None:
        """Append the last item to the list before it."""
        self._extend(self._stack[-2], [self._stack.pop()])

    def appends(self) -> None:
        """Append the items since the mark to the list before it."""
        items = self._pop_to_mark()
        self._extend(self._stack[-1], items)

    def set_item(self) -> None:
        """Set one item of the dict before it, as protocol 0 does."""
        value, key = self._stack.pop(), self._stack.pop()
        if type(self._stack[-1]) is not dict:
            raise TypeError("items without a dict")
        self._stack[-1][checked_key(key)] = value

    def set_items(self) -> None:
        """Set the items since the mark in the dict before them."""
        self._update(self._pop_to_mark())

    def _pop_to_mark(self) -> list[Any]:
        first = self._marks.pop()
        items = self._stack[first:]
        del self._stack[first:]
        return items

    def _update(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("items without a dict")
        target.update(zip(map(checked_key, items[::2]), items[1::2], strict=True))

    def _extend(self, target: Any, items: list[Any]) -> None:
        if type(target) is not list:
            raise TypeError("items without a list")
        target.extend(items)

    # The memo ---------------------------------------------------------------------------------------------------------
    def memoize(self) -> None:
        """Memoize the last item under the next number."""
        self._memo.append(self._stack[-1])

    def put(self, count: int) -> Callable[[], None]:
        """Return a handler that memoizes the last item under a number of `count` bytes."""
        return lambda: self._put(int.from_bytes(self._take(count), "little"), self._stack[-1])

    def get(self, count: int) -> Callable[[], None]:
        """Return a handler that pushes the memoized item with a number of `count` bytes."""

        def push() -> None:
            end = self._pos + count
            self._stack.append(self._get(int.from_bytes(self._data[self._pos : end], "little")))
            self._pos = end

        return push

    def written_put(self) -> None:
        """Memoize the last item under a decimal number (protocol 0)."""
        self._put(_digits(self._line()), self._stack[-1])

    def _put(self, number: int, item: Any) -> None:
        # Picklers count up from 0. With a number far ahead, a small file would make the reader reserve gigabytes.
        if number != len(self._memo):
            raise self.fail(f"memoizes an item as number {number:,}, not as {len(self._memo):,}, the next")
        self._memo.append(item)

    def _get(self, number: int) -> Any:
        if not 0 <= number < len(self._memo):
            raise self.fail(f"refers to item {number:,} of {len(self._memo):,}")
        memoized = self._memo[number]
        if memoized is SPENT:
            raise self.fail("refers to one item twice")
        return memoized

    def opcodes(self) -> dict[str, Callable[[], None]]:
        """Return the handler of each opcode that is not refused, by name."""
        return {
            "PROTO": self.skip(1), "FRAME": self.skip(8), "MARK": self.mark,
            "NONE": self.push(lambda: None), "NEWTRUE": self.push(lambda: True), "NEWFALSE": self.push(lambda: False),
            "BININT": self.integer(4, signed=True), "BININT1": self.integer(1, signed=False),
            "BININT2": self.integer(2, signed=False), "LONG1": self.push(lambda: self._long(1)),
            "LONG4": self.push(lambda: self._long(4)),
            "BINFLOAT": self.push(lambda: struct.unpack(">d", self._take(8))[0]),
            "SHORT_BINUNICODE": self.text(1), "BINUNICODE": self.text(4), "BINUNICODE8": self.text(8),
            # Protocol 0 writes numbers in decimal, booleans as 00 and 01.
            "INT": self.push(lambda: _digits_or_boolean(self._line())),
            "LONG": self.push(lambda: _digits(self._line().rstrip(b"L"))),
            "FLOAT": self.push(lambda: float(self._line())),
            "UNICODE": self.push(lambda: self._line().decode("raw-unicode-escape", "replace")),
            "EMPTY_LIST": self.push(list), "EMPTY_DICT": self.push(dict), "EMPTY_TUPLE": self.push(tuple),
            "LIST": self.marked_list, "DICT": self.marked_dict, "TUPLE": self.push(lambda: tuple(self._pop_to_mark())),
            "TUPLE1": self.tuple_of(1), "TUPLE2": self.tuple_of(2), "TUPLE3": self.tuple_of(3),
            "APPEND": self.append, "APPENDS": self.appends, "SETITEM": self.set_item,
            "SETITEMS": self.set_items, "MEMOIZE": self.memoize, "PUT": self.written_put,
            "BINPUT": self.put(1), "LONG_BINPUT": self.put(4), "BINGET": self.get(1), "LONG_BINGET": self.get(4),
            "GET": self.push(lambda: self._get(_digits(self._line()))),
        }  # fmt: skip


def _digits(line: bytes) -> int:
    if len(line) > 20:
        raise ValueError("a number of more than 20 digits")
    return int(line)


def _digits_or_boolean(line: bytes) -> int:
    return line == b"01" if line in (b"00", b"01") else _digits(line)


def checked_key(key: Any) -> Any:
    """Return the key of a dict or set. Raises TypeError if it is a tuple of tuples."""
    # Tuples in tuples are hashed by recursion: deep enough, they overflow the interpreter's stack and kill the process.
    if type(key) is tuple and any(type(part) is tuple for part in key):
        raise TypeError("a key of nested tuples")
    return key
