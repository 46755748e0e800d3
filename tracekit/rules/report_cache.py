"""Reports and facts of runs that were checked before, from the user's cache directory, without reading traces.

`report` returns the result of `loader.load` and `engine.check` with default thresholds, cached across processes; its
run reads a trace only if a page needs a table that was not measured. `summary` returns the part for a list of runs.

The dashboard uses this cache, and `tracekit check` fills it, too; the command line itself is answered by what it
printed (`tracekit.cli.question`). Both depend on the states of the files that were read (size, times, and the real path
of a link), on the code and on the rules.
"""

import dataclasses
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from threading import Lock
from types import ModuleType

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import compute_gap_causes, kernels
from tracekit.analysis.host import ops
from tracekit.analysis.time import breakdown
from tracekit.conventions import object_storage
from tracekit.conventions.read_settings import NO_SETTINGS, ReadSettings
from tracekit.errors import InputError, RuleError
from tracekit.ingest import disk_cache, file_states, files, loader, readers, trace_cache
from tracekit.ingest.disk_cache import DiskCache
from tracekit.ingest.file_states import FileState, FileStates
from tracekit.ingest.remote import RemoteFile
from tracekit.model import plugins
from tracekit.model.fact import Fact
from tracekit.model.run import OnTrace, Run
from tracekit.model.source import Source
from tracekit.model.trace import Trace, TraceFact
from tracekit.rules import engine, report_entry
from tracekit.rules.registry import RULES, all_rules
from tracekit.rules.report_entry import Summary
from tracekit.rules.rule import Report

FACTS: tuple[TraceFact, ...] = (
    breakdown.by_rank, breakdown.extent, compute_gap_causes.communication_gap_time, ops.roofs, *kernels.BY_NAME,
)  # fmt: skip
"""Facts of traces that reports and pages draw and no rule reads: every check that is stored measures them, too."""
MIN_MEASURED_S = 0.2
"""A table that takes less is measured again: reading it would save little, and each is a file."""
MAX_TABLE_BYTES = 128 << 20
"""Limit for one table: in memory, or of its Parquet files."""
MAX_ACTIVITIES = MAX_TABLE_BYTES // 8
"""Of more activities, whose durations would not fit into one table, a page adds up the kernels when it needs them."""
_PARTS = "\0parts"


def report(
    path: str,
    *,
    facts: Iterable[TraceFact] = (),
    surveys: Iterable[Fact[Run]] = (),
    settings: ReadSettings = NO_SETTINGS,
    on_progress: OnTrace | None = None,
    on_rule: engine.OnRule | None = None,
    on_crash: Callable[[str, RuleError], None] | None = None,
) -> Report:
    """Return the report of a run by all rules with default thresholds, from the cache if it is there with `facts`.

    Its run has measured `facts`, the facts by which runs are compared among them, and `surveys`, and the facts of all
    rules. Of a report that was stored by `store` alone, only what is missing is measured. `settings` are as in
    `loader.load`, the callbacks as in `engine.check`. A report without a rule that crashed is stored. Raises the errors
    of both.
    """
    key = run_key(path, settings=settings)
    cached = get(key, path, settings) if key is not None else None
    if cached is not None and key is not None and has_comparisons(key):
        return cached
    from tracekit.executors.processes import ProcessesPerPass  # takes 10 ms, which commands that only store save

    run = cached.run if cached is not None else loader.load(path, settings=settings, executor=ProcessesPerPass())
    crashed: list[str] = []

    def note(code: str, error: RuleError) -> None:
        crashed.append(code)
        if on_crash is None:
            raise error
        on_crash(code, error)

    new_report = engine.check(run, facts=(*FACTS, *facts), on_progress=on_progress, on_rule=on_rule, on_crash=note)
    for survey in surveys:
        run.table(survey)
    if not crashed and key is not None:
        store(key, new_report, path, settings)
    return new_report


def summary(path: str, state: FileStates | None = None, settings: ReadSettings = NO_SETTINGS) -> Summary | None:
    """Return the summary of a run; None if it was not checked, or changed since.

    `state` is the state of its files, if the caller has it already.
    """
    key = run_key(path, state, settings)
    return None if key is None else DiskCache.of_user("reports").get(key, report_entry.read_summary)


