"""NVTX ranges of an Nsight Systems report."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers.kineto.numbers import MISSING, Ints
from tracekit.ingest.readers.nsight.database import Database
from tracekit.ingest.readers.nsight.names import Texts
from tracekit.ingest.readers.nsight.nccl_ranges import Communicators, Fields, NcclRange, Payloads
from tracekit.ingest.readers.nsight.processes import THREAD_BITS
from tracekit.model.nesting import Flags

_TABLE = "NVTX_EVENTS"
_RANGES = (59, 60)
"""Event types: a range that was pushed and popped on one thread, and one that was started and ended."""
_NUMBERS = ("rowid", "start", "end", "globalTid", "textId")
PAYLOAD = ("jsonText", "jsonTextId", "binaryData")


@dataclass(frozen=True, eq=False)
class Ranges:
    """Ranges as arrays, in the order of the table. Times in ns since the report's start; MISSING where not known.

    `thread` are serialized ids with hardware and process; `named` is the place of each range's name in `names`.
    `fields` has the payloads by place.
    """

    names: pl.Series
    named: Ints
    start: Ints
    end: Ints
    thread: Ints
    fields: dict[int, Fields]

    @property
    def process(self) -> Ints:
        """Return the serialized id of the process of each range; 0 where not known."""
        return np.where(self.thread == MISSING, 0, self.thread) >> THREAD_BITS << THREAD_BITS

    @property
    def is_whole(self) -> Flags:
        """Return which ranges have a start and an end."""
        return np.asarray((self.start != MISSING) & (self.end != MISSING))


def read(database: Database, texts: Texts) -> Ranges:
    """Return the ranges of all processes of a report."""
    where = f"WHERE eventType IN ({', '.join(map(str, _RANGES))})" if database.has(_TABLE, "eventType") else ""
    found = database.integers(_TABLE, _NUMBERS, where)
    names, named = texts.of_all(found["textId"])
    own: dict[str, int] = {}
    for row, (text,) in _rows(database, found["rowid"], ("text",)):
        if isinstance(text, str):
            named[row] = len(names) + own.setdefault(text, len(own))
    every = pl.concat([names, pl.Series("name", list(own), dtype=pl.String)])
    payloads, fields = Payloads(database, texts), dict[int, Fields]()
    for row, of in _rows(database, found["rowid"], PAYLOAD):
        if read_fields := payloads.read(*of):
            fields[row] = read_fields
    return Ranges(every, named, found["start"], found["end"], found["globalTid"], fields)


def communicators(database: Database, texts: Texts) -> Communicators:
    """Return what the ranges of NCCL state of communicators."""
    payloads, found = Payloads(database, texts), []
    for start, thread, *payload in database.each(
        _TABLE, ("start", "globalTid", *PAYLOAD), _with_any(database, PAYLOAD)
    ):
        if isinstance(start, int) and isinstance(thread, int) and (fields := payloads.read(*payload)):
            found.append(NcclRange(thread >> THREAD_BITS << THREAD_BITS, start, fields))
    return Communicators(sorted(found, key=lambda each: each.start_ns))


def _rows(database: Database, ids: Ints, columns: tuple[str, ...]) -> Iterator[tuple[int, list[object]]]:
    """Yield the place in `ids` of each row that has a value in one of the columns, and its values."""
    for row, *values in database.each(_TABLE, ("rowid", *columns), _with_any(database, columns)):
        at = int(np.searchsorted(ids, row)) if isinstance(row, int) else len(ids)
        if at < len(ids) and ids[at] == row:
            yield at, values


def _with_any(database: Database, columns: tuple[str, ...]) -> str:
    known = [f'"{name}" IS NOT NULL' for name in columns if database.has(_TABLE, name)]
    return f"WHERE {' OR '.join(known) or '0'}"
