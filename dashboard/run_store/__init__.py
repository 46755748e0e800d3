"""Open runs: checked once, then shared by every page and every person, also after a restart.

A page asks an `OpenRun` for tables; each is measured once. A run is read again when its files change. A run that is
being recorded, whose files change all the time, is read again on request, or on its overview once another trace is
complete.
"""

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
import streamlit as st

from dashboard import run_catalog, settings
from dashboard.run_entry import RunEntry
from dashboard.run_store import first_opening
from dashboard.run_store.first_opening import FirstOpening
from dashboard.run_store.tables import Table
from tracekit.analysis.compute import efficiency
from tracekit.analysis.time import breakdown
from tracekit.cli.watch.run_watch import Watch
from tracekit.cli.watch.training_state import TrainingState
from tracekit.conventions import object_storage
from tracekit.errors import InputError, RuleError
from tracekit.ingest import loader
from tracekit.model.run import OnTrace, Run, progress_of
from tracekit.model.trace import TraceFact
from tracekit.regression import baseline, samples, scaling, step_change
from tracekit.report.headlines import Headline
from tracekit.rules import engine, report_cache
from tracekit.rules.rule import Report
from tracekit.sql import run_query, table_documents

MAX_OPEN_RUNS = 3
MAX_LOADED_RUNS = 20
MAX_RESULTS = 24
MAX_WATCHED = 16
AUTO_CHECK_BYTES = 24 << 20
"""Larger runs are checked where a page needs their report, or on request."""
MAX_QUERIES = 4
"""SQL queries of all sessions at a time: each may use a processor and its memory limit."""
MAX_SHARED_TABLE_BYTES = 32 << 20
"""Larger tables are read from the run each time, which may have them on disk."""
_COMPARED_FACTS: tuple[TraceFact, ...] = (*baseline.FACTS, *step_change.FACTS, *scaling.FACTS, efficiency.by_step)
"""What comparisons and charts of runs read. The command line does not measure it: see `OpenRun.measure_comparisons`."""
_FACTS = (*report_cache.FACTS, *_COMPARED_FACTS)
_RUN_FACTS = (samples.samples_across, breakdown.run_clock)
_SEEN = "entries_seen"
_NOT_MADE = object()
_queries = threading.BoundedSemaphore(MAX_QUERIES)
on_trace: ContextVar[OnTrace | None] = ContextVar("on_trace", default=None)
"""What a page calls after each trace that is measured for it (`widgets.measuring`)."""
_T = TypeVar("_T")
queryable_tables = table_documents.all_documents


@dataclass(frozen=True, eq=False)
class LoadedRun:
    """A run whose files are listed and not yet read. Hold `lock` while reading traces: a Run serves one thread."""

    run: Run
    lock: Any = field(default_factory=threading.RLock)
    read_s: float = field(default_factory=time.time)
    """When it was read, Unix time in seconds."""


