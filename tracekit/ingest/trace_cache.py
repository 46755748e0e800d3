"""Parsed tables of traces in the user's cache directory, so that a trace file is parsed once.

An entry is one trace: a zip archive (members stored) with a Parquet file (zstd) for each table that has rows and a JSON
file for the rest, so that each table is read on first access. `tracekit.ingest.disk_cache` stores and evicts entries.

The key of an entry: path, size, modification time and first and last MiB of the trace file and of its companion files
(logs), rank, window, and the code that reads. A change in the middle of a file that preserves its size and modification
time is therefore not noticed. Of a remote file and its companions, the key has size and version (ETag) as listed, so
that nothing is downloaded to look an entry up. Key and entry have the real path of a local file, however it is written.
"""

import dataclasses
import functools
import hashlib
import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError
from tracekit.ingest import disk_cache, readers
from tracekit.ingest.disk_cache import DiskCache
from tracekit.model import schema
from tracekit.model.source import Source
from tracekit.model.trace import Trace

_EDGE_BYTES = 1 << 20
_FIELDS = "fields.json"
_READING_CODE = ("ingest/*.py", "ingest/readers/**/*.py", "model/*.py", "conventions/*.py")

Read = Callable[[], Trace]


def cached_source(source: Source) -> Source:
    """Return a source that reads the same trace from the user's cache, and stores it there if it is not cached yet.

    Tables of a cached trace are read on first access.
    """
    return dataclasses.replace(source, read=partial(_read, source))


def store(source: Source, trace: Trace) -> None:
    """Store the trace of a source that was read already."""
    if (key := key_of(source)) is not None:
        TraceCache.of_user().put(key, trace, paths=(source.path, _real_path(source)))


@dataclasses.dataclass(frozen=True)
class TraceCache:
    """Traces in a disk cache, by key."""

    disk: DiskCache

    @classmethod
    def of_user(cls) -> "TraceCache":
        """The user's cache of traces."""
        return cls(DiskCache.of_user("traces"))

    def get(self, key: str, read_again: Read) -> Trace | None:
        """Return the trace stored under `key`; None if there is none.

        If the entry is gone or damaged when one of its tables is read, all tables come from `read_again()`.
        """
        entry = self.disk.get(key, _fields)
        if entry is None:
            return None
        fields, rows = entry
        return StoredTrace.of(fields, partial(self._table, key, rows), read_again)

    def put(self, key: str, trace: Trace, *, paths: tuple[str, str] = ("", "")) -> None:
        """Store a trace under `key`, unless JSON or Parquet cannot represent it.

        The entry has the second of `paths` in place of the first.
        """
        unserializable = (TypeError, ValueError, pl.exceptions.PolarsError)
        self.disk.put(key, partial(_write, trace, *paths), unless=unserializable)

    def _table(self, key: str, rows: Mapping[str, int], name: str) -> pl.DataFrame | None:
        """Return one table of an entry; None if it cannot be read."""
        if not rows[name]:
            return schema.TABLES[name].empty()

        def read(file: BinaryIO) -> pl.DataFrame:
            with zipfile.ZipFile(file) as entry:
                table = pl.read_parquet(entry.read(f"{name}.parquet"))
            if table.schema != schema.TABLES[name].schema or table.height != rows[name]:
                raise ValueError(f"{name}: not the table that was stored")
            return table

        return self.disk.get(key, read)


class StoredTrace(Trace):
    """A trace whose tables are read from the cache on first access."""

    @classmethod
    def of(
        cls, fields: Mapping[str, Any], stored: Callable[[str], pl.DataFrame | None], read_again: Read
    ) -> "StoredTrace":
        """Return a trace with these fields; tables come from `stored(name)`, or from `read_again()` if that is None."""
        trace = object.__new__(cls)
        vars(trace).update(fields, _stored=stored, _read_again=read_again)
        return trace

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name not in schema.TABLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        table: pl.DataFrame | None = vars(self)["_stored"](name)
        if table is None:
            trace = vars(self)["_read_again"]()
            for other_name, other in trace.tables.items():
                vars(self).setdefault(other_name, other)
            table = trace.tables[name]
        first: pl.DataFrame = vars(self).setdefault(name, table)  # another thread may have been first
        return first


