"""Preparatory work on communication lanes: alone, and beside compute."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import intervals
from tracekit.analysis import breakdown
from tracekit.trace import Trace

COLUMNS = {
    "step": pl.Int64, "device": pl.Int64, "lane": pl.Int64, "name": pl.String, "bytes": pl.Int64, "start_ns": pl.Int64,
    "dur_ns": pl.Int64, "overlapped_ns": pl.Int64, "gap_ns": pl.Int64, "collective_id": pl.Int64,
    "collective": pl.String, "idle_ns": pl.Int64,
}  # fmt: skip
DEVICE_COLUMNS = {"devices": pl.Int64}


def preparation(trace: Trace) -> pl.DataFrame:
    """Return the work other than collectives on the communication lanes of devices, with the collective it precedes.

    Columns step, device, lane, name, bytes (null but for copies), start_ns, dur_ns, overlapped_ns (time of it during
    which other lanes computed), gap_ns (time of it during which no collective ran on the device), collective_id and
    collective (activities.id and name of the next collective on its lane, null where none follows), idle_ns (time
    within that collective in which the device computed nothing); one row per activity. Empty on a CPU run.
    """
    lanes = trace.lanes.filter(pl.col("device").is_not_null())
    communicating = lanes.filter(pl.col("role") == "communication").select("lane", "device")
    parts = [pl.DataFrame(schema=COLUMNS)]
    for (device,), mine in communicating.group_by("device", maintain_order=True):
        compute, collectives, _ = breakdown.busy(trace, int(str(device)))
        work = _with_following(trace.activities.join(mine, on="lane").sort("lane", "start_ns"))
        prepared = work.filter(pl.col("kind") != "communication")
        others = trace.activities.join(lanes.filter(pl.col("device") == device), on="lane", how="semi").join(
            mine, on="lane", how="anti"
        )
        beside = _spans(others.filter(pl.col("kind") == "compute"))
        spans = intervals.from_columns(prepared["start_ns"], prepared["dur_ns"])
        following = intervals.from_columns(prepared["next_start_ns"].fill_null(0), prepared["next_dur_ns"].fill_null(0))
        parts.append(
            prepared.with_columns(
                pl.Series("overlapped_ns", intervals.coverage(spans, beside), pl.Int64),
                (pl.col("dur_ns") - _column(intervals.coverage(spans, collectives))).alias("gap_ns"),
                (pl.col("next_dur_ns") - _column(intervals.coverage(following, compute))).alias("idle_ns"),
            ).select(*COLUMNS)
        )
    return pl.concat(parts)


def _with_following(work: pl.DataFrame) -> pl.DataFrame:
    """Add id, name, start and duration of the collective that comes next on the lane; null where none does."""
    is_collective = pl.col("kind") == "communication"

    def following(column: str) -> pl.Expr:
        return pl.when(is_collective).then(column).backward_fill().over("lane")

    return work.with_columns(
        following("id").alias("collective_id"),
        following("name").alias("collective"),
        following("start_ns").alias("next_start_ns"),
        following("dur_ns").alias("next_dur_ns"),
    )


def device_count(trace: Trace) -> pl.DataFrame:
    """Return the number of devices with activity. Column devices; one row."""
    return pl.DataFrame(
        {"devices": [trace.lanes["device"].n_unique() if trace.on_device else 0]}, schema=DEVICE_COLUMNS
    )


def _column(values: npt.NDArray[np.int64]) -> pl.Expr:
    return pl.lit(pl.Series(values, dtype=pl.Int64))


def _spans(activities: pl.DataFrame) -> intervals.Spans:
    return intervals.union(intervals.from_columns(activities["start_ns"], activities["dur_ns"]))
