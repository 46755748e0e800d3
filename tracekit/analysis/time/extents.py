"""When a trace begins, on its own clock, and the run on its clock: where displayed times begin at 0."""

import polars as pl

from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.sync import alignment

COLUMNS = schema.columns("first_ns steps", steps=pl.List(pl.Int64))
RUN_CLOCK = schema.columns("window rank offset_ns drift at_ns zero_ns", drift=pl.Float64)


@trace_fact
def extent(trace: Trace) -> pl.DataFrame:
    """First time and steps of a trace. Columns first_ns, steps; one row.

    first_ns is the start of its first operation, activity, allocation, step or checkpoint stage; 0 without any.
    """
    starts = [trace.ops["start_ns"].min(), trace.activities["start_ns"].min(), trace.allocations["at_ns"].min()]
    starts += [trace.steps["start_ns"].min(), trace.checkpoints["start_ns"].min()]
    first_ns = min((start for start in starts if isinstance(start, int)), default=0)
    steps = trace.steps["step"].drop_nulls().unique().sort().to_list()
    return pl.DataFrame({"first_ns": [first_ns], "steps": [steps]}, schema=COLUMNS)


@run_fact
def run_clock(run: Run) -> pl.DataFrame:
    """Clock for the display of each trace's times: columns RUN_CLOCK, one row per window and rank.

    offset_ns, drift and at_ns convert a time to the run's clock, as in `Run.offsets`. zero_ns is when the first trace
    of the window begins on that clock. Traces that could not be aligned with others have a zero of their own.
    """
    begins = run.table(extent).select("window", "rank", "first_ns")
    clocks = run.offsets.join(begins, on=["window", "rank"], maintain_order="left")
    aligned = alignment.on_run_clock(clocks.select("window", "rank", "first_ns"), run.offsets, ("first_ns",))
    zero_ns = pl.col("zero_ns").min().over("window", "clock_domain")
    return schema.select(clocks.with_columns(zero_ns=aligned["first_ns"]).with_columns(zero_ns), RUN_CLOCK)
