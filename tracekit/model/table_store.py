"""TableStore: the tables of a run in memory, as Parquet files where they need too much of it, and saved on disk."""

import os
import re
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import polars as pl

from tracekit.model.trace import TraceFact

_CODE = re.compile(r"\(os error (\d+)\)")

Measure: TypeAlias = Callable[[Any], pl.DataFrame]
"""A fact of a trace or of a run."""
Place = tuple[int, int]
"""Window and rank of a trace."""

_MAX_FRAMES = 32
"""So many tables become one: a small table takes 100 times the memory of its rows."""


class SavedTables(Protocol):
    """Tables by name, measured of the same traces by the same code: after a restart nothing is measured again."""

    def get(self, name: str) -> pl.DataFrame | None:
        """Table of a name; None if it has to be measured."""

    def put(self, name: str, table: pl.DataFrame, measured_s: float) -> None:
        """Save a table that took `measured_s` to measure, if that is worth it."""

    def get_parts(self, name: str, new_part: Callable[[], Path]) -> tuple[Path, ...]:
        """Table of a name as Parquet files at paths of `new_part`; none if it has to be measured."""

    def put_parts(self, name: str, parts: Sequence[Path]) -> None:
        """Save a table that is in Parquet files, if that is worth it."""


class TableStore:
    """The table of each fact; that of a fact of traces has columns window and rank, then those of the fact.

    While traces are measured, their tables are in memory up to `max_bytes`; beyond that, those of the fact with most
    bytes become a Parquet file. Such a table is read again each time that it is requested, unless it still exists.
    """

    def __init__(self, max_bytes: int) -> None:
        """Start without tables."""
        self._max_bytes = max_bytes
        self._tables: dict[Measure, pl.DataFrame] = {}
        self._run_facts: set[Measure] = set()
        self.parts: dict[TraceFact, tuple[Path, ...]] = {}
        """Parquet files of the facts whose tables are not in memory."""
        self._read: weakref.WeakValueDictionary[TraceFact, pl.DataFrame] = weakref.WeakValueDictionary()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._part_count = 0
        self._naming = threading.Lock()
        self._saved: SavedTables | None = None
        self.is_complete = True
        """Whether no trace was left out. If one was, nothing is saved: another process may be able to read it."""

    def get(self, fact: Measure) -> pl.DataFrame:
        """Table of a fact. Raises KeyError if it was not measured."""
        if fact in self._tables:
            return self._tables[fact]
        table = self._read.get(fact)
        if table is None:
            table = self._read[fact] = self.scan(fact).collect()
        return table

    def put(self, fact: TraceFact, table: pl.DataFrame) -> None:
        """Add the table of a fact; it becomes a Parquet file if it does not fit in memory with the others."""
        if table.estimated_size() <= self.free_bytes:
            self._tables[fact] = table
        else:
            part = self.new_part()
            write_parquet(table, part, compression_level=1)
            self.parts[fact] = (part,)

    def find(self, fact: Measure) -> pl.DataFrame | None:
        """Table of a fact of the run, which was measured or saved; None if it has to be measured."""
        if fact not in self._tables and (table := self.saved_table(full_name(fact))) is not None:
            self._tables[fact] = table
            self._run_facts.add(fact)
        return self._tables.get(fact)

    def keep(self, fact: Measure, table: pl.DataFrame, measured_s: float) -> None:
        """Add and save the table of a fact of the run, which stays in memory: it is small and needed often."""
        self._tables[fact] = table
        self._run_facts.add(fact)
        self.save(full_name(fact), table, measured_s)

    def scan(self, fact: TraceFact) -> pl.LazyFrame:
        """Table of a fact to select from, without reading it whole. Raises KeyError if not measured."""
        if fact in self._tables:
            return self._tables[fact].lazy()
        return pl.scan_parquet(list(self.parts[fact]), glob=False)

    def in_memory(self) -> dict[str, pl.DataFrame]:
        """Tables that are in memory, by full name of the fact, where it has one."""
        return {name: table for fact, table in self._tables.items() if (name := full_name(fact)) is not None}

    def of_rows(self, rows: pl.Expr) -> "TableStore":
        """Some rows of the tables of facts of traces, in a store of its own."""
        store = TableStore(self._max_bytes)
        for fact in (*(fact for fact in self._tables if fact not in self._run_facts), *self.parts):
            store.put(fact, self.scan(fact).filter(rows).collect())
        return store

    @property
    def free_bytes(self) -> int:
        """Memory that tables of facts of traces may still take."""
        tables = (table for fact, table in self._tables.items() if fact not in self._run_facts)
        return max(self._max_bytes - sum(int(table.estimated_size()) for table in tables), 0)

    def new_part(self) -> Path:
        """Path of a new Parquet file, which is removed with these tables; no two callers get the same path."""
        # Two pages may read tables of one run at the same time, and a file is written after its path is chosen.
        with self._naming:
            if self._folder is None:
                self._folder = tempfile.TemporaryDirectory(prefix="tracekit-facts-")
            self._part_count += 1
            return Path(self._folder.name, f"{self._part_count:06}.parquet")

    # Saved on disk

    def use(self, saved: SavedTables) -> None:
        """Take tables from `saved`, and save there those that it does not have; those in Parquet files now."""
        self._saved = saved
        for fact in self.parts:
            self._save_parts(fact)

    def take(self, fact: TraceFact) -> bool:
        """Whether the table of a fact is here, or was saved and is here now."""
        is_measured = fact in self._tables or fact in self.parts
        if is_measured or self._saved is None or (name := full_name(fact)) is None:
            return is_measured
        if (table := self._saved.get(name)) is not None:
            self.put(fact, table)
        elif parts := self._saved.get_parts(name, self.new_part):
            self.parts[fact] = parts
        return table is not None or bool(parts)

    def saved_table(self, name: str | None) -> pl.DataFrame | None:
        """Table that was saved under a name; None if it has to be measured."""
        return None if name is None or self._saved is None else self._saved.get(name)

    def save(self, name: str | None, table: pl.DataFrame, measured_s: float) -> None:
        """Save a table that took `measured_s` to measure."""
        if name is not None and self._saved is not None and self.is_complete:
            self._saved.put(name, table, measured_s)

    def add(self, fact: TraceFact, table: pl.DataFrame | Sequence[Path], measured_s: float) -> None:
        """Add and save a table, or its Parquet files, that took `measured_s` to measure."""
        if isinstance(table, pl.DataFrame):
            self._tables[fact] = table
            self.save(full_name(fact), table, measured_s)
        else:
            self.parts[fact] = tuple(table)
            self._save_parts(fact)

    def _save_parts(self, fact: TraceFact) -> None:
        if (name := full_name(fact)) is not None and self._saved is not None and self.is_complete:
            self._saved.put_parts(name, self.parts[fact])