def run_states(path: str) -> FileStates | None:
    """States of a run's files; None if there are no files, or too many.

    For a URL the files are listed; None also if the server states no version of one.
    """
    if object_storage.is_url(path):
        return remote_states(files.list_remote(path).files, path)
    return file_states.of_run(path, readers.companion_suffixes())


def remote_states(listed: Iterable[RemoteFile], url: str) -> FileStates | None:
    """Return the states of the files of a run behind a URL; None if one has no version, or there are too many."""
    read = [file for file in listed if files.is_read_by_tracekit(file.name)]
    states = [
        FileState(file.url.removeprefix(url.rstrip("/")).lstrip("/"), file.size_bytes or 0, 0, 0, version=file.version)
        for file in read
        if file.version is not None
    ]
    if len(states) < len(read) or not 0 < len(read) <= file_states.MAX_FILES:
        return None
    return FileStates(tuple(sorted(states, key=lambda state: state.path)))


def run_key(path: str, known_states: FileStates | None = None, settings: ReadSettings = NO_SETTINGS) -> str | None:
    """Return the key of a run's report, however its path is written; None if it cannot be cached.

    `settings` are as in `loader.load`. Raises InputError if a URL cannot be listed.
    """
    states = run_states(path) if known_states is None else known_states
    if states is None:
        return None
    real_path = path if object_storage.is_url(path) else os.path.realpath(path)
    text = repr((_code_hash(), real_path, states.stamp, settings))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def get(key: str, path: str, settings: ReadSettings = NO_SETTINGS) -> Report | None:
    """Return the report stored under `key` of the run at `path`, whose files it names so; None without a valid one."""
    run = _LazyRun(path, key, settings)
    reports = DiskCache.of_user("reports")
    stored = reports.get(key, lambda file: report_entry.read(file, run.read, object_storage.shown(path)))
    if stored is None:
        return None
    report, names = stored
    report.run.use_cache(_MeasuredTables(reports, key, names, run.is_unchanged))
    return report


def is_stored(key: str) -> bool:
    """Whether there is a report under `key`."""
    return DiskCache.of_user("reports").path(key).exists()


def has_comparisons(key: str) -> bool:
    """Whether a report is stored under `key` with the facts by which runs are compared."""
    stored = DiskCache.of_user("reports").get(key, report_entry.read_summary)
    return stored is not None and stored.has_comparisons


def store(
    key: str, report: Report, path: str, settings: ReadSettings = NO_SETTINGS, *, has_comparisons: bool = True
) -> None:
    """Store a report under `key` with the tables of its run, unless files of the run have changed since that key.

    The report of a role in a folder of its own below `path` is not stored: the folder's is another run.

    `has_comparisons` states whether these are also the facts by which runs are compared.
    """
    lazy_run = _LazyRun(path, key, settings)
    # A role has the path of its own folder, where that is below: a report is named by the path that it is stored for.
    is_of_path = not report.run.roles or os.path.realpath(report.run.path) == os.path.realpath(path)
    if is_of_path and lazy_run.is_unchanged():
        if kernels.activity_count(report.run) <= MAX_ACTIVITIES:
            report.run.table(kernels.by_name)
        put(key, report, has_comparisons=has_comparisons)
        report.run.use_cache(_MeasuredTables(DiskCache.of_user("reports"), key, frozenset(), lazy_run.is_unchanged))


def put(key: str, report: Report, *, has_comparisons: bool = True) -> None:
    """Store a report; one that cannot be serialized is not stored."""
    write = partial(report_entry.write, report, has_comparisons=has_comparisons)
    DiskCache.of_user("reports").put(key, write, unless=report_entry.UNSERIALIZABLE)


