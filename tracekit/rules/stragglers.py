"""The rule on stragglers."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.parallelism import stragglers
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct
from tracekit.sync import collective_matching

_EVIDENCE_ROWS = 40


@dataclass(frozen=True)
class Straggler(Rule):
    """A straggler: a rank that arrives late at collectives in most steps, while the others are idle.

    What it does: reports a rank for which the others lose more than `min_wait_ratio` of the step, in at least
    `min_steps_ratio` of the steps since the first such step, and in more than one.

    Why it costs: a collective moves data only after the last rank arrives, so one slow rank slows all.

    How it is measured: collectives are matched across ranks, with clocks aligned by their ends. The wait of a rank in
    collectives is attributed to the last rank with a trace, as far as the waiting rank computes nothing meanwhile, or
    is idle in collectives for longer than the late rank is: where compute overlaps the wait, the following collectives
    start late instead. Extra time that the late rank itself spends in collectives is a slow link (RANK002) and
    subtracted. In each step the median over the other ranks counts. More than half of all waiting in collectives must
    be for this rank, and the loss must not vary by more than `max_spread_ratio` (interquartile range over median)
    between steps: a slow rank is late by the same time in each. Differences below the clock error are ignored. Steps
    that save are left out.

    How to fix: check what the late rank does before its collectives: a slower or hotter device (clocks, nvidia-smi -q
    -d PERFORMANCE), more work (uneven batches or experts), a busy host (HOST001, HOST003), other jobs on its node. Move
    the rank to another node to separate hardware from data.

    Blind spots: needs traces of several ranks of a group and three shared collectives; a rank without a trace may
    arrive even later. Delays that move between ranks, as with uneven data, belong to RANK003. A rank that another
    collective delayed is blamed for the part of the delay that its peers do not have.
    """

    code: ClassVar[str] = "RANK001"
    facts: ClassVar[tuple[Fact, ...]] = (
        compute_gap_causes.compute_gap_causes,
        collective_matching.calls,
        breakdown.by_step,
        save_stages.save_spans,
    )
    min_wait_ratio: float = 0.03
    min_steps_ratio: float = 0.75
    max_spread_ratio: float = 0.6

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per straggling rank."""
        for (rank,), rank_steps in run.run_table(stragglers.straggler_costs).group_by("late_rank", maintain_order=True):
            worst = self._persistent_step(rank_steps.sort("order"))
            if worst is not None:
                yield self._finding(run, int(str(rank)), worst)

    def _persistent_step(self, rank_steps: pl.DataFrame) -> dict[str, Any] | None:
        """Return the representative step of a rank that is late in most steps since its first late one; else None."""
        late = rank_steps.filter((pl.col("lost_ratio") >= self.min_wait_ratio) & (pl.col("share") > _MOST))
        if late.height < 2:
            return None
        since = rank_steps.filter(pl.col("order") >= late["order"][0])
        if late.height < self.min_steps_ratio * since.height or since.height * 3 < rank_steps.height:
            return None
        lost = since["lost_ratio"]
        low, middle, high = (lost.quantile(q, "linear") or 0.0 for q in (0.25, 0.5, 0.75))
        if high - low > self.max_spread_ratio * middle:
            return None
        ordered = since.sort("lost_ratio", "order")
        median_step = ordered.row((ordered.height - 1) // 2, named=True)
        return median_step | {"late": late, "since": since.height, "first": since["step"][0]}

    def _finding(self, run: Run, rank: int, worst: dict[str, Any]) -> Finding:
        late: pl.DataFrame = worst["late"]
        waits = run.run_table(stragglers.late_calls).filter(pl.col("late_rank") == rank)
        quoted = waits.filter(pl.col("window") == worst["window"], pl.col("step") == worst["step"])
        others = waits.filter((pl.col("window") != worst["window"]) | (pl.col("step") != worst["step"]))
        shown = [rows.sort("wait_ns", "start_ns", descending=[True, False]) for rows in (quoted, others)]
        return Finding(
            self.code,
            Severity.WARNING,
            f"Rank {rank} is a straggler: the other ranks wait {units.duration(worst['lost_ns'])} of "
            f"{units.duration(worst['duration_ns'])} ({units.share(worst['lost_ratio'])}) for it in the "
            f"representative step ({worst['step']}), and in {late.height} of {worst['since']} steps since step "
            f"{worst['first']}. It arrives last at {worst['late_calls']} of {worst['calls']} collectives, with the "
            f"longest waits at {_worst_collective(quoted)}.",
            f"Check what rank {rank} does before its collectives: GPU clocks and temperature, uneven work, a busy host "
            "(HOST001, HOST003), other jobs on its node; move the rank to another node to separate hardware from data.",
            impact=min(1.0, worst["lost_ratio"]),
            cost_ns=worst["lost_ns"],
            confidence=0.8 if worst["is_whole"] else 0.7,
            ranks=(rank,),
            steps=distinct(late, "step"),
            what_if=WhatIf("straggler"),
            evidence=pl.concat([shown[0].head(_EVIDENCE_ROWS), shown[1].head(_EVIDENCE_ROWS)]).select(
                "window", "rank", "step", "phase", "unit", "op", "late_rank", "start_ns", "dur_ns", "wait_ns"
            ),
            subject=f"rank {rank}",
        )


_MOST = 0.5


def _worst_collective(quoted: pl.DataFrame) -> str:
    """Return the collective with the longest waits: its op, and unit or phase."""
    sums = quoted.group_by("op", "unit", "phase").agg(pl.col("wait_ns").sum())
    most = sums.sort("wait_ns", "op", "unit", "phase", descending=[True, False, False, False]).row(0, named=True)
    what = f"the {(most['op'] or 'collective').replace('_', '-')}"
    if most["unit"]:
        return f"{what} of {most['unit']}" + (f" in {most['phase']}" if most["phase"] else "")
    return f"{what} in {most['phase']}" if most["phase"] else what
