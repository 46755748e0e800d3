"""Roofline of a run: how far each kind of call is from what memory and arithmetic of the device allow.

Williams, Waterman, Patterson, https://doi.org/10.1145/1498765.1498785.
"""

import polars as pl

from tracekit.analysis.compute import efficiency
from tracekit.analysis.host import ops
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = {
    "name": pl.String, "shapes": pl.String, "count": pl.Int64, "work_ns": pl.Int64, "flops": pl.Float64,
    "bytes": pl.Float64, "flops_per_byte": pl.Float64, "tflops_per_s": pl.Float64, "tbytes_per_s": pl.Float64,
    "roofline_ratio": pl.Float64, "above_ns": pl.Int64,
}  # fmt: skip
ROOF_COLUMNS = {
    "device": pl.String, "dtype": pl.String, "flops_per_s": pl.Float64, "memory_bytes_per_s": pl.Float64,
}  # fmt: skip


def by_call(run: Run) -> pl.DataFrame:
    """Return the calls of all ranks whose distance from the roofline is known, by operator and shapes of its inputs.

    Columns COLUMNS: work_ns (time of their kernels), flops_per_byte (null for operators that memory bandwidth limits),
    roofline_ratio (of `ops`), above_ns (work_ns less what the roofline needs: the most that faster kernels can save);
    one row per name and shapes, largest above_ns first. Empty where the device or the shapes are not known.
    """
    rows = ops.ops(run, by=("name", "shapes")).filter(pl.col("roofline_ratio") > 0, pl.col("tbytes_per_s") > 0)
    work_ns = pl.col("bytes") / pl.col("tbytes_per_s") / 1000
    return (
        rows.with_columns(
            work_ns.round().cast(pl.Int64).alias("work_ns"),
            (pl.col("flops") / pl.col("bytes")).alias("flops_per_byte"),
            (work_ns * (1 - pl.col("roofline_ratio")).clip(0)).round().cast(pl.Int64).alias("above_ns"),
        )
        .pipe(schema.select, COLUMNS)
        .sort("above_ns", "name", "shapes", descending=[True, False, False], nulls_last=True)
    )


@trace_fact
def roofs(trace: Trace) -> pl.DataFrame:
    """Return the peaks of a trace's device: columns ROOF_COLUMNS, one row per element type; empty if it is unknown."""
    device = efficiency.device_of(trace.header)
    if device is None:
        return pl.DataFrame(schema=ROOF_COLUMNS)
    rows = [(device.name, dtype, peak, device.memory_bytes_per_s) for dtype, peak in device.peaks.items()]
    return pl.DataFrame(rows, ROOF_COLUMNS, orient="row")
