"""Judgements of streams that get in each other's way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, contention
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run


@dataclass(frozen=True)
class GiveWay(Rule):
    """Preparatory kernels on a communication stream that crawl beside the main compute.

    What it does: finds kernels on communication lanes that take `min_inflation` times as long beside compute as alone
    and hold up a collective meanwhile.

    Why it costs: the collective behind them starts late, so a communication gap opens, and then compute waits for the
    collective: the give-way effect of FSDP.

    How it is measured: for each kernel name on a communication lane, the median duration of instances more than half
    overlapped by compute, against the median of instances that compute does not touch. The cost is the excess time in
    which no collective ran, per step.

    How to fix: move the preparation to the compute stream or out of the step: pre-allocated flat buffers (YaFSDP),
    fewer casts and divides before the reduce-scatter, gradients kept in the reduce dtype.

    Blind spots: needs device streams, and instances of the same kernel alone; kernels of one name may differ in size.
    """

    code: ClassVar[str] = "STREAM001"
    facts: ClassVar[tuple[Fact, ...]] = (contention.preparation, contention.device_count, breakdown.by_step)
    min_inflation: float = 1.5
    min_cost_ratio: float = 0.01

    def blind_spot(self, run: Run) -> str | None:
        """Return why a CPU run cannot be judged."""
        if run.table(contention.device_count)["devices"].sum():
            return None
        return "contention needs device streams; this run was on the CPU, so it was not judged."

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per run in which inflated preparation holds up collectives."""
        table = run.table(contention.preparation).drop_nulls("step")
        beside = pl.col("overlapped_ns") * 2 > pl.col("dur_ns")
        alone = (
            table.filter(pl.col("overlapped_ns") == 0)
            .group_by("rank", "name")
            .agg(pl.col("dur_ns").median().alias("alone_ns"))
        )
        slowed = (
            table.filter(beside)
            .join(alone, on=["rank", "name"])
            .filter(pl.col("dur_ns") > self.min_inflation * pl.col("alone_ns"))
            .with_columns(
                pl.min_horizontal(pl.col("dur_ns") - pl.col("alone_ns"), "gap_ns").cast(pl.Int64).alias("lost_ns")
            )
            .filter(pl.col("lost_ns") > 0)
        )
        steps = run.table(breakdown.by_step)
        if slowed.is_empty() or steps.is_empty():
            return
        count = steps.group_by("rank").agg(pl.col("step").n_unique().alias("steps"), pl.col("duration_ns").median())
        cost = (
            slowed.group_by("rank")
            .agg(pl.col("lost_ns").sum())
            .join(count, on="rank")
            .with_columns((pl.col("lost_ns") / pl.col("steps")).alias("cost_ns"))
            .sort("cost_ns", descending=True)
        )
        worst = cost.row(0, named=True)
        impact = worst["cost_ns"] / worst["duration_ns"]
        if impact < self.min_cost_ratio:
            return
        inflation = slowed.select((pl.col("dur_ns") / pl.col("alone_ns")).median()).item()
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Preparatory kernels on a communication stream take {inflation:.1f} times as long beside compute as alone "
            f"and hold up collectives for {units.duration(worst['cost_ns'])} a step on rank {worst['rank']}.",
            "Prepare gradients on the compute stream into pre-allocated flat buffers (YaFSDP), or drop casts and "
            "divides before the reduce-scatter (MixedPrecisionPolicy.reduce_dtype).",
            impact=min(impact, 1.0),
            cost_ns=int(worst["cost_ns"]),
            confidence=0.7,
            ranks=tuple(cost["rank"].sort().to_list()),
            steps=tuple(slowed["step"].unique().sort().to_list()),
            evidence=slowed.sort("lost_ns", descending=True).head(20),
        )
