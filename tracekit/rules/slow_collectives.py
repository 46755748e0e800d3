"""Rules on slow collectives: links slower than their peers, and single collectives that stall."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.parallelism import expert_load, pipeline_actions, stalled_collectives
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import SLOW_LINK
from tracekit.replay.graph.causes.stalls import STALLED_COLLECTIVE, STOPPED, Removal
from tracekit.replay.graph.nodes import HostSpan
from tracekit.rules import outlier_steps, slow_pairs
from tracekit.rules.quoted_step import describe_loss
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, median_row

_EVIDENCE_ROWS = 40
_GROUP = ("window", "group", "members")
_MAX_NAMED = 8
_FIX_ON_DEVICE = (
    "Run nccl-tests (all_reduce_perf) between pairs of {ranks}. Check the transport (NCCL_DEBUG=INFO), link errors "
    "(ibstat, perfquery, nvidia-smi nvlink -e) and NCCL_IB_HCA."
)
_WITHOUT_PYTORCH = (
    "Find out why the links are slow: NCCL_DEBUG=INFO shows the transport, nvidia-smi topo -m the links, nccl-tests "
    "(all_reduce_perf) their speed."
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
    least `min_steps_ratio` of the steps since the first such step; groups that become slower by that factor at some
    step and stay slow; and links between two ranks of an expert-parallel group of four or more that are as much slower
    than its other links. It is a warning if the exposed part of the difference is `min_lost_ratio` of the step or more,
    else information; also information, as a suspicion, with fewer than `min_calls` slow collectives, if they are too
    small to reach `min_bandwidth_bytes_per_s` over any link, or if a group is slower than before of which a rank has no
    trace: that rank may arrive later.

    Why it costs: a ring is as fast as its slowest link (a bad cable, a throttled or misrouted adapter, other traffic),
    and all ranks of the group wait for it.

    How it is measured: the time of a collective from the last known arrival to its end, the shortest over the ranks
    with a trace, compared at the same op, type, size and place in the step. Medians are taken over all messages of at
    least a quarter of the group's largest, so that neither latency nor contention at one place looks like the link. The
    bus bandwidth is defined as in nccl-tests. Groups whose times vary by more than `max_spread_ratio` (interquartile
    range) between steps are not judged, nor are steps that save. The transfer between two ranks has ended when the
    first of them leaves the all-to-all (`tracekit summary --by expert-pair`); of a link, the cost is what that takes
    longer than the median over links, without what the tokens of overloaded experts take.

    How to fix: run nccl-tests between the ranks (all_reduce_perf -b 64M -e 1G -f 2); check NCCL_DEBUG=INFO for the
    transport (NET/Socket instead of NET/IB, no GPUDirect), link errors (ibstat, perfquery, nvidia-smi nvlink -e) and
    NCCL_IB_HCA; exclude the node meanwhile. On a CPU run: iperf3 between the hosts, GLOO_SOCKET_IFNAME, nstat.

    Blind spots: all members of a ring see its slowest link, so one group does not identify the rank. A link that was
    always slow shows only in comparison with another group, so not in a run whose ranks all share one group. Late ranks
    without a trace look like a slow link. A send and its receive are judged as a group of two if the trace contains
    both ends; several in one kernel (batch_isend_irecv) cannot be separated. Those of a pipeline belong to PIPE005.
    """

    code: ClassVar[str] = "RANK002"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *group_bandwidth.FACTS, *save_stages.FACTS, pipeline_actions.pipeline_actions, *expert_load.FACTS,
        breakdown.by_step,
    )  # fmt: skip
    min_slowdown: float = 1.5
    min_steps_ratio: float = 0.75
    min_lost_ratio: float = 0.01
    max_spread_ratio: float = 0.3
    min_calls: int = 6
    min_bandwidth_bytes_per_s: int = 100_000_000

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per slow group; at most one for groups that all became slow together."""
        medians = save_stages.steps(run).group_by("window", "step").agg(pl.col("duration_ns").median().cast(pl.Int64))
        steady = run.table(group_bandwidth.step_variation).filter(pl.col("spread_ratio") <= self.max_spread_ratio)
        durations = medians.join(steady, on="window")
        to_peers = _by_group(_judged_groups(run, run.table(group_bandwidth.group_comparison)), durations)
        slow = [row for group in to_peers if (row := self._slower_than_peers(group))]
        if not slow:
            to_steps = _by_group(_judged_groups(run, run.table(group_bandwidth.step_comparison)), durations)
            slow = [row for group in to_steps if (row := self._slower_than_before(group))]
            slow = [max(slow, key=lambda row: row["extra_ns"])] if slow else []
        for row in slow:
            yield self._finding(run, row)
        thresholds = slow_pairs.Thresholds(self.code, self.min_slowdown, self.min_steps_ratio, self.min_lost_ratio)
        yield from slow_pairs.findings(run, thresholds)

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
        if slow.is_empty():  # slower than the median of all steps, but not than the steps before
            return None
        return median_row(slow, "extra_ns", "step") | {
            "slow": slow,
            "reference": "earlier steps",
            "since": after.height,
        }

    def _finding(self, run: Run, worst: dict[str, Any]) -> Finding:
        slow: pl.DataFrame = worst["slow"]
        lost_ratio = worst["extra_ns"] / worst["duration_ns"]
        members = worst["ranks"] if worst["group_ranks"] is None else worst["group_ranks"]
        listed = ", ".join(map(str, members)) if len(members) <= _MAX_NAMED else units.ranges(members)
        ranks = f"rank{'' if len(members) == 1 else 's'} {listed}"
        all_traced, to_peers = len(worst["ranks"]) == worst["group_size"], worst["reference"] == "peers"
        reference, others = ("its peers", "those of other groups") if to_peers else ("before", "before")
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
        # Why the finding is only a suspicion; empty where there is enough evidence.
        calls = int(worst["slow"]["calls"].sum())
        if calls < self.min_calls:
            suspicion = f" Only {calls} collectives could be compared, so this is a suspicion: record more steps."
        elif worst["bus_bytes"] * 1_000_000_000 < self.min_bandwidth_bytes_per_s * worst["usual_ns"]:
            suspicion = " The messages are too small to measure bandwidth, so this is a suspicion."
        else:
            suspicion = ""
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
            claim=f"Collectives of the group of {ranks} are slower than {others}",
        )


def _judged_groups(run: Run, groups: pl.DataFrame) -> pl.DataFrame:
    """Return the groups without the sends and receives of a pipeline, whose links are of different kinds."""
    if run.table(pipeline_actions.pipeline_actions).is_empty():
        return groups
    return groups.filter(~pl.col("members").str.contains(">", literal=True).fill_null(value=False))


def _by_group(table: pl.DataFrame, durations: pl.DataFrame) -> list[pl.DataFrame]:
    timed = table.join(durations, on=[*_GROUP, "step"], nulls_equal=True, maintain_order="left")
    return timed.partition_by(_GROUP, maintain_order=True)


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


_FIX_PROCESS = (
    "Check what stopped {ranks} at that time: CPU limits of its cgroup (cpu.stat: nr_throttled), swapping, a debugger "
    "or profiler that attached, a paused container (docker pause, SIGSTOP), a migrated or preempted virtual machine, "
    "other processes on its cores."
)
_FIX_UNKNOWN = (
    "Check the network and the hosts of {ranks} at that time: link errors and retransmissions (ibstat, ethtool -S, "
    "nstat -az TcpRetransSegs), NCCL_DEBUG=INFO, dmesg, and processes that were stopped or throttled (cpu.stat: "
    "nr_throttled, swapping). If it recurs, record with --hang-timeout below its duration: each rank then dumps its "
    "stacks and flight recorder while it waits."
)
_ARRIVED = (
    "All ranks of the group had arrived. Either the network or one of the ranks stalled; the traces do not show which."
)
_UNTRACED = (
    "Not all ranks of the group have a trace in which it could be matched, so it is unknown whether a rank "
    "arrived late."
)
_FIX_UNTRACED = (
    "Record all ranks (record --ranks all) to see whether one arrives late; check its host, and otherwise the network."
)


@dataclass(frozen=True)
class StalledCollective(Rule):
    """A single collective that takes far longer than usual, although all its ranks have arrived.

    What it does: reports collectives that stall once: the network stalled, or a member was stopped while it took
    part. It names the step, the group, the usual and the actual duration, and, where the traces show it, the rank whose
    process did nothing meanwhile.

    Why it costs: all members of the group wait until the collective ends, and then the ranks that wait for them. Rules
    on the median step do not see it.

    How it is measured: the time of a collective from the last arrival to its end, the shortest over its ranks: a
    rank that arrives late does not count, and neither do differences between clocks. It must be four times as long
    as the same collective (group, op, type, size within a factor of two) usually takes, both at the same place of
    other steps and anywhere: the third quartile of the others, of three or fewer the longest. Among 20 others or
    more, it must also be twice as long as their 95th percentile. Five others are needed, and an excess of 1 ms. On
    devices, for a size that occurs less often, two others at the same place of other steps are needed, and five of the
    group, op and type that are as large or larger: it must take four times as long as those, too. Where the trace has
    no sizes, calls at one place of steps with as many calls are the same, and two others are needed.
    Collectives that stall at the same time are one event. It costs the exposed part of the excess, or what the
    steps are shorter in a replay with the usual duration. It is a warning from `min_lost_ratio` of the window, and
    information from `min_step_ratio` of a step (`min_cpu_step_ratio` on a CPU run, where other processes slow
    collectives down). A rank is named if no slice begins or ends on any thread of its host during the excess while
    those of other members do, or, on a CPU run, if an op that computes lasts for all of it.

    How to fix: for a named rank, find what stopped its process: CPU limits of the cgroup, swapping, a debugger, a
    paused container. Otherwise check the links (retransmissions, link errors) and the hosts of the group at that time.

    Blind spots: where a rank of the group has no trace, it may have come late; the finding says so. Where the hosts of
    all members only wait, the traces do not show whether the network or a member stalled. The first collective of
    each group is not judged, for it may set up the communicator; sends and receives are not, for they wait for compute;
    nor are saves. Stalls of a host before a collective belong to STEP001.
    """

    code: ClassVar[str] = "STEP004"
    fix_without_pytorch: ClassVar[str] = _WITHOUT_PYTORCH
    facts: ClassVar[tuple[TraceFact, ...]] = (*stalled_collectives.FACTS, *outlier_steps.OutlierStep.facts)
    min_lost_ratio: float = 0.03
    min_step_ratio: float = 0.1
    min_cpu_step_ratio: float = 0.5

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for each set of ranks that stopped, and one for the collectives without such ranks."""
        events = run.table(stalled_collectives.stalled_collectives)
        key = ["silent_ranks", "is_whole"]
        for _, similar in largest_first(events, "lost_ns", "start_ns").group_by(key, maintain_order=True):
            longest = similar.row(0, named=True)
            step_ns = longest["reference_ns"] or longest["window_ns"]
            if step_ns is None:  # no step has work, so nothing is known of how long one takes
                continue
            least_ns = step_ns * (self.min_step_ratio if breakdown.is_on_device(run) else self.min_cpu_step_ratio)
            if longest["lost_ns"] < least_ns / 2:
                continue
            ratio = _lost_ratio(similar)
            if ratio >= self.min_lost_ratio:
                yield self._finding(run, similar, Severity.WARNING, self.min_lost_ratio)
            elif longest["lost_ns"] >= least_ns:
                yield self._finding(run, similar, Severity.INFO, least_ns / longest["window_ns"])

    def _finding(self, run: Run, events: pl.DataFrame, severity: Severity, min_saved_ratio: float) -> Finding:
        event, windows = events.row(0, named=True), events.unique("window")
        stopped, lost_ratio = tuple(event["silent_ranks"]), _lost_ratio(events)
        steps = int(windows["steps"].sum())
        excess, share = units.duration(int((events["end_ns"] - events["start_ns"]).sum())), units.share(lost_ratio)
        how_often = f"It costs {excess} ({share}) of the window."
        if steps > 1:
            often = "once" if events.height == 1 else f"{events.height} times"
            how_often = f"It happens {often} in {steps} profiled steps, so it may be rare; "
            how_often += f"it takes {excess} in total ({share} of the time)."
        several, called = len(stopped) > 1, event["op"].replace("_", "-")
        claim = f"One {called} takes much longer than the others"
        if stopped:
            claim = f"The process of {units.numbers('rank', stopped)} stops, and a collective waits for it"
            confidence, fix = 0.9, _FIX_PROCESS.format(ranks=units.numbers("rank", stopped))
            where = f", inside {event['name']}" if event["name"] else ""
            cause = f"Meanwhile the host of {units.numbers('rank', stopped)} does nothing{where}: "
            cause += f"{'these processes were' if several else 'its process was'} stopped or got no CPU time."
        elif event["is_whole"]:
            confidence, fix, cause = (
                0.8,
                _FIX_UNKNOWN.format(ranks=units.numbers("rank", event["ranks"])),
                _ARRIVED,
            )
        else:
            confidence, fix, cause = 0.5, _FIX_UNTRACED, _UNTRACED
        calls = run.table(stalled_collectives.stalled_calls).join(events.select("event"), on="event", how="semi")
        columns = ("window", "rank", "step", "op", "group", "bytes", "start_ns", "dur_ns", "transfer_ns", "usual_ns")
        return Finding(
            self.code,
            severity,
            f"{_what(event)}. {cause} {how_often}",
            fix,
            impact=min(1.0, lost_ratio),
            cost_ns=int(events["lost_ns"].sum()) // max(1, steps),
            confidence=confidence if event["is_whole"] else 0.5,
            ranks=stopped or tuple(events["ranks"].explode().unique().sort().to_list()),
            steps=distinct(events, "step"),
            evidence=largest_first(calls, "excess_ns", "rank", "start_ns").select(*columns).head(_EVIDENCE_ROWS),
            what_if=WhatIf(STALLED_COLLECTIVE, min_saved_ratio),
            subject=_subject(event),
            is_of_window=event["step"] is None,
            claim=claim,
        )


