"""The figures of a run by name, each with its heading and caption: the HTML report and the library draw them.

A figure is a function of a run; it returns None where the run has no such data. `FIGURES` lists them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import plotly.graph_objects as go
import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.analysis.checkpoint.save_stages import representative_step
from tracekit.analysis.communication import exposed_communication, group_bandwidth
from tracekit.analysis.compute import collective_contention, compute_gap_causes, kernels
from tracekit.analysis.host import ops
from tracekit.analysis.memory import allocations, snapshot_files, usage
from tracekit.analysis.parallelism import (
    axis_communication,
    expert_load,
    group_axes,
    pipeline_bubbles,
    pipeline_stages,
    rank_places,
    rank_timelines,
)
from tracekit.analysis.time import breakdown
from tracekit.errors import InputError, TracekitError, did_you_mean
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import escaping, units
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.replay.allocator import memory_usage
from tracekit.replay.graph.critical_path import path as critical_path_walk
from tracekit.report import charts, rank_selection, trace_tracks
from tracekit.report import what_if as what_if_report
from tracekit.rules import engine, stated_savings
from tracekit.rules.rule import Finding, Report

_MIN_MEMORY_EVENTS = 50
_BREAKDOWN_COLUMNS = (
    "rank", "duration_ns", "compute_ns", "communication_ns", "overlapped_ns", "exposed_communication_ns",
    "exposed_copy_ns", "idle_ns",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class RunFigure:
    """A figure of a run with its heading and caption, and the table of its numbers as HTML, or ''."""

    heading: str
    caption: str
    figure: go.Figure
    table: str = ""


Draw: TypeAlias = Callable[[Run], RunFigure | None]


def draw(run: Run, name: str) -> RunFigure:
    """Figure of a run by its name in FIGURES. Raises InputError for another name, or where the run has no such data."""
    if name not in FIGURES:
        raise InputError(f"{name}: no such figure{did_you_mean(name, FIGURES)}; the figures are {', '.join(FIGURES)}")
    figure = FIGURES[name](run)
    if figure is None:
        raise InputError(f"{run.name}: nothing to draw in the figure {name}: the run has no such data")
    return figure


def of_report(report: Report, run: Run) -> Iterator[tuple[str, RunFigure]]:
    """Figures of a report, by name, with the evidence of its findings: those of REPORTED that the run has data for."""
    for name in REPORTED:
        draw_figure = partial(timeline, findings=report.findings) if name == "timeline" else FIGURES[name]
        figure = draw_figure(run)
        if figure is not None:
            yield name, figure


# Time ----------------------------------------------------------------------------------------------------------------


def breakdown_by_rank(run: Run) -> RunFigure | None:
    """Time of each rank over its steps: compute, exposed communication, exposed copies, idle."""
    by_rank, (labels, more) = breakdown.steps_by_rank(run), _drawn_ranks(run)
    if by_rank.is_empty():
        return None
    numbers = escaping.frame(by_rank.select(_BREAKDOWN_COLUMNS))
    return RunFigure("Where the time goes", breakdown_caption(run) + more, charts.breakdown(by_rank, labels), numbers)


def breakdown_caption(run: Run) -> str:
    """What `breakdown.steps_by_rank` adds up."""
    steps = run.table(breakdown.by_step)["step"].drop_nulls().unique().sort()
    window = units.numbers("step", steps) if steps.len() else "the whole profiled window"
    return f"Sums over {window} of each rank. The shares above are of the same time, over all ranks."


def steps(run: Run) -> RunFigure | None:
    """Duration of each step, one line per rank."""
    by_step, (labels, more) = run.table(breakdown.by_step), _drawn_ranks(run)
    if by_step.height <= run.table(breakdown.by_rank).height:
        return None
    return RunFigure(
        "Step time", "Duration of each step, one line per rank." + more, charts.step_times(by_step, labels)
    )


def timeline(run: Run, findings: Sequence[Finding] = ()) -> RunFigure | None:
    """A step of median duration on the slowest rank: phases, work on the device, host."""
    by_step, by_rank = run.table(breakdown.by_step), run.table(breakdown.by_rank)
    row = representative_step(run, by_step if by_step.height else by_rank)
    if not row:
        return None
    rank, window, start_ns, duration_ns = (
        int(row[name] or 0) for name in ("rank", "window", "start_ns", "duration_ns")
    )
    evidence = trace_tracks.evidence_spans(findings, rank=rank, window=window)
    step = "The whole window" if row["step"] is None else f"Step {row['step']}"
    caption = (
        f"{step} of rank {rank}, the slowest rank; this step is the nearest to the rank's median. "
        "Drag to zoom, double-click to reset, hover for details."
    )
    figure = charts.timeline(run.trace(rank, window), (start_ns, start_ns + duration_ns), evidence=evidence)
    return RunFigure("A step of median duration", caption, figure)


def ranks(run: Run) -> RunFigure | None:
    """Ranks against steps: which rank is slower than the others, and when."""
    spread = run.table(rank_timelines.spread)
    if spread.is_empty():
        return None
    caption = "The device window of each step against the median of the ranks; first profiled window."
    spread = spread.filter(pl.col("window") == pl.col("window").min())
    return RunFigure("Ranks and steps", caption, charts.step_heatmap(spread))


def critical_path(run: Run) -> RunFigure | None:
    """Critical path of the representative step: whose time the step waits for, first to last."""
    try:
        step_path = critical_path_walk.critical_path(run)
    except TracekitError:
        return None
    parts = critical_path_walk.placed_parts(run, step_path)
    caption = f"Step of {units.duration(step_path.step_ns)}; each bar is in the row of the rank that owns the time."
    return RunFigure("Critical path", caption, charts.critical_path(parts, step_path.start_ns))


def potential_savings(run: Run) -> RunFigure | None:
    """Estimated saving per step without each cause of lost time, as findings state it, else by replay."""
    try:
        savings = what_if_report.as_table(stated_savings.answer(engine.check(run)))
    except TracekitError:
        return None
    if savings.is_empty():
        return None
    caption = "Estimated saving per step without each cause, by replay. Savings may overlap: do not add them up."
    return RunFigure("Potential savings", caption, charts.potential_savings(savings))


# Work ----------------------------------------------------------------------------------------------------------------


def longest_kernels(run: Run) -> RunFigure | None:
    """Kernels and copies with the most time, over all ranks and steps."""
    rows = kernels.kernels(run, ("name",))
    if rows.is_empty():
        return None
    return RunFigure(
        "Kernels", "Time of kernels and copies, over all ranks and steps.", charts.top_bars(rows, ("name",))
    )


def modules(run: Run) -> RunFigure | None:
    """Device time of each module of the model, with the modules inside it."""
    table = ops.by_module(run)
    if not table["module"].count():
        return None
    caption = "Each module is as wide as its compute time with the modules inside it, backward included."
    return RunFigure("Modules", caption, charts.icicle(ops.tree(table, "compute_ns"), "compute time"))


def roofline(run: Run) -> RunFigure | None:
    """Operators against the peaks of the device: operations per byte, and rate."""
    roofs = run.table(ops.roofs)
    if roofs["device"].n_unique() != 1:
        return None
    rows = ops.rooflines(run)
    if rows.is_empty():
        return None
    caption = (
        f"Each marker is an operator with inputs of the same shapes; the lines are the peaks of {roofs['device'][0]}."
    )
    return RunFigure("Roofline", caption, charts.roofline(rows, roofs))


def concurrent_slowdowns(run: Run) -> RunFigure | None:
    """Slowdown of each kind of work by concurrent work on the device."""
    pairs = run.table(collective_contention.all_pairs)
    if not pairs["slowdown"].is_not_null().any():
        return None
    caption = "Work that runs concurrently with other work against the same work alone; 95% confidence intervals."
    return RunFigure("Slowdown by concurrent work", caption, charts.slowdowns(pairs))


# Communication -------------------------------------------------------------------------------------------------------


def communication(run: Run) -> RunFigure | None:
    """Communication of each rank: overlapped with compute, exposed transfer, waiting for late ranks."""
    by_rank, (labels, more) = run.table(exposed_communication.by_rank), _drawn_ranks(run)
    if not int(by_rank["communication_ns"].sum()):
        return None
    caption = (
        "Communication time of each rank in all steps: overlapped with compute, exposed transfer, exposed "
        "while the rank waits for a late rank." + more
    )
    return RunFigure("Hidden and exposed communication", caption, charts.communication_parts(by_rank, labels))


def idle_causes(run: Run) -> RunFigure | None:
    """Time of each rank in which no compute runs, by cause."""
    idle, (labels, more) = run.table(compute_gap_causes.idle_by_rank), _drawn_ranks(run)
    if idle.is_empty():
        return None
    caption = "Time of each rank in all steps in which no compute runs, split by cause. The parts sum to it." + more
    return RunFigure("Why compute is idle", caption, charts.stall_causes(idle, labels))


def waits(run: Run) -> RunFigure | None:
    """Which rank waits for which: time in collectives until a late rank arrives."""
    waited = run.table(rank_timelines.wait_times)
    if waited.filter(pl.col("peer_rank").is_not_null()).is_empty():
        return None
    caption = "Time in all steps in which a rank runs no compute and waits in a collective for a late rank." + (
        " The ranks with the longest waits are drawn." if len(run.ranks) > charts.MAX_MATRIX_RANKS else ""
    )
    return RunFigure("Which rank waits for which", caption, charts.wait_matrix(waited, run.ranks))


def bandwidth(run: Run) -> RunFigure | None:
    """Bus bandwidth of each collective by message size."""
    speeds = run.table(group_bandwidth.speeds)
    if speeds.is_empty():
        return None
    caption = "Each mark is one collective; its bus bandwidth is that of nccl-tests, from the last arrival to the end."
    return RunFigure("Bandwidth by message size", caption, charts.bandwidth(speeds, charts.BUS))


def axes(run: Run) -> RunFigure | None:
    """Communication per step along each axis of the mesh."""
    by_axis = run.table(axis_communication.by_axis)
    if by_axis.is_empty():
        return None
    caption = "Mean over ranks, per step. Exposed: the rank computes nothing while it communicates."
    return RunFigure("Communication by axis", caption, charts.axis_communication(by_axis))


# Parallelism ---------------------------------------------------------------------------------------------------------


def mesh_map(run: Run) -> RunFigure | None:
    """Mesh of the ranks: their process groups along each axis."""
    groups = pl.concat([run.table(group_axes.group_axes), run.table(rank_places.mesh_table)], how="diagonal")
    figure = charts.mesh_map(groups)
    if not figure.data:
        return None
    caption = "Each row is an axis, each column a rank; ranks with the same number form one process group."
    return RunFigure("Mesh", caption, figure)


def pipeline(run: Run) -> RunFigure | None:
    """One step of the pipeline: the micro-batches of each rank, and its bubbles."""
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles)
    if bubbles.is_empty():
        return None
    place = bubbles.row((bubbles.height - 1) // 2, named=True)
    is_drawn = [pl.col(name).eq_missing(pl.lit(place[name])) for name in ("window", "step", "iteration", "pipeline")]
    actions, gaps = (
        run.table(fact).filter(is_drawn) for fact in (pipeline_stages.staged_actions, pipeline_bubbles.idle_gaps)
    )
    caption = (
        f"Step {place['step']}. Numbers are micro-batches; hatched is bubble: the rank runs no action of its stages."
    )
    return RunFigure(f"Pipeline, step {place['step']}", caption, charts.pipeline_step(actions, gaps))


def stages(run: Run) -> RunFigure | None:
    """Forward and backward time of each stage of the pipeline, mean of all steps."""
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles)
    if bubbles.is_empty():
        return None
    caption = "A stage with more forward and backward time than the others makes all of them wait."
    return RunFigure("Stages, mean of all steps", caption, charts.stage_balance(bubbles))


def experts(run: Run) -> RunFigure | None:
    """Tokens of each rank's experts, by layer."""
    load = run.table(expert_load.expert_load)
    if load.is_empty():
        return None
    caption = "Bytes that the first all-to-all of a layer brings a rank, over the mean of its group; mean of steps."
    return RunFigure("Tokens of each rank's experts", caption, charts.expert_heatmap(load))


