"""Judgements of communication."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import communication, engine
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
    step's device window; collectives of checkpoint saves are left out. The median step of the worst rank is judged.

    How to fix: start gathers earlier (explicit prefetch) and reduce later, use larger units, or send less.

    Blind spots: a collective that waits for a slow peer counts as communication. On a CPU run compute is the union of
    dispatcher ops.
    """

    code: ClassVar[str] = "COMM001"
    facts: ClassVar[tuple[Fact, ...]] = (communication.by_step, communication.exposed, engine.engines)
    max_exposed_ratio: float = 0.2
    error_exposed_ratio: float = 0.6

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for the run if the worst rank's median step exceeds the threshold."""
        steps = run.table(communication.by_step).filter(pl.col("duration_ns") > 0)
        sent_ns = pl.col("communication_ns").sum()
        devices = steps.group_by("rank", "device").agg(
            (pl.col("exposed_ns") / pl.col("duration_ns")).median().alias("ratio"),
            pl.col("exposed_ns").median().alias("cost_ns"),
            pl.when(sent_ns > 0).then(1 - pl.col("exposed_ns").sum() / sent_ns).alias("hidden"),
            pl.col("step").is_not_null().any().alias("has_steps"),
        )
        over = devices.filter(pl.col("ratio") > self.max_exposed_ratio)
        over = over.sort("ratio", "rank", "device", descending=[True, False, False])
        if over.is_empty():
            return
        worst = over.row(0, named=True)
        evidence = _evidence(run, over["rank"].unique().to_list())
        whole, per = ("the step", "a step") if worst["has_steps"] else ("the traced time", "in all")
        yield Finding(
            self.code,
            Severity.ERROR if worst["ratio"] > self.error_exposed_ratio else Severity.WARNING,
            f"{units.share(worst['ratio'])} of {whole} is communication that no compute hides: "
            f"{units.duration(worst['cost_ns'])} {per} on rank {worst['rank']}; "
            f"compute hides {units.share(worst['hidden'] or 0)} of its communication.",
            _fix(run, evidence),
            impact=worst["ratio"],
            cost_ns=int(worst["cost_ns"]),
            confidence=0.9,
            ranks=tuple(over["rank"].unique().sort().to_list()),
            steps=tuple(steps["step"].drop_nulls().unique().sort().to_list()),
            evidence=evidence,
        )


def _evidence(run: Run, ranks: list[int]) -> pl.DataFrame:
    spans = run.table(communication.exposed).filter(pl.col("rank").is_in(ranks), pl.col("exposed_ns") > 0)
    return spans.sort("exposed_ns", descending=True).head(_EVIDENCE_ROWS)


_FIXES = {
    "fsdp2": "Gather further ahead: set_modules_to_forward_prefetch and set_modules_to_backward_prefetch; keep weights "
    "with reshard_after_forward=False where memory allows, or give each rank more compute per layer (batch, sequence).",
    "fsdp1": "FullyShardedDataParallel(forward_prefetch=True, backward_prefetch=BackwardPrefetch.BACKWARD_PRE); wrap "
    "larger units, or give each rank more compute per layer (batch, sequence).",
    "yafsdp": "Gather further ahead: fully_shard(buffers=3); keep weights with reshard_after_forward=False where "
    "memory allows, or give each rank more compute per layer (batch, sequence).",
    "ddp": "Reduce earlier: DistributedDataParallel(bucket_cap_mb=…, gradient_as_bucket_view=True, static_graph=True); "
    "accumulate gradients under no_sync(), or give each rank more compute (batch, sequence).",
}
# Seen in the source of torch 2.13: on the CPU both wait for a collective where they issue it, whatever is prefetched.
_FIXES_ON_HOST = {
    "fsdp2": "On gloo FSDP2 waits for each collective where it issues it: start the gathers by unshard(async_op=True) "
    "on the units that come next, or train under an engine that does (YaFSDP).",
    "fsdp1": "On gloo FSDP1 waits for each collective where it issues it: FSDP2 with unshard(async_op=True), or an "
    "engine that gathers ahead (YaFSDP), overlaps them.",
}


_OPS_OF_SHARDING = ("all_gather", "reduce_scatter")


def _fix(run: Run, evidence: pl.DataFrame) -> str:
    seen = run.table(engine.engines).group_by("engine").agg(pl.col("spans").sum()).sort("spans", descending=True)
    strategy = run.manifest.get("strategy") or seen["engine"].first()
    ops = evidence.group_by("op").agg(pl.col("exposed_ns").sum()).drop_nulls("op")
    op = ops.sort("exposed_ns", "op", descending=[True, False])["op"].first()
    if op is None or op in _OPS_OF_SHARDING or (strategy == "ddp" and op == "all_reduce"):
        if evidence["device"].is_null().all() and strategy in _FIXES_ON_HOST:
            return _FIXES_ON_HOST[str(strategy)]
        if strategy in _FIXES:
            return _FIXES[str(strategy)]
    what = f"the {op!s} calls" if op else "the collectives"
    return f"Start {what} in the evidence earlier (async_op=True), or give each rank more compute per byte sent."