def removal(run: Run, findings: Iterable[Finding]) -> Removal | None:
    """Removal in a replay for findings of this rule: the excess of their collectives; None without such."""
    events = run.table(stalled_collectives.stalled_collectives)
    steps_of = {finding.subject: finding.steps for finding in findings if finding.code == StalledCollective.code}
    stalled = [
        row
        for row in events.iter_rows(named=True)
        if (steps := steps_of.get(_subject(row))) is not None and (row["step"] is None or row["step"] in steps)
    ]
    calls = run.table(stalled_collectives.stalled_calls).filter(
        pl.col("event").is_in([row["event"] for row in stalled])
    )
    rows = calls.select(
        "window", "rank", "excess_start_ns", end_ns=pl.col("excess_start_ns") + pl.col("excess_ns")
    ).rows()
    stopped = [
        HostSpan(row["window"], rank, row["start_ns"], row["end_ns"], STOPPED)
        for row in stalled
        for rank in row["silent_ranks"]
    ]
    spans = (*(HostSpan(*row) for row in rows), *stopped)
    return Removal(STALLED_COLLECTIVE, (), spans) if spans else None


def _subject(event: dict[str, Any]) -> str:
    if event["silent_ranks"]:
        return f"ranks {units.ranges(event['silent_ranks'])}"
    return "" if event["is_whole"] else "untraced ranks"


def _lost_ratio(events: pl.DataFrame) -> float:
    return int(events["lost_ns"].sum()) / max(1, int(events.unique("window")["window_ns"].sum()))


def _what(event: dict[str, Any]) -> str:
    """Clause on the collective that took long, its group, and the time that it usually takes."""
    size = f" of {units.size(event['bytes'])}" if event["bytes"] else ""
    group = f" of the group {event['group']}" if event["group"] else ""
    more = event["collectives"] - 1
    more_text = f", and {units.count(more, 'other')} at the same time" if more else ""
    return (
        f"{outlier_steps.where(event, event['lost_ns'])}one {event['op'].replace('_', '-')}{size}{group} takes "
        f"{units.duration(event['transfer_ns'])} instead of {units.duration(event['usual_ns'])}{more_text}"
    )
