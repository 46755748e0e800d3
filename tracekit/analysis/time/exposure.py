"""How long nothing computes beside activities."""

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import intervals
from tracekit.model.trace import Trace


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
