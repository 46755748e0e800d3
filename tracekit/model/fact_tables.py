"""Tables of facts of all traces of a run: in memory, or, for many ranks, as Parquet parts in a temporary folder."""

import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import polars as pl

from tracekit.model.trace import TraceFact

Place = tuple[int, int]
"""Window and rank of a trace."""


_MAX_FRAMES = 32
"""So many tables become one: a small table takes 100 times the memory of its rows."""
_CODE = re.compile(r"\(os error (\d+)\)")


class FactTables:
    """The table of each fact: columns window and rank, then those of the fact, by trace in the order of measuring.

    While traces are measured, their tables are in memory up to `max_bytes`; beyond that, those of the fact with most
    bytes become a Parquet file. Such a table is read again each time that it is requested, unless it still exists.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without tables."""
        self._max_bytes = max_bytes
        self._tables: dict[TraceFact, pl.DataFrame] = {}
        self._parts: dict[TraceFact, tuple[Path, ...]] = {}
        self._read: weakref.WeakValueDictionary[TraceFact, pl.DataFrame] = weakref.WeakValueDictionary()
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __contains__(self, fact: object) -> bool:
        return fact in self._tables or fact in self._parts

    def __iter__(self) -> Iterator[TraceFact]:
        return iter([*self._tables, *self._parts])

    def __getitem__(self, fact: TraceFact) -> pl.DataFrame:
        """Return the table of a fact. Raises KeyError if it was not measured."""
        if fact in self._tables:
            return self._tables[fact]
        table = self._read.get(fact)
        if table is None:
            table = self._read[fact] = self.scan(fact).collect()
        return table

    def __setitem__(self, fact: TraceFact, table: pl.DataFrame) -> None:
        self._tables[fact] = table

    def add(self, fact: TraceFact, table: pl.DataFrame) -> None:
        """Add the table of a fact; it becomes a Parquet file if it does not fit in memory with the others."""
        if table.estimated_size() <= self._free_bytes():
            self._tables[fact] = table
        else:
            part = self.new_part()
            write_parquet(table, part, compression_level=1)
            self.add_parts(fact, (part,))

    def scan(self, fact: TraceFact) -> pl.LazyFrame:
        """Return the table of a fact to select from, without reading it whole. Raises KeyError if not measured."""
        if fact in self._tables:
            return self._tables[fact].lazy()
        return pl.scan_parquet(list(self._parts[fact]), glob=False)

    def parts(self, fact: TraceFact) -> tuple[Path, ...]:
        """Return the Parquet files of a fact; none if its table is in memory."""
        return self._parts.get(fact, ())

    def collector(self, facts: Sequence[TraceFact]) -> "Collector":
        """Return a collector that takes the tables of these facts trace by trace."""
        return Collector(self, facts, max(self._free_bytes(), 0))

    def _free_bytes(self) -> int:
        return self._max_bytes - sum(int(table.estimated_size()) for table in self._tables.values())

    def new_part(self) -> Path:
        """Return the path of a new Parquet file, which is removed with these tables."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="tracekit-facts-")
        return Path(self._folder.name, f"{sum(1 for _ in Path(self._folder.name).iterdir()):06}.parquet")

    def add_parts(self, fact: TraceFact, parts: Sequence[Path]) -> None:
        """Add a fact whose table is in Parquet files."""
        self._parts[fact] = tuple(parts)


class Collector:
    """Takes the tables of several facts, trace by trace."""

    def __init__(self, into: FactTables, facts: Sequence[TraceFact], max_bytes: int) -> None:
        """Collect the tables of `facts`; more than `max_bytes` of them are written to files."""
        self._into, self._max_bytes = into, max_bytes
        self._pending: dict[TraceFact, _Pending] = {fact: _Pending() for fact in facts}
        self._parts: dict[TraceFact, list[Path]] = {}

    def add(self, place: Place, tables: Sequence[pl.DataFrame]) -> None:
        """Add the tables of one trace, in the order of the facts."""
        for pending, table in zip(self._pending.values(), tables, strict=True):
            pending.add(place, table)
        while sum(pending.size_bytes for pending in self._pending.values()) > self._max_bytes:
            self._write(max(self._pending, key=lambda fact: self._pending[fact].size_bytes))

    def finish(self) -> None:
        """Pass the complete tables on."""
        for fact, pending in self._pending.items():
            if fact in self._parts:
                self._write(fact)
                self._into.add_parts(fact, self._parts[fact])
            elif pending.places:
                self._into[fact] = pending.table()

    def _write(self, fact: TraceFact) -> None:
        pending, self._pending[fact] = self._pending[fact], _Pending()
        if pending.places:
            part = self._into.new_part()
            write_parquet(pending.table(), part, compression_level=1)
            self._parts.setdefault(fact, []).append(part)


class _Pending:
    """The tables of one fact that are in memory."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.size_bytes = 0
        self._heights: list[int] = []
        self._frames: list[pl.DataFrame] = []

    def add(self, place: Place, table: pl.DataFrame) -> None:
        self.places.append(place)
        self._heights.append(table.height)
        if table.height or not self._frames:  # one empty table is enough for the columns
            self._frames.append(_without_place(table))
        self.size_bytes += int(table.estimated_size())
        if len(self._frames) >= _MAX_FRAMES:
            self._frames = [pl.concat(self._frames, rechunk=True)]

    def table(self) -> pl.DataFrame:
        """Return all tables as one, with the window and rank of the trace of each row as first columns."""
        window, rank = (
            pl.Series(name, np.repeat(np.array(values, np.int64), self._heights))
            for name, values in zip(("window", "rank"), zip(*self.places, strict=True), strict=True)
        )
        return pl.DataFrame([window, rank, *pl.concat(self._frames, rechunk=True).get_columns()])


def write_parquet(table: pl.DataFrame, path: Path, *, compression_level: int | None = None) -> None:
    """Write a table. Raises OSError where the file cannot be written, such as on a full disk.

    Polars raises its own ComputeError there.
    """
    try:
        table.write_parquet(path, compression="zstd", compression_level=compression_level)
    except pl.exceptions.ComputeError as error:
        code = _CODE.search(str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from None


def _without_place(frame: pl.DataFrame) -> pl.DataFrame:
    place = {"window", "rank"}.intersection(frame.columns)
    return frame.drop(place) if place else frame
