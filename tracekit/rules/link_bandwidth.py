"""The rule on slow links: process groups that move data more slowly than their peers, or than before."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.parallelism import pipeline_actions
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import SLOW_LINK
from tracekit.rules.quoted_step import describe_loss
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, median_row

_EVIDENCE_ROWS = 40
_GROUP = ("window", "group", "members")
_MAX_NAMED = 8
_FIX_ON_DEVICE = (
    "Run nccl-tests (all_reduce_perf) between pairs of {ranks}. Check the transport (NCCL_DEBUG=INFO), link errors "
    "(ibstat, perfquery, nvidia-smi nvlink -e) and NCCL_IB_HCA."
)
_FIX_ON_HOST = (
    "Measure the network between the hosts of {ranks} (iperf3). Check the interface (GLOO_SOCKET_IFNAME), "
    "retransmissions (nstat -az TcpRetransSegs) and other processes on the cores of these ranks."
)


@dataclass(frozen=True)
class SlowLink(Rule):
    """A process group that moves data more slowly than its peers, or than before.

    What it does: reports groups whose collectives take `min_slowdown` times as long as the same collectives of other
    groups along the same axis and of the same size (two replicas' shard groups, the rings of two local ranks), in at
    least `min_steps_ratio` of the steps since the first such step; and groups that become slower by that factor at some
    step and stay slow. It is a warning if the exposed part of the difference is `min_lost_ratio` of the step or more,
    else information; also information, as a suspicion, with fewer than `min_calls` slow collectives, if they are too
    small to reach `min_bandwidth_bytes_per_s` over any link, or if a group is slower than before of which a rank has no
    trace: that rank may arrive later.

    Why it costs: a ring is as fast as its slowest link (a bad cable, a throttled or misrouted adapter, other traffic),
    and all ranks of the group wait for it.

    How it is measured: the time of a collective from the last known arrival to its end, the shortest over the ranks
    with a trace, compared at the same op, type, size and place in the step. Medians are taken over all messages of at
    least a quarter of the group's largest, so that neither latency nor contention at one place looks like the link. The
    bus bandwidth is defined as in nccl-tests. Groups whose times vary by more than `max_spread_ratio` (interquartile
    range) between steps are not judged, nor are steps that save.

    How to fix: run nccl-tests between the ranks (all_reduce_perf -b 64M -e 1G -f 2); check NCCL_DEBUG=INFO for the
    transport (NET/Socket instead of NET/IB, no GPUDirect), link errors (ibstat, perfquery, nvidia-smi nvlink -e) and
    NCCL_IB_HCA; exclude the node meanwhile. On a CPU run: iperf3 between the hosts, GLOO_SOCKET_IFNAME, nstat.

    Blind spots: all members of a ring see its slowest link, so one group does not identify the rank. A link that was
    always slow shows only in comparison with another group, so not in a run whose ranks all share one group. Late ranks
    without a trace look like a slow link. A send and its receive are judged as a group of two if the trace contains
    both ends; several in one kernel (batch_isend_irecv) cannot be separated. Those of a pipeline belong to PIPE005.
    """

    code: ClassVar[str] = "RANK002"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *group_bandwidth.FACTS, *save_stages.FACTS, pipeline_actions.pipeline_actions,
    )  # fmt: skip
    min_slowdown: float = 1.5
    min_steps_ratio: float = 0.75
    min_lost_ratio: float = 0.01
    max_spread_ratio: float = 0.3
    min_calls: int = 6
    min_bandwidth_bytes_per_s: int = 100_000_000

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per slow group; at most one for groups that all became slow together."""
        durations = self._durations(run)
        to_peers = _by_group(_judged_groups(run, run.table(group_bandwidth.group_comparison)), durations)
        slow = [row for group in to_peers if (row := self._slower_than_peers(group))]
        if not slow:
            to_steps = _by_group(_judged_groups(run, run.table(group_bandwidth.step_comparison)), durations)
            slow = [row for group in to_steps if (row := self._slower_than_before(group))]
            slow = [max(slow, key=lambda row: row["extra_ns"])] if slow else []
        for row in slow:
            yield self._finding(run, row)

    def _durations(self, run: Run) -> pl.DataFrame:
        """Return the steps of each group with steady transfer times, with the step's duration."""
        durations = save_stages.steps(run).group_by("window", "step").agg(pl.col("duration_ns").median().cast(pl.Int64))
        steady = run.table(group_bandwidth.step_variation).filter(pl.col("spread_ratio") <= self.max_spread_ratio)
        return durations.join(steady, on="window")

    def _slower_than_peers(self, group: pl.DataFrame) -> dict[str, Any] | None:
        """Return the median slow step of a group that is slow in most steps since its first slow one; else None."""
        steps = group.sort("step").with_row_index("order")
        slow = steps.filter(pl.col("ratio") >= self.min_slowdown)
        if slow.height < min(2, steps.height) or slow.is_empty():
            return None
        since = steps.filter(pl.col("order") >= slow["order"][0])
        if slow.height < self.min_steps_ratio * since.height or since.height * 3 < steps.height:
            return None
        return median_row(slow, "extra_ns", "step") | {"slow": slow, "reference": "peers", "since": since.height}

    def _slower_than_before(self, group: pl.DataFrame) -> dict[str, Any] | None:
        """Return the median slow step of a group that became slow and stays slow; else None."""
        steps = group.sort("step")
        first = group_bandwidth.first_slow_step(
            steps["ratio"].to_list(), min_ratio=self.min_slowdown, share=self.min_steps_ratio
        )
        if first is None:
            return None
        # The baseline is the state before: if most steps are slow, their median is not the usual time.
        before = steps[:first]["ratio"].median()
        rest_ns = (pl.col("transfer_ns") - (pl.col("usual_ns") * before).cast(pl.Int64)).clip(0)
        after = steps[first:].with_columns(
            (pl.col("ratio") / before).alias("ratio"),
            (pl.col("usual_ns") * before).cast(pl.Int64).alias("usual_ns"),
            pl.min_horizontal(rest_ns, "exposed_ns").alias("extra_ns"),
        )
        slow = after.filter(pl.col("ratio") >= self.min_slowdown)
        return median_row(slow, "extra_ns", "step") | {
            "slow": slow,
            "reference": "earlier steps",
            "since": after.height,
        }

    def _finding(self, run: Run, worst: dict[str, Any]) -> Finding:
        slow: pl.DataFrame = worst["slow"]
        lost_ratio = worst["extra_ns"] / worst["duration_ns"]
        ranks = _ranks(worst)
        all_traced, to_peers = len(worst["ranks"]) == worst["group_size"], worst["reference"] == "peers"
        reference = "its peers" if to_peers else "before"
        is_of_window = worst["step"] is None
        first = min(distinct(slow, "step"), default=None)
        over = f"in {slow.height} of {worst['since']} steps since step {first}"
        place = "the window" if is_of_window else f"step {worst['step']}"
        message = (
            f"The group {worst['axis'] or worst['group'] or 'of all ranks'} of {ranks} takes {worst['ratio']:.1f} "
            f"times as long as {reference} for the same collectives: {_bandwidth(worst, 'transfer_ns')} instead of "
            f"{_bandwidth(worst, 'usual_ns')}, {'in the window' if is_of_window else over}. The exposed "
            f"part is {describe_loss(worst, 'extra_ns')} in {place}."
        )
        ring = " All members of a ring see its slowest link, so one group does not identify the rank."
        untraced = " Or ranks without a trace arrive late."
        suspicion = self._suspicion(worst)
        is_certain = all_traced or to_peers
        is_costly = lost_ratio >= self.min_lost_ratio and not suspicion and is_certain
        return Finding(
            self.code,
            Severity.WARNING if is_costly else Severity.INFO,
            message + ("" if to_peers else ring) + ("" if all_traced else untraced) + suspicion,
            (_FIX_ON_DEVICE if breakdown.is_on_device(run) else _FIX_ON_HOST).format(ranks=ranks),
            impact=min(1.0, lost_ratio),
            cost_ns=worst["extra_ns"],
            confidence=(0.8 if all_traced else 0.6) - (0.0 if to_peers else 0.1),
            ranks=tuple(sorted(worst["ranks"])),
            steps=distinct(slow, "step"),
            what_if=WhatIf(SLOW_LINK) if is_costly else None,
            evidence=_evidence(run, worst),
            subject=f"{worst['axis']} {ranks}",
            is_of_window=is_of_window,
        )

    def _suspicion(self, worst: dict[str, Any]) -> str:
        """Return why the finding is only a suspicion; empty where there is enough evidence."""
        calls = int(worst["slow"]["calls"].sum())
        if calls < self.min_calls:
            return f" Only {calls} collectives could be compared, so this is a suspicion: record more steps."
        if worst["bus_bytes"] * 1_000_000_000 < self.min_bandwidth_bytes_per_s * worst["usual_ns"]:
            return " The messages are too small to measure bandwidth, so this is a suspicion."
        return ""


def _judged_groups(run: Run, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the groups without the sends and receives of a pipeline, whose links are of different kinds."""
    if run.table(pipeline_actions.pipeline_actions).is_empty():
        return groups
    return groups.filter(~pl.col("members").str.contains(">", literal=True).fill_null(value=False))


def _by_group(table: pl.DataFrame, durations: pl.DataFrame) -> list[pl.DataFrame]:
    timed = table.join(durations, on=[*_GROUP, "step"], nulls_equal=True, maintain_order="left")
    return timed.partition_by(_GROUP, maintain_order=True)


def _ranks(worst: dict[str, Any]) -> str:
    ranks = worst["ranks"] if worst["group_ranks"] is None else worst["group_ranks"]
    rank_text = ", ".join(map(str, ranks)) if len(ranks) <= _MAX_NAMED else units.ranges(ranks)
    return f"rank{'' if len(ranks) == 1 else 's'} {rank_text}"


def _bandwidth(worst: dict[str, Any], name: str) -> str:
    return units.rate(worst["bus_bytes"] * 1_000_000_000 / worst[name]) if worst[name] else "no time"


def _evidence(run: Run, worst: dict[str, Any]) -> pl.DataFrame:
    is_group = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(worst[name])) for name in _GROUP)
    group_rows = run.table(group_bandwidth.transfers).filter(is_group)
    is_quoted = pl.col("step").eq_missing(pl.lit(worst["step"], pl.Int64))
    quoted_rows = group_rows.filter(is_quoted).sort("transfer_ns", descending=True)
    other_rows = group_rows.filter(~is_quoted).sort("step", "start_ns")
    return pl.concat([quoted_rows.head(_EVIDENCE_ROWS), other_rows.head(_EVIDENCE_ROWS)]).select(
        "window", "rank", "step", "unit", "op", "group", "bytes", "nth", "start_ns", "dur_ns", "transfer_ns"
    )
