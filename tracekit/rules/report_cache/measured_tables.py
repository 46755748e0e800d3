"""Tables of a checked run: those in the entry of its report, and those that were measured later, each an entry."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import polars as pl

from tracekit.ingest.disk_cache import DiskCache
from tracekit.rules.report_cache import entry

MIN_MEASURED_S = 0.2
"""A table that takes less is measured again: reading it would save little, and each is a file."""
MAX_TABLE_BYTES = 128 << 20
"""Limit for one table: in memory, or of its Parquet files."""
_PARTS = "\0parts"


class MeasuredTables:
    """The cache of tables of one run, by full name of the fact (`Run.use_cache`)."""

    def __init__(self, reports: DiskCache, key: str, numbers: Mapping[str, int], is_unchanged: Callable[[], bool]):
        """Read tables of the report `key`, whose entry has those of `numbers`, by name.

        `is_unchanged` returns whether the files of the run are those that were checked.
        """
        self._reports, self._key, self._numbers, self._is_unchanged = reports, key, numbers, is_unchanged
        self._later = DiskCache.of_user("tables")

    def get(self, name: str) -> pl.DataFrame | None:
        """Return the table of a name; None if it has to be measured."""
        if name in self._numbers:
            table = self._reports.get(self._key, partial(entry.read_fact, self._numbers[name]))
            if table is not None:
                return table
        return self._later.get(self._key_of(name), partial(entry.read_fact, 0))

    def put(self, name: str, table: pl.DataFrame, measured_s: float) -> None:
        """Store a table that took long to measure, unless it is large or files of the run have changed."""
        is_worth_it = measured_s >= MIN_MEASURED_S and table.estimated_size() <= MAX_TABLE_BYTES
        if is_worth_it and self._is_unchanged():
            self._later.put(self._key_of(name), partial(entry.write_table, table), unless=entry.UNSERIALIZABLE)

    def get_parts(self, name: str, new_part: Callable[[], Path]) -> tuple[Path, ...]:
        """Return the table of a name as Parquet files at paths of `new_part`; none if it has to be measured."""
        read = partial(entry.read_parts, new_part=new_part)
        return self._later.get(self._key_of(name + _PARTS), read) or ()

    def put_parts(self, name: str, parts: Sequence[Path]) -> None:
        """Store a table that is in Parquet files, unless it is large, stored already, or files of the run changed."""
        key = self._key_of(name + _PARTS)
        size_bytes = sum(part.stat().st_size for part in parts)
        if size_bytes <= MAX_TABLE_BYTES and not self._later.path(key).exists() and self._is_unchanged():
            self._later.put(key, partial(entry.write_parts, parts))

    def _key_of(self, name: str) -> str:
        return hashlib.sha256(f"{self._key}\0{name}".encode()).hexdigest()
