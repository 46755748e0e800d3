"""Judgements of streams that get in each other's way."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit import units
from tracekit.analysis import breakdown, contention
from tracekit.rule import Finding, Rule, Severity
from tracekit.rules import typical
from tracekit.trace import Fact, Run

_EVIDENCE_ROWS = 40
_CHAIN = ("window", "rank", "step", "device", "collective_id")


@dataclass(frozen=True)
class GiveWay(Rule):
    """Preparatory kernels on a communication stream that crawl beside the main compute, and compute that then waits.

    What it does: finds the whole chain of the give-way effect of FSDP: a kernel on a communication stream that takes
    `min_inflation` times as long beside compute as it ever takes alone; no collective runs meanwhile; the collective
    behind it on that stream starts late; and compute stands idle until that collective ends. Less than
    `min_cost_ratio` of the step is not reported.

    Why it costs: the preparation (copies, casts and divides before a reduce-scatter) yields the device to the main
    compute, and then compute waits for the collective as long as the preparation was held up.

    How it is measured: for each kernel name on a communication stream, the longest instance that compute does not
    touch is what it takes alone; instances more than half beside compute and longer than `min_inflation` times that are
    held up, by the difference, as far as no collective ran on the device meanwhile (the communication gap). Lost is
    only what compute really waited: for each collective, the smaller of that gap, over all preparation in front of it,
    and the time for which nothing had computed when the collective ended. The typical step of the worst device is
    quoted.

    How to fix: move the preparation to the compute stream or out of the step: pre-allocated flat buffers (YaFSDP),
    fewer casts and divides before the reduce-scatter, gradients kept in the reduce dtype.

    Blind spots: needs device streams, and instances of the same kernel alone; kernels of one name may differ in size.
    Preparation on another stream than its collective is not seen. What crawls without making compute wait is not
    reported.
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
        """Yield one finding per run in which inflated preparation makes compute wait."""
        chains = _chains(self._slowed(run.table(contention.preparation).drop_nulls("step")))
        steps = _steps(run, chains)
        worst = typical.of_worst(steps, "lost_ratio")
        if worst is None or worst["lost_ratio"] < self.min_cost_ratio:
            return
        lost = steps.filter(pl.col("lost_ratio") >= self.min_cost_ratio)
        yield Finding(
            self.code,
            Severity.WARNING,
            _message(worst, typical.here(chains, worst)),
            "Prepare gradients on the compute stream into pre-allocated flat buffers (YaFSDP), or drop casts and "
            "divides before the reduce-scatter (MixedPrecisionPolicy.reduce_dtype).",
            impact=worst["lost_ratio"],
            cost_ns=worst["lost_ns"],
            confidence=0.7,
            ranks=tuple(lost["rank"].unique().sort().to_list()),
            steps=tuple(lost["step"].unique().sort().to_list()),
            evidence=_evidence(worst, chains),
        )

    def _slowed(self, preparation: pl.DataFrame) -> pl.DataFrame:
        """Return the preparation that was held up beside compute while no collective ran, and by how much."""
        alone = (
            preparation.filter(pl.col("overlapped_ns") == 0)
            .group_by("rank", "device", "name")
            .agg(pl.col("dur_ns").max().alias("alone_ns"))
        )
        held_up = pl.min_horizontal(pl.col("dur_ns") - pl.col("alone_ns"), "gap_ns")
        return (
            preparation.drop_nulls("collective_id")
            .filter(pl.col("overlapped_ns") * 2 > pl.col("dur_ns"))
            .join(alone, on=["rank", "device", "name"])
            .filter(pl.col("dur_ns") > self.min_inflation * pl.col("alone_ns"))
            .with_columns(held_up.alias("held_up_ns"))
            .filter(pl.col("held_up_ns") > 0)
            .sort("window", "rank", "start_ns")
        )


def _chains(slowed: pl.DataFrame) -> pl.DataFrame:
    """Return the held-up work of whole chains; `lost_ns`, the time compute waited for it, stands at a chain's first."""
    lost_ns = pl.min_horizontal(pl.col("held_up_ns").sum().over(_CHAIN), "wait_ns")
    first = pl.int_range(pl.len()).over(_CHAIN) == 0
    return slowed.filter(lost_ns > 0).with_columns(pl.when(first).then(lost_ns).otherwise(0).alias("lost_ns"))


def _steps(run: Run, chains: pl.DataFrame) -> pl.DataFrame:
    """Return every step with the time lost in it, 0 where no chain was found."""
    lost = chains.group_by(typical.PLACE).agg(pl.col("lost_ns").sum(), pl.col("held_up_ns").sum())
    steps = run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0).drop_nulls("step")
    return (
        steps.select(*typical.PLACE, "start_ns", "duration_ns")
        .join(lost, on=typical.PLACE, how="left", nulls_equal=True)
        .with_columns(pl.col("lost_ns", "held_up_ns").fill_null(0))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
    )


def _message(worst: dict[str, Any], own: pl.DataFrame) -> str:
    inflation = own.select((pl.col("dur_ns") / pl.col("alone_ns")).median()).item()
    return (
        f"Preparatory kernels on a communication stream take {inflation:.1f} times as long beside compute as alone: "
        f"collectives start {units.duration(worst['held_up_ns'])} late in {typical.in_words(worst)}, and compute waits "
        f"{units.duration(worst['lost_ns'])} of its {units.duration(worst['duration_ns'])} for that."
    )


def _evidence(worst: dict[str, Any], chains: pl.DataFrame) -> pl.DataFrame:
    """Return the work of the quoted step's chains, then the costliest of others."""
    own = typical.here(chains, worst)
    others = chains.join(own, on=["window", "rank", "lane", "start_ns"], how="anti")
    return pl.concat([own, others.sort("lost_ns", descending=True).head(_EVIDENCE_ROWS)]).select(
        *("window", "rank", "step", "device", "lane", "name", "start_ns", "dur_ns", "alone_ns"),
        *("held_up_ns", "wait_ns", "lost_ns", "collective_start_ns", "collective_dur_ns"),
    )
