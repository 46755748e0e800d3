"""Iterate over the events of one trace file in batches, for any layout; count damaged and missing data."""

import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tracekit.errors import BadTraceError
from tracekit.ingest import untrusted_json
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.kineto import header
from tracekit.ingest.readers.normalize import events
from tracekit.ingest.readers.normalize.event_tables import Damage
from tracekit.ingest.readers.normalize.events import Event

_BATCH_BYTES = 1 << 18  # decoded objects of a batch should still be in the CPU cache when they are converted to columns
_PATIENCE_BYTES = 8 << 20  # a longer event that does not parse is damaged, not incomplete
_LITERAL_CHARACTERS = 16  # a literal or escape that is cut at the end of a block fails at most this far before it
_KEYS = "ph|name|cat|args|ts|pid|tid|id|dur|s|bp"
_EVENT_START = re.compile(rf'\{{\s*"(?:{_KEYS})"\s*:')
_PHASE_KEY = re.compile(r'"ph"\s*:')
_BETWEEN = re.compile(r"\s*(,?)\s*")
_AFTER_ARRAY = re.compile(r'\s*(?:,\s*"|\}|\Z)')
_EMPTY_OBJECTS = re.compile(r"\{\s*\}(?:\s*,\s*\{\s*\})*")
_FIRST_KEY = re.compile(r'\{\s*"[^"\\]*"')
_BRACKET = re.compile(r"[\[{]")
_SKIPPED_LEVELS = 500
"""The parser ends 900 levels below its start: what opens in the first 500 has more levels than the 100 allowed."""
_parse = json.JSONDecoder(strict=False, parse_float=str).raw_decode  # text keeps every digit of a time