@dataclass(frozen=True, eq=False)
class OpenRun(LoadedRun):
    """A run and its report. Every method raises TracekitError where the traces cannot be read."""

    report: Report = field(kw_only=True)
    entry: RunEntry = field(kw_only=True)
    crashed_rules: Mapping[str, RuleError] = field(default_factory=dict)
    """The errors of rules that crashed, by code."""
    _results: dict[Hashable, object] = field(default_factory=dict)
    _measured: dict[Callable[[Run], object], object] = field(default_factory=dict)

    def measure_comparisons(self) -> None:
        """Measure what comparisons of runs read in one pass, if it was not measured when the run was checked."""
        self.compute(lambda run: run.measure(_COMPARED_FACTS))

    def table(self, table: Table) -> pl.DataFrame:
        """Return a table of `run_store.tables`."""
        return self.result_of(table.measure)

    def result_of(self, make: Callable[[Run], _T]) -> _T:
        """Result of a function of a module on the run, computed once.

        What was made before is returned without waiting for another session that reads the run.
        """
        result = self._measured.get(make)
        if result is None:
            result = self.compute(make)
            if not isinstance(result, pl.DataFrame) or result.estimated_size() <= MAX_SHARED_TABLE_BYTES:
                self._measured[make] = result
        return result  # type: ignore[return-value]  # the function determines the type

    def cached_table(self, measure: Callable[..., pl.DataFrame], *arguments: Hashable) -> pl.DataFrame:
        """Return `measure(run, *arguments)` as `remember` does; it is stored with the report, too."""
        name = f"{measure.__module__}.{measure.__qualname__}{arguments!r}"
        return self.remember(name, lambda run: run.named_table(name, lambda loaded: measure(loaded, *arguments)))

    def headline(self, make: Callable[[Report, Run], Headline | None]) -> Headline | None:
        """Return a headline of `report.headlines`, made once."""
        return self.remember(("headline", make), lambda run: make(self.report, run))

    def query(self, text: str, *, timeout_s: float, memory_bytes: int, max_rows: int) -> pl.DataFrame:
        """Return the result of one SELECT over the tables of the run.

        At most `MAX_QUERIES` run at a time. Raises InputError where that is so for longer than `timeout_s`.
        """
        limits: dict[str, Any] = {"timeout_s": timeout_s, "memory_bytes": memory_bytes, "max_rows": max_rows}
        with _turn(timeout_s), run_query.open_query(text, **limits) as process:
            tables = self.compute(process.collect_tables)
            return process.execute(tables)  # without the lock: other pages may read the run meanwhile

    def remember(self, key: Hashable, make: Callable[[Run], _T]) -> _T:
        """Result that was made of the run by this key before, or now; the oldest of many results is dropped.

        What was made before is returned without waiting for another session that reads the run.
        """
        result = self._results.get(key, _NOT_MADE)
        if result is _NOT_MADE:
            with self._reading():
                if key not in self._results:
                    new_result = make(self.run)
                    while len(self._results) >= MAX_RESULTS:
                        self._results.pop(next(iter(self._results)))
                    self._results[key] = new_result
                result = self._results[key]
        return result  # type: ignore[return-value]  # the key determines the type

    def compute(self, make: Callable[[Run], _T]) -> _T:
        """Result of `make` on the run, while no other thread reads it."""
        with self._reading():
            return make(self.run)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with self.lock, progress_of(self.run, on_trace.get()):
            yield


