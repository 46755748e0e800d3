"""Runs that were opened: loaded and checked once, then kept for every page and every person looking.

A run is read again when its files change. What a page draws is kept apart from the traces: tables are small, traces
are not.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import polars as pl
import streamlit as st

from dashboard.catalog import Entry
from tracekit import checking, loading, replay
from tracekit.analysis import allocations, breakdown, held, samples, snapshot_history, snapshots
from tracekit.analysis import kernels as kernels_of
from tracekit.analysis import ops as ops_of
from tracekit.analysis.beside import Beside
from tracekit.readers import memory_snapshot
from tracekit.replay import History, Outcome
from tracekit.reports import memory as memory_report
from tracekit.reports.memory import Memory
from tracekit.rule import Report
from tracekit.snapshot import MemorySnapshot
from tracekit.trace import Fact, Run, Survey

MAX_OPEN_RUNS = 3
Play: TypeAlias = Callable[[str, float | None], Memory]
"""A replay by what its settings are written as, and the GiB of the device (None: as recorded, or enough)."""
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


def across(entry: Entry, survey: Survey, facts: Sequence[Fact] = ()) -> pl.DataFrame:
    """Return a survey of the run, `facts` measured for it in one pass over the traces; kept. Raises TracekitError."""
    held = opened(entry)
    with held.lock:
        held.run.measure(facts)
        return held.run.across(survey)


def table(entry: Entry, fact: Fact) -> pl.DataFrame:
    """Return a fact of all traces of the run; measured once, then kept. Raises TracekitError."""
    held = opened(entry)
    with held.lock:
        return held.run.table(fact)


def kernels(entry: Entry, by: tuple[str, ...]) -> pl.DataFrame:
    """Return `analysis.kernels.kernels` with `launch_delays` where launches are known. Raises TracekitError."""
    return _kernels(entry.path, entry.stamp, by)


def ops(entry: Entry, by: tuple[str, ...], kinds: tuple[str, ...]) -> pl.DataFrame:
    """Return `analysis.ops.ops`. Raises TracekitError."""
    return _ops(entry.path, entry.stamp, by, kinds)


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


@st.cache_resource(max_entries=40, show_spinner=False)
def _kernels(path: str, stamp: str, by: tuple[str, ...]) -> pl.DataFrame:
    held = _open(path, stamp)
    with held.lock:
        found, delays = kernels_of.kernels(held.run, by), kernels_of.launch_delays(held.run, by)
    keys = [name for name in found.columns if name in (*by, "kind")]
    if delays.is_empty():
        return found
    return found.join(delays.drop("launched"), on=keys, how="left", nulls_equal=True, maintain_order="left")


@st.cache_resource(max_entries=40, show_spinner=False)
def _ops(path: str, stamp: str, by: tuple[str, ...], kinds: tuple[str, ...]) -> pl.DataFrame:
    held = _open(path, stamp)
    with held.lock:
        return ops_of.ops(held.run, by, kinds)


_OF_MEMORY = (held.over_time, held.lifetimes, allocations.peaks, allocations.at_peak, allocations.churn)


@st.cache_resource(max_entries=40, show_spinner=False)
def _memory_of_trace(path: str, stamp: str, rank: int, window: int) -> dict[str, pl.DataFrame]:
    opened = _open(path, stamp)
    with opened.lock:
        trace = opened.run.trace(rank, window)
        return {fact.__name__: fact(trace) for fact in _OF_MEMORY}


def replay_of_trace(entry: Entry, rank: int, window: int, text: str, device_gib: float | None) -> Memory:
    """Return what a trace's allocator events come to under the settings that `text` writes. Raises TracekitError."""
    return _replay_of_trace(entry.path, entry.stamp, rank, window, text, device_gib)


def replay_of_snapshot(found: Beside, device: int | None, text: str, device_gib: float | None) -> Memory:
    """Return what a snapshot's history comes to under the settings that `text` writes. Raises TracekitError."""
    return _replay_of_snapshot(found, device, text, device_gib)


@st.cache_resource(max_entries=20, show_spinner=False)
def _replay_of_trace(path: str, stamp: str, rank: int, window: int, text: str, device_gib: float | None) -> Memory:
    held = _open(path, stamp)
    with held.lock:
        trace = held.run.trace(rank, window)
        mine = allocations.peaks(trace).filter(pl.col("device").is_not_null())
    history = replay.of_trace(trace)
    told = Memory(_most(mine["peak_allocated_bytes"]), None, pl.DataFrame(), pl.DataFrame())
    return memory_report.with_replay(told, history, text, capacity_bytes=_capacity(device_gib))


@st.cache_resource(max_entries=20, show_spinner=False)
def _replay_of_snapshot(found: Beside, device: int | None, text: str, device_gib: float | None) -> Memory:
    snapshot = _snapshot(found)
    chosen = _device(snapshot, device)
    told = replace(memory_report.of_snapshot(snapshot, chosen), notes=())
    return memory_report.with_replay(told, replay.of(snapshot, chosen), text, capacity_bytes=_capacity(device_gib))


def _device(snapshot: MemorySnapshot, device: int | None) -> int:
    """Return the device asked for, else the one with the longest history."""
    return device if device is not None else max(snapshot.devices, default=0, key=lambda each: _events(snapshot, each))


def _capacity(device_gib: float | None) -> int | None:
    return None if device_gib is None else int(device_gib * (1 << 30))


def _most(values: pl.Series) -> int | None:
    found = values.max()
    return None if found is None else int(str(found))


@st.cache_resource(max_entries=40, show_spinner=False)
def _memory_of_snapshot(found: Beside, device: int | None) -> dict[str, pl.DataFrame]:
    snapshot = _snapshot(found)
    chosen = _device(snapshot, device)
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
