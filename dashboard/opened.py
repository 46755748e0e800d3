"""Runs that were opened: loaded and checked once, then kept for every page and every person looking.

A run is read again when its files change. What a page draws is kept apart from the traces: tables are small, traces
are not.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import polars as pl
import streamlit as st

from dashboard.catalog import Entry
from tracekit import checking, loading, replay
from tracekit.analysis import allocations, breakdown, held, samples, snapshot_history, snapshots
from tracekit.analysis.beside import Beside
from tracekit.readers import memory_snapshot
from tracekit.replay import History, Outcome
from tracekit.reports import memory as memory_report
from tracekit.rule import Report
from tracekit.snapshot import MemorySnapshot
from tracekit.trace import Run

MAX_OPEN_RUNS = 3
_FACTS = (breakdown.by_step, breakdown.by_rank, samples.samples)


@dataclass(frozen=True, eq=False)
class Opened:
    """A run and its report. `lock` is held around whatever reads traces: a Run itself serves one thread."""

    run: Run
    report: Report
    lock: Any = field(default_factory=threading.RLock)


def opened(entry: Entry) -> Opened:
    """Return the run, loaded and checked. Raises TracekitError where that cannot be."""
    return _open(entry.path, entry.stamp)


def by_step(entry: Entry) -> pl.DataFrame:
    """Return the run's breakdown by step. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["by_step"]


def by_rank(entry: Entry) -> pl.DataFrame:
    """Return the run's breakdown by rank. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["by_rank"]


def measured(entry: Entry) -> pl.DataFrame:
    """Return the run's per-step samples. Raises TracekitError."""
    return _tables(entry.path, entry.stamp)["samples"]


def memory_of_trace(entry: Entry, rank: int, window: int) -> dict[str, pl.DataFrame]:
    """Return the tables of one trace that pictures of memory are drawn from, by name. Raises TracekitError."""
    return _memory_of_trace(entry.path, entry.stamp, rank, window)


def memory_of_snapshot(found: Beside, device: int | None) -> dict[str, pl.DataFrame]:
    """Return the tables of one device of a snapshot, by name; its devices are the table of that name.

    Raises TracekitError.
    """
    return _memory_of_snapshot(found, device)


@st.cache_resource(max_entries=MAX_OPEN_RUNS, show_spinner=False)
def _open(path: str, stamp: str) -> Opened:  # noqa: ARG001  # the stamp is part of the cache's key
    run = loading.load(path)
    run.measure(_FACTS)
    return Opened(run, checking.check(run))


@st.cache_resource(max_entries=200, show_spinner=False)
def _tables(path: str, stamp: str) -> dict[str, pl.DataFrame]:
    run = _open(path, stamp).run  # its facts are measured: no lock is needed to read them
    return {fact.__name__: run.table(fact) for fact in _FACTS}


_OF_MEMORY = (held.over_time, held.lifetimes, allocations.peaks, allocations.at_peak, allocations.churn)


@st.cache_resource(max_entries=40, show_spinner=False)
def _memory_of_trace(path: str, stamp: str, rank: int, window: int) -> dict[str, pl.DataFrame]:
    opened = _open(path, stamp)
    with opened.lock:
        trace = opened.run.trace(rank, window)
        return {fact.__name__: fact(trace) for fact in _OF_MEMORY}


@st.cache_resource(max_entries=40, show_spinner=False)
def _memory_of_snapshot(found: Beside, device: int | None) -> dict[str, pl.DataFrame]:
    snapshot = _snapshot(found)
    chosen = (
        device if device is not None else max(snapshot.devices, default=0, key=lambda each: _events(snapshot, each))
    )
    history, outcome = memory_report.played(replay.of(snapshot, chosen))
    return _pictured(snapshot, history, outcome) | {"devices": pl.DataFrame({"device": list(snapshot.devices)})}


def _pictured(snapshot: MemorySnapshot, history: History, outcome: Outcome) -> dict[str, pl.DataFrame]:
    own = pl.col("device") == history.device
    return {
        "over_time": snapshot_history.over_time(snapshot, history, outcome),
        "lifetimes": snapshot_history.lifetimes(snapshot, history, outcome),
        "segment_map": snapshot_history.segment_map(snapshot, history.device),
        "at_peak": snapshots.at_peak(snapshot, history, outcome),
        "fragmentation": snapshots.fragmentation(snapshot).filter(own),
    }


def _events(snapshot: MemorySnapshot, device: int) -> int:
    return int((snapshot.events["device"] == device).sum())


@st.cache_resource(max_entries=1, show_spinner=False)
def _snapshot(found: Beside) -> MemorySnapshot:
    return memory_snapshot.read(found.path)
