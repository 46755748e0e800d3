"""Stall attribution: time without collectives and time without compute on each rank, summed by cause."""

import polars as pl

from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COMMUNICATION, COMPUTE = ("communication", "compute")
COLUMNS = schema.columns("window rank device step phase gap_kind cause detail pieces dur_ns")
_PLACE = ("device", "step", "phase", "cause", "detail")


@trace_fact
def communication_gap_time(trace: Trace) -> pl.DataFrame:
    """Return communication gaps summed. Columns device, step, phase, cause, detail, pieces, dur_ns."""
    pieces, count = communication_gap_causes.gap_causes(trace), pl.len().cast(pl.Int64).alias("pieces")
    return pieces.group_by(_PLACE, maintain_order=True).agg(count, pl.col("dur_ns").sum())


@run_fact
def by_cause(run: Run) -> pl.DataFrame:
    """Stall time of each rank in each step, by kind of gap and cause; use ``run.run_table``.

    Columns COLUMNS; `gap_kind` is communication (no collective runs although more of the phase follow:
    `gaps.communication_gaps`) or compute (no compute: `gaps.compute_gaps`, with waiting for peers separated). One row
    per device, step, phase, gap_kind, cause and detail. The causes of one kind sum to its gaps exactly.
    """
    place = ("window", "rank", *_PLACE)
    quiet = run.table(communication_gap_time).with_columns(gap_kind=pl.lit(COMMUNICATION))
    idle = compute_gap_causes.sums_across(run, place).with_columns(gap_kind=pl.lit(COMPUTE))
    both = pl.concat(schema.select(part, COLUMNS) for part in (quiet, idle))
    return both.sort("gap_kind", "window", "rank", "device", "step", "phase", "dur_ns", descending=[False] * 6 + [True])


@run_fact
def by_rank(run: Run) -> pl.DataFrame:
    """Return `by_cause` over all steps: columns rank, gap_kind, cause, pieces, dur_ns; use ``run.run_table``."""
    return _sum_by_rank(run.table(by_cause))


@run_fact
def idle_by_rank(run: Run) -> pl.DataFrame:
    """Return the compute part of `by_rank`, which needs fewer facts; use ``run.run_table``."""
    sums = compute_gap_causes.sums_across(run, ("rank", "cause"))
    return _sum_by_rank(sums.with_columns(gap_kind=pl.lit(COMPUTE)))


def _sum_by_rank(rows: pl.DataFrame) -> pl.DataFrame:
    sums = rows.group_by("rank", "gap_kind", "cause").agg(pl.col("pieces", "dur_ns").sum())
    return sums.sort("gap_kind", "rank", "cause")