class _LazyRun:
    """A run that is loaded when one of its traces is needed that is not in the user's cache."""

    def __init__(self, path: str, key: str, settings: ReadSettings) -> None:
        self._path, self._key, self._settings = path, key, settings
        self._is_as_checked = False
        self._run: Run | None = None
        self._lock = Lock()

    def read(self, source: Source) -> Trace:
        """Return the trace of a stored source. Raises InputError if the run has changed since it was checked."""
        with self._lock:
            self._is_as_checked = self._is_as_checked or self.is_unchanged()
        if not self._is_as_checked:
            # Not BadTraceError: a run would continue without that rank.
            raise InputError(f"{self._path}: changed since it was checked; open it again")
        trace = trace_cache.recall(dataclasses.replace(source, read=partial(self._read, source)))
        return self._read(source) if trace is None else loader.with_settings(trace, self._settings)

    def is_unchanged(self) -> bool:
        """Return whether the files of the run are those that were checked."""
        return run_key(self._path, settings=self._settings) == self._key

    def _read(self, source: Source) -> Trace:
        with self._lock:
            self._run = self._run or loader.load(self._path, settings=self._settings)
        for loaded in self._run.sources:
            if (loaded.window, loaded.rank, loaded.path) == (source.window, source.rank, source.path):
                return loaded.read()
        raise InputError(f"{source.path}: is no longer part of the run; open it again")


class _MeasuredTables:
    """The cache of tables of one run, by full name of the fact (`Run.use_cache`)."""

    def __init__(self, reports: DiskCache, key: str, names: frozenset[str], is_unchanged: Callable[[], bool]):
        """Read tables of the report `key`, whose entry has those of `names`.

        `is_unchanged` returns whether the files of the run are those that were checked.
        """
        self._reports, self._key, self._names, self._is_unchanged = reports, key, names, is_unchanged
        self._later = DiskCache.of_user("tables")

    def get(self, name: str) -> pl.DataFrame | None:
        """Return the table of a name; None if it has to be measured."""
        if name in self._names:
            table = self._reports.get(self._key, partial(report_entry.read_fact, name))
            if table is not None:
                return table
        return self._later.get(self._key_of(name), report_entry.read_table)

    def put(self, name: str, table: pl.DataFrame, measured_s: float) -> None:
        """Store a table that took long to measure, unless it is large or files of the run have changed."""
        is_worth_it = measured_s >= MIN_MEASURED_S and table.estimated_size() <= MAX_TABLE_BYTES
        if is_worth_it and self._is_unchanged():
            self._later.put(
                self._key_of(name), partial(report_entry.write_table, table), unless=report_entry.UNSERIALIZABLE
            )

    def get_parts(self, name: str, new_part: Callable[[], Path]) -> tuple[Path, ...]:
        """Return the table of a name as Parquet files at paths of `new_part`; none if it has to be measured."""
        read = partial(report_entry.read_parts, new_part=new_part)
        return self._later.get(self._key_of(name + _PARTS), read) or ()

    def put_parts(self, name: str, parts: Sequence[Path]) -> None:
        """Store a table that is in Parquet files, unless it is large, stored already, or files of the run changed."""
        key = self._key_of(name + _PARTS)
        size_bytes = sum(part.stat().st_size for part in parts)
        if size_bytes <= MAX_TABLE_BYTES and not self._later.path(key).exists() and self._is_unchanged():
            self._later.put(key, partial(report_entry.write_parts, parts))

    def _key_of(self, name: str) -> str:
        return hashlib.sha256(f"{self._key}\0{name}".encode()).hexdigest()


@functools.cache
def _code_hash() -> str:
    """Return the hash of all code that makes a report, and of the rules with their thresholds, plugins among them."""
    package = Path(conventions.__file__).parents[1]
    rules = [(rule.code, rule.__module__, rule.__qualname__, dataclasses.asdict(rule())) for rule in all_rules()]
    added: list[type | ModuleType] = [rule for rule in all_rules() if rule not in RULES]
    added += [type(reader) for reader in readers.available() if reader not in readers.READERS]
    added += [
        importlib.import_module(point.module)
        for group in ("tracekit.metrics", "tracekit.causes")
        for point in plugins.entry_points(group=group)
    ]
    parts = {
        "code": disk_cache.code_hash(package, ("**/*.py",)),
        "libraries": [pl.__version__, np.__version__],
        "rules": rules,
        "plugins": sorted({disk_cache.plugin_hash(plugin) for plugin in added}),
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
