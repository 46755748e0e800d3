"""The header of a trace file: its keys before and after the events."""

import json
import re
from collections.abc import Iterator
from typing import Any, TypeAlias

from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers import foreign_formats

Header: TypeAlias = dict[str, Any]

_SEARCH_BYTES = 256 << 20  # a file that holds no events so far in is not a trace
_TAIL_BYTES = 1 << 20
PARSED_BYTES = 32 << 20
"""Keys before or after the events that are parsed: parsed JSON takes up to 30 times its size. Those of longer ones that
are worth saving are looked for in their first and last part."""
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*\[')
_SPACES = b" \t\r\n\f\v"
_FIRST_EVENT = re.compile(rb'\{\s*"ph"\s*:\s*"')
_FURTHER_EVENT = re.compile(r'"ph"\s*:\s*"')
_ARRAY_END = re.compile(r'\]\s*(?:,\s*"|\}\s*\Z)')
_COMMA, _COLON, _CLOSED = re.compile(r'\s*,\s*(?=")'), re.compile(r"\s*:\s*"), re.compile(r"\s*\}\s*\Z")
_MOST_PARSED = 8  # times the text: no profiler nests lists of objects so deeply
_WORTH_SAVING = ("distributedInfo", "baseTimeNanoseconds", "deviceProperties", "traceName")
_HEADER_KEYS = frozenset({*_WORTH_SAVING, "schemaVersion", "displayTimeUnit", "traceEvents"})


def find_events(blocks: Blocks, unread: Iterator[bytes]) -> tuple[bytes, bytes, bool]:
    """Return the bytes before the event array, those read after its bracket, and whether the array is all there is.

    `unread` yields what is left of `blocks`. The bytes before are no JSON by themselves.
    Raises BadTraceError where there is no event.
    """
    start = bytearray()
    searched = 0
    opening = b""  # the first two characters but spaces: a match from the start again in each block is quadratic
    for block in unread:
        start += block
        if len(opening) < len(b"[{"):
            opening = (opening + block.translate(None, _SPACES))[: len(b"[{")]
        if opening == b"[{" or (opening == b"[]" and not start[start.index(b"]") + 1 :].strip()):
            return b"", bytes(start[start.index(b"[") + 1 :]), True
        match = _EVENTS_KEY.search(start, max(searched - 64, 0))
        if match:
            return bytes(start[: match.start()]), bytes(start[match.end() :]), False
        searched = len(start)
        if searched > _SEARCH_BYTES:
            break
    lone = _FIRST_EVENT.search(start)
    if lone:  # the bracket or its key is damaged, the events may be whole
        return bytes(start[: lone.start()]), bytes(start[lone.start() :]), False
    if blocks.broken:
        raise BadTraceError(f"{blocks.path}: {blocks.broken}, before its first event; copy or record it again")
    raise BadTraceError(f"{blocks.path}: {_what_it_is(bytes(start), blocks.path)}")


def parse_start(text: bytes) -> tuple[Header, bool]:
    """Return the keys before the events, and whether they could be read whole."""
    if len(text) > PARSED_BYTES:
        return _salvage_long(text[:PARSED_BYTES], text[-_TAIL_BYTES:]), False
    decoded = text.decode("utf-8", "replace").strip()
    try:
        keys = untrusted_json.parse(decoded.rstrip(",") + "}", strict=False) if decoded else {}
    except ValueError:
        return _salvage(decoded), False
    return (keys, True) if isinstance(keys, dict) else ({}, False)


class Tail:
    """What follows the events of a file: the first `PARSED_BYTES` of it, and the end."""

    def __init__(self, start: bytes, unread: Iterator[bytes]) -> None:
        """Read all blocks of `unread`, which follow `start`."""
        first, self._last = bytearray(start), b""
        for block in unread:
            if len(first) <= PARSED_BYTES:
                first += block
            else:
                self._last = (self._last + block)[-_TAIL_BYTES:]
        self._first = first

    @property
    def is_blank(self) -> bool:
        """Whether only white space follows the events."""
        return not self._first.strip() and not self._last.strip()

    def parse(self) -> tuple[Header, bool]:
        """Return the keys after the events, and whether they could be read whole to the end of the file."""
        if len(self._first) > PARSED_BYTES:
            return _salvage_long(self._first, self._last), False
        return parse_tail(self._first.decode("utf-8", "replace"))

    def further_events(self) -> int:
        """Number of events in documents that follow the first one, as far as they are in the first part."""
        return len(_FURTHER_EVENT.findall(self._first.decode("utf-8", "replace")))


def parse_tail(text: str) -> tuple[Header, bool]:
    """Return the keys after the events, and whether they could be read whole to the end of the file."""
    try:
        keys, end = json.JSONDecoder(strict=False).raw_decode('{"":0' + text)
        keys = untrusted_json.replace_surrogates(keys)
    except (ValueError, RecursionError):
        return _salvage(text), False
    keys.pop("", None)
    return keys, not text[end - len('{"":0') :].strip()


def end_of_events(text: str) -> int | None:
    """Index at which the event array ends in the last part of a file; None where it doesn't."""
    if not text.rstrip().endswith("}"):
        return None
    parsed, failed = 0, set[int]()
    for match in _ARRAY_END.finditer(text):
        if match.start() in failed:
            continue
        keys, ends = _last_keys(text, match.start() + 1)
        # A file cut behind an event's arguments ends like one whose array ends with the last list in them.
        if keys is not None and (text[: match.start()].rstrip()[-1:] == "}" or not _HEADER_KEYS.isdisjoint(keys)):
            return match.start()
        if keys is None:
            failed.update(end - 1 for end in ends)  # the lists among these values are followed by the same keys
        parsed += ends[-1] - match.start()
        if parsed > _MOST_PARSED * len(text):
            return None
    return None


def _last_keys(text: str, pos: int) -> tuple[set[str] | None, list[int]]:
    """Return the keys from `pos` to the brace that ends the text, and the ends of their values; None for other text."""
    # Values are not used; Python refuses to convert numbers of thousands of digits.
    decoder, keys, ends = json.JSONDecoder(strict=False, parse_int=str), set(), [pos]
    try:
        while (comma := _COMMA.match(text, ends[-1])) is not None:
            key, pos = decoder.raw_decode(text, comma.end())
            colon = _COLON.match(text, pos)
            if colon is None:
                return None, ends
            ends.append(decoder.raw_decode(text, colon.end())[1])
            keys.add(key)
    except json.JSONDecodeError as error:
        return None, [*ends, error.pos]
    except RecursionError:
        return None, [*ends, len(text)]
    return (keys if _CLOSED.match(text, ends[-1]) else None), ends


def read_header(path: str, first: bytes | None = None) -> Header:
    """Return the keys before and after the events of a trace file, given its first block if that is known.

    Its end is read only if its start does not state the rank. Raises BadTraceError if the file cannot be read or has no
    events.
    """
    blocks = Blocks(path, first)
    unread = iter(blocks)
    before, after, bare = find_events(blocks, unread)
    if bare:
        return {}
    header, _ = parse_start(before)
    if "distributedInfo" in header:
        return header
    tail = bytes(_last(unread, after)).decode("utf-8", "replace")
    end = end_of_events(tail)
    return header if end is None else header | parse_tail(tail[end + 1 :])[0]


def _last(blocks: Iterator[bytes], tail: bytes) -> bytes:
    for block in blocks:
        tail = (tail + block)[-_TAIL_BYTES:]
    return tail


def _salvage_long(first: bytes | bytearray, last: bytes) -> Header:
    return _salvage(first.decode("utf-8", "replace")) | _salvage(last.decode("utf-8", "replace"))


def _salvage(text: str) -> Header:
    saved: Header = {}
    for key in _WORTH_SAVING:
        match = re.search(rf'"{key}"\s*:\s*', text)
        if match:
            try:
                value, _ = json.JSONDecoder(strict=False).raw_decode(text, match.end())
                saved[key] = untrusted_json.replace_surrogates(value)
            except (ValueError, RecursionError):
                continue
    return saved


def _what_it_is(start: bytes, path: str) -> str:
    if (description := foreign_formats.describe(start, path)) is not None:
        return description
    if start.lstrip().startswith(b"{") and (b'"schemaVersion"' in start or b'"deviceProperties"' in start):
        return "the file ends before its first event, it was cut; record it again"
    return "no traceEvents array, so this is no profiler trace; name a trace file or run"