def full_name(fact: Measure) -> str | None:
    """Module and name of a fact; None if it cannot be imported by them, such as a lambda."""
    module, name = getattr(fact, "__module__", ""), getattr(fact, "__qualname__", "")
    is_reached = getattr(sys.modules.get(module), name, None) is fact
    return f"{module}.{name}" if is_reached else None


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


class Collector:
    """Takes the tables of several facts, trace by trace."""

    def __init__(self, into: TableStore, facts: Sequence[TraceFact]) -> None:
        """Collect the tables of `facts`; what does not fit in the memory of the store is written to files."""
        self.facts = list(facts)
        self.places: set[Place] = set()
        """The traces whose tables were added."""
        self._into, self._max_bytes = into, into.free_bytes
        self._pending: dict[TraceFact, _Pending] = {fact: _Pending() for fact in facts}
        self._parts: dict[TraceFact, list[Path]] = {}

    def add(self, place: Place, tables: Sequence[pl.DataFrame]) -> None:
        """Add the tables of one trace, in the order of the facts."""
        for pending, table in zip(self._pending.values(), tables, strict=True):
            pending.add(place, table)
        while sum(pending.size_bytes for pending in self._pending.values()) > self._max_bytes:
            self._write(max(self._pending, key=lambda fact: self._pending[fact].size_bytes))
        self.places.add(place)

    def finish(self, measured_s: float) -> None:
        """Pass the complete tables on, which took `measured_s` to measure."""
        for fact in self._parts:
            self._write(fact)
            self._into.add(fact, self._parts[fact], measured_s)
        for fact, pending in self._pending.items():
            if pending.places:
                self._into.add(fact, pending.table(), measured_s)

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
            place_columns = {"window", "rank"}.intersection(table.columns)
            self._frames.append(table.drop(place_columns) if place_columns else table)
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
