"""Judgements of how fast groups of ranks move data."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.communication import group_bandwidth
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import Fact
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf

_EVIDENCE_ROWS = 40
_GROUP = ("window", "group", "members")
_MAX_NAMED = 8


@dataclass(frozen=True)
class SlowLink(Rule):
    """A process group that moves data more slowly than its peers do, or than it did before.

    What it does: reports groups whose collectives take `min_slowdown` times as long as the same collectives of other
    groups along the same axis and of the same size (two replicas' shard groups, the rings of two local ranks), in at
    least `min_steps_ratio` of the steps from the first in which they do; and groups that become slower by that factor
    from one step on and stay so. It is a warning where what compute doesn't hide of the difference is
    `min_lost_ratio` of the step or more, else information.

    Why it costs: a ring goes at the pace of its slowest link (a bad cable, a throttled or misrouted adapter, traffic of
    others), and all ranks of the group wait for it.

    How it is measured: the time of a collective from the last known arrival to its end, the shortest over the ranks
    that have a trace; compared at the same op, type, size and place in the step, medians over all messages of at least
    a quarter of the group's largest, so that neither latency nor contention at one place is taken for the link. The bus
    bandwidth told is that of nccl-tests. Groups whose times vary by more than `max_spread_ratio` (between quartiles)
    from step to step are not judged, nor are steps that save.

    How to fix: run nccl-tests between the ranks named (all_reduce_perf -b 64M -e 1G -f 2), look at NCCL_DEBUG=INFO for
    the transport (NET/Socket where NET/IB is meant, no GPUDirect), at link errors (ibstat, perfquery, nvidia-smi
    nvlink -e) and NCCL_IB_HCA; take the node out meanwhile.

    Blind spots: a ring shows its slowest link to all of its members, so one group alone cannot tell which rank's link
    it is, and a link that was always slow shows only beside another group: it cannot be told in a run whose ranks all
    share one group. Ranks without a trace that come late look like a slow link. A send and its
    receive are judged as a group of two where the trace tells both ends; several in one kernel (batch_isend_irecv)
    cannot be told apart.
    """

    code: ClassVar[str] = "RANK002"
    facts: ClassVar[tuple[Fact, ...]] = (*group_bandwidth.FACTS, *steps_without_saves.FACTS)
    min_slowdown: float = 1.5
    min_steps_ratio: float = 0.75
    min_lost_ratio: float = 0.01
    max_spread_ratio: float = 0.3

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per slow group; at most one for groups that all became slow together."""
        durations = self._durations(run)
        beside = _with_durations(run.run_table(group_bandwidth.group_comparison), durations)
        found = [self._slower_than_peers(group) for _, group in beside.group_by(_GROUP, maintain_order=True)]
        told = [each for each in found if each is not None]
        for slow in told:
            yield self._finding(run, slow)
        if not told:
            since = _with_durations(run.run_table(group_bandwidth.step_comparison), durations)
            later = [self._slower_than_before(group) for _, group in since.group_by(_GROUP, maintain_order=True)]
            most = max((each for each in later if each is not None), key=lambda each: each["extra_ns"], default=None)
            if most is not None:
                yield self._finding(run, most)

    def _durations(self, run: Run) -> pl.DataFrame:
        """Return the steps to be judged of each group that goes at a steady pace, with the step's duration."""
        each = (
            steps_without_saves.steps(run)
            .drop_nulls("step")
            .group_by("window", "step")
            .agg(pl.col("duration_ns").median().cast(pl.Int64))
        )
        steady = run.run_table(group_bandwidth.step_variation).filter(pl.col("spread_ratio") <= self.max_spread_ratio)
        return each.join(steady, on="window")

    def _slower_than_peers(self, group: pl.DataFrame) -> dict[str, Any] | None:
        """Return the typical slow step of a group that is slow in most steps since it first was; else None."""
        steps = group.sort("step").with_row_index("order")
        slow = steps.filter(pl.col("ratio") >= self.min_slowdown)
        if slow.height < min(2, steps.height) or slow.is_empty():
            return None
        since = steps.filter(pl.col("order") >= slow["order"][0])
        if slow.height < self.min_steps_ratio * since.height or since.height * 3 < steps.height:
            return None
        return _median_step(slow) | {"slow": slow, "beside": "groups", "since": since.height}

    def _slower_than_before(self, group: pl.DataFrame) -> dict[str, Any] | None:
        """Return the typical slow step of a group that became slow and stayed so; else None."""
        steps = group.sort("step")
        first = group_bandwidth.first_slow_step(
            steps["ratio"].to_list(), least=self.min_slowdown, share=self.min_steps_ratio
        )
        if first is None:
            return None
        # What is usual is how it was before; where most steps are slow the median step is none of them.
        before = steps[:first]["ratio"].median()
        rest_ns = (pl.col("transfer_ns") - (pl.col("usual_ns") * before).cast(pl.Int64)).clip(0)
        after = steps[first:].with_columns(
            (pl.col("ratio") / before).alias("ratio"),
            (pl.col("usual_ns") * before).cast(pl.Int64).alias("usual_ns"),
            pl.min_horizontal(rest_ns, "exposed_ns").alias("extra_ns"),
        )
        slow = after.filter(pl.col("ratio") >= self.min_slowdown)
        return _median_step(slow) | {"slow": slow, "beside": "steps", "since": after.height}

    def _finding(self, run: Run, worst: dict[str, Any]) -> Finding:
        slow: pl.DataFrame = worst["slow"]
        lost_ratio = worst["extra_ns"] / worst["duration_ns"]
        named = _ranks(worst)
        whole, beside = len(worst["ranks"]) == worst["group_size"], worst["beside"] == "groups"
        unlike, usual = ("its peers", "its peers move it") if beside else ("before", "it did")
        first = int(slow["step"].min())  # type: ignore[arg-type]
        told = (
            f"The group {worst['axis'] or worst['group'] or 'of all ranks'} of {named} takes {worst['ratio']:.1f} "
            f"times as long for the same collectives as {unlike} ({_speed(worst, 'transfer_ns')} where {usual} at "
            f"{_speed(worst, 'usual_ns')}), in {slow.height} of {worst['since']} steps since step {first}: "
            f"{units.duration(worst['extra_ns'])} of {units.duration(worst['duration_ns'])} "
            f"({units.share(lost_ratio)}) of step {worst['step']} that no compute hides."
        )
        ring = " A ring shows its slowest link to all of its members: whose it is cannot be told from one group."
        unseen = " Ranks without a trace may come late instead."
        enough = lost_ratio >= self.min_lost_ratio
        return Finding(
            self.code,
            Severity.WARNING if enough else Severity.INFO,
            told + ("" if beside else ring) + ("" if whole else unseen),
            f"Run nccl-tests (all_reduce_perf) between pairs of {named}, and look at NCCL_DEBUG=INFO for the "
            "transport, at link errors (ibstat, perfquery, nvidia-smi nvlink -e) and NCCL_IB_HCA.",
            impact=min(1.0, lost_ratio),
            cost_ns=worst["extra_ns"],
            confidence=(0.8 if whole else 0.6) - (0.0 if beside else 0.1),
            ranks=tuple(sorted(worst["ranks"])),
            steps=tuple(slow["step"].unique().sort().to_list()),
            what_if=WhatIf("slow-link") if enough else None,
            evidence=_evidence(run, worst),
            subject=f"{worst['axis']} {named}",
        )


def _with_durations(table: pl.DataFrame, durations: pl.DataFrame) -> pl.DataFrame:
    return table.join(durations, on=[*_GROUP, "step"], nulls_equal=True, maintain_order="left")


def _median_step(slow: pl.DataFrame) -> dict[str, Any]:
    return slow.sort("extra_ns", "step").row((slow.height - 1) // 2, named=True)


def _ranks(worst: dict[str, Any]) -> str:
    ranks = worst["group_ranks"]
    if ranks is None:
        ranks = worst["ranks"]
    shown = ", ".join(map(str, ranks)) if len(ranks) <= _MAX_NAMED else units.ranges(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def _speed(worst: dict[str, Any], name: str) -> str:
    return f"{worst['bus_bytes'] / worst[name]:.1f} GB/s" if worst[name] else "no time"


def _evidence(run: Run, worst: dict[str, Any]) -> pl.DataFrame:
    here = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(worst[name])) for name in _GROUP)
    mine = run.run_table(group_bandwidth.transfers).filter(here)
    own = mine.filter(pl.col("step") == worst["step"]).sort("transfer_ns", descending=True)
    others = mine.filter(pl.col("step") != worst["step"]).sort("step", "start_ns")
    return pl.concat([own.head(_EVIDENCE_ROWS), others.head(_EVIDENCE_ROWS)]).select(
        "window", "rank", "step", "unit", "op", "group", "bytes", "nth", "start_ns", "dur_ns", "transfer_ns"
    )