class Scan:
    """The events of one file in batches, in file order. `header` and `damage` are complete after one iteration.

    Raises BadTraceError if the file cannot be opened or has no event.
    """

    def __init__(self, path: str, *, with_flows: bool = False) -> None:
        """Read the events of a file, by default without arrows, which are many and seldom needed."""
        self.path = path
        self._with_flows = with_flows
        self.header: dict[str, Any] = {}
        self.damage = Damage()
        self.exact = False
        self.read_bytes = 0
        self._batch = b""
        self._bare = False
        self._closed = False
        self._need_comma = False

    def __iter__(self) -> Iterator[list[Event]]:
        blocks = Blocks(self.path)
        unread = self._count_bytes(iter(blocks))
        before, buffer, self._bare = header.find_events(blocks, unread)
        self.header, is_complete = header.parse_start(before)
        self.damage.header = not is_complete
        has_events = False
        for batch in self._batches(buffer, unread, blocks):
            blocks.budget.build(len(batch))
            has_events = has_events or bool(batch)
            yield batch
        if not has_events and (self.damage.truncated or self.damage.lost_bytes):
            raise BadTraceError(f"{self.path}: no complete event, the file is truncated or damaged; record it again")
        if not has_events and self.damage.header:
            raise BadTraceError(
                f"{self.path}: no event, and a traceEvents array within another value, so this is no profiler trace; "
                "name a trace file or run"
            )

    def redecode_exactly(self) -> list[Event] | None:
        """Return the last batch again with times as text, and use text from now on; None if it already is text."""
        if self.exact or not self._batch:
            return None
        self.exact = True
        return events.decode(self._batch, exact=True)

    def _count_bytes(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.read_bytes += len(block)
            yield block

    def _batches(self, buffer: bytes, unread: Iterator[bytes], blocks: Blocks) -> Iterator[list[Event]]:
        between = _between_events(buffer)
        comma = between.find(b",")
        for block in unread:
            if len(buffer) + len(block) < _BATCH_BYTES:
                buffer += block
                continue
            cut = block.rfind(between) if between else -1
            if cut < 0:
                buffer, block = b"", buffer + block
                cut = block.rfind(between) if between else -1
            batch = self._decode(buffer, memoryview(block)[: cut + 1]) if cut >= 0 else None
            if batch is not None:
                buffer = block[cut + comma + 1 :]
            else:
                buffer += block
                if cut >= 0 or len(buffer) > _PATIENCE_BYTES:
                    batch, buffer = self._one_by_one(buffer, last=False)
                    between = _between_events(buffer) or between
                    comma = between.find(b",")
            yield batch or []
            if self._closed:
                break
        tail = header.Tail(buffer, unread) if self._closed else None
        cut = buffer.rfind(between) if between and not self._closed else -1
        batch = self._decode(buffer[: cut + 1]) if cut >= 0 else None
        if batch is not None:
            yield batch
            buffer = buffer[cut + comma + 1 :]
        if not self._closed:
            batch, buffer = self._one_by_one(buffer, last=True)
            yield batch
        self.damage.broken = blocks.broken
        self._finish(tail or header.Tail(buffer, iter(())))

    def _decode(self, *parts: bytes | memoryview) -> list[Event] | None:
        """Return the events in the concatenated `parts`; None if they must be read one by one."""
        self._batch = b"".join((b"[", *parts, b"]"))
        if self._need_comma:
            return None
        if not self._batch.isascii():  # the decoder does not see a stray byte in a key, whose value is lost then
            replaced = self._batch.decode("utf-8", "replace").encode()
            self.damage.stray_bytes |= replaced != self._batch
            self._batch = replaced
        return events.decode(self._batch, exact=self.exact, with_flows=self._with_flows)

    def _one_by_one(self, buffer: bytes, *, last: bool) -> tuple[list[Event], bytes]:
        """Return the events at the start of `buffer`, and the rest: what follows the array if `_closed` is set."""
        self._batch = b""
        end = len(buffer) if last else _whole_characters(buffer)
        text, incomplete = buffer[:end].decode("utf-8", "replace"), buffer[end:]
        self.damage.stray_bytes |= "\ufffd" in text
        batch: list[Event] = []
        pos: int | None = 0
        rest = 0
        while pos is not None:
            rest = pos
            pos, rest = self._step(text, pos, batch, last=last)
        return batch, text[rest:].encode("utf-8", "replace") + incomplete

    def _step(self, text: str, pos: int, batch: list[Event], *, last: bool) -> tuple[int | None, int]:
        """Read or skip one event; return where to continue (None: stop) and where the rest begins."""
        between = _BETWEEN.match(text, pos)
        assert between
        comma, start = between[1], between.end()
        if start >= len(text):
            self._need_comma &= not comma
            return None, start
        if text[start] == "]":
            after = _AFTER_ARRAY.match(text, start + 1)
            if after:
                sure = last or after.end() < len(text)  # otherwise the next bytes may show that the array continues
                self._closed = sure
                return None, start + 1 if sure else pos
        if empty := _EMPTY_OBJECTS.match(text, start):
            self._take(comma)
            batch += [events.EMPTY] * text.count("{", start, empty.end())
            return empty.end(), empty.end()
        try:
            item, end = _parse(text, start)
        except RecursionError as error:
            raise self._too_deep() from error
        except ValueError as error:
            if not last and _may_be_incomplete(error, text, start):
                return None, pos
            return self._skip_damaged(text, start)
        if untrusted_json.is_deep(item):
            raise self._too_deep()
        self._take(comma)
        if isinstance(item, dict):
            batch.append(events.from_text(text[start:end], item, with_flows=self._with_flows))
        else:
            self.damage.non_objects += 1
        return end, end

    def _too_deep(self) -> BadTraceError:
        return BadTraceError(
            f"{self.path}: an event is {untrusted_json.deep()}; no profiler writes it: record the trace again"
        )

    def _take(self, comma: str) -> None:
        """Count a missing comma before an element of the array."""
        self.damage.lost_bytes += self._need_comma and not comma
        self._need_comma = True

    def _skip_damaged(self, text: str, start: int) -> tuple[int | None, int]:
        """Skip a damaged event, up to the next complete one."""
        self._need_comma = False
        resumed = _next_event(text, start + 1)
        if resumed is None:
            return None, self._skip_to_array_end(text, start)
        self._count_lost(text[start:resumed])
        return resumed, resumed

    def _skip_to_array_end(self, text: str, start: int) -> int:
        """Count everything from `start` to the end of the array as lost; without an array end the file is truncated."""
        end = header.end_of_events(text[start:])
        if end is None:
            return len(text)
        self._count_lost(text[start : start + end])
        self._closed = True
        return start + end + 1

    def _count_lost(self, text: str) -> None:
        self.damage.lost_bytes += len(text.encode("utf-8", "replace"))
        self.damage.lost_events += len(_PHASE_KEY.findall(text))

    def _finish(self, tail: header.Tail) -> None:
        if not self._closed or self.damage.broken:
            self.damage.truncated = True
        if not self._closed:
            return
        keys, is_complete = ({}, tail.is_blank) if self._bare else tail.parse()
        later = keys.pop("traceEvents", None)
        self.damage.later_events = len(later) if isinstance(later, list) else 0
        if not is_complete:
            self.damage.later_events = max(self.damage.later_events, tail.further_events())
            self.damage.header |= not self.damage.later_events
        self.header |= keys


def _between_events(buffer: bytes) -> bytes:
    """Return the most frequent bytes between two events at a file's start: closing brace, comma, next first key."""
    text = buffer[:_BATCH_BYTES].decode("utf-8", "replace")
    seen: Counter[str] = Counter()
    pos = 0
    for _ in range(64):
        between = _BETWEEN.match(text, pos)
        assert between
        first_key = _FIRST_KEY.match(text, between.end())
        if pos and first_key and between[1]:
            seen[text[pos - 1 : first_key.end()]] += 1
        try:
            _, pos = _parse(text, between.end())
        except (ValueError, RecursionError):
            break
    return seen.most_common(1)[0][0].encode() if seen else b""


def _may_be_incomplete(error: Exception, text: str, start: int) -> bool:
    """Return whether the object at `start`, which failed to parse, may continue in the bytes after `text`."""
    if not isinstance(error, json.JSONDecodeError) or len(text) - start >= _PATIENCE_BYTES:
        return False
    return error.pos >= len(text) - _LITERAL_CHARACTERS or error.msg.startswith("Unterminated string")


def _next_event(text: str, pos: int) -> int | None:
    while match := _EVENT_START.search(text, pos):
        pos = match.end()
        try:
            item, _ = _parse(text, match.start())
        except ValueError:
            continue
        except RecursionError:
            # All that opens within is too deep for an event, too: a try of each would take quadratic time.
            brackets = itertools.islice(_BRACKET.finditer(text, pos), _SKIPPED_LEVELS)
            pos = max((bracket.start() for bracket in brackets), default=pos)
            continue
        if isinstance(item, dict) and "ph" in item:
            return match.start()
    return None


def _whole_characters(buffer: bytes) -> int:
    """Return the length of `buffer` without an incomplete UTF-8 character at its end."""
    end = len(buffer)
    while end and len(buffer) - end < 3 and buffer[end - 1] >= 0x80:
        end -= 1
    return end
