"""The pictures of memory in a report: of the rank that holds most, and of a snapshot beside the traces."""

from collections.abc import Iterator
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.errors import TracekitError
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model.run import Run
from tracekit.replay.allocator import playback
from tracekit.replay.allocator.facts import snapshot_timeline
from tracekit.report import charts, memory

_LEAST_EVENTS = 50


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with its name, heading and caption."""

    name: str
    heading: str
    caption: str
    figure: go.Figure


def of_run(run: Run) -> Iterator[ReportFigure]:
    """Yield what is held over time and the map of lifetimes, and of a snapshot its map; nothing where nothing is known.

    Of several snapshots the first is shown, unless it is larger than what is read unasked.
    """
    yield from _of_traces(run)
    for found in snapshot_files.first_files(run)[:1]:
        try:
            yield from _of_snapshot(found)
        except TracekitError:
            return  # the command that reads it says why; here the report is about the run


def _of_traces(run: Run) -> Iterator[ReportFigure]:
    peaks = run.table(allocations.peaks)
    on_device = bool(peaks["device"].is_not_null().any())
    mine = peaks.filter(pl.col("device").is_not_null() if on_device else pl.col("device").is_null())
    if mine.is_empty():
        return
    top = mine.sort("peak_allocated_bytes", "rank", descending=[True, False]).row(0, named=True)
    trace = run.trace(top["rank"], top["window"])
    own = pl.col("device").eq_missing(pl.lit(top["device"], pl.Int64))
    if trace.allocations.filter(own).height < _LEAST_EVENTS:
        return
    what = f"device {top['device']}" if on_device else "the host's memory"
    by_unit = trace.allocations["unit"].is_not_null().any()
    table = usage.over_time(trace).filter(own, pl.col("owner_kind") == ("unit" if by_unit else "phase"))
    told = (
        f"Rank {top['rank']}, which holds most, on {what}; by the {'FSDP unit' if by_unit else 'phase'} that took it."
    )
    yield ReportFigure("memory", "Memory held over time", told, charts.memory_over_time(table))
    told = "Each cell is the blocks of one size and lifetime; the darker, the more bytes were taken in them."
    yield ReportFigure(
        "lifetimes", "Sizes and lifetimes of blocks", told, charts.block_lifetimes(usage.lifetimes(trace).filter(own))
    )


def _of_snapshot(found: snapshot_files.SnapshotFile) -> Iterator[ReportFigure]:
    snapshot = reader.read(found.path)
    events = snapshot.events["device"]
    device = max(snapshot.devices, default=0, key=lambda each: int((events == each).sum()))
    history, outcome = memory.play_history(playback.of(snapshot, device))
    over_time = snapshot_timeline.over_time(snapshot, history, outcome)
    if over_time.height:
        told = f"By the op and place in code that took it, of rank {found.rank}."
        yield ReportFigure(
            "snapshot", "Memory held in the snapshot's history", told, charts.memory_over_time(over_time)
        )
    told = (
        f"What the allocator of rank {found.rank} holds of device {device} at the snapshot, end to end, each pool on "
        "lines of its own; a tick is the end of a segment."
    )
    table = snapshot_timeline.segment_map(snapshot, device)
    yield ReportFigure("segments", "The device's memory at the snapshot", told, charts.segment_map(table))
