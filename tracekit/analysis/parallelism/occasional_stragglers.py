"""Occasional stragglers: a few steps in which one rank works for longer than in its others, while the others wait."""

import polars as pl

from tracekit.analysis.parallelism import late_ranks, outlier_steps, stragglers
from tracekit.analysis.time import breakdown, operators
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import collective_matching

COLUMNS = {
    **schema.columns("window step late_rank step_ns reference_ns lost_ns window_ns steps"),
    **dict.fromkeys(("compute_ns", "usual_compute_ns"), pl.Int64),
    "ops_ratio": pl.Float64,
    "late_ranks": pl.List(pl.Int64),
}
_STEP, _RANK = ["window", "step"], ["window", "rank"]
_LONGER_RATIO = 0.5
"""Share of the median step that the others wait beyond what is usual."""
_MOST = 0.5
_FEWEST_STEPS = 3


FACTS: tuple[TraceFact, ...] = (*late_ranks.FACTS, operators.by_step)
"""The facts that the run tables of this module read, without those of `outlier_steps`."""


@run_fact
def occasional_stragglers(run: Run) -> pl.DataFrame:
    """Return the few steps in which most of the waiting is for one rank that takes longer than usual.

    Columns COLUMNS: late_rank and late_ranks as in `stragglers.straggler_costs`, step_ns and reference_ns (of the step,
    and the median), lost_ns (by the other ranks, beyond the median of the steps), compute_ns (of the late rank in the
    step) and usual_compute_ns (the larger of two medians: of its steps, and of all ranks in the step), ops_ratio
    (operators over the same for operators; null if not recorded), window_ns and steps (of the window); one row per step
    and late rank. Use ``run.run_table``. Fewer than half of the window's steps. Steps with saves, and those in which
    the rank's host stalls, are left out.
    """
    costs = run.table(stragglers.straggler_costs).drop_nulls("step")
    if costs.is_empty():
        return schema.empty(COLUMNS)
    of_rank = ["window", "late_rank"]
    usual_ns = pl.col("lost_ns").median().over(of_rank).cast(pl.Int64)
    measured = costs.with_columns(
        pl.col("duration_ns").alias("step_ns"),
        pl.col("duration_ns").median().over(of_rank).cast(pl.Int64).alias("reference_ns"),
        pl.col("duration_ns").sum().over(of_rank).alias("window_ns"),
        pl.len().over(of_rank).cast(pl.Int64).alias("steps"),
        (pl.col("lost_ns") - usual_ns).alias("lost_ns"),
    )
    is_outlier = (pl.col("lost_ns") >= _LONGER_RATIO * pl.col("reference_ns")) & (pl.col("share") > _MOST)
    few = measured.filter(is_outlier, pl.col("steps") >= _FEWEST_STEPS)
    few = few.filter(2 * pl.len().over(of_rank) < pl.col("steps"))
    worked = _work(run).rename({"rank": "late_rank"})
    table = _without_host_stalls(run, few).join(worked, on=[*_STEP, "late_rank"], how="left")
    return table.pipe(schema.select, COLUMNS).sort("window", "step", "late_rank")


def _work(run: Run) -> pl.DataFrame:
    """Return columns window, rank, step, compute_ns, usual_compute_ns, ops_ratio."""
    computed = run.table(breakdown.by_step).drop_nulls("step").group_by(*_RANK, "step").agg(pl.col("compute_ns").max())
    counted = computed.join(run.table(operators.by_step), on=[*_RANK, "step"], how="left")
    return counted.with_columns(
        _usual("compute_ns").cast(pl.Int64).alias("usual_compute_ns"),
        (pl.col("ops") / _usual("ops")).alias("ops_ratio"),
    ).drop("ops")


def _usual(name: str) -> pl.Expr:
    of_ranks = pl.col(name).quantile(0.5, "lower").over(_STEP)
    return pl.max_horizontal(pl.col(name).median().over(_RANK), of_ranks)


def _without_host_stalls(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the steps without those in which stalls of the late rank's host explain most of the time.

    Where ranks do not meet in each step, as in local SGD, the others wait in a later step than that of the stall.
    """
    meetings = run.table(collective_matching.calls).select("window", since="step").drop_nulls().unique().sort("since")
    late = steps.select(*_STEP, "late_rank", "lost_ns").sort("step")
    since = late.join_asof(
        meetings, left_on="step", right_on="since", by="window", allow_exact_matches=False, check_sortedness=False
    )
    stalls = run.table(outlier_steps.outlier_steps)
    stalled = stalls.select("window", "ranks", "gap_step", stalled_ns="lost_ns")
    is_between = (pl.col("gap_step") <= pl.col("step")) & (pl.col("gap_step") >= pl.coalesce("since", "step"))
    pairs = since.join(stalled, on="window").filter(is_between)
    of_rank = pairs.filter(pl.col("ranks").list.contains(pl.col("late_rank")))
    sums = of_rank.group_by(*_STEP, "late_rank").agg(pl.col("stalled_ns").sum(), pl.col("lost_ns").first())
    explained = sums.filter(pl.col("stalled_ns") >= _MOST * pl.col("lost_ns"))
    return steps.join(explained, on=[*_STEP, "late_rank"], how="anti", maintain_order="left")
