"""Parsed tables of traces in the user's cache directory, so that a trace file is parsed once.

An entry is one trace: a zip archive of stored members, a Parquet file (zstd) for each table that has rows and a JSON
file for the rest, so that a table is read only when somebody asks for it. An entry appears whole under its name or not
at all, the least recently used go when the cache outgrows its bound, and a cache that cannot be used, or an entry that
cannot be trusted, costs no more than the parsing that it would have saved. Tiles (`tracekit.tiles`) lie here too, under
the same bound.

What an entry is found by: the path, size, time of change and first and last MiB of the trace file and of the logs that
are read beside it, the rank and window asked for, and the code that reads. A file that is changed in its middle, with
its size and its time of change kept as they were, is therefore not seen to have changed.
"""

import dataclasses
import errno
import functools
import hashlib
import io
import json
import logging
import os
import secrets
import stat
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl

from tracekit import conventions, schema
from tracekit.errors import BadTraceError
from tracekit.trace import Source, Trace

DIRECTORY = "TRACEKIT_CACHE_DIR"
MAX_BYTES = "TRACEKIT_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 10 << 30
_SUFFIX = ".trace"
TILES_SUFFIX = ".tiles"
_SUFFIXES = (_SUFFIX, TILES_SUFFIX)
_ABANDONED_S = 3600  # no writer takes that long: what it began was left behind by one that died
_EDGE_BYTES = 1 << 20
_FIELDS = "fields.json"
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in an entry's place must not hang the reader
_READING_CODE = ("readers/*.py", "schema.py", "conventions.py", "intervals.py", "trace.py", "cache.py")

log = logging.getLogger(__name__)

Read = Callable[[], Trace]


def cached(source: Source) -> Source:
    """Return a source that reads the same trace from the user's cache where it is there, and else puts it there.

    Tables of a trace from the cache are read at first access. Only local files are cached.
    """
    return dataclasses.replace(source, read=partial(_read, source))


def key_of(source: Source) -> str | None:
    """Return what the entry of a trace is found by; None where it is no local file."""
    trace = _state(Path(source.path))
    if trace is None:
        return None
    logs = [_state(path) for path in _logs(Path(source.path), source.rank)]
    told = json.dumps([_code(), source.path, source.rank, source.window, trace, logs])
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()


