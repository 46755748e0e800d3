"""The step that a finding quotes: a rank's median step by what the rule measures.

It is a real step, whose numbers can be looked up in the trace. It need not be the representative step of the run
(`save_stages.representative_step`), which pages show first.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

DEVICE = ("window", "rank", "device")
KEY = ("window", "rank", "step", "device")
_REPLAY_FROM = 0.25  # facts can underestimate a loss where delays propagate


def per_device(steps: pl.DataFrame, by: str) -> pl.DataFrame:
    """Return, for each rank and device, its step with the lower median of column `by`; of equal ones the earliest.

    `steps` has columns window, rank, step, device and `by`. Sorted by `by`, the highest first.
    """
    ordered = steps.lazy().sort(by, "window", "step", maintain_order=True)
    medians = ordered.group_by("rank", "device", maintain_order=True).agg(pl.all().get((pl.len() - 1) // 2))
    return medians.select(steps.columns).sort(by, "rank", "device", descending=[True, False, False]).collect()


def worst(steps: pl.DataFrame, by: str) -> dict[str, Any] | None:
    """Return the median step of the rank and device where it is worst; None if there are no steps."""
    medians = per_device(steps, by)
    return None if medians.is_empty() else medians.row(0, named=True)


def in_steps(run: Run, table: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a table with columns KEY that belong to a step; where none are marked, to the window."""
    steps = run.table(breakdown.by_step).select(KEY).unique()
    return table.join(steps, on=KEY, how="semi", nulls_equal=True, maintain_order="left")


def describe(row: dict[str, Any]) -> str:
    """Return "step 7 of rank 0 (the rank's median by this measure)"; "the trace of rank 0" without marked steps."""
    if row["step"] is None:
        return f"the trace of rank {row['rank']}"
    return f"step {row['step']} of rank {row['rank']} (the rank's median by this measure)"


def place(step: int | None) -> str:
    """Return "step 7 (the median by this measure)", or "the window" where no steps are marked; it names no rank."""
    return "the window" if step is None else f"step {step} (the median by this measure)"


def noun(row: dict[str, Any]) -> str:
    """Noun for `row`: "step", or "window" where no steps are marked."""
    return "window" if row["step"] is None else "step"


def describe_loss(row: dict[str, Any], name: str = "lost_ns") -> str:
    """Return "12 ms of 80 ms (15.0%)": the time in column `name` and its share of the step, duration_ns."""
    lost_ns, step_ns = row[name], row["duration_ns"]
    return f"{units.duration(lost_ns)} of {units.duration(step_ns)} ({units.share(lost_ns / step_ns)})"


def rows_of(table: pl.DataFrame, row: dict[str, Any], keys: Iterable[str] = KEY) -> pl.DataFrame:
    """Return the rows of a table in the window, rank, step and (if the table has it) device of `row`."""
    return table.filter(is_of(row, (name for name in keys if name in table.columns)))


def is_of(row: dict[str, Any], keys: Iterable[str]) -> pl.Expr:
    """Whether rows agree with `row` in some whole-number columns, null with null."""
    return pl.all_horizontal(pl.col(name).eq_missing(pl.lit(row[name], pl.Int64)) for name in keys)


def evidence(table: pl.DataFrame, row: dict[str, Any], by: str, count: int = 40) -> pl.DataFrame:
    """Return the rows of the step `row`, then those of other steps, the largest `by` first, at most `count` of each."""
    ordered = largest_first(table, by, "start_ns")
    is_quoted = is_of(row, (name for name in KEY if name in table.columns))
    return pl.concat([ordered.filter(is_quoted).head(count), ordered.filter(~is_quoted).head(count)])


def by_step(run: Run, lost: pl.DataFrame, *, max_loss: pl.Expr | None = None) -> pl.DataFrame:
    """Return every step with the time lost in it (0 where none), and its share of the step (lost_ratio).

    `lost` has columns window, rank, step, device, lost_ns and others that end in _ns; these are summed. `max_loss`, an
    expression of the breakdown's columns, bounds the loss of a step: the most that the step can save.
    """
    names = [name for name in lost.columns if name.endswith("_ns") and name != "start_ns"]
    sums = lost.lazy().group_by(KEY).agg(pl.col(names).sum())
    steps = run.table(breakdown.by_step).lazy().filter(pl.col("duration_ns") > 0)
    bound = pl.col("duration_ns") if max_loss is None else max_loss
    return (
        steps.with_columns(bound.clip(0).alias("_max_loss_ns"))
        .join(sums, on=KEY, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col(names).fill_null(0))
        .with_columns(pl.min_horizontal(pl.col("lost_ns").clip(0), "_max_loss_ns").alias("lost_ns"))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
        .drop("_max_loss_ns")
        .collect()
    )


@dataclass(frozen=True, eq=False)
class StepLoss:
    """The loss that a finding quotes: that of the median step of the worst device."""

    row: dict[str, Any]
    """The step, with columns KEY, duration_ns, lost_ns and lost_ratio."""
    steps: pl.DataFrame
    """All steps that lose enough for the finding."""

    def __str__(self) -> str:
        return f"{describe_loss(self.row)} in {describe(self.row)}"

    def rows(self, table: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of a table in the quoted step."""
        return rows_of(table, self.row)

    def finding(
        self,
        rule: Rule,
        severity: Severity,
        message: str,
        fix: str,
        *,
        claim: str,
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
            claim=claim,
            what_if=what_if,
            subject=subject,
            is_of_window=self.row["step"] is None,
            is_upper_bound=is_upper_bound,
        )


def worst_loss(steps: pl.DataFrame, min_lost_ratio: float) -> StepLoss | None:
    """Return the loss of the worst device; None if its median step loses less than `min_lost_ratio`.

    `steps` is a table of `by_step` or `save_stages.losses`.
    """
    is_enough = steps["lost_ratio"] >= min_lost_ratio
    row = worst(steps, "lost_ratio") if is_enough.any() else None  # most rules find nothing in most runs
    if row is None or row["lost_ratio"] < min_lost_ratio:
        return None
    return StepLoss(row, steps.filter(pl.col("lost_ratio") >= min_lost_ratio))


def worst_for_replay(steps: pl.DataFrame, min_cost_ratio: float) -> StepLoss | None:
    """Return the loss of the worst device if it is enough for a replay, with the steps that lose half as much."""
    loss = worst_loss(steps, min_cost_ratio * _REPLAY_FROM)
    return loss and StepLoss(loss.row, steps.filter(pl.col("lost_ratio") >= loss.row["lost_ratio"] / 2))
