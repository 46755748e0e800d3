"""Reports and facts of runs that were checked before, from the user's cache directory, without reading traces.

`report` returns the result of `loader.load` and `engine.check` with default thresholds, cached across processes; its
run reads a trace only if a page needs a table that was not measured. `summary` returns the part for a list of runs.

Only the dashboard uses this cache. `tracekit check` always judges again: its report names files as the command line
does, and a failed build must depend on the files themselves, not on a cache.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock

from tracekit.conventions.devices import DeviceOverride
from tracekit.errors import InputError, RuleError
from tracekit.executors.processes import ProcessesPerPass
from tracekit.ingest import loader
from tracekit.ingest.disk_cache import DiskCache
from tracekit.ingest.file_states import FileStates
from tracekit.model.fact import Fact
from tracekit.model.run import OnTrace, Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.rules import engine
from tracekit.rules.report_cache import entry, keys
from tracekit.rules.report_cache.entry import Summary
from tracekit.rules.report_cache.measured_tables import MeasuredTables
from tracekit.rules.rule import Report

__all__ = ["Summary", "get", "put", "report", "summary", "user_cache"]
_SUFFIX = ".report"
_SHARE_OF_CACHE = 0.1


def report(
    path: str,
    *,
    facts: Iterable[TraceFact] = (),
    surveys: Iterable[Fact[Run]] = (),
    devices: Sequence[DeviceOverride] = (),
    on_progress: OnTrace | None = None,
    on_crash: Callable[[str, RuleError], None] | None = None,
) -> Report:
    """Return the report of a run by all rules with default thresholds, from the cache if it is there.

    Its run has measured `facts` and `surveys`, and the facts of all rules; `devices` are as in `loader.load`,
    `on_crash` as in `engine.check`. A report without a rule that crashed is not stored. Raises the errors of both.
    """
    key = keys.run_key(path, devices=devices)
    cached = get(key, path, devices) if key is not None else None
    if cached is not None:
        return cached
    run = loader.load(path, devices=devices, executor=ProcessesPerPass())
    crashed: list[str] = []

    def note(code: str, error: RuleError) -> None:
        crashed.append(code)
        if on_crash is None:
            raise error
        on_crash(code, error)

    new_report = engine.check(run, facts=facts, on_progress=on_progress, on_crash=note)
    for survey in surveys:
        run.table(survey)
    if (
        not crashed and key is not None and keys.run_key(path, devices=devices) == key
    ):  # else the run changed while it was read
        put(key, new_report)
        run.use_cache(MeasuredTables(user_cache(), key, {}, _LazyRun(path, key, devices).is_unchanged))
    return new_report


def summary(path: str, state: FileStates | None = None, devices: Sequence[DeviceOverride] = ()) -> Summary | None:
    """Return the summary of a run; None if it was not checked, or changed since.

    `state` is the state of its files, if the caller has it already.
    """
    key = keys.run_key(path, state, devices)
    return None if key is None else user_cache().get(key, entry.read_summary)


def user_cache() -> DiskCache:
    """Return the cache of reports, next to the parsed traces; without a home directory, one that stores nothing."""
    cache = DiskCache.of_user("reports", _SUFFIX, share=_SHARE_OF_CACHE)
    return DiskCache(Path(os.devnull), _SUFFIX, 0) if cache is None else cache


def get(key: str, path: str, devices: Sequence[DeviceOverride] = ()) -> Report | None:
    """Return the report stored under `key` of the run at `path`; None if there is no valid one."""
    run = _LazyRun(path, key, devices)
    reports = user_cache()
    stored = reports.get(key, lambda file: entry.read(file, run.reader))
    if stored is None:
        return None
    report, numbers = stored
    report.run.use_cache(MeasuredTables(reports, key, numbers, run.is_unchanged))
    return report


def put(key: str, report: Report) -> None:
    """Store a report; one that cannot be serialized is not stored."""
    user_cache().put(key, partial(entry.write, report), unless=entry.UNSERIALIZABLE)


class _LazyRun:
    """A run that is loaded when one of its traces is needed."""

    def __init__(self, path: str, key: str, devices: Sequence[DeviceOverride]) -> None:
        self._path, self._key, self._devices = path, key, tuple(devices)
        self._run: Run | None = None
        self._lock = Lock()

    def reader(self, window: int, rank: int, path: str) -> Callable[[], Trace]:
        return partial(self._read, window, rank, path)

    def is_unchanged(self) -> bool:
        """Return whether the files of the run are those that were checked."""
        return keys.run_key(self._path, devices=self._devices) == self._key

    def _read(self, window: int, rank: int, path: str) -> Trace:
        with self._lock:
            if self._run is None:
                if not self.is_unchanged():
                    # Not BadTraceError: a run would continue without that rank.
                    raise InputError(f"{self._path}: changed since it was checked; open it again")
                self._run = loader.load(self._path, devices=self._devices)
        for source in self._run.sources:
            if (source.window, source.rank, source.path) == (window, rank, path):
                return source.read()
        raise InputError(f"{path}: is no longer part of the run; open it again")
