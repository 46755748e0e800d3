"""Pickles of plain values, such as memory snapshots and flight recorder dumps, whose texts are replaced in place.

A pickle is never executed: its instructions are copied one by one, those of texts with the scrubbed text. A pickle that
makes objects, or holds bytes, is not copied: what these contain cannot be known.
"""

import json
import pickletools
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tracekit.conventions import regular_files

_MOST_BYTES = 1 << 30
_FIRST = b"\x80"
_REMOVED = "[removed]"
_SHORT_TEXT, _TEXT, _LONG_TEXT = b"\x8c", b"X", b"\x8d"
_SIZES = {_SHORT_TEXT: 1, _TEXT: 4, _LONG_TEXT: 8}
"""By the instruction of a text: how many bytes its length takes."""
_FRAME, _FRAME_BYTES = b"\x95", 9  # states how many bytes follow; a pickle is valid without it
_STOP = b"."
_MEMOIZE = re.compile(rb"\x94|q.|r.{4}", re.DOTALL)
_LONGEST_NAME = 100
# Instructions that make numbers, lists, tuples, sets and dicts of what is there, and refer to it again.
_PLAIN = re.compile(
    rb"(?s:[(012N\x88\x89}dsu\]lae)t\x85-\x87\x8f-\x91\x94]|[Khq\x80].|M..|[Jjr].{4}|G.{8}|%b)++"
    % b"|".join(rb"\x8a\x%02x.{%d}" % (size, size) for size in range(17))
)


def is_pickle(path: Path) -> bool:
    """Return whether a file is a pickle, by its first byte, which no text has."""
    with regular_files.open_to_read(path) as file:
        return file.read(1) == _FIRST


def why_not(path: Path) -> str:
    """Return why a pickle cannot be scrubbed; '' if it can."""
    if path.stat().st_size > _MOST_BYTES:
        return f"a pickle of more than {_MOST_BYTES >> 30} GiB"
    if not is_pickle(path):
        return "not a pickle of protocol 2 or later"
    try:
        for _ in _pieces(regular_files.read_bytes(path)):
            pass
    except ValueError as error:
        return str(error)
    return ""


def texts(path: Path) -> Iterator[bytes]:
    """Yield the distinct texts of a pickle as JSON, each a line, those that follow another as its value.

    Raises ValueError if `why_not` has a reason.
    """
    lines = (_line(name, text) for name, text, _ in _named_texts(path) if text is not None)
    yield from (line + b"\n" for line in dict.fromkeys(lines))


def write(source: Path, target: Path, hide: Callable[[bytes], bytes]) -> None:
    """Write a copy of a pickle whose texts, as JSON, are what `hide` makes of them."""
    instructions: dict[tuple[str | None, str], bytes] = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("wb") as file:
        for name, text, raw in _named_texts(source):
            if text is not None and (name, text) not in instructions:
                instructions[name, text] = _instruction(_hide(name, text, hide))
            file.write(raw if text is None else instructions[name, text])


def _named_texts(path: Path) -> Iterator[tuple[str | None, str | None, bytes]]:
    """Yield texts with the text that stands directly before, as the key of a dict does; else None and instructions."""
    previous = None
    for text, raw in _pieces(regular_files.read_bytes(path)):
        yield (None if text is None else previous), text, raw
        if text is not None:
            previous = text if len(text) <= _LONGEST_NAME else None
        elif not _MEMOIZE.fullmatch(raw):
            previous = None


def _line(name: str | None, text: str) -> bytes:
    return json.dumps(text if name is None else {name: text}).encode()


def _pieces(data: bytes) -> Iterator[tuple[str | None, bytes]]:
    """Yield texts, and the instructions between them; None for what is not text.

    Raises ValueError, which says why, if an instruction is another, or the pickle is damaged.
    """
    pos = 0
    while data[pos : pos + 1] != _STOP:
        code = data[pos : pos + 1]
        if (run := _PLAIN.match(data, pos)) is not None:
            yield None, run[0]
            pos = run.end()
        elif code in _SIZES:
            text, pos = _text(data, pos + 1, _SIZES[code])
            yield text, b""
        elif code == _FRAME:
            pos += _FRAME_BYTES
        else:
            name = next((opcode.name for opcode in pickletools.opcodes if opcode.code == code.decode("latin-1")), "")
            if not name or name.startswith(("LONG", "BININT", "BINFLOAT")):
                raise ValueError(f"a damaged pickle (at byte {pos:,})")
            raise ValueError(f"a pickle with objects or bytes ({name}), not plain values")
    yield None, _STOP


def _text(data: bytes, pos: int, size_bytes: int) -> tuple[str, int]:
    """Return the text whose length is at a place, and where it ends."""
    begin = pos + size_bytes
    end = begin + int.from_bytes(data[pos:begin], "little")
    if end > len(data):
        raise ValueError(f"a damaged pickle (at byte {pos:,})")
    return data[begin:end].decode("utf-8", "surrogatepass"), end


def _hide(name: str | None, text: str, hide: Callable[[bytes], bytes]) -> str:
    try:
        hidden = json.loads(hide(_line(name, text)))
        return str(hidden if name is None else next(iter(hidden.values())))
    except ValueError:  # a placeholder in the place of half an escape
        return _REMOVED


def _instruction(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogatepass")
    if len(raw) < 1 << 8:
        return _SHORT_TEXT + len(raw).to_bytes(1, "little") + raw
    if len(raw) < 1 << 32:
        return _TEXT + len(raw).to_bytes(4, "little") + raw
    return _LONG_TEXT + len(raw).to_bytes(8, "little") + raw
