"""Measured bandwidth of storage as a document, and as the limits that `plan checkpoint` reads from it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tracekit.conventions import regular_files
from tracekit.errors import InputError
from tracekit.model import units
from tracekit.plan.storage import Measurement
from tracekit.report.document import Cells, Document, Section, line

_HEADER = ("threads", "a file", "fsync", "write", "read")
_LARGEST_BYTES = 4 << 20
_ENOUGH_RATIO = 0.95
"""More threads are not worth it that write at most 5% more: repeated measurements differ by as much."""


class NodeLimits(msgspec.Struct, frozen=True):
    """What one node writes with fsync, and reads, in bytes/s; the keys of the JSON document."""

    node_write_bytes_per_second: float
    node_read_bytes_per_second: float | None = None


def document(path: Path, measurements: Sequence[Measurement]) -> Document:
    """Headline and a row per load. Raises InputError where no load with fsync was written completely."""
    synced = [each for each in measurements if each.fsync and each.is_complete]
    if not synced:
        raise InputError(f"{path}: no load was written in time; choose fewer --bytes, or more --seconds")
    fastest = max(measured.write_bytes_per_second for measured in synced)
    enough = next(one for one in synced if one.write_bytes_per_second >= _ENOUGH_RATIO * fastest)
    reads = [measured.read_bytes_per_second for measured in synced if measured.read_bytes_per_second is not None]
    sections: tuple[Section, ...] = ([line(headline(path, synced[0], enough))], [_table(measurements)])
    values = {
        "path": str(path),
        "node_write_bytes_per_second": fastest,
        "node_read_bytes_per_second": max(reads, default=None),
        "threads": enough.threads,
        "measurements": [dataclasses.asdict(measured) for measured in measurements],
    }
    return Document(sections, values=values)


def headline(path: Path, first: Measurement, enough: Measurement) -> str:
    """How many threads write at the full rate, and what that is against the fewest."""
    rate = units.rate(enough.write_bytes_per_second)
    text = f"{path}: {units.count(enough.threads, 'thread')} of this node write {rate}"
    if enough.threads > first.threads:
        text += f", {units.count(first.threads, 'thread')} {units.rate(first.write_bytes_per_second)}: "
        text += f"save with {enough.threads} threads on a node (FileSystemWriter(thread_count=…) times its ranks)"
    return f"{text}."


def read_limits(path: Path) -> NodeLimits:
    """Limits in a JSON document of `plan storage`. Raises InputError, naming the file."""
    try:
        data = regular_files.read_bytes(path)
        if len(data) > _LARGEST_BYTES:
            raise InputError(
                f"{path}: larger than a measurement; name the output of tracekit plan storage --format json"
            )
        limits = msgspec.json.decode(data, type=NodeLimits)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{path}: no output of tracekit plan storage --format json: {error}") from error
    if not 0 < limits.node_write_bytes_per_second < 1e18:
        raise InputError(f"{path}: node_write_bytes_per_second must be above 0")
    return limits


def _table(measurements: Sequence[Measurement]) -> Cells:
    rows = []
    for measured in measurements:
        read = "" if measured.read_bytes_per_second is None else units.rate(measured.read_bytes_per_second)
        write = units.rate(measured.write_bytes_per_second) + ("" if measured.is_complete else " (not complete)")
        synced = "yes" if measured.fsync else "no: the page cache"
        rows.append((str(measured.threads), units.size(measured.file_bytes), synced, write, read))
    return Cells(_HEADER, tuple(rows), numbers=(0, 1, 3, 4))
