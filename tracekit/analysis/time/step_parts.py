"""What each step's time consists of, by name: compute, and the gaps before it."""

import polars as pl

from tracekit.analysis.time import gaps
from tracekit.model import schema
from tracekit.model.trace import Trace

COLUMNS = schema.columns("step device part name dur_ns", part=pl.String)
COMPUTE, GAP = "compute", "gap"


def step_parts(trace: Trace) -> pl.DataFrame:
    """Return the time of each step in compute of each name, and in the gaps without compute before each name.

    Columns COLUMNS; one row per step, device, part (compute or gap) and name, '' for a gap that no compute ends. A gap
    holds the exposed communication, the copies and the idle time before the compute that ends it.
    """
    compute = trace.activities.filter(pl.col("kind") == "compute").join(
        trace.lanes.select("lane", "device"), on="lane", maintain_order="left"
    )
    columns = ("step", "device", "name", "dur_ns")
    rows = pl.concat(
        table.select(*columns, pl.lit(part).alias("part"))
        for part, table in ((COMPUTE, compute), (GAP, gaps.compute_gaps(trace)))
    )
    step_rows = rows.filter(pl.col("step").is_not_null()).with_columns(pl.col("name").fill_null(""))
    sums = step_rows.group_by("step", "device", "part", "name").agg(pl.col("dur_ns").sum())
    return schema.select(sums, COLUMNS).sort("step", "device", "part", "name")
