"""Collectives of data-parallel axes that recur with the micro-batches of a pipeline: ZeRO stages 2 and 3."""

import polars as pl

from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.parallelism import axis_communication, pipeline_bubbles, pipeline_stages
from tracekit.conventions.strategies import CP, EP, PP, TP
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.sync import alignment

COLUMNS = schema.columns("window rank step axis op with_calls micro_batches calls bytes exposed_ns lost_ns duration_ns")
_OPS = ("all_gather", "reduce_scatter")


def sharded_micro_batches(run: Run) -> pl.DataFrame:
    """Return for how many micro-batches data-parallel collectives run; use ``run.run_table``.

    Columns COLUMNS; one row per rank, step, axis and op (all_gather, reduce_scatter): with_calls (micro-batches during
    or after whose actions such a collective started), exposed_ns (without waits), lost_ns (that beyond one
    micro-batch), duration_ns (of the pipeline in that step). Empty without a pipeline.
    """
    bubbles = run.run_table(pipeline_bubbles.pipeline_bubbles)
    if bubbles.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    other_axes = [PP, TP, EP, CP, "world"]
    named = run.run_table(axis_communication.calls).filter(
        pl.col("op").is_in(_OPS), ~pl.col("axis").is_in(other_axes).fill_null(value=True)
    )
    if named.is_empty():
        return pl.DataFrame(schema=COLUMNS)
    exposed = run.run_table(exposed_communication.exposed_transfers).select(
        "window", "rank", "activity_id", "exposed_ns"
    )
    calls = named.join(exposed, on=["window", "rank", "activity_id"], how="left", maintain_order="left")
    placed = alignment.on_run_clock(calls, run.offsets, ("start_ns",)).sort("start_ns")
    actions = run.run_table(pipeline_stages.staged_actions).select(
        "window", "rank", "step", "micro_batch", at_ns="start_ns"
    )
    during = placed.join_asof(
        actions.sort("at_ns"),
        left_on="start_ns",
        right_on="at_ns",
        by=["window", "rank", "step"],
        check_sortedness=False,
    )
    sums = during.group_by("window", "rank", "step", "axis", "op").agg(
        pl.col("micro_batch").drop_nulls().n_unique().alias("with_calls"),
        pl.len().alias("calls"),
        pl.col("bytes", "exposed_ns").sum(),
    )
    steps = bubbles.unique(["window", "rank", "step"]).select("window", "rank", "step", "micro_batches", "duration_ns")
    lost = pl.col("exposed_ns") - pl.col("exposed_ns") // pl.col("with_calls").clip(1)
    joined = sums.join(steps, on=["window", "rank", "step"], nulls_equal=True).with_columns(lost.alias("lost_ns"))
    return schema.conform(joined, COLUMNS).sort("window", "rank", "step", "axis", "op")
