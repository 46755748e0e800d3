"""The events of one trace file, batch by batch, whatever its layout; what is damaged or missing is counted."""

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tracekit.errors import BadTraceError
from tracekit.ingest.decompression import Blocks
from tracekit.ingest.readers.kineto import events, header
from tracekit.ingest.readers.kineto.events import Event

_BATCH_BYTES = 1 << 18  # decoded objects of a batch should still be in cache when they are put into columns
_PATIENCE_BYTES = 8 << 20  # an event longer than this that doesn't parse is damaged, not just incomplete
_LITERAL_CHARACTERS = 16  # a literal or escape cut at the end of a block fails that much before it at most
_KEYS = "ph|name|cat|args|ts|pid|tid|id|dur|s|bp"
_EVENT_START = re.compile(rf'\{{\s*"(?:{_KEYS})"\s*:')
_PHASE_KEY = re.compile(r'"ph"\s*:')
_BETWEEN = re.compile(r"\s*(,?)\s*")
_AFTER_ARRAY = re.compile(r'\s*(?:,\s*"|\}|\Z)')
_FIRST_KEY = re.compile(r'\{\s*"[^"\\]*"')
_parse = json.JSONDecoder(strict=False, parse_float=str).raw_decode  # text keeps every digit of a time


@dataclass
class Damage:
    """What of a file could not be read."""

    lost_bytes: int = 0
    lost_events: int = 0
    """Events known to have begun in the lost bytes."""
    not_events: int = 0
    """Members of the array that are no objects."""
    truncated: bool = False
    broken: str | None = None
    """Why the packed bytes could not be unpacked to their end."""
    header: bool = False
    """Whether keys beside the events could not be read."""
    later_events: int = 0
    """Events in a second traceEvents array, which were left out."""
    stray_bytes: bool = False
    """Whether text held bytes that are not UTF-8; each was replaced."""