def hash_of_code(patterns: Iterable[str]) -> str:
    """Return the hash of code of this package: a version number is forgotten sooner or later."""
    package = Path(__file__).parent
    digest = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(package.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


@dataclasses.dataclass(frozen=True)
class Cache:
    """Entries in a folder of this user's own, by key. Nothing that fails in here raises: it is said once, to debug."""

    folder: Path
    max_bytes: int = DEFAULT_MAX_BYTES

    @classmethod
    def of_user(cls, environment: Mapping[str, str] = os.environ) -> "Cache | None":
        """Return the cache that the environment names, or the user's usual one; None for a user without a home."""
        bound = environment.get(MAX_BYTES, "")
        max_bytes = int(bound) if bound.isdecimal() else DEFAULT_MAX_BYTES
        if named := environment.get(DIRECTORY):
            return cls(Path(named) / "traces", max_bytes)
        try:
            usual = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        except RuntimeError:
            return None
        return cls(usual / "tracekit" / "traces", max_bytes)

    def get(self, key: str, again: Read) -> Trace | None:
        """Return the trace stored under `key`, None where there is none to trust.

        Should the entry be gone or damaged once a table of it is asked for, the tables come from `again()`.
        """
        path = self._entry(key)
        try:
            _check_own(self.folder)
        except OSError as error:
            self._complain(error)
            return None
        try:
            with _open_own(path) as file, zipfile.ZipFile(file) as entry:
                fields, rows = json.loads(entry.read(_FIELDS))
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 whatever bytes lie there, the trace itself can be read
            _drop(path, error)
            return None
        return StoredTrace.of(fields, partial(self._table, path, rows), again)

    def put(self, key: str, trace: Trace) -> None:
        """Store a trace under `key`, and let the least recently used go where the cache is full."""
        if not self.max_bytes:
            return
        try:
            with self.writing(f"{key}{_SUFFIX}") as file:
                _write(file, trace)
        except (OSError, TypeError, ValueError, pl.exceptions.PolarsError) as error:  # what JSON or Parquet cannot say
            self._complain(error)

    def file(self, name: str) -> BinaryIO | None:
        """Return what lies here under `name`, open to be read and marked as used; None where there is none to trust."""
        try:
            _check_own(self.folder)
            file = _open_own(self.folder / name)
            os.utime(self.folder / name)
        except OSError as error:
            self._complain(error)
            return None
        return file

    @contextmanager
    def writing(self, name: str) -> Iterator[BinaryIO]:
        """Give a file to write and read, which lies here under `name` once the block has ended well.

        What is larger than the cache may be is not kept. Raises OSError where nothing can be written.
        """
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.folder)
        path = self.folder / f"{Path(name).stem}.{secrets.token_hex(8)}{conventions.PARTIAL_SUFFIX}"
        try:
            with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600), "w+b") as file:
                yield file
                file.flush()
                size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes <= self.max_bytes:
                path.replace(self.folder / name)
        finally:
            path.unlink(missing_ok=True)
        self._shed()

    def drop(self, name: str, error: Exception) -> None:
        """Remove what lies under `name`, which cannot be trusted."""
        _drop(self.folder / name, error)

    def size_bytes(self) -> int:
        """Return how much the entries take."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> int:
        """Remove every entry and return how much that freed, in bytes."""
        files = list(self._files())
        for _, _, path in files:
            with suppress(OSError):
                path.unlink()
        return sum(size for _, size, _ in files)

    def _entry(self, key: str) -> Path:
        return self.folder / f"{key}{_SUFFIX}"

    def _table(self, path: Path, rows: Mapping[str, int], name: str) -> pl.DataFrame | None:
        """Return one table of an entry, None where it cannot be had."""
        if not rows[name]:
            return schema.TABLES[name].empty()
        try:
            with _open_own(path) as file, zipfile.ZipFile(file) as entry:
                table = pl.read_parquet(entry.read(f"{name}.parquet"))
            if table.schema != schema.TABLES[name].schema or table.height != rows[name]:
                raise ValueError(f"{name}: not the table that was stored")
        except Exception as error:  # noqa: BLE001 whatever bytes lie there, the trace itself can be read
            _drop(path, error)
            return None
        return table

    def _complain(self, error: Exception) -> None:
        if not isinstance(error, FileNotFoundError):
            _say_once(f"{self.folder}: {getattr(error, 'strerror', None) or error}")

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use in ns, size in bytes and path of all that lies in the cache."""
        try:
            files = [file for file in self.folder.iterdir() if file.suffix in (*_SUFFIXES, conventions.PARTIAL_SUFFIX)]
        except OSError:
            return
        for file in files:
            with suppress(OSError):  # another process may remove it meanwhile
                known = file.lstat()
                yield known.st_mtime_ns, known.st_size, file

    def _shed(self) -> None:
        abandoned_ns = time.time_ns() - _ABANDONED_S * 10**9
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        for used_ns, size, path in files:
            is_entry = path.suffix in _SUFFIXES
            if (held > self.max_bytes and is_entry) or (used_ns < abandoned_ns and not is_entry):
                with suppress(OSError):
                    path.unlink()
                held -= size


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
    key, cache = key_of(source), Cache.of_user()
    if key is None or cache is None:
        return source.read()
    return cache.get(key, partial(_read_again, source, key)) or _read_and_keep(source, cache, key)


def _read_and_keep(source: Source, cache: Cache, key: str) -> Trace:
    trace = source.read()
    if key_of(source) == key:  # else it was written to while it was read
        cache.put(key, trace)
    return trace


def _read_again(source: Source, key: str) -> Trace:
    if key_of(source) != key:
        raise BadTraceError(f"{source.path}: changed while it was being analysed; run the command again")
    return source.read()


def _logs(trace: Path, rank: int) -> Iterator[Path]:
    """Yield where the logs that belong to a trace may lie: beside it or, for a window, in the folder above."""
    for folder in (trace.parent, trace.parent.parent):
        for suffix in (conventions.CHECKPOINT_LOG_SUFFIX, conventions.METRICS_SUFFIX):
            yield folder / conventions.rank_file(rank, suffix)


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
    """Return the hash of the code that makes tables."""
    return hash_of_code(_READING_CODE)


def _write(file: BinaryIO, trace: Trace) -> None:
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


def _check_own(folder: Path) -> None:
    """Raise OSError unless a folder is this user's own; close it to all others."""
    known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder of this user's own")
    if stat.S_IMODE(known.st_mode) != 0o700:
        folder.chmod(0o700)


def _open_own(path: Path) -> io.BufferedReader:
    """Open a file that this user wrote. Raises OSError where it is a link, no file, or somebody else's."""
    file = os.fdopen(os.open(path, os.O_RDONLY | _NO_LINK), "rb")
    known = os.fstat(file.fileno())
    if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid():
        file.close()
        raise PermissionError(errno.EPERM, "not a file of this user's own")
    return file


def _drop(path: Path, error: Exception) -> None:
    _say_once(f"{path}: not used ({error})")
    with suppress(OSError):
        path.unlink()


@functools.cache
def _say_once(message: str) -> None:
    log.debug("cache: %s; going on without", message)
