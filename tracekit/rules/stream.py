"""Judgements of streams that get in each other's way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, contention
from tracekit.rule import Finding, Rule, Severity
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 20
_SURE_INSTANCES = 3


@dataclass(frozen=True)
class GiveWay(Rule):
    """Preparatory kernels on a communication stream that crawl beside the main compute.

    What it does: finds copies, casts and divides on communication lanes that take `min_inflation` times as long beside
    compute as alone, delay the collective behind them, and leave compute waiting for that collective.

    Why it costs: it is the give-way effect of FSDP. The collective starts late, a communication gap opens, and compute
    that needs the collective's result idles as much later.

    How it is measured: the duration of an instance more than half overlapped by compute, against the median of those of
    the same name (and bytes, where told) that compute does not touch. Per collective, what the inflation delayed it is
    the excess of what precedes it on its lane, counted only while no collective ran. What was lost is that delay, as
    far as the device then computed nothing during the collective.

    How to fix: move the preparation to the compute stream or out of the step: pre-allocated flat buffers (YaFSDP),
    fewer casts and divides before the reduce-scatter, gradients kept in the reduce dtype.

    Blind spots: needs device streams, and instances of the same kernel alone; kernels of one name may differ in size.
    Compute that waits for something else meanwhile is taken as waiting for the collective.
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
        """Yield one finding per run in which inflated preparation holds up collectives and compute."""
        slowed = _slowed(run.table(contention.preparation).drop_nulls("step"), self.min_inflation)
        steps = run.table(breakdown.by_step)
        if slowed.is_empty() or steps.is_empty():
            return
        place = ["window", "rank", "device"]
        chains = _chains(slowed)
        count = steps.group_by("rank", "device").agg(
            pl.struct("window", "step").n_unique().alias("steps"), pl.col("duration_ns").median()
        )
        per_step = (pl.col("late_ns", "lost_ns") / pl.col("steps")).name.suffix("_a_step")
        cost = chains.group_by("rank", "device").agg(pl.col("late_ns", "lost_ns").sum()).join(count, ["rank", "device"])
        if not cost["lost_ns"].sum():
            return
        worst = cost.with_columns(per_step).sort("lost_ns_a_step", "rank", descending=[True, False]).row(0, named=True)
        impact = worst["lost_ns_a_step"] / worst["duration_ns"]
        if impact < self.min_cost_ratio:
            return
        evidence = slowed.join(chains.select(*place, "collective_id", "lost_ns"), [*place, "collective_id"])
        evidence = evidence.filter(pl.col("lost_ns") > 0).sort("lost_ns", "start_ns", descending=[True, False])
        inflation = evidence.select((pl.col("dur_ns") / pl.col("alone_ns")).median()).item()
        yield Finding(
            self.code,
            Severity.WARNING,
            f"Preparatory kernels on a communication stream take {inflation:.1f} times as long beside compute as "
            f"alone: collectives start {units.duration(worst['late_ns_a_step'])} late a step on rank {worst['rank']}, "
            f"and compute idles for {units.duration(worst['lost_ns_a_step'])} of it.",
            "Prepare gradients on the compute stream into pre-allocated flat buffers (YaFSDP), or drop casts and "
            "divides before the reduce-scatter (MixedPrecisionPolicy.reduce_dtype).",
            impact=min(impact, 1.0),
            cost_ns=int(worst["lost_ns_a_step"]),
            confidence=0.7 if evidence["instances_alone"].min() >= _SURE_INSTANCES else 0.5,  # type: ignore[operator]
            ranks=tuple(evidence["rank"].unique().sort().to_list()),
            steps=tuple(evidence["step"].unique().sort().to_list()),
            evidence=evidence.drop("collective_id").head(_EVIDENCE_ROWS),
        )


def _slowed(table: pl.DataFrame, min_inflation: float) -> pl.DataFrame:
    """Return the preparation that took `min_inflation` times as long beside compute as alone, with its excess."""
    same = ["rank", "name", "bytes"]
    alone = (
        table.filter(pl.col("overlapped_ns") == 0)
        .group_by(same)
        .agg(pl.col("dur_ns").median().cast(pl.Int64).alias("alone_ns"), pl.len().alias("instances_alone"))
    )
    beside = table.filter(pl.col("overlapped_ns") * 2 > pl.col("dur_ns"))
    return beside.join(alone, on=same, nulls_equal=True).filter(pl.col("dur_ns") > min_inflation * pl.col("alone_ns"))


def _chains(slowed: pl.DataFrame) -> pl.DataFrame:
    """Return per delayed collective how late it started and how much compute lost: columns late_ns and lost_ns."""
    excess_ns = pl.min_horizontal(pl.col("dur_ns") - pl.col("alone_ns"), "gap_ns")
    late = slowed.drop_nulls("collective_id").group_by("window", "rank", "device", "collective_id")
    return late.agg(excess_ns.sum().alias("late_ns"), pl.col("idle_ns").first()).with_columns(
        pl.min_horizontal("late_ns", "idle_ns").alias("lost_ns")
    )
