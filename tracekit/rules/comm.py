"""Judgements of communication."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, communication
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 20


@dataclass(frozen=True)
class ExposedCommunication(Rule):
    """Communication that no compute hides.

    What it does: reports runs in which a collective runs while its device computes nothing for more than
    `max_exposed_ratio` of the step.

    Why it costs: a device that waits for a collective earns nothing. What compute hides is free.

    How it is measured: per rank and step, the union of all collectives minus the union of all compute, over the
    step's device window; the median step of the worst rank is judged.

    How to fix: start gathers earlier (explicit prefetch) and reduce later, use larger units, or send less.

    Blind spots: a collective that waits for a slow peer counts as communication. On a CPU run compute is the union of
    dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[Fact, ...]] = (breakdown.by_step, communication.exposed)
    max_exposed_ratio: float = 0.2
    error_exposed_ratio: float = 0.6

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for the run if the worst rank's median step exceeds the threshold."""
        steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0)
        ratio = pl.col("exposed_communication_ns") / pl.col("duration_ns")
        ranks = steps.group_by("rank").agg(
            ratio.median().alias("ratio"),
            pl.col("exposed_communication_ns").median().alias("cost_ns"),
            (pl.col("overlapped_ns").sum() / pl.col("communication_ns").sum()).alias("hidden"),
        )
        over = ranks.filter(pl.col("ratio") > self.max_exposed_ratio).sort("ratio", "rank", descending=[True, False])
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        evidence = _evidence(run, over["rank"].to_list())
        yield Finding(
            self.code,
            Severity.ERROR if worst["ratio"] > self.error_exposed_ratio else Severity.WARNING,
            f"{units.share(worst['ratio'])} of the step is communication that no compute hides: "
            f"{units.duration(worst['cost_ns'])} a step on rank {worst['rank']}; "
            f"compute hides {units.share(worst['hidden'] or 0)} of its communication.",
            _fix(run, evidence, worst["hidden"] or 0),
            impact=worst["ratio"],
            cost_ns=int(worst["cost_ns"]),
            confidence=0.9,
            ranks=tuple(over["rank"].sort().to_list()),
            steps=tuple(steps["step"].drop_nulls().unique().sort().to_list()),
            evidence=evidence,
        )


def _evidence(run: Run, ranks: list[int]) -> pl.DataFrame:
    spans = run.table(communication.exposed).filter(pl.col("rank").is_in(ranks), pl.col("exposed_ns") > 0)
    return spans.sort("exposed_ns", descending=True).head(_EVIDENCE_ROWS)


def _fix(run: Run, evidence: pl.DataFrame, hidden: float) -> str:
    strategy = run.manifest.get("strategy")
    ops = evidence["op"].drop_nulls()
    op = ops.mode().sort().first() if len(ops) else None
    if strategy == "fsdp2" and hidden < 0.05:
        return (
            "Nothing overlaps: call set_modules_to_forward_prefetch and set_modules_to_backward_prefetch on the FSDP "
            "modules, and unshard(async_op=True) before they are needed."
        )
    if op in ("all_gather", "reduce_scatter"):
        return (
            "Prefetch by set_modules_to_forward_prefetch and set_modules_to_backward_prefetch, keep weights with "
            "reshard_after_forward=False where memory allows, or raise the batch per rank."
        )
    if op == "all_reduce" and strategy == "ddp":
        return "Set bucket_cap_mb and gradient_as_bucket_view=True in DistributedDataParallel, or accumulate gradients."
    return "Start the collectives in the evidence earlier (async_op=True), or give each rank more compute per byte."
