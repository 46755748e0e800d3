"""Preparatory work on communication lanes: alone, and beside compute."""

import polars as pl

from tracekit import intervals
from tracekit.analysis import breakdown
from tracekit.trace import Trace

COLUMNS = {
    "step": pl.Int64, "lane": pl.Int64, "name": pl.String, "start_ns": pl.Int64, "dur_ns": pl.Int64,
    "overlapped_ns": pl.Int64, "gap_ns": pl.Int64, "idle_ns": pl.Int64,
}  # fmt: skip
DEVICE_COLUMNS = {"devices": pl.Int64}


def preparation(trace: Trace) -> pl.DataFrame:
    """Return the work other than collectives on the communication lanes of devices.

    Columns step, lane, name, start_ns, dur_ns, overlapped_ns (time of it during which other lanes computed), gap_ns
    (time of it during which no collective ran on the device), idle_ns (time within the collective right after it
    in which nothing computed); one row per activity. Empty on a CPU run.
    """
    lanes = trace.lanes.filter(pl.col("device").is_not_null())
    communicating = lanes.filter(pl.col("role") == "communication").select("lane", "device")
    parts = [pl.DataFrame(schema=COLUMNS)]
    for (device,), mine in communicating.group_by("device", maintain_order=True):
        work = trace.activities.join(mine.select("lane"), on="lane", how="semi").sort("lane", "start_ns")
        others = trace.activities.join(lanes.filter(pl.col("device") == device), on="lane", how="semi").join(
            mine, on="lane", how="anti"
        )
        compute = _spans(others.filter(pl.col("kind") == "compute"))
        _, collectives, _ = breakdown.busy(trace, int(str(device)))
        following = work.with_columns(
            pl.col("kind").shift(-1).over("lane").alias("next_kind"),
            pl.col("start_ns").shift(-1).over("lane").alias("next_start_ns"),
            pl.col("dur_ns").shift(-1).over("lane").alias("next_dur_ns"),
        ).filter(pl.col("kind") != "communication")
        spans = intervals.from_columns(following["start_ns"], following["dur_ns"])
        after = following.with_columns(
            pl.when(pl.col("next_kind") == "communication").then("next_dur_ns").otherwise(0).alias("after_ns")
        )
        next_spans = intervals.from_columns(after["next_start_ns"].fill_null(0), after["after_ns"].fill_null(0))
        computed = intervals.coverage(next_spans, compute)
        parts.append(
            after.with_columns(
                pl.Series("overlapped_ns", intervals.coverage(spans, compute), pl.Int64),
                (pl.col("dur_ns") - pl.Series(intervals.coverage(spans, collectives), dtype=pl.Int64)).alias("gap_ns"),
                (pl.col("after_ns").fill_null(0) - pl.Series(computed, dtype=pl.Int64)).alias("idle_ns"),
            ).select(*COLUMNS)
        )
    return pl.concat(parts)


def device_count(trace: Trace) -> pl.DataFrame:
    """Return the number of devices with activity. Column devices; one row."""
    return pl.DataFrame(
        {"devices": [trace.lanes["device"].n_unique() if trace.on_device else 0]}, schema=DEVICE_COLUMNS
    )


def _spans(activities: pl.DataFrame) -> intervals.Spans:
    return intervals.union(intervals.from_columns(activities["start_ns"], activities["dur_ns"]))