# Memory --------------------------------------------------------------------------------------------------------------


def memory(run: Run) -> RunFigure | None:
    """Allocated memory over time, by the FSDP unit or phase that allocated it."""
    peak = _highest_peak(run)
    if peak is None:
        return None
    rank, window, device, owner = peak
    table = usage.over_time(run.trace(rank, window)).filter(_is_on(device), pl.col("owner_kind") == owner)
    place = "the host" if device is None else f"device {device}"
    owners = "FSDP unit" if owner == "unit" else "phase"
    caption = f"Memory of {place} on rank {rank}, the rank with the highest peak, by the {owners} that allocated it."
    return RunFigure("Allocated memory over time", caption, charts.memory_over_time(table))


def lifetimes(run: Run) -> RunFigure | None:
    """Blocks of memory by size and lifetime."""
    peak = _highest_peak(run)
    if peak is None:
        return None
    rank, window, device, _ = peak
    caption = "Each cell holds the blocks of one size and lifetime; a stronger blue means more bytes in them."
    blocks = usage.lifetimes(run.trace(rank, window)).filter(_is_on(device))
    return RunFigure("Block sizes and lifetimes", caption, charts.block_lifetimes(blocks))


def _highest_peak(run: Run) -> tuple[int, int, int | None, str] | None:
    """Rank, window and device with the highest peak, and what owns memory there; None without enough allocations."""
    peaks = run.table(allocations.peaks)
    on_device = bool(peaks["device"].is_not_null().any())
    peaks = peaks.filter(pl.col("device").is_not_null() if on_device else pl.col("device").is_null())
    if peaks.is_empty():
        return None
    top = peaks.sort("peak_allocated_bytes", "rank", descending=[True, False]).row(0, named=True)
    trace = run.trace(top["rank"], top["window"])
    if trace.allocations.filter(_is_on(top["device"])).height < _MIN_MEMORY_EVENTS:
        return None
    owner = "unit" if trace.allocations["unit"].is_not_null().any() else "phase"
    return top["rank"], top["window"], top["device"], owner


