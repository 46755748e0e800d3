"""Events that a reader lost without a word: another, lenient reading of a trace file counts what is there."""

import json
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa

from tracekit.errors import TracekitError
from tracekit.ingest import untrusted_json
from tracekit.ingest.readers.kineto import reader

LOSSY = frozenset({"truncated", "damaged_events", "repeated_events", "damaged_header"})
"""Kinds of data-quality findings that say that events are lost."""
Counts = Counter[tuple[str | None, str | None]]
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_PIECE = 1 << 16


def silent(path: Path) -> str:
    """Return which events of a trace file, packed or not, are read otherwise than by `lenient`, without a finding.

    Of a damaged file, those are stated that are whole in it, and more than the finding says are lost. "" if there are
    none, or if the file is refused.
    """
    try:
        trace, counts = reader.read_counted(str(path), rank=0)
    except TracekitError:
        return ""
    reference = lenient(unpacked(path.read_bytes()))
    missing = _plain(reference) - _plain(counts)
    if set(trace.data_quality["kind"]) & LOSSY:
        stated = lost_events(path)
        is_stated = missing.total() <= stated
        return "" if is_stated else f"lost {dict(reference - counts)}, of which {stated} are stated"
    if _plain(counts) == _plain(reference):
        return ""
    return f"lost {dict(reference - counts)}, invented {dict(counts - reference)}"


def lost_events(path: Path) -> int:
    """Return how many events the findings on a damaged file say are lost."""
    damage = reader.read_events(str(path)).damage
    return damage.lost_events + damage.non_objects + damage.later_events


def _plain(counts: Counts) -> Counter[tuple[str, ...]]:
    """Return counts in which numbers, where a name should be, are spelled alike: 1e400 is inf."""
    plain: Counter[tuple[str, ...]] = Counter()
    for names, count in counts.items():
        plain[tuple(_spelled(name) for name in names)] += count
    return plain


def _spelled(name: str | None) -> str:
    try:
        return str(float(name or "x"))
    except ValueError:
        return repr(name)


def silent_of_ranks(path: Path) -> str:
    """Return how many slices of the host in a merged file belong to no rank's trace, without a finding; "" if none.

    Ranks whose events are equal are duplicates where the file is read as one trace: these are left out there, and said.
    """
    try:
        merged = reader.read_counted(str(path), rank=0)[0]
        in_file = merged.ops.height
        traces = reader.read_merged(str(path)).values()
    except TracekitError:
        return ""
    if "duplicate_events" in merged.data_quality["kind"]:
        return ""
    lost = in_file - sum(trace.ops.height for trace in traces)
    is_said = any("rankless_events" in trace.data_quality["kind"] for trace in traces)
    return "" if lost == 0 or is_said or not traces else f"{lost} of {in_file} slices belong to no rank"


def unpacked(data: bytes) -> bytes:
    """Return the content of gzip, as zlib reads it, or of zstd, up to the first damage; other bytes as they are."""
    if data.startswith(_ZSTD):
        return _unzstd(data)
    if not data.startswith(_GZIP):
        return data
    content = b""
    while data.startswith(_GZIP):
        data = data[:3] + bytes([byte & 0x1F for byte in data[3:4]]) + data[4:]  # without flags that have no meaning
        member = zlib.decompressobj(wbits=31)
        try:
            for at in range(0, len(data), _PIECE):
                content += member.decompress(data[at : at + _PIECE])
                if member.eof:
                    break
        except zlib.error:
            return content
        if not member.eof:
            return content
        data = (member.unused_data + data[at + _PIECE :]).lstrip(b"\0")
    return content


def _unzstd(data: bytes) -> bytes:
    content = b""
    try:
        with pa.CompressedInputStream(pa.BufferReader(data), "zstd") as stream:
            while piece := stream.read(_PIECE):
                content += piece
    except OSError:
        pass
    return content


def lenient(data: bytes) -> Counts:
    """Count events per (ph, cat): each object of the array by itself; after damage, the next that has a ph."""
    text = data.decode("utf-8", "replace")
    key = text.find('"traceEvents"')
    is_list = key < 0 and text.lstrip().startswith("[")
    bracket = text.find("[", max(key, 0)) if key >= 0 or is_list else -1
    at = bracket + 1 if bracket >= 0 else text.find('{"ph"')
    found: Counts = Counter()
    lost = False
    decoder = json.JSONDecoder(strict=False)
    while 0 <= at < len(text):
        if text[at] in " \t\r\n,":
            at += 1
        elif text[at] == "]" and not lost:
            break
        else:
            item, at, lost = _one(decoder, text, at, lost=lost)
            if item is not None:
                found[_text_of(item.get("ph")), _text_of(item.get("cat"))] += 1
    return found


def _one(decoder: json.JSONDecoder, text: str, at: int, *, lost: bool) -> tuple[dict[str, Any] | None, int, bool]:
    """Return the event at a place, None if there is none; where to go on; and whether an event must be found there."""
    try:
        item, end = decoder.raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, _next_brace(text, at), True
    if isinstance(item, dict) and ("ph" in item or not lost):
        return item, end, False
    return None, _next_brace(text, at) if lost else end, lost


def _next_brace(text: str, at: int) -> int:
    found = text.find("{", at + 1)
    return len(text) if found < 0 else found


def _text_of(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return None if value is None else value.encode("utf-8", "replace").decode()
    return untrusted_json.to_text(value) if isinstance(value, list | dict) else str(value)  # bounded in depth
