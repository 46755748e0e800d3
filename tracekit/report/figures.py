"""The figures of a report, each with its heading and caption."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.checkpoint import saves, steps_without_saves
from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.analysis.parallelism import rank_timelines
from tracekit.analysis.time import breakdown
from tracekit.errors import TracekitError
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model import escaping
from tracekit.model.run import Run
from tracekit.replay.allocator import memory_usage, playback
from tracekit.replay.allocator.facts import categories, snapshot_facts
from tracekit.report import charts, rank_rows, trace_tracks
from tracekit.rules.rule import Report

_MIN_MEMORY_EVENTS = 50
_BREAKDOWN_COLUMNS = (
    "rank", "duration_ns", "compute_ns", "communication_ns", "overlapped_ns", "exposed_communication_ns",
    "exposed_copy_ns", "idle_ns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ReportFigure:
    """A figure with its name, heading and caption, and the table of its numbers as HTML, or ''."""

    name: str
    heading: str
    caption: str
    figure: go.Figure
    table: str = ""


def of_report(report: Report, run: Run) -> Iterator[ReportFigure]:
    """Yield all figures of a report: time, communication, memory, checkpoints; none where there is no data."""
    yield from _time(report, run)
    yield from communication(run)
    yield from memory(run)
    yield from checkpoints(run)


def communication(run: Run) -> Iterator[ReportFigure]:
    """Yield figures of overlap, of idle compute and of waits for late ranks; none where there is no data."""
    by_rank, (labels, more) = run.table(exposed_communication.by_rank), _drawn_ranks(run)
    if int(by_rank["communication_ns"].sum()):
        yield ReportFigure(
            "communication",
            "Hidden and exposed communication",
            "Communication time of each rank in all steps: overlapped with compute, exposed transfer, exposed "
            "while the rank waits for a late rank." + more,
            charts.communication_parts(by_rank, labels),
        )
    idle = run.table(compute_gap_causes.idle_by_rank)
    if idle.height:
        yield ReportFigure(
            "standing",
            "Why compute is idle",
            "Time of each rank in all steps in which no compute runs, split by cause. The parts sum to it." + more,
            charts.stall_causes(idle, labels),
        )
    waited = run.table(rank_timelines.wait_times)
    if waited.filter(pl.col("peer_rank").is_not_null()).height:
        yield ReportFigure(
            "waits",
            "Which rank waits for which",
            "Time in all steps in which a rank runs no compute and waits in a collective for a late rank."
            + (" The ranks with the longest waits are drawn." if len(run.ranks) > charts.MAX_MATRIX_RANKS else ""),
            charts.wait_matrix(waited, run.ranks),
        )


def memory(run: Run) -> Iterator[ReportFigure]:
    """Yield memory over time and block lifetimes, and history, categories and segments of the first memory snapshot.

    A snapshot larger than what is read by default is left out.
    """
    yield from _allocations(run)
    for file in snapshot_files.first_files(run)[:1]:
        try:
            yield from _snapshot(file)
        except TracekitError:
            return  # `tracekit memory` shows the reason; this report is about the run


def checkpoints(run: Run) -> Iterator[ReportFigure]:
    """Yield the saves of a run, the stages of the longest, and the write rate; none without a checkpoint log."""
    each_save = run.table(saves.by_save)
    if each_save.is_empty():
        return
    if each_save.height > 1:
        caption = "Time that training was blocked and time until all data was written, of the slowest rank."
        yield ReportFigure("saves", "Checkpoints", caption, charts.save_clocks(each_save))
    longest = each_save.sort("written_ns", "start_ns", descending=[True, False])["save"][0]
    caption = (
        f"Save {longest}, one bar per rank and worker. Stages alternate tensor by tensor; a bar shows the total "
        "time of each stage, in the order in which the stages were first entered."
    )
    stages = run.table(saves.stages).filter(pl.col("save") == longest)
    yield ReportFigure("save-stages", "Stages of the longest save", caption, charts.save_stages(stages))
    clocks = run.table(saves.by_rank)
    if clocks["storage_bytes_per_s"].drop_nulls().len() > 1:
        caption = "Bytes divided by the time spent in write and fsync, one point per rank and save."
        yield ReportFigure("save-bandwidth", "Durable write rate of each rank", caption, charts.save_bandwidth(clocks))


def _drawn_ranks(run: Run) -> tuple[Mapping[int, str], str]:
    """Return the ranks that figures by rank draw, and the end of their captions."""
    note = rank_rows.selection_note(run)
    return rank_rows.drawn_ranks(run), f" {note}" if note else ""


def _time(report: Report, run: Run) -> Iterator[ReportFigure]:
    by_step, by_rank = run.table(breakdown.by_step), run.table(breakdown.by_rank)
    labels, more = _drawn_ranks(run)
    if by_rank.height:
        caption = "Time of each rank from its first activity to its last." + more
        numbers = escaping.frame(by_rank.select(_BREAKDOWN_COLUMNS))
        yield ReportFigure("breakdown", "Where the time goes", caption, charts.breakdown(by_rank, labels), numbers)
    if by_step.height > by_rank.height:
        caption = "Duration of each step, one line per rank." + more
        yield ReportFigure("steps", "Step time", caption, charts.step_times(by_step, labels))
    row = steps_without_saves.representative_step(run, by_step if by_step.height else by_rank)
    if row:
        rank, window, start_ns, duration_ns = (
            int(row[name] or 0) for name in ("rank", "window", "start_ns", "duration_ns")
        )
        evidence = trace_tracks.evidence_spans(report.findings, rank=rank, window=window)
        step = "The whole window" if row["step"] is None else f"Step {row['step']}"
        caption = (
            f"{step} of rank {rank}, the slowest rank; this step is the nearest to the rank's median. "
            "Drag to zoom, double-click to reset, hover for details."
        )
        figure = charts.timeline(run.trace(rank, window), (start_ns, start_ns + duration_ns), evidence=evidence)
        yield ReportFigure("timeline", "A step of median duration", caption, figure)


def _allocations(run: Run) -> Iterator[ReportFigure]:
    peaks = run.table(allocations.peaks)
    on_device = bool(peaks["device"].is_not_null().any())
    peaks = peaks.filter(pl.col("device").is_not_null() if on_device else pl.col("device").is_null())
    if peaks.is_empty():
        return
    top = peaks.sort("peak_allocated_bytes", "rank", descending=[True, False]).row(0, named=True)
    trace = run.trace(top["rank"], top["window"])
    on_same_device = pl.col("device").eq_missing(pl.lit(top["device"], pl.Int64))
    if trace.allocations.filter(on_same_device).height < _MIN_MEMORY_EVENTS:
        return
    owner = "unit" if trace.allocations["unit"].is_not_null().any() else "phase"
    table = usage.over_time(trace).filter(on_same_device, pl.col("owner_kind") == owner)
    device = f"device {top['device']}" if on_device else "the host"
    owners = "FSDP unit" if owner == "unit" else "phase"
    caption = (
        f"Memory of {device} on rank {top['rank']}, the rank with the highest peak, by the {owners} that allocated it."
    )
    yield ReportFigure("memory", "Allocated memory over time", caption, charts.memory_over_time(table))
    caption = "Each cell holds the blocks of one size and lifetime; a stronger blue means more bytes in them."
    blocks = usage.lifetimes(trace).filter(on_same_device)
    yield ReportFigure("lifetimes", "Block sizes and lifetimes", caption, charts.block_lifetimes(blocks))


def _snapshot(file: snapshot_files.SnapshotFile) -> Iterator[ReportFigure]:
    snapshot = reader.read(file.path)
    events = snapshot.events["device"]
    device = max(snapshot.devices, default=0, key=lambda device: int((events == device).sum()))
    history, outcome = memory_usage.play_history(playback.from_snapshot(snapshot, device))
    over_time = snapshot_facts.over_time(snapshot, history, outcome)
    if over_time.height:
        caption = f"Memory of device {device} on rank {file.rank}, by the op and source line that allocated it."
        figure = charts.memory_over_time(over_time)
        yield ReportFigure("snapshot", "Allocated memory in the snapshot's history", caption, figure)
    at_peak = categories.at_peak(snapshot, history, outcome)
    if categories.are_known(at_peak):
        caption = f"What memory of device {device} on rank {file.rank} is for, at the peak of the snapshot's history."
        figure = charts.memory_categories(at_peak)
        yield ReportFigure("memory-categories", "Categories of memory at the peak", caption, figure)
    caption = (
        f"Memory that the allocator of rank {file.rank} has reserved on device {device} at the snapshot, in address "
        "order. Each pool starts on its own line; a tick marks the end of a segment."
    )
    figure = charts.segment_map(snapshot_facts.segment_map(snapshot, device))
    yield ReportFigure("segments", "Device memory at the snapshot", caption, figure)
