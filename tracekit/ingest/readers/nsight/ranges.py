"""NVTX ranges of an Nsight Systems report."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.ingest.readers.normalize.numbers import MISSING, Ints
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

    `thread` are serialized ids with hardware and process; `name_id` is the place of each range's name in `names`.
    `fields` has the payloads by place.
    """

    names: pl.Series
    name_id: Ints
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
        """Flag the ranges that have a start and an end."""
        return np.asarray((self.start != MISSING) & (self.end != MISSING))


def read(database: Database, texts: Texts) -> Ranges:
    """Return the ranges of all processes of a report."""
    where = f"WHERE eventType IN ({', '.join(map(str, _RANGES))})" if database.has(_TABLE, "eventType") else ""
    columns = database.integers(_TABLE, _NUMBERS, where)
    names, name_id = texts.of_all(columns["textId"])
    inline_texts: dict[str, int] = {}
    for row, (text,) in _rows(database, columns["rowid"], ("text",)):
        if isinstance(text, str):
            name_id[row] = len(names) + inline_texts.setdefault(text, len(inline_texts))
    all_names = pl.concat([names, pl.Series("name", list(inline_texts), dtype=pl.String)])
    payloads, fields = Payloads(database, texts), dict[int, Fields]()
    for row, payload in _rows(database, columns["rowid"], PAYLOAD):
        if read_fields := payloads.read(*payload):
            fields[row] = read_fields
    return Ranges(all_names, name_id, columns["start"], columns["end"], columns["globalTid"], fields)


def communicators(database: Database, texts: Texts) -> Communicators:
    """The communicators that the ranges of NCCL state."""
    payloads, stated = Payloads(database, texts), []
    for start, thread, *payload in database.each(
        _TABLE, ("start", "globalTid", *PAYLOAD), _with_any(database, PAYLOAD)
    ):
        if isinstance(start, int) and isinstance(thread, int) and (fields := payloads.read(*payload)):
            stated.append(NcclRange(thread >> THREAD_BITS << THREAD_BITS, start, fields))
    return Communicators(sorted(stated, key=lambda nccl_range: nccl_range.start_ns))


def _rows(database: Database, ids: Ints, columns: tuple[str, ...]) -> Iterator[tuple[int, list[object]]]:
    """Yield the place in `ids` of each row that has a value in one of the columns, and its values."""
    for row, *values in database.each(_TABLE, ("rowid", *columns), _with_any(database, columns)):
        place = int(np.searchsorted(ids, row)) if isinstance(row, int) else len(ids)
        if place < len(ids) and ids[place] == row:
            yield place, values


def _with_any(database: Database, columns: tuple[str, ...]) -> str:
    conditions = [f'"{name}" IS NOT NULL' for name in columns if database.has(_TABLE, name)]
    return f"WHERE {' OR '.join(conditions) or '0'}"