class Scan:
    """The events of one file in batches, in the order of the file: iterate once, then `header` and `damage` are whole.

    Raises BadTraceError where the file cannot be opened or holds no event.
    """

    def __init__(self, path: str) -> None:
        self.path = path
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
        unread = self._counted(iter(blocks))
        before, held, self._bare = header.find_events(blocks, unread)
        self.header, whole = header.parse_start(before)
        self.damage.header = not whole
        some = False
        for batch in self._batches(held, unread, blocks):
            some = some or bool(batch)
            yield batch
        if not some and (self.damage.truncated or self.damage.lost_bytes):
            raise BadTraceError(f"{self.path}: not one whole event, the file is cut or damaged; record it again")

    def again_exactly(self) -> list[Event] | None:
        """Return the last batch once more with times as text, and do so from now on; None if it has them already."""
        if self.exact or not self._batch:
            return None
        self.exact = True
        return events.decode(self._batch, exact=True)

    def _counted(self, blocks: Iterator[bytes]) -> Iterator[bytes]:
        for block in blocks:
            self.read_bytes += len(block)
            yield block

    def _batches(self, held: bytes, unread: Iterator[bytes], blocks: Blocks) -> Iterator[list[Event]]:
        between = _between_events(held)
        comma = between.find(b",")
        for block in unread:
            if len(held) + len(block) < _BATCH_BYTES:
                held += block
                continue
            cut = block.rfind(between) if between else -1
            if cut < 0:
                held, block = b"", held + block
                cut = block.rfind(between) if between else -1
            batch = self._decode(held, memoryview(block)[: cut + 1]) if cut >= 0 else None
            if batch is not None:
                held = block[cut + comma + 1 :]
            else:
                held += block
                if cut >= 0 or len(held) > _PATIENCE_BYTES:
                    batch, held = self._one_by_one(held, last=False)
                    between = _between_events(held) or between
                    comma = between.find(b",")
            yield batch or []
            if self._closed:
                break
        rest = [block for block in unread] if self._closed else []  # noqa: C416  (a huge header may follow)
        cut = held.rfind(between) if between and not self._closed else -1
        batch = self._decode(held[: cut + 1]) if cut >= 0 else None
        if batch is not None:
            yield batch
            held = held[cut + comma + 1 :]
        if not self._closed:
            batch, held = self._one_by_one(held, last=True)
            yield batch
        self.damage.broken = blocks.broken
        self._finish(b"".join((held, *rest)).decode("utf-8", "replace"))

    def _decode(self, *parts: bytes | memoryview) -> list[Event] | None:
        """Return the events that `parts` hold together; None where they must be read one by one."""
        self._batch = b"".join((b"[", *parts, b"]"))
        found = None if self._need_comma else events.decode(self._batch, exact=self.exact)
        if found is None:
            mended = self._batch.decode("utf-8", "replace").encode()
            if mended != self._batch and not self._need_comma:
                self.damage.stray_bytes = True
                self._batch = mended
                found = events.decode(mended, exact=self.exact)
        return found

    def _one_by_one(self, held: bytes, *, last: bool) -> tuple[list[Event], bytes]:
        """Return the events at the start of `held` and what is left of it: after the array's end, if `_closed` now."""
        self._batch = b""
        whole = len(held) if last else _whole_characters(held)
        text, kept = held[:whole].decode("utf-8", "replace"), held[whole:]
        self.damage.stray_bytes |= "\ufffd" in text
        found: list[Event] = []
        at: int | None = 0
        rest = 0
        while at is not None:
            rest = at
            at, rest = self._step(text, at, found, last=last)
        return found, text[rest:].encode("utf-8", "replace") + kept

    def _step(self, text: str, at: int, found: list[Event], *, last: bool) -> tuple[int | None, int]:
        """Read one event, or step over none; return where to go on (None: nowhere) and where the rest begins."""
        between = _BETWEEN.match(text, at)
        assert between
        comma, start = between[1], between.end()
        if start >= len(text):
            self._need_comma &= not comma
            return None, start
        if text[start] == "]":
            after = _AFTER_ARRAY.match(text, start + 1)
            if after:
                sure = last or after.end() < len(text)  # else what follows may yet show that the array goes on
                self._closed = sure
                return None, start + 1 if sure else at
        try:
            item, end = _parse(text, start)
        except (ValueError, RecursionError) as error:
            if not last and _may_be_incomplete(error, text, start):
                return None, at
            return self._resume(text, start)
        self.damage.lost_bytes += self._need_comma and not comma
        self._need_comma = True
        if isinstance(item, dict):
            found.append(events.from_text(text[start:end], item))
        else:
            self.damage.not_events += 1
        return end, end

    def _resume(self, text: str, start: int) -> tuple[int | None, int]:
        """Step over an event that is damaged, to the next that is whole."""
        self._need_comma = False
        resumed = _next_event(text, start + 1)
        if resumed is None:
            return None, self._give_up(text, start)
        self._lose(text[start:resumed])
        return resumed, resumed

    def _give_up(self, text: str, start: int) -> int:
        """Nothing after `start` is an event: count it lost up to the end of the array. Without one the file is cut."""
        end = header.end_of_events(text[start:])
        if end is None:
            return len(text)
        self._lose(text[start : start + end])
        self._closed = True
        return start + end + 1

    def _lose(self, text: str) -> None:
        self.damage.lost_bytes += len(text.encode("utf-8", "replace"))
        self.damage.lost_events += len(_PHASE_KEY.findall(text))

    def _finish(self, tail: str) -> None:
        if not self._closed or self.damage.broken:
            self.damage.truncated = True
        if not self._closed:
            return
        if self._bare:
            self.damage.header |= bool(tail.strip())
            return
        keys, whole = header.parse_tail(tail)
        self.damage.header |= not whole
        later = keys.pop("traceEvents", None)
        self.damage.later_events = len(later) if isinstance(later, list) else 0
        self.header |= keys


def _between_events(held: bytes) -> bytes:
    """Return the bytes between most events of a file's start: from one's brace over a comma to the next's first key."""
    text = held[:_BATCH_BYTES].decode("utf-8", "replace")
    seen: Counter[str] = Counter()
    at = 0
    for _ in range(64):
        between = _BETWEEN.match(text, at)
        assert between
        first_key = _FIRST_KEY.match(text, between.end())
        if at and first_key and between[1]:
            seen[text[at - 1 : first_key.end()]] += 1
        try:
            _, at = _parse(text, between.end())
        except (ValueError, RecursionError):
            break
    return seen.most_common(1)[0][0].encode() if seen else b""


def _may_be_incomplete(error: Exception, text: str, start: int) -> bool:
    """Return whether the object at `start`, which failed to parse, may go on in the bytes that follow `text`."""
    if not isinstance(error, json.JSONDecodeError) or len(text) - start >= _PATIENCE_BYTES:
        return False
    return error.pos >= len(text) - _LITERAL_CHARACTERS or error.msg.startswith("Unterminated string")


def _next_event(text: str, at: int) -> int | None:
    for found in _EVENT_START.finditer(text, at):
        try:
            item, _ = _parse(text, found.start())
        except (ValueError, RecursionError):
            continue
        if isinstance(item, dict) and "ph" in item:
            return found.start()
    return None


def _whole_characters(held: bytes) -> int:
    """Return the length of `held` without a character of UTF-8 that may be cut at its end."""
    end = len(held)
    while end and len(held) - end < 3 and held[end - 1] >= 0x80:
        end -= 1
    return end
