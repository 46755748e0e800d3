"""Exposed time of activities: how long no compute ran on their device meanwhile."""

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import intervals
from tracekit.model.trace import Trace


def with_exposure(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    """Return activities (columns device, start_ns, dur_ns and more) by device, with exposed_ns.

    exposed_ns is the time in which no compute ran on the activity's device.
    """
    parts = [work.clear().with_columns(pl.lit(0, pl.Int64).alias("exposed_ns"))]
    for device in breakdown.devices(trace):
        compute, _, _ = breakdown.busy(trace, device)
        device_work = work.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))
        spans = intervals.from_columns(device_work["start_ns"], device_work["dur_ns"])
        hidden = pl.Series("hidden", intervals.coverage(spans, compute), pl.Int64)
        parts.append(device_work.with_columns((pl.col("dur_ns") - hidden).alias("exposed_ns")))
    return pl.concat(parts)
