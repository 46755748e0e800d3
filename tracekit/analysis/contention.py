"""The give-way chain: preparation that crawls beside compute, a late collective, and compute that waits for it."""

import numpy as np
import polars as pl

from tracekit import intervals
from tracekit.analysis import breakdown
from tracekit.trace import Trace

COLUMNS = {
    "step": pl.Int64, "device": pl.Int64, "lane": pl.Int64, "name": pl.String, "start_ns": pl.Int64,
    "dur_ns": pl.Int64, "overlapped_ns": pl.Int64, "gap_ns": pl.Int64, "collective_id": pl.Int64,
    "collective_start_ns": pl.Int64, "collective_dur_ns": pl.Int64, "wait_ns": pl.Int64,
}  # fmt: skip
DEVICE_COLUMNS = {"devices": pl.Int64}


def preparation(trace: Trace) -> pl.DataFrame:
    """Return the work other than collectives on the communication lanes of devices, and the collective it precedes.

    Columns step, device, lane, name, start_ns, dur_ns, overlapped_ns (time of it during which other lanes of the device
    computed), gap_ns (time of it during which no collective ran on the device: the communication gap), collective_id,
    collective_start_ns, collective_dur_ns (the next collective on the lane; null where there is none), wait_ns (how
    long nothing had computed on the device when that collective ended, within the collective: the compute gap that it
    closes; 0 where compute ran on). One row per activity; several rows share a collective, and its wait. Empty on a
    CPU run.
    """
    lanes = trace.lanes.filter(pl.col("device").is_not_null())
    communicating = lanes.filter(pl.col("role") == "communication").select("lane", "device")
    parts = [pl.DataFrame(schema=COLUMNS)]
    for (device,), mine in communicating.group_by("device", maintain_order=True):
        others = lanes.filter(pl.col("device") == device).join(mine, on="lane", how="anti")
        compute = _spans(trace.activities.join(others, on="lane", how="semi").filter(pl.col("kind") == "compute"))
        _, collectives, _ = breakdown.busy(trace, int(str(device)))
        work = _before_collectives(trace.activities.join(mine, on="lane"))
        spans = intervals.from_columns(work["start_ns"], work["dur_ns"])
        carried = pl.Series(intervals.coverage(spans, collectives), dtype=pl.Int64)
        parts.append(
            work.with_columns(
                pl.Series("overlapped_ns", intervals.coverage(spans, compute), pl.Int64),
                (pl.col("dur_ns") - carried).alias("gap_ns"),
                _closed_gaps(work, compute),
            ).select(*COLUMNS)
        )
    return pl.concat(parts)


def device_count(trace: Trace) -> pl.DataFrame:
    """Return the number of devices with activity. Column devices; one row."""
    return pl.DataFrame(
        {"devices": [trace.lanes["device"].n_unique() if trace.on_device else 0]}, schema=DEVICE_COLUMNS
    )


def _before_collectives(work: pl.DataFrame) -> pl.DataFrame:
    """Return the work that is no collective, each with the next collective on its lane."""
    is_collective = pl.col("kind") == "communication"
    named = [
        pl.when(is_collective).then(pl.col(source)).shift(-1).backward_fill().over("lane").alias(f"collective_{target}")
        for source, target in (("id", "id"), ("start_ns", "start_ns"), ("dur_ns", "dur_ns"))
    ]
    return work.sort("lane", "start_ns", "id").with_columns(named).filter(~is_collective)


def _closed_gaps(work: pl.DataFrame, compute: intervals.Spans) -> pl.Series:
    """Return how long compute had been idle at the end of each row's collective, within that collective."""
    starts = work["collective_start_ns"].fill_null(0).to_numpy()
    ends = starts + work["collective_dur_ns"].fill_null(0).to_numpy()
    if not len(compute):
        return pl.Series("wait_ns", np.zeros(len(work), np.int64))
    before = np.searchsorted(compute[:, 0], ends, side="left") - 1  # the last compute that began before the end
    last_end = np.where(before >= 0, compute[np.maximum(before, 0), 1], starts)
    # A gap that no compute follows (the end of the step) was not closed by the collective.
    resumed = before + 1 < len(compute)
    wait_ns = np.where(resumed, np.clip(ends - np.maximum(last_end, starts), 0, None), 0)
    return pl.Series("wait_ns", wait_ns.astype(np.int64))


def _spans(activities: pl.DataFrame) -> intervals.Spans:
    return intervals.union(intervals.from_columns(activities["start_ns"], activities["dur_ns"]))
