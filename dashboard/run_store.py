"""Runs that were opened: checked once, then kept for every page and every person looking, also after a restart.

A run is read again when its files change. One that is being recorded, whose files change all the time, is read again
when somebody asks, or looks at its overview once another trace is whole. What a page draws is kept apart from the
traces: tables are small, traces are not.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import streamlit as st

from dashboard import run_catalog
from dashboard.run_catalog import RunEntry
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError
from tracekit.ingest import loader
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model.memory_snapshot import MemorySnapshot
from tracekit.model.run import Run, Source
from tracekit.regression import baseline, samples
from tracekit.replay.allocator import playback
from tracekit.replay.allocator.facts import snapshot_summary, snapshot_timeline
from tracekit.replay.allocator.playback import History, Outcome
from tracekit.report import memory as memory_report
from tracekit.rules import engine, report_cache
from tracekit.rules.report_cache import keys
from tracekit.rules.rule import Report

MAX_OPEN_RUNS = 3
_FACTS = (breakdown.by_step, breakdown.by_rank, *baseline.FACTS)
_SURVEYS = (samples.samples_across,)
_SEEN = "entries_seen"


@dataclass(frozen=True, eq=False)
class OpenRun:
    """A run and its report. `lock` is held around whatever reads traces: a Run itself serves one thread."""

    run: Run
    report: Report
    lock: Any = field(default_factory=threading.RLock)
    read_s: float = field(default_factory=time.time)
    """When it was opened, Unix time in seconds."""


def open_run(entry: RunEntry) -> OpenRun:
    """Return the run, loaded and checked. Raises TracekitError where that cannot be."""
    return _open_private(entry, entry.stamp) if entry.is_private else _open(entry, stamp_seen(entry))


def check(entry: RunEntry, on_progress: Callable[[Source], None] | None = None) -> None:
    """Check a run and keep its report, without holding it open. Raises TracekitError."""
    refuse_links(entry)
    report_cache.report(entry.path, facts=_FACTS, surveys=_SURVEYS, on_progress=on_progress)


def read_again(entry: RunEntry) -> None:
    """From now on show a run that is being recorded as it is now."""
    st.session_state.get(_SEEN, {}).pop(entry.path, None)


def follow(entry: RunEntry) -> None:
    """From now on show a run that is being recorded with the traces that it has now, once they are whole."""
    seen: RunEntry | None = st.session_state.get(_SEEN, {}).get(entry.path)
    if seen is not None and entry.traces_stamp not in ("", seen.traces_stamp):
        read_again(entry)


def by_step(entry: RunEntry) -> pl.DataFrame:
    """Return the run's breakdown by step. Raises TracekitError."""
    return _table(entry, "by_step")


def by_rank(entry: RunEntry) -> pl.DataFrame:
    """Return the run's breakdown by rank. Raises TracekitError."""
    return _table(entry, "by_rank")


def measured(entry: RunEntry) -> pl.DataFrame:
    """Return the run's per-step samples. Raises TracekitError."""
    return _table(entry, "samples")


def memory_of_snapshot(found: SnapshotFile, device: int | None) -> dict[str, pl.DataFrame]:
    """Return the tables of one device of a snapshot, by name; its devices are the table of that name.

    Raises TracekitError.
    """
    return _memory_of_snapshot(found, device)


@st.cache_resource(max_entries=MAX_OPEN_RUNS, show_spinner=False)
def _open(_entry: RunEntry, stamp: str) -> OpenRun:  # noqa: ARG001  # the stamp is the cache's key
    refuse_links(_entry)
    report = report_cache.report(_entry.path, facts=_FACTS, surveys=_SURVEYS)
    return OpenRun(report.run, report)


@st.cache_resource(max_entries=1, show_spinner=False, scope="session")
def _open_private(_entry: RunEntry, stamp: str) -> OpenRun:  # noqa: ARG001  # the stamp is the cache's key
    run = loader.load(_entry.path, cache=False)
    return OpenRun(run, engine.check(run, facts=_FACTS))


def stamp_seen(entry: RunEntry) -> str:
    """Return the stamp of what this person sees of a run: while it is being recorded, that of when it was opened."""
    seen: dict[str, RunEntry] = st.session_state.setdefault(_SEEN, {})
    if not entry.is_live:
        seen.pop(entry.path, None)
        return entry.stamp
    return seen.setdefault(entry.path, entry).stamp


def refuse_links(entry: RunEntry) -> None:
    """Raise InputError where a file of the run is a link to a place that the dashboard was not opened on."""
    # Also here, for a file may have become a link after the run was listed.
    linked = run_catalog.link_outside(keys.file_states(entry.path), entry.roots)
    if linked:
        raise InputError(
            f"{linked} is a link to a place that the dashboard was not opened on; put the file itself there"
        )


def _table(entry: RunEntry, name: str) -> pl.DataFrame:
    if entry.is_private:
        return _measured(open_run(entry).run)[name]
    return _tables(entry, stamp_seen(entry))[name]


@st.cache_resource(max_entries=200, show_spinner=False)
def _tables(_entry: RunEntry, stamp: str) -> dict[str, pl.DataFrame]:
    return _measured(_open(_entry, stamp).run)  # its facts are measured: no lock is needed to read them


def _measured(run: Run) -> dict[str, pl.DataFrame]:
    return {fact.__name__: run.table(fact) for fact in (breakdown.by_step, breakdown.by_rank, samples.samples)}


@st.cache_resource(max_entries=40, show_spinner=False)
def _memory_of_snapshot(found: SnapshotFile, device: int | None) -> dict[str, pl.DataFrame]:
    snapshot = _snapshot(found)
    chosen = (
        device if device is not None else max(snapshot.devices, default=0, key=lambda each: _events(snapshot, each))
    )
    history, outcome = memory_report.play_history(playback.of(snapshot, chosen))
    return _pictured(snapshot, history, outcome) | {"devices": pl.DataFrame({"device": list(snapshot.devices)})}


def _pictured(snapshot: MemorySnapshot, history: History, outcome: Outcome) -> dict[str, pl.DataFrame]:
    own = pl.col("device") == history.device
    return {
        "over_time": snapshot_timeline.over_time(snapshot, history, outcome),
        "lifetimes": snapshot_timeline.lifetimes(snapshot, history, outcome),
        "segment_map": snapshot_timeline.segment_map(snapshot, history.device),
        "at_peak": snapshot_summary.at_peak(snapshot, history, outcome),
        "fragmentation": snapshot_summary.fragmentation(snapshot).filter(own),
    }


def _events(snapshot: MemorySnapshot, device: int) -> int:
    return int((snapshot.events["device"] == device).sum())


@st.cache_resource(max_entries=1, show_spinner=False)
def _snapshot(found: SnapshotFile) -> MemorySnapshot:
    return reader.read(found.path)
