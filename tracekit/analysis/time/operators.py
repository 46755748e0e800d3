"""Operators that the host runs in each step."""

import polars as pl

from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace


@trace_fact
def by_step(trace: Trace) -> pl.DataFrame:
    """Operators that the host runs in each marked step. Columns step, ops; one row per step with some."""
    cpu_ops = trace.ops.filter(pl.col("kind") == "cpu_op").drop_nulls("step")
    return cpu_ops.group_by("step").agg(pl.len().cast(pl.Int64).alias("ops")).sort("step")
