"""Operators that the host runs in each step."""

import polars as pl

from tracekit.model.trace import Trace


def by_step(trace: Trace) -> pl.DataFrame:
    """Return how many operators the host runs in each marked step. Columns step, ops; one row per step with some."""
    own = trace.ops.filter(pl.col("kind") == "cpu_op").drop_nulls("step")
    return own.group_by("step").agg(pl.len().cast(pl.Int64).alias("ops")).sort("step")
