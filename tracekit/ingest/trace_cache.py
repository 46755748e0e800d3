"""Parsed tables of traces in the user's cache directory, so that a trace file is parsed once.

An entry is one trace: a zip archive (members stored) with a Parquet file (zstd) for each table that has rows and a JSON
file for the rest, so that each table is read on first access. `tracekit.ingest.disk_cache` stores and evicts entries.

What an entry is found by: the path, size, time of change and first and last MiB of the trace file and of the logs that
are read beside it, the rank and window asked for, and the code that reads. A file that is changed in its middle, with
its size and its time of change kept as they were, is therefore not seen to have changed.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import stat
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.ingest import disk_cache, readers
from tracekit.ingest.disk_cache import DIRECTORY_VARIABLE, DiskCache
from tracekit.model import schema
from tracekit.model.run import Source
from tracekit.model.trace import Trace

__all__ = ["DIRECTORY_VARIABLE", "MAX_BYTES_VARIABLE", "StoredTrace", "TraceCache", "cached_source", "max_cache_bytes"]

MAX_BYTES_VARIABLE = "TRACEKIT_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 10 << 30
_SUFFIX = ".trace"
_EDGE_BYTES = 1 << 20
_FIELDS = "fields.json"
_READING_CODE = ("ingest/**/*.py", "model/*.py", "conventions.py")

Read = Callable[[], Trace]


def cached_source(source: Source) -> Source:
    """Return a source that reads the same trace from the user's cache where it is there, and else puts it there.

    Tables of a trace from the cache are read at first access. Only local files are cached.
    """
    return dataclasses.replace(source, read=partial(_read, source))


@dataclasses.dataclass(frozen=True)
class TraceCache:
    """Traces in a folder of this user's own, by key. Nothing that fails in here raises: it is said once, to debug."""

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @classmethod
    def of_user(cls, environment: Mapping[str, str] = os.environ) -> "TraceCache | None":
        """Return the cache that the environment names, or the user's usual one; None for a user without a home."""
        folder = disk_cache.folder("traces", environment)
        return None if folder is None else cls(folder, max_cache_bytes(environment))

    def get(self, key: str, again: Read) -> Trace | None:
        """Return the trace stored under `key`, None where there is none to trust.

        Should the entry be gone or damaged once a table of it is asked for, the tables come from `again()`.
        """
        found = self._disk_cache.get(key, _fields)
        if found is None:
            return None
        fields, rows = found
        return StoredTrace.of(fields, partial(self._table, key, rows), again)

    def put(self, key: str, trace: Trace) -> None:
        """Store a trace under `key`, and let the least recently used go where the cache is full."""
        # The errors are of what JSON or Parquet cannot say.
        unsaid = (TypeError, ValueError, pl.exceptions.PolarsError)
        self._disk_cache.put(key, partial(_write, trace), unless=unsaid)

    def size_bytes(self) -> int:
        """Return how much the entries take."""
        return self._disk_cache.size_bytes()

    def clear(self) -> int:
        """Remove every entry and return how much that freed, in bytes."""
        return self._disk_cache.clear()

    @property
    def _disk_cache(self) -> DiskCache:
        return DiskCache(self.folder, _SUFFIX, self.max_bytes)

    def _table(self, key: str, rows: Mapping[str, int], name: str) -> pl.DataFrame | None:
        """Return one table of an entry, None where it cannot be had."""
        if not rows[name]:
            return schema.TABLES[name].empty()

        def read(file: BinaryIO) -> pl.DataFrame:
            with zipfile.ZipFile(file) as entry:
                table = pl.read_parquet(entry.read(f"{name}.parquet"))
            if table.schema != schema.TABLES[name].schema or table.height != rows[name]:
                raise ValueError(f"{name}: not the table that was stored")
            return table

        return self._disk_cache.get(key, read)


def max_cache_bytes(environment: Mapping[str, str] = os.environ) -> int:
    """Return how many bytes the environment lets the cache of traces take."""
    told = environment.get(MAX_BYTES_VARIABLE, "")
    return int(told) if told.isdecimal() else DEFAULT_MAX_BYTES


class StoredTrace(Trace):
    """A trace whose tables are read from the cache when they are first asked for."""

    @classmethod
    def of(cls, fields: Mapping[str, Any], stored: Callable[[str], pl.DataFrame | None], again: Read) -> "StoredTrace":
        """Return a trace of these fields; its tables come from `stored(name)`, or from `again()` where that fails."""
        trace = object.__new__(cls)
        vars(trace).update(fields, _stored=stored, _again=again)
        return trace

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name not in schema.TABLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        table: pl.DataFrame | None = vars(self)["_stored"](name)
        if table is None:
            whole = vars(self)["_again"]()
            for other, made in whole.tables.items():
                vars(self).setdefault(other, made)
            table = whole.tables[name]
        kept: pl.DataFrame = vars(self).setdefault(name, table)  # another thread may have been first
        return kept


def _read(source: Source) -> Trace:
    key, cache = key_of(source), TraceCache.of_user()
    if key is None or cache is None:
        return source.read()
    return cache.get(key, partial(_read_again, source, key)) or _read_and_keep(source, cache, key)


def _read_and_keep(source: Source, cache: TraceCache, key: str) -> Trace:
    trace = source.read()
    if key_of(source) == key:  # else it was written to while it was read
        cache.put(key, trace)
    return trace


def _read_again(source: Source, key: str) -> Trace:
    if key_of(source) != key:
        raise BadTraceError(f"{source.path}: changed while it was being analysed; run the command again")
    return source.read()


def key_of(source: Source) -> str | None:
    """Return what the entry of a trace is found by; None where it is no local file."""
    trace = _state(Path(source.path))
    if trace is None:
        return None
    folder = Path(source.path).parent
    names = readers.companions(source.rank)
    companions = [_state(place / name) for place in (folder, folder.parent) for name in names]
    told = json.dumps([_code(), source.path, source.rank, source.window, trace, companions])
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()


def _state(path: Path) -> tuple[int, int, str] | None:
    """Return size, time of change in ns and hash of the first and last MiB; None where it is no readable file."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # opening a pipe would wait for its writer
            return None
        with path.open("rb") as file:
            known = os.fstat(file.fileno())
            edges = hashlib.sha256(file.read(_EDGE_BYTES))
            file.seek(max(_EDGE_BYTES, known.st_size - _EDGE_BYTES))
            edges.update(file.read(_EDGE_BYTES))
    except OSError:
        return None
    return known.st_size, known.st_mtime_ns, edges.hexdigest()


@functools.cache
def _code() -> str:
    return disk_cache.code_hash(Path(__file__).parents[1], _READING_CODE)


def _fields(file: BinaryIO) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    with zipfile.ZipFile(file) as entry:
        fields, rows = json.loads(entry.read(_FIELDS))
    return fields, rows


def _write(trace: Trace, file: BinaryIO) -> None:
    tables = trace.tables
    fields = {f.name: getattr(trace, f.name) for f in dataclasses.fields(Trace) if f.name not in tables}
    rows = {name: table.height for name, table in tables.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as entry:
        for name, table in tables.items():
            if rows[name]:
                packed = io.BytesIO()
                table.write_parquet(packed, compression="zstd", compression_level=1, statistics=False)
                entry.writestr(f"{name}.parquet", packed.getbuffer())
        entry.writestr(_FIELDS, json.dumps([fields, rows]))
