"""Tables of allocated memory, from a trace or a memory snapshot, and replays of them under other allocator settings."""

import polars as pl
import streamlit as st

from dashboard.run_store import OpenRun
from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model.memory_snapshot import MemorySnapshot
from tracekit.model.run import Run
from tracekit.replay.allocator import playback
from tracekit.replay.allocator.facts import snapshot_facts
from tracekit.replay.allocator.playback import History
from tracekit.report import memory as memory_report
from tracekit.report.memory import MemoryReport

__all__ = ["SnapshotFile", "replay_snapshot", "replay_trace", "snapshot_tables", "snapshots", "trace_tables"]
_TRACE_FACTS = (usage.over_time, usage.lifetimes, allocations.peaks, allocations.at_peak, allocations.churn)


def snapshots(run: OpenRun) -> tuple[SnapshotFile, ...]:
    """Return the memory snapshots in the run's folder, by window and rank."""
    return snapshot_files.files(run.run)


def trace_tables(run: OpenRun, rank: int, window: int) -> dict[str, pl.DataFrame]:
    """Return the memory tables of one trace by name. Raises TracekitError."""

    def measured(of: Run) -> dict[str, pl.DataFrame]:
        trace = of.trace(rank, window)
        return {fact.__name__: fact(trace) for fact in _TRACE_FACTS}

    return run.cached(("memory", rank, window), measured)


@st.cache_resource(max_entries=40, show_spinner=False)
def snapshot_tables(file: SnapshotFile, device: int | None) -> dict[str, pl.DataFrame]:
    """Return the memory tables of one device of a snapshot by name (None: the device with most events).

    The table `devices` lists its devices. Raises TracekitError.
    """
    snapshot = _snapshot(file)
    if device is None:
        device = max(snapshot.devices, default=0, key=lambda of: snapshot.events.filter(device=of).height)
    history, outcome = memory_report.play_history(playback.from_snapshot(snapshot, device))
    return {
        "devices": pl.DataFrame({"device": list(snapshot.devices)}),
        "over_time": snapshot_facts.over_time(snapshot, history, outcome),
        "lifetimes": snapshot_facts.lifetimes(snapshot, history, outcome),
        "segment_map": snapshot_facts.segment_map(snapshot, history.device),
        "at_peak": snapshot_facts.at_peak(snapshot, history, outcome),
        "fragmentation": snapshot_facts.fragmentation(snapshot).filter(device=history.device),
    }


def replay_trace(run: OpenRun, rank: int, window: int, settings: str, device_gib: float | None) -> MemoryReport:
    """Return a replay of a trace's allocator events under `settings`; the initial cache is inferred.

    Raises TracekitError.
    """

    def replayed(of: Run) -> MemoryReport:
        trace = of.trace(rank, window)
        peak = allocations.peaks(trace).filter(pl.col("device").is_not_null())["peak_allocated_bytes"].max()
        allocated_bytes = None if peak is None else int(str(peak))
        return _replayed(playback.from_trace(trace), allocated_bytes, settings, device_gib)

    return run.cached(("replay", rank, window, settings, device_gib), replayed)


def replay_snapshot(
    run: OpenRun, file: SnapshotFile, device: int, settings: str, device_gib: float | None
) -> MemoryReport:
    """Return a replay of a snapshot's history under `settings`. Raises TracekitError."""

    def replayed(_run: Run) -> MemoryReport:
        history = playback.from_snapshot(reader.read(file.path), device)
        allocated_bytes = None if history.not_replayable else playback.replay_as_recorded(history).peak_allocated_bytes
        return _replayed(history, allocated_bytes, settings, device_gib)

    return run.cached(("replay", file, device, settings, device_gib), replayed)


def _replayed(history: History, allocated_bytes: int | None, settings: str, device_gib: float | None) -> MemoryReport:
    recorded = MemoryReport(allocated_bytes, None, pl.DataFrame(), pl.DataFrame())
    capacity_bytes = None if device_gib is None else int(device_gib * (1 << 30))
    return memory_report.with_replay(recorded, history, settings, capacity_bytes=capacity_bytes)


@st.cache_resource(max_entries=1, show_spinner=False)
def _snapshot(file: SnapshotFile) -> MemorySnapshot:
    return reader.read(file.path)