def recall(source: Source) -> Trace | None:
    """Return the trace of a source from the user's cache; None if it is not there."""
    key = key_of(source)
    trace = None if key is None else TraceCache.of_user().get(key, partial(_read_again, source, key))
    return None if trace is None else _with_path(trace, _real_path(source), source.path)


def _read(source: Source) -> Trace:
    return recall(source) or _read_and_store(source)


def _read_and_store(source: Source) -> Trace:
    key = key_of(source)
    trace = source.read()
    if key is not None and key_of(source) == key:  # else the file changed while it was read
        TraceCache.of_user().put(key, trace, paths=(source.path, _real_path(source)))
    return trace


def _real_path(source: Source) -> str:
    return os.path.realpath(source.path) if source.origin is None else source.path


def _with_path(trace: Trace, old: str, new: str) -> Trace:
    """Return a trace that is named `new` where it was named `old`."""
    if old == new or trace.path != old:
        return trace
    return trace.replace(path=new, data_quality=_with_new_path(trace.data_quality, old, new))


def _with_new_path(issues: pl.DataFrame, old: str, new: str) -> pl.DataFrame:
    return issues.with_columns(pl.col("message").str.replace_all(old, new, literal=True))


def _read_again(source: Source, key: str) -> Trace:
    if key_of(source) != key:
        raise BadTraceError(f"{source.path}: changed while it was being analysed; run the command again")
    return source.read()


def key_of(source: Source) -> str | None:
    """Return the key of a trace's entry; None if its file cannot be read, or has no known version."""
    state = _local_state(source) if source.origin is None else source.origin.state
    if state is None:
        return None
    companions = [[path, _state(Path(path))] for path in source.companions]
    parts = json.dumps([_code(), _real_path(source), source.rank, source.window, state, companions])
    return hashlib.sha256(parts.encode("utf-8", "surrogateescape")).hexdigest()


def _local_state(source: Source) -> object:
    """Return the states of a trace file and its companion files; None if the trace file cannot be read."""
    trace = _state(Path(source.path))
    if trace is None:
        return None
    folder = Path(source.path).parent
    places = (folder, folder.parent)
    names = readers.companions(source.rank, lambda name: any((place / name).is_file() for place in places))
    return [trace, [[name, *(_state(place / name) for place in places)] for name in names]]


def _state(path: Path) -> tuple[int, int, str] | None:
    """Return size, modification time in ns and hash of first and last MiB; None if it is not a readable file."""
    try:
        with regular_files.open_to_read(path) as file:
            status = os.fstat(file.fileno())
            edges = hashlib.sha256(file.read(_EDGE_BYTES))
            file.seek(max(_EDGE_BYTES, status.st_size - _EDGE_BYTES))
            edges.update(file.read(_EDGE_BYTES))
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, edges.hexdigest()


@functools.cache
def _code() -> str:
    plugins = [disk_cache.plugin_hash(type(r)) for r in readers.available() if r not in readers.READERS]
    return "+".join((disk_cache.code_hash(Path(__file__).parents[1], _READING_CODE), *plugins))


def _fields(file: BinaryIO) -> tuple[Mapping[str, Any], Mapping[str, int]]:
    with zipfile.ZipFile(file) as entry:
        fields, rows = json.loads(entry.read(_FIELDS))
    return fields, rows


def _write(trace: Trace, old_path: str, new_path: str, file: BinaryIO) -> None:
    tables = trace.tables  # built once, for whoever reads the trace now, too
    trace = _with_path(trace, old_path, new_path)
    tables["data_quality"] = trace.data_quality
    fields = {f.name: getattr(trace, f.name) for f in dataclasses.fields(Trace) if f.name not in tables}
    rows = {name: table.height for name, table in tables.items()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as entry:
        for name, table in tables.items():
            if rows[name]:
                packed = io.BytesIO()
                table.write_parquet(packed, compression="zstd", compression_level=1, statistics=False)
                entry.writestr(f"{name}.parquet", packed.getbuffer())
        entry.writestr(_FIELDS, json.dumps([fields, rows]))