def cached_per_run(*, max_entries: int, max_private: int = 1) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Cache a function of run entries until a file of theirs changes.

    Everyone shares the results; those of uploaded runs live in the session that uploaded them.
    """

    def decorate(make: Callable[..., _T]) -> Callable[..., _T]:
        options: dict[str, Any] = {
            "show_spinner": False,
            "hash_funcs": {RunEntry: lambda entry: (entry.name, stamp_seen(entry))},
        }
        shared = st.cache_resource(make, max_entries=max_entries, **options)
        private = st.cache_resource(make, max_entries=max_private, scope="session", **options)

        @functools.wraps(make)
        def cached_call(*entries: RunEntry) -> _T:
            return (private if any(entry.is_private for entry in entries) else shared)(*entries)

        return cached_call

    return decorate


def open_run(entry: RunEntry) -> OpenRun:
    """Return the run, loaded and checked. Raises TracekitError where that is impossible."""
    return replace(_open_entry(entry), entry=entry)


def start_opening(entry: RunEntry) -> FirstOpening[OpenRun] | None:
    """Return the opening of a run that was not checked before, which runs in a thread; None for other runs."""
    return None if entry.summary is not None else first_opening.start(_opening_key(entry), lambda: open_run(entry))


def is_checked_soon(entry: RunEntry) -> bool:
    """Return whether the report of a run is cached, or made soon because the run is small."""
    return entry.summary is not None or entry.size_bytes <= AUTO_CHECK_BYTES


def check(entry: RunEntry) -> None:
    """Check a run and store its report with what comparisons read; it is not kept open. Raises TracekitError."""
    refuse_links(entry)
    report_cache.report(entry.path, facts=_FACTS, surveys=_RUN_FACTS, settings=settings.read_settings())


@cached_per_run(max_entries=MAX_LOADED_RUNS)
def load(entry: RunEntry) -> LoadedRun:
    """Return the run with its files listed and no trace read, as a check stored it. Raises TracekitError."""
    if entry.is_private:
        return LoadedRun(loader.load(entry.path, cache=False, settings=settings.read_settings()))
    refuse_links(entry)
    report = stored_report(entry)
    return LoadedRun(report.run if report else loader.load(entry.path, settings=settings.read_settings()))


@cached_per_run(max_entries=200)
def breakdown_by_step(entry: RunEntry) -> pl.DataFrame:
    """Return the breakdown by step: small, and cached longer than the open run."""
    return _open_entry(entry).run.table(breakdown.by_step)  # measured by the check: no lock is needed to read it


def read_again(entry: RunEntry) -> None:
    """From now on show a run that is being recorded as it is now."""
    st.session_state.get(_SEEN, {}).pop(entry.path, None)


def follow(entry: RunEntry) -> None:
    """From now on show a run that is being recorded with the traces that are complete now."""
    seen: RunEntry | None = st.session_state.get(_SEEN, {}).get(entry.path)
    if seen is not None and entry.traces_stamp not in ("", seen.traces_stamp):
        read_again(entry)


def stamp_seen(entry: RunEntry) -> str:
    """Stamp of the files as this person sees them: while a run is being recorded, that of when it was opened."""
    seen: dict[str, RunEntry] = st.session_state.setdefault(_SEEN, {})
    if not entry.is_live:
        seen.pop(entry.path, None)
        return entry.stamp
    return seen.setdefault(entry.path, entry).stamp


def refuse_links(entry: RunEntry) -> None:
    """Raise InputError where a file of the run is a link to a path outside of those the dashboard was opened on."""
    if object_storage.is_url(entry.path):
        return  # an object store has no links
    # Also here: a file may have become a link after the run was listed.
    linked = run_catalog.link_outside(report_cache.run_states(entry.path), entry.roots)
    if linked:
        raise InputError(
            f"{linked} is a link to a path outside of those the dashboard was opened on; put the file itself there"
        )


def training_state(entry: RunEntry) -> TrainingState | None:
    """Return the progress of a run that is being recorded, from its logs.

    None where a file is a link elsewhere, and for a URL: its logs arrive with each profiled window.
    """
    if object_storage.is_url(entry.path):
        return None
    try:
        refuse_links(entry)
    except InputError:
        return None
    watch, lock = _watch(entry.path)
    now_s = time.time()
    with lock:
        watch.poll(now_s)
        return watch.state(now_s)


def stored_report(entry: RunEntry) -> Report | None:
    """Return the report that a check has stored, also one of the command line, which has no facts of comparisons."""
    key = report_cache.run_key(entry.path, settings=settings.read_settings())
    return None if key is None else report_cache.get(key, entry.path, settings.read_settings())


@contextlib.contextmanager
def _turn(timeout_s: float) -> Iterator[None]:
    if not _queries.acquire(timeout=timeout_s):
        raise InputError(f"{MAX_QUERIES} queries of all visitors are running; try again when one of them has ended")
    try:
        yield
    finally:
        _queries.release()


@st.cache_resource(max_entries=MAX_WATCHED, show_spinner=False)
def _watch(path: str) -> tuple[Watch, Any]:
    return Watch(Path(path)), threading.Lock()


def _opening_key(entry: RunEntry) -> Hashable:
    return "open", entry.path, stamp_seen(entry)


@cached_per_run(max_entries=MAX_OPEN_RUNS)
def _open_entry(entry: RunEntry) -> OpenRun:
    crashed: dict[str, RuleError] = {}
    read_settings = settings.read_settings()
    opening = first_opening.under_way(_opening_key(entry))
    callbacks: dict[str, Any] = {"on_crash": crashed.__setitem__}
    if opening is not None:
        callbacks |= {"on_progress": opening.on_progress, "on_rule": opening.on_rule}
    if entry.is_private:
        run = loader.load(entry.path, cache=False, settings=read_settings)
        return OpenRun(run, report=engine.check(run, facts=_FACTS, **callbacks), entry=entry, crashed_rules=crashed)
    refuse_links(entry)
    report = stored_report(entry) or report_cache.report(
        entry.path, facts=_FACTS, surveys=_RUN_FACTS, settings=read_settings, **callbacks
    )
    return OpenRun(report.run, report=report, entry=entry, crashed_rules=crashed)
