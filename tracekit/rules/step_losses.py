"""The time lost in each step, and the worst device's median step: shared by the rules on streams."""

from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct


def by_step(run: Run, lost: pl.DataFrame, *, max_loss: pl.Expr | None = None) -> pl.DataFrame:
    """Return every step with the time lost in it (0 where none), and its share of the step (lost_ratio).

    `lost` has columns window, rank, step, device, lost_ns and others that end in _ns; these are summed. `max_loss`, an
    expression of the breakdown's columns, bounds the loss of a step: the most that the step can save.
    """
    names = [name for name in lost.columns if name.endswith("_ns") and name != "start_ns"]
    sums = lost.group_by(quoted_step.KEY).agg(pl.col(names).sum())
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0)
    bound = pl.col("duration_ns") if max_loss is None else max_loss
    return (
        steps.with_columns(bound.clip(0).alias("_max_loss_ns"))
        .join(sums, on=quoted_step.KEY, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col(names).fill_null(0))
        .with_columns(pl.min_horizontal(pl.col("lost_ns").clip(0), "_max_loss_ns").alias("lost_ns"))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
        .drop("_max_loss_ns")
    )


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The loss that a finding quotes: that of the median step of the worst device."""

    row: dict[str, Any]
    """The step, with columns KEY, duration_ns, lost_ns and lost_ratio."""
    steps: pl.DataFrame
    """All steps that lose enough for the finding."""

    def __str__(self) -> str:
        return f"{quoted_step.describe_loss(self.row)} in {quoted_step.describe(self.row)}"

    def rows(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of a table in the quoted step."""
        return quoted_step.rows_of(table, self.row)

    def finding(
        self,
        rule: Rule,
        severity: Severity,
        message: str,
        fix: str,
        *,
        confidence: float,
        evidence: pl.DataFrame,
        what_if: WhatIf | None = None,
        subject: str = "",
        is_upper_bound: bool = False,
    ) -> Finding:
        """Return a finding with the impact and cost of the quoted step, and the ranks and steps that lose enough."""
        return Finding(
            rule.code,
            severity,
            message,
            fix,
            impact=min(1.0, self.row["lost_ratio"]),
            cost_ns=self.row["lost_ns"],
            confidence=confidence,
            ranks=distinct(self.steps, "rank"),
            steps=distinct(self.steps, "step"),
            evidence=evidence,
            what_if=what_if,
            subject=subject,
            is_of_window=self.row["step"] is None,
            is_upper_bound=is_upper_bound,
        )


def worst(steps: pl.DataFrame, min_lost_ratio: float) -> StepLoss | None:
    """Return the loss of the worst device; None if its median step loses less than `min_lost_ratio`.

    `steps` is a table of `by_step` or `steps_without_saves.losses`.
    """
    row = quoted_step.worst(steps, "lost_ratio")
    if row is None or row["lost_ratio"] < min_lost_ratio:
        return None
    return StepLoss(row, steps.filter(pl.col("lost_ratio") >= min_lost_ratio))


def worst_for_replay(steps: pl.DataFrame, min_cost_ratio: float) -> StepLoss | None:
    """Return the loss of the worst device if it is enough for a replay, with the steps that lose half as much."""
    loss = worst(steps, min_cost_ratio * _REPLAY_FROM)
    return loss and StepLoss(loss.row, steps.filter(pl.col("lost_ratio") >= loss.row["lost_ratio"] / 2))


_REPLAY_FROM = 0.25  # facts can underestimate a loss where delays propagate
