"""Facts of an open run that pages ask for, measured once and kept for as long as the run is held open."""

from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import polars as pl

from dashboard import run_store
from dashboard.run_catalog import RunEntry
from tracekit.analysis.compute import kernels as kernels_of
from tracekit.analysis.host import ops as ops_of
from tracekit.analysis.memory import allocations, usage
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model.run import Run, RunFact
from tracekit.model.trace import Fact
from tracekit.replay.allocator import playback
from tracekit.report import memory as memory_report
from tracekit.report.memory import MemoryReport

Play: TypeAlias = Callable[[str, float | None], MemoryReport]
"""A replay by what its settings are written as, and the GiB of the device (None: as recorded, or enough)."""
MOST_KEPT = 24
_OF_MEMORY = (usage.over_time, usage.lifetimes, allocations.peaks, allocations.at_peak, allocations.churn)
_Made = TypeVar("_Made")
_KEPT: WeakKeyDictionary[Run, dict[Hashable, object]] = WeakKeyDictionary()


def across(entry: RunEntry, survey: RunFact, facts: Sequence[Fact] = ()) -> pl.DataFrame:
    """Return a survey of the run, `facts` measured for it in one pass over the traces. Raises TracekitError."""
    held = run_store.open_run(entry)
    with held.lock:
        held.run.measure(facts)
        return held.run.run_table(survey)


def table(entry: RunEntry, fact: Fact) -> pl.DataFrame:
    """Return a fact of all traces of the run. Raises TracekitError."""
    held = run_store.open_run(entry)
    with held.lock:
        return held.run.table(fact)


def kernels(entry: RunEntry, by: tuple[str, ...]) -> pl.DataFrame:
    """Return `analysis.kernels.kernels` with `launch_delays` where launches are known. Raises TracekitError."""

    def made(run: Run) -> pl.DataFrame:
        found, delays = kernels_of.kernels(run, by), kernels_of.launch_delays(run, by)
        keys = [name for name in found.columns if name in (*by, "kind")]
        if delays.is_empty():
            return found
        return found.join(delays.drop("launched"), on=keys, how="left", nulls_equal=True, maintain_order="left")

    return kept(entry, ("kernels", by), made)


def ops(entry: RunEntry, by: tuple[str, ...], kinds: tuple[str, ...]) -> pl.DataFrame:
    """Return `analysis.ops.ops`. Raises TracekitError."""
    return kept(entry, ("ops", by, kinds), lambda run: ops_of.ops(run, by, kinds))


def memory(entry: RunEntry, rank: int, window: int) -> dict[str, pl.DataFrame]:
    """Return the tables of one trace that pictures of memory are drawn from, by name. Raises TracekitError."""

    def made(run: Run) -> dict[str, pl.DataFrame]:
        trace = run.trace(rank, window)
        return {fact.__name__: fact(trace) for fact in _OF_MEMORY}

    return kept(entry, ("memory", rank, window), made)


def replay_of_trace(entry: RunEntry, rank: int, window: int, text: str, device_gib: float | None) -> MemoryReport:
    """Return what a trace's allocator events come to under the settings that `text` writes. Raises TracekitError."""

    def made(run: Run) -> MemoryReport:
        trace = run.trace(rank, window)
        held_bytes = allocations.peaks(trace).filter(pl.col("device").is_not_null())["peak_allocated_bytes"].max()
        told = MemoryReport(None if held_bytes is None else int(str(held_bytes)), None, pl.DataFrame(), pl.DataFrame())
        history = playback.of_trace(trace)
        return memory_report.with_replay(told, history, text, capacity_bytes=_capacity(device_gib))

    return kept(entry, ("replay", rank, window, text, device_gib), made)


def replay_of_snapshot(
    entry: RunEntry, found: SnapshotFile, device: int, text: str, device_gib: float | None
) -> MemoryReport:
    """Return what a snapshot's history comes to under the settings that `text` writes. Raises TracekitError."""

    def made(_run: Run) -> MemoryReport:
        history = playback.of(reader.read(found.path), device)
        told = MemoryReport(None, None, pl.DataFrame(), pl.DataFrame())
        if not history.unplayable:
            told = MemoryReport(playback.play(history).peak_allocated_bytes, None, pl.DataFrame(), pl.DataFrame())
        return memory_report.with_replay(told, history, text, capacity_bytes=_capacity(device_gib))

    return kept(entry, ("replay", found, device, text, device_gib), made)


def kept(entry: RunEntry, key: Hashable, make: Callable[[Run], _Made]) -> _Made:
    """Return what was made of the run by this key before, or make it; of many the oldest are let go."""
    held = run_store.open_run(entry)
    with held.lock:
        kept = _KEPT.setdefault(held.run, {})
        if key not in kept:
            while len(kept) >= MOST_KEPT:
                kept.pop(next(iter(kept)))
            kept[key] = make(held.run)
        return kept[key]  # type: ignore[return-value]  # the key says what it is


def _capacity(device_gib: float | None) -> int | None:
    return None if device_gib is None else int(device_gib * (1 << 30))
