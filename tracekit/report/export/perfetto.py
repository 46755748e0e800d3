"""A run as one file for Perfetto: a process per rank, a track per lane, all of them on one clock."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import BinaryIO, TypeAlias

import numpy as np
import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.conventions import perfetto as conventions
from tracekit.errors import InputError
from tracekit.model.run import MeasuredTrace, OnTrace, Run
from tracekit.model.source import Source
from tracekit.replay.graph.critical_path.path import CriticalPath
from tracekit.report.export import perfetto_encoder
from tracekit.report.export.perfetto_encoder import ExportCounts
from tracekit.report.export.protobuf_wire import Ints
from tracekit.report.trace_tracks import timeline
from tracekit.rules.rule import Finding
from tracekit.sync import alignment

TraceKey: TypeAlias = tuple[int, int]
"""Window and rank of a trace."""


@dataclass(frozen=True)
class Clock:
    """Converts times of a trace to the clock of the run: an offset, and a drift relative to the time `at_ns`."""

    offset_ns: int = 0
    drift: float = 0.0
    at_ns: int = 0

    def to_run(self, times_ns: Ints) -> Ints:
        """Return times of the trace on the clock of the run, in the same order."""
        drifted_ns = np.rint(self.drift * (times_ns - self.at_ns)).astype(np.int64) if self.drift else 0
        return times_ns + self.offset_ns + drifted_ns


def write(
    run: Run,
    file: BinaryIO,
    *,
    clocks_by_trace: Mapping[TraceKey, Clock] | None = None,
    findings: Sequence[Finding] = (),
    path: CriticalPath | None = None,
    step: int | None = None,
    ranks: Iterable[int] | None = None,
    on_progress: OnTrace | None = None,
) -> ExportCounts:
    """Write a run to `file`, one trace after the other, each moved to the clock of the run (by default with `clocks`).

    `path` is shown as a track of each rank that it passes. `step` and `ranks` select a part. The same run gives the
    same bytes. Raises InputError if a rank has no trace, or no trace has the step.
    """
    run.measure((breakdown.extent,))
    sources = _select_sources(run, ranks, step)
    clocks_by_trace = clocks(run) if clocks_by_trace is None else clocks_by_trace
    # Perfetto knows no time before zero; traces of relative clocks may have one.
    starts = run.table(breakdown.extent).select("window", "rank", "first_ns").rows()
    firsts = {(window, rank): first_ns for window, rank, first_ns in starts}
    moved = (clocks_by_trace.get(trace, Clock()).to_run(np.array([first_ns])) for trace, first_ns in firsts.items())
    zero_ns = min([0, *(int(time_ns) for (time_ns,) in moved)])
    several = len({source.window for source in run.sources}) > 1
    done = ExportCounts()
    for number, source in enumerate(sources, 1):
        trace = run.trace(source.rank, source.window)
        clock = clocks_by_trace.get((source.window, source.rank), Clock())
        clock = replace(clock, offset_ns=clock.offset_ns - zero_ns)
        name = f"rank {source.rank}" + (f" · window {source.window}" if several else "")
        tracks = timeline(trace, findings, step=step, path=_path_on(run, source, path))
        if clock.drift:  # cannot be undone to the ns
            tracks = replace(tracks, slices=tracks.slices.with_columns(begin_ns="start_ns", length_ns="dur_ns"))
        first_ns = int(firsts[source.window, source.rank] or 0)
        about = {"format": conventions.FORMAT, "rank": source.rank, "window": source.window, "step": step}
        rows = [perfetto_encoder.of_clock(about | vars(clock), first_ns)]
        rows += perfetto_encoder.of_run(run, first_ns) if number == 1 else []
        rows += perfetto_encoder.of_trace(trace, first_ns, step=step)
        done += perfetto_encoder.write_trace(
            file, tracks, number=number, name=name, to_run_clock=clock.to_run, rows=rows
        )
        if on_progress:
            on_progress(MeasuredTrace(source))
    return done


def clocks(run: Run) -> dict[TraceKey, Clock]:
    """Return the clock of each trace, if the run could be aligned."""
    offsets = getattr(run, "offsets", None)
    if offsets is None:
        return {}
    return {
        (row["window"], row["rank"]): Clock(row["offset_ns"], row.get("drift") or 0.0, row.get("at_ns") or 0)
        for row in offsets.iter_rows(named=True)
    }


def _path_on(run: Run, source: Source, path: CriticalPath | None) -> pl.DataFrame | None:
    """Return the parts of a critical path on the rank of a trace, on its clock."""
    if path is None or path.window != source.window:
        return None
    rank_parts = path.compact.filter(rank=source.rank).with_columns(window=pl.lit(source.window, pl.Int64))
    return alignment.on_trace_clock(rank_parts, run.offsets, ("start_ns",))


def _select_sources(run: Run, ranks: Iterable[int] | None, step: int | None) -> list[Source]:
    selected_ranks = set(run.ranks if ranks is None else ranks)
    missing = sorted(selected_ranks - set(run.ranks))
    if missing:
        raise InputError(
            f"--ranks {missing[0]}: no trace of that rank; there are {len(run.ranks)}, from {run.ranks[0]}"
        )
    if step is None:
        return [source for source in run.sources if source.rank in selected_ranks]
    steps = {(row["window"], row["rank"]): row["steps"] for row in run.table(breakdown.extent).iter_rows(named=True)}
    sources = [s for s in run.sources if s.rank in selected_ranks and step in steps.get((s.window, s.rank), [])]
    if not sources:
        names = ", ".join(map(str, sorted(set().union(*steps.values())))) or "none"
        raise InputError(f"--step {step}: no such step; the traces have {names}")
    return sources
