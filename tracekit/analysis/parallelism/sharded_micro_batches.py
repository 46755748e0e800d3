"""Collectives of data-parallel axes that recur with the micro-batches of a pipeline: ZeRO stages 2 and 3."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import exposed_communication
from tracekit.analysis.parallelism import axis_communication, pipeline_bubbles, pipeline_stages
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import CP, EP, PP, TP
from tracekit.model import intervals, schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import alignment

COLUMNS = schema.columns("window rank step axis op with_calls micro_batches calls bytes exposed_ns lost_ns duration_ns")
PASSES = schema.columns("window pipeline step lost_ns delayed_ns duration_ns")
_OPS = ("all_gather", "reduce_scatter")
_ACTION = ["stage", "micro_batch", "action"]
_KEY = [*pipeline_stages.PIPELINE, "rank", *_ACTION]
FACTS: tuple[TraceFact, ...] = (
    *pipeline_bubbles.FACTS, *axis_communication.FACTS, exposed_communication.exposed_calls, breakdown.by_step,
)  # fmt: skip
"""The facts that the run tables of this module read."""


@run_fact
def sharded_micro_batches(run: Run) -> pl.DataFrame:
    """Number of micro-batches that data-parallel collectives run for; use ``run.run_table``.

    Columns COLUMNS; one row per rank, step, axis and op (all_gather, reduce_scatter): with_calls (micro-batches during
    or after whose actions such a collective started), exposed_ns (without waits), lost_ns (that beyond one
    micro-batch), duration_ns (of the pipeline in that step). Empty without a pipeline.
    """
    bubbles = run.table(pipeline_bubbles.pipeline_bubbles)
    calls = run.table(data_parallel_calls).filter(pl.col("op").is_in(_OPS))
    if bubbles.is_empty() or calls.is_empty():
        return schema.empty(COLUMNS)
    aligned = alignment.on_run_clock(calls, run.offsets, ("start_ns",)).sort("start_ns")
    actions = run.table(pipeline_stages.staged_actions).select(
        "window", "rank", "step", "micro_batch", at_ns="start_ns"
    )
    during = aligned.join_asof(
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


@run_fact
def passes(run: Run) -> pl.DataFrame:
    """Delay of one pass of each pipeline by those collectives; use ``run.run_table``.

    Columns PASSES; one row per pipeline, for its pass of median duration. Its actions are scheduled on links without
    cost, each with its own duration and the exposed collectives right before it: delayed_ns is what the pass is longer
    than without the latter, lost_ns what it is longer than if the collectives took the time of one micro-batch.
    """
    by_pipeline = pipeline_stages.representative_passes(run)
    if not by_pipeline:
        return schema.empty(PASSES)
    exposed = exposed_spans(run)
    after_ns = pl.max_horizontal("start_ns", pl.min_horizontal(pl.coalesce("ready_ns", "start_ns"), "end_ns"))
    gaps = run.table(pipeline_bubbles.idle_gaps).drop_nulls("action")
    delays = gaps.select(*_KEY, idle_ns=pl.col("end_ns") - after_ns)
    rows = []
    for (window, pipeline), actions in by_pipeline.items():
        place = (pl.col("rank").rank("dense") - 1).cast(pl.Int64)
        schedule = pipeline_stages.schedule_graph(tuple(actions.select(place, *_ACTION).iter_rows()))
        if schedule is None:
            continue
        idle_ns = actions.join(delays, on=_KEY, how="left", nulls_equal=True, maintain_order="left")["idle_ns"]
        before_ns, within_ns = exposed_around(actions, idle_ns.fill_null(0), exposed)
        own_ns = (actions["end_ns"] - actions["start_ns"]).to_numpy().astype(np.float64)
        one_ns = (before_ns + within_ns) / actions["micro_batch"].n_unique()
        cases = np.stack([own_ns + before_ns, own_ns, own_ns - within_ns + one_ns], axis=1)
        with_ns, undelayed_ns, once_ns = pipeline_stages.end_times(schedule, cases).max(axis=0)
        step, lost_ns = actions["step"][0], round(max(0.0, with_ns - once_ns))
        rows.append((window, pipeline, step, lost_ns, round(with_ns - undelayed_ns), round(with_ns)))
    return pl.DataFrame(rows, schema=PASSES, orient="row")


def exposed_spans(run: Run) -> dict[tuple[object, ...], intervals.Spans]:
    """Spans in which each rank runs such collectives, all of whose ranks have arrived, and computes nothing.

    Keys are (window, rank), times on the clock of the rank's trace.
    """
    compute = axis_communication.compute_spans(run)
    # Calls that `exposed_transfers` leaves out, such as those of checkpoint saves, have no times.
    calls = run.table(data_parallel_calls).filter(pl.col("op").is_in(_OPS)).drop_nulls("dur_ns")
    of_rank = calls.partition_by("window", "rank", as_dict=True)
    return {
        place: intervals.subtract(exposed_communication.transfer_spans(rank_calls), compute.get(place, intervals.EMPTY))
        for place, rank_calls in of_rank.items()
    }


@run_fact
def data_parallel_calls(run: Run) -> pl.DataFrame:
    """Return the calls of `axis_communication.calls` on data-parallel axes, with exposed_ns and waited_ns.

    Use ``run.run_table``.
    """
    other_axes = [PP, TP, EP, CP, "world"]
    calls = run.table(axis_communication.calls).filter(~pl.col("axis").is_in(other_axes).fill_null(value=True))
    times = ("exposed_ns", "waited_ns", "dur_ns")
    exposed = run.table(exposed_communication.exposed_transfers).select("window", "rank", "activity_id", *times)
    return calls.drop(times, strict=False).join(
        exposed, on=["window", "rank", "activity_id"], how="left", maintain_order="left"
    )


def exposed_around(
    actions: pl.DataFrame, idle_ns: pl.Series, exposed: Mapping[tuple[object, ...], intervals.Spans]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the exposed time of collectives in the idle_ns before each action, and within it.

    `exposed` are the spans of `exposed_spans`.
    """
    before, within = np.zeros((2, actions.height), np.int64)
    indexed = actions.with_row_index("at").with_columns(
        idle_ns.alias("idle_ns"), (pl.col("end_ns") - pl.col("start_ns")).alias("own")
    )
    for place, rows in indexed.partition_by("window", "rank", as_dict=True).items():
        index, start_ns, idle = (rows[name] for name in ("at", "trace_start_ns", "idle_ns"))
        spans = exposed.get(place, intervals.EMPTY)
        before[index] = intervals.coverage(intervals.from_columns(start_ns - idle, idle), spans)
        within[index] = intervals.coverage(intervals.from_columns(start_ns, rows["own"]), spans)
    return before, within
