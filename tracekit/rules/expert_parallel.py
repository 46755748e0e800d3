"""The rule on experts that get more tokens than others."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.parallelism import expert_load
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import UNBALANCED_EXPERTS
from tracekit.rules import quoted_step
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40


@dataclass(frozen=True)
class OverloadedExperts(Rule):
    """Overloaded experts: the experts of some ranks get more tokens than those of others.

    What it does: reports ranks whose experts get `min_load_ratio` times the mean of their group, in the median over
    layers and steps, if that costs `min_lost_ratio` of the step. It says how long the others wait.

    Why it costs: all ranks of an expert-parallel group wait in the second all-to-all of each layer for the rank with
    most tokens.

    How it is measured: all-to-alls of axis ep come in pairs: the first brings tokens to the experts, the second returns
    as many bytes. The load of a rank is what the first brings it; the time of its experts is the compute between the
    two. The message quotes the median step: over all pairs, the time of the rank with the highest load, less
    what it would take with the mean load. The cost is from a replay in which all ranks of a group get equally many
    tokens.

    How to fix: raise the coefficient of the load-balancing loss, use a bias per expert (loss-free balancing), a
    capacity factor that drops tokens, or place a busy expert with idle ones or on several ranks.

    Blind spots: needs message sizes, and pairs of all-to-alls without others between them (batches that overlap are not
    judged). Kernels with padding to a fixed capacity have equal messages: their waste is not seen.
    """

    code: ClassVar[str] = "EP001"
    facts: ClassVar[tuple[TraceFact, ...]] = (*expert_load.FACTS, breakdown.by_step)
    min_load_ratio: float = 1.05
    min_lost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all ranks with overloaded experts."""
        loads = run.table(expert_load.expert_load)
        if loads.is_empty():
            return
        medians = loads.group_by("rank").agg(pl.col("load_ratio").median()).sort("rank")
        hot = medians.filter(pl.col("load_ratio") >= self.min_load_ratio)
        steps = _losses(run, loads)
        if hot.is_empty() or steps.is_empty():
            return
        worst = median_row(steps, "lost_ratio", "step")
        if worst["lost_ratio"] < self.min_lost_ratio:
            return
        ranks = distinct(hot, "rank")
        hottest = largest_first(hot, "load_ratio", "rank").row(0, named=True)
        yield Finding(
            self.code,
            Severity.WARNING,
            f"The experts of {units.numbered('rank', ranks)} are overloaded: those of "
            f"rank {hottest['rank']} get {hottest['load_ratio']:.2f} times the mean of their group. The other ranks "
            f"wait {units.duration(worst['lost_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(worst['lost_ratio'])}) for rank {hottest['rank']} in {quoted_step.place(worst['step'])}.",
            "Balance the experts: a larger coefficient of the load-balancing loss, a bias per expert (loss-free "
            "balancing), a capacity factor; or place busy experts with idle ones, or on several ranks.",
            impact=min(1.0, worst["lost_ratio"]),
            cost_ns=worst["lost_ns"],
            confidence=0.8,
            ranks=ranks,
            steps=distinct(loads, "step"),
            evidence=largest_first(loads, "load_ratio", "rank", "start_ns")
            .drop("members", "first_id", "second_id")
            .head(_EVIDENCE_ROWS),
            is_of_window=worst["step"] is None,
            what_if=WhatIf(UNBALANCED_EXPERTS),
        )


def overloaded_ranks(run: Run) -> frozenset[int]:
    """Return the ranks that EP001 reports: they are late for their tokens, and no stragglers."""
    return frozenset(rank for finding in OverloadedExperts().check(run) for rank in finding.ranks)


def _losses(run: Run, loads: pl.DataFrame) -> pl.DataFrame:
    """Loss of each step to the rank with the highest load in each pair, in the group that loses most."""
    of_layer = ["window", "step", "group", "members", "layer"]
    hottest = loads.sort("load_ratio", descending=True).group_by(of_layer, maintain_order=True).first()
    lost_ns = (pl.col("expert_ns") - pl.col("balanced_ns")).sum().alias("lost_ns")
    of_group = hottest.group_by("window", "step", "group", "members").agg(lost_ns)
    worst = of_group.group_by("window", "step").agg(pl.col("lost_ns").max())
    steps = run.table(breakdown.by_step).group_by("window", "step").agg(pl.col("duration_ns").median().cast(pl.Int64))
    joined = worst.join(steps, on=["window", "step"], nulls_equal=True).filter(pl.col("duration_ns") > 0)
    return joined.with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
