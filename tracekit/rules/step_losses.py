"""The time lost in each step, and the worst device's representative step: shared by the rules on streams."""

from typing import Any

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.rules import representative_step
from tracekit.rules.rule import distinct


def by_step(run: Run, lost: pl.DataFrame, *, max_loss: pl.Expr | None = None) -> pl.DataFrame:
    """Return every step with the time lost in it (0 where none), and its share of the step (lost_ratio).

    `lost` has columns window, rank, step, device, lost_ns and others that end in _ns; these are summed. `max_loss`, an
    expression of the breakdown's columns, bounds the loss of a step: the most that the step can save.
    """
    names = [name for name in lost.columns if name.endswith("_ns") and name != "start_ns"]
    sums = lost.group_by(representative_step.KEY).agg(pl.col(names).sum())
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0).drop_nulls("step")
    bound = pl.col("duration_ns") if max_loss is None else max_loss
    return (
        steps.with_columns(bound.clip(0).alias("_max_loss_ns"))
        .join(sums, on=representative_step.KEY, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col(names).fill_null(0))
        .with_columns(pl.min_horizontal(pl.col("lost_ns").clip(0), "_max_loss_ns").alias("lost_ns"))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
        .drop("_max_loss_ns")
    )


def worst_step(steps: pl.DataFrame, min_cost_ratio: float) -> dict[str, Any] | None:
    """Return the representative step of the worst device, if it loses enough for a replay."""
    worst = representative_step.worst(steps, "lost_ratio")
    return None if worst is None or worst["lost_ratio"] < min_cost_ratio * _REPLAY_FROM else worst


_REPLAY_FROM = 0.25  # facts can underestimate a loss where delays propagate


def ranks_and_steps(steps: pl.DataFrame, min_lost_ratio: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the ranks and steps that lose at least `min_lost_ratio`."""
    lost = steps.filter(pl.col("lost_ratio") >= min_lost_ratio)
    return distinct(lost, "rank"), distinct(lost, "step")


def evidence(worst: dict[str, Any], rows: pl.DataFrame, count: int = 40) -> pl.DataFrame:
    """Return the rows of the quoted step, then those of other steps, the costliest first, `count` of each."""
    ordered = rows.sort("lost_ns", "start_ns", descending=[True, False])
    own = representative_step.rows_of(ordered, worst)
    others = ordered.join(
        own.select("window", "rank", "step"), on=["window", "rank", "step"], how="anti", nulls_equal=True
    )
    return pl.concat([own.head(count), others.head(count)])
