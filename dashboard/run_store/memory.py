"""Tables of allocated memory, from a trace or a memory snapshot, and replays of them under other allocator settings."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import polars as pl
import streamlit as st

from dashboard.run_entry import RunEntry
from dashboard.run_store import OpenRun, refuse_links
from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.ingest.readers import memory_snapshots
from tracekit.model.run import Run
from tracekit.replay.allocator import memory_usage, playback
from tracekit.replay.allocator.memory_usage import AS_RECORDED, MemoryUsage
from tracekit.replay.allocator.playback import History

__all__ = [
    "AS_RECORDED",
    "MemoryUsage",
    "SnapshotFile",
    "replay_snapshot",
    "replay_trace",
    "snapshot_report",
    "snapshot_tables",
    "snapshots",
    "snapshots_of_entry",
    "trace_tables",
]
_T = TypeVar("_T")
_TRACE_FACTS = (usage.over_time, usage.lifetimes, allocations.peaks, allocations.at_peak, allocations.churn)


def snapshots(run: OpenRun) -> tuple[SnapshotFile, ...]:
    """Return the memory snapshots in the run's folder, by window and rank."""
    return snapshot_files.files(run.run)


def snapshots_of_entry(entry: RunEntry) -> tuple[SnapshotFile, ...]:
    """Return the memory snapshots of a run that has no traces. Raises InputError where one is a link elsewhere."""
    refuse_links(entry)
    return snapshot_files.without_traces(Path(entry.path))


def trace_tables(run: OpenRun, rank: int, window: int) -> dict[str, pl.DataFrame]:
    """Return the memory tables of one trace by name. Raises TracekitError."""

    def measure_trace(run: Run) -> dict[str, pl.DataFrame]:
        trace = run.trace(rank, window)
        return {fact.__qualname__: fact(trace) for fact in _TRACE_FACTS}

    return run.remember(("memory", rank, window), measure_trace)


def snapshot_tables(entry: RunEntry, file: SnapshotFile, device: int | None) -> dict[str, pl.DataFrame]:
    """Return the memory tables of one device of a snapshot by name (None: the device with most events).

    The table `devices` lists its devices. Raises TracekitError.
    """
    return _snapshot_tables(entry, file, device)


def snapshot_report(entry: RunEntry, file: SnapshotFile, device: int | None) -> MemoryUsage:
    """Return the report of one device of a snapshot (None: that of `snapshot_tables`). Raises TracekitError."""
    return _snapshot_report(entry, file, device)


def replay_trace(run: OpenRun, rank: int, window: int, settings: str, device_gib: float | None) -> MemoryUsage:
    """Return a replay of a trace's allocator events under `settings`; the initial cache is inferred.

    Raises TracekitError.
    """

    def replay_events(run: Run) -> MemoryUsage:
        trace = run.trace(rank, window)
        peak = allocations.peaks(trace).filter(pl.col("device").is_not_null())["peak_allocated_bytes"].max()
        allocated_bytes = None if peak is None else int(str(peak))
        return _replay(playback.from_trace(trace), allocated_bytes, settings, device_gib)

    return run.remember(("replay", rank, window, settings, device_gib), replay_events)


def replay_snapshot(
    entry: RunEntry, file: SnapshotFile, device: int, settings: str, device_gib: float | None
) -> MemoryUsage:
    """Return a replay of a snapshot's history under `settings`. Raises TracekitError."""
    return _replay_snapshot(entry, file, device, settings, device_gib)


def _replay(history: History, allocated_bytes: int | None, settings: str, device_gib: float | None) -> MemoryUsage:
    recorded = MemoryUsage(allocated_bytes, None, pl.DataFrame(), pl.DataFrame())
    capacity_bytes = None if device_gib is None else int(device_gib * (1 << 30))
    return memory_usage.with_replay(recorded, history, settings, capacity_bytes=capacity_bytes)


def _cached_by_snapshot(*, max_entries: int) -> Callable[[Callable[..., _T]], Callable[..., _T]]:
    """Cache a function of a snapshot; what is made of uploaded ones lives in the session that uploaded them."""

    def decorate(make: Callable[..., _T]) -> Callable[..., _T]:
        shared = st.cache_resource(make, max_entries=max_entries, show_spinner=False)
        private = st.cache_resource(make, max_entries=max_entries, show_spinner=False, scope="session")

        @functools.wraps(make)
        def cached_call(entry: RunEntry, *arguments: object) -> _T:
            return (private if entry.is_private else shared)(*arguments)

        return cached_call

    return decorate


@_cached_by_snapshot(max_entries=40)
def _snapshot_tables(file: SnapshotFile, device: int | None) -> dict[str, pl.DataFrame]:
    return memory_usage.snapshot_tables(memory_snapshots.read(file.path), device)


@_cached_by_snapshot(max_entries=40)
def _snapshot_report(file: SnapshotFile, device: int | None) -> MemoryUsage:
    snapshot = memory_snapshots.read(file.path)
    return memory_usage.of_snapshot(snapshot, snapshot.main_device if device is None else device)


@_cached_by_snapshot(max_entries=8)
def _replay_snapshot(file: SnapshotFile, device: int, settings: str, device_gib: float | None) -> MemoryUsage:
    history = playback.from_snapshot(memory_snapshots.read(file.path), device)
    allocated_bytes = None if history.not_replayable else playback.replay_as_recorded(history).peak_allocated_bytes
    return _replay(history, allocated_bytes, settings, device_gib)
