"""Storage of reports: a disk cache next to the parsed traces, with a tenth of the size limit."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import Lock

import polars as pl

from tracekit.errors import InputError
from tracekit.ingest import loader
from tracekit.ingest.disk_cache import DiskCache
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.rules.report_cache import entry, keys
from tracekit.rules.rule import Report

_SUFFIX = ".report"
_SHARE_OF_CACHE = 0.1


def report_cache() -> DiskCache:
    """Return the user's cache of reports; for a user without a home directory, one that stores nothing."""
    cache = DiskCache.of_user("reports", _SUFFIX, share=_SHARE_OF_CACHE)
    return DiskCache(Path(os.devnull), _SUFFIX, 0) if cache is None else cache


def get(key: str, path: str) -> Report | None:
    """Return the report stored under `key` of the run at `path`; None if there is no valid one."""
    cache, run = report_cache(), _LazyRun(path, key)

    def read_cached(number: int) -> pl.DataFrame | None:
        return cache.get(key, partial(entry.read_fact, number))

    return cache.get(key, lambda file: entry.read(file, run.reader, read_cached))


def put(key: str, report: Report) -> None:
    """Store a report; one that cannot be serialized is not stored."""
    report_cache().put(key, partial(entry.write, report), unless=entry.UNSERIALIZABLE)


class _LazyRun:
    """A run that is loaded when one of its traces is needed."""

    def __init__(self, path: str, key: str) -> None:
        self._path, self._key = path, key
        self._run: Run | None = None
        self._lock = Lock()

    def reader(self, window: int, rank: int, path: str) -> Callable[[], Trace]:
        return partial(self._read, window, rank, path)

    def _read(self, window: int, rank: int, path: str) -> Trace:
        with self._lock:
            if self._run is None:
                if keys.run_key(self._path) != self._key:
                    # Not BadTraceError: a run would continue without that rank.
                    raise InputError(f"{self._path}: changed since it was checked; open it again")
                self._run = loader.load(self._path)
        for source in self._run.sources:
            if (source.window, source.rank, source.path) == (window, rank, path):
                return source.read()
        raise InputError(f"{path}: is no longer part of the run; open it again")
