"""The rule on stalled collectives: a single one takes far longer than usual, although no rank arrives late."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.parallelism import stalled_collectives
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.stalls import STALLED_COLLECTIVE, STOPPED, Removal
from tracekit.replay.graph.nodes import HostSpan
from tracekit.rules import outlier_steps
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
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
    more, it must also be twice as long as their 95th percentile. Five others are needed, and an excess of 1 ms.
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
        stopped = tuple(event["silent_ranks"])
        steps = int(events.unique("window")["steps"].sum())
        excess_ns = int((events["end_ns"] - events["start_ns"]).sum())
        if steps < 2:
            how_often = f"It costs {units.duration(excess_ns)} ({units.share(_lost_ratio(events))}) of the window."
        else:
            often = "once" if events.height == 1 else f"{events.height} times"
            how_often = (
                f"It happens {often} in {steps} profiled steps, so it may be rare; it takes "
                f"{units.duration(excess_ns)} in total ({units.share(_lost_ratio(events))} of the time)."
            )
        confidence = 0.9 if event["silent_ranks"] else 0.8
        return Finding(
            self.code,
            severity,
            f"{_what(event)}. {_cause(event)} {how_often}",
            _fix(event),
            impact=min(1.0, _lost_ratio(events)),
            cost_ns=int(events["lost_ns"].sum()) // max(1, int(windows["steps"].sum())),
            confidence=confidence if event["is_whole"] else 0.5,
            ranks=stopped or tuple(events["ranks"].explode().unique().sort().to_list()),
            steps=distinct(events, "step"),
            evidence=_evidence(run, events),
            what_if=WhatIf(STALLED_COLLECTIVE, min_saved_ratio),
            subject=_subject(event),
            is_of_window=event["step"] is None,
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


def _cause(event: dict[str, Any]) -> str:
    """Sentence on what stalled, as far as the traces show it."""
    if event["silent_ranks"]:
        several = len(event["silent_ranks"]) > 1
        where = f", inside {event['name']}" if event["name"] else ""
        return (
            f"Meanwhile the host of {units.numbered('rank', event['silent_ranks'])} does nothing{where}: "
            f"{'these processes were' if several else 'its process was'} stopped or got no CPU time."
        )
    if not event["is_whole"]:
        return (
            "Not all ranks of the group have a trace in which it could be matched, so it is unknown whether a rank "
            "arrived late."
        )
    return (
        "All ranks of the group had arrived. Either the network or one of the ranks stalled; the traces do not show "
        "which."
    )


def _fix(event: dict[str, Any]) -> str:
    if event["silent_ranks"]:
        stopped = event["silent_ranks"]
        return _FIX_PROCESS.format(ranks=units.numbered("rank", stopped))
    if not event["is_whole"]:
        return _FIX_UNTRACED
    return _FIX_UNKNOWN.format(ranks=units.numbered("rank", event["ranks"]))


def _evidence(run: Run, events: pl.DataFrame) -> pl.DataFrame:
    calls = run.table(stalled_collectives.stalled_calls).join(events.select("event"), on="event", how="semi")
    columns = ("window", "rank", "step", "op", "group", "bytes", "start_ns", "dur_ns", "transfer_ns", "usual_ns")
    return largest_first(calls, "excess_ns", "rank", "start_ns").select(*columns).head(_EVIDENCE_ROWS)
