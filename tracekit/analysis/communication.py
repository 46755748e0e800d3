"""Collectives of training, which leaves out those of checkpoint saves: how much of them no compute hides."""

import polars as pl

from tracekit import conventions, intervals
from tracekit.analysis import breakdown
from tracekit.trace import Trace

COLUMNS = {
    "step": pl.Int64, "device": pl.Int64, "lane": pl.Int64, "name": pl.String, "op": pl.String, "unit": pl.String,
    "phase": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64, "exposed_ns": pl.Int64,
}  # fmt: skip


def exposed(trace: Trace) -> pl.DataFrame:
    """Return every communication activity of training with the part of it during which its device computed nothing.

    Columns step, device, lane, name, op, unit, phase, start_ns, dur_ns, exposed_ns; one row per activity. Where several
    run at once, each counts the same exposed moment, so sums over activities may exceed the breakdown's.
    """
    known = trace.collectives.select(pl.col("activity_id").alias("id"), "op")
    return (
        with_exposure(trace, _of_training(trace))
        .join(known, on="id", how="left", maintain_order="left")
        .select(*COLUMNS)
    )


def with_exposure(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    """Return activities (columns device, start_ns, dur_ns and more) by device, with exposed_ns.

    exposed_ns is how long nothing computed on their device meanwhile.
    """
    parts = [work.clear().with_columns(pl.lit(0, pl.Int64).alias("exposed_ns"))]
    for device in breakdown.devices(trace):
        compute, _, _ = breakdown.busy(trace, device)
        mine = work.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))
        spans = intervals.from_columns(mine["start_ns"], mine["dur_ns"])
        hidden = pl.Series("hidden", intervals.coverage(spans, compute), pl.Int64)
        parts.append(mine.with_columns((pl.col("dur_ns") - hidden).alias("exposed_ns")))
    return pl.concat(parts)


def _of_training(trace: Trace) -> pl.DataFrame:
    """Return the communication activities but those of checkpoint saves, with their device."""
    return trace.activities.filter(
        pl.col("kind") == "communication", pl.col("phase").ne_missing(conventions.CHECKPOINT)
    ).join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