def _is_on(device: int | None) -> pl.Expr:
    return pl.col("device").eq_missing(pl.lit(device, pl.Int64))


def snapshot(run: Run) -> RunFigure | None:
    """Memory over the history of the first memory snapshot, by op and source line."""
    place, tables = _first_snapshot(run) or ("", {})
    if not tables or tables["over_time"].is_empty():
        return None
    caption = f"Memory of {place}, by the op and source line that allocated it."
    figure = charts.memory_over_time(tables["over_time"])
    return RunFigure("Allocated memory in the snapshot's history", caption, figure)


def memory_categories(run: Run) -> RunFigure | None:
    """What memory is for at the peak of the first memory snapshot: parameters, gradients, activations, …."""
    place, tables = _first_snapshot(run) or ("", {})
    if not tables or tables["categories"].is_empty():
        return None
    caption = f"What memory of {place} is for, at the peak of the snapshot's history."
    return RunFigure("Categories of memory at the peak", caption, charts.memory_categories(tables["categories"]))


def segments(run: Run) -> RunFigure | None:
    """Memory that the allocator has reserved at the first memory snapshot, in address order."""
    place, tables = _first_snapshot(run) or ("", {})
    if not tables:
        return None
    caption = (
        f"Reserved memory of {place} at the snapshot, in address order. Each pool starts on its own line; a tick marks "
        "the end of a segment."
    )
    return RunFigure("Device memory at the snapshot", caption, charts.segment_map(tables["segment_map"]))


@memoize
def _first_snapshot(run: Run) -> tuple[str, dict[str, pl.DataFrame]] | None:
    """The place of the first memory snapshot, and its tables; None without one, or if it cannot be read."""
    for file in snapshot_files.first_files(run)[:1]:
        try:
            snapshot = memory_snapshots.read(file.path)
        except TracekitError:
            return None  # `tracekit memory` shows the reason; these figures are about the run
        device = snapshot.main_device
        return f"device {device} on rank {file.rank}", memory_usage.snapshot_tables(snapshot, device)
    return None


# Checkpoints ---------------------------------------------------------------------------------------------------------


def save_times(run: Run) -> RunFigure | None:
    """How long each save blocks training, and how long until its data is written."""
    by_save = run.table(saves.by_save)
    if by_save.height < 2:
        return None
    caption = "Time that training was blocked and time until all data was written, of the slowest rank."
    return RunFigure("Checkpoints", caption, charts.save_clocks(by_save))


def save_stages(run: Run) -> RunFigure | None:
    """Stages of the longest save, one bar per rank and worker."""
    by_save = run.table(saves.by_save)
    if by_save.is_empty():
        return None
    longest = by_save.sort("written_ns", "start_ns", descending=[True, False])["save"][0]
    caption = (
        f"Save {longest}, one bar per rank and worker. Stages alternate tensor by tensor; a bar shows the total "
        "time of each stage, in the order in which the stages were first entered."
    )
    rows = run.table(saves.stages).filter(pl.col("save") == longest)
    return RunFigure("Stages of the longest save", caption, charts.save_stages(rows))


def save_bandwidth(run: Run) -> RunFigure | None:
    """Durable write rate of each rank and save."""
    clocks = run.table(saves.by_rank)
    if clocks["storage_bytes_per_s"].drop_nulls().len() < 2:
        return None
    caption = "Bytes divided by the time spent in write and fsync, one point per rank and save."
    return RunFigure("Durable write rate of each rank", caption, charts.save_bandwidth(clocks))


def _drawn_ranks(run: Run) -> tuple[Mapping[int, str], str]:
    """Ranks that figures by rank draw, and the end of their captions."""
    note = rank_selection.selection_note(run)
    return rank_selection.drawn_ranks(run), f" {note}" if note else ""


REPORTED: Mapping[str, Draw] = {
    "breakdown": breakdown_by_rank,
    "steps": steps,
    "timeline": timeline,
    "communication": communication,
    "idle_causes": idle_causes,
    "waits": waits,
    "memory": memory,
    "lifetimes": lifetimes,
    "snapshot": snapshot,
    "memory_categories": memory_categories,
    "segments": segments,
    "saves": save_times,
    "save_stages": save_stages,
    "save_bandwidth": save_bandwidth,
}
"""The figures of the HTML report, in its order."""
FIGURES: Mapping[str, Draw] = {
    **REPORTED,
    "ranks": ranks,
    "critical_path": critical_path,
    "potential_savings": potential_savings,
    "kernels": longest_kernels,
    "modules": modules,
    "roofline": roofline,
    "contention": concurrent_slowdowns,
    "bandwidth": bandwidth,
    "axes": axes,
    "mesh": mesh_map,
    "pipeline": pipeline,
    "stages": stages,
    "experts": experts,
}
"""Every figure that ``run.plot`` draws, by name."""
