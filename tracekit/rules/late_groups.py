"""Rules on ranks that straggle together (a node, a replica, a tensor-parallel group), or once in a while."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.parallelism import stragglers
from tracekit.analysis.quality import trace_quality
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules import outlier_steps
from tracekit.rules.model_parallel import OverloadedExperts, overloaded_ranks
from tracekit.rules.rule import Finding, Rule, Severity, distinct, largest_first
from tracekit.rules.stragglers import Straggler

_EVIDENCE_ROWS = 40
_FIX_WORK = (
    "Find what only {ranks} does in these steps, such as an evaluation, metrics or samples: divide it among the ranks, "
    "do it less often, or let the other ranks train on meanwhile."
)
_FIX_SLOW = (
    "Check {ranks} at that time: longer batches or more experts' tokens than on the other ranks, GPU clocks and "
    "temperature, other processes on its cores."
)


@dataclass(frozen=True)
class LateGroup(Straggler):
    """Ranks that straggle together, such as those of one node.

    What it does: reports ranks that arrive late together at collectives, while the others are idle, as one finding
    named by what these ranks share: a node, a replica, a coordinate of another mesh axis, a process group. The others
    lose more than `min_wait_ratio` of the step for them, in at least `min_steps_ratio` of the steps since the first
    such step, by a time that varies by at most `max_spread_ratio`. It names what the late ranks take longer for: their
    kernels, or their launches.

    Why it costs: a collective moves data only after the last rank arrives, so one slow node slows all.

    How it is measured: as in RANK001, for ranks together. Ranks are late together if the others would wait at least
    twice as long for all of them as for any one, and would still wait for each one if all but that one came early. In a
    hybrid mesh, where the ranks of a late node have no collective in common with other nodes, each of them must be late
    in its own process groups, and must not wait itself for more than half as long as the other ranks do. At most half
    of the ranks are a late group. Nodes come from the host names in file names, else from device indices that start
    again every few ranks, else from the GPUs per node in run.json; axes from the mesh or groups in run.json, else from
    the names of process groups. The cost is the saving of a replay in which nobody waits for these ranks. Below
    `min_cost_ratio` of the step the finding is information.

    How to fix: check what these ranks share before the ranks themselves: power and clocks of the node, its network
    adapters, its CPUs and storage, other jobs on it, the batch of the replica (uneven sequence lengths). Take the node
    out of the job to separate hardware from data.

    Blind spots: needs traces of ranks inside and outside of the group, and three collectives that both join. All ranks
    of a pipeline stage are not reported: how long stages take is what rules on pipelines judge. Waits between stages do
    not count. If more than half of the ranks are late, nobody straggles.
    """

    code: ClassVar[str] = "RANK004"

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per group of ranks that straggles."""
        yield from self._findings(run, pl.col("late_ranks").list.len() > 1)


@dataclass(frozen=True)
class OccasionalStraggler(Rule):
    """A rank for which the others wait in a few steps, because it works longer in these.

    What it does: reports ranks that delay the others in fewer than half of the steps, such as the one rank that
    evaluates the model, with the steps and what the rank does more of in them.

    Why it costs: all other ranks wait meanwhile. Rules on the median step do not see it.

    How it is measured: as in RANK001, the time that the other ranks lose to waiting for the rank, in each step. It
    counts where it is longer than in the median step by half of that step or more, and where more than half of all
    waiting in the step is for this rank. Compute and the number of operators of the rank are compared with the larger
    of two medians: of its steps, and of all ranks in the step. Losses below `min_lost_ratio` of the window are left
    out. On a CPU run, where other processes slow ranks down, a rank that runs no more operators than usual is
    information. The cost is the mean per step.

    How to fix: divide the evaluation, metrics or samples among the ranks, or do them less often.

    Blind spots: needs three marked steps and traces of several ranks. A window without such a step does not show it:
    record more steps. Stalls of the rank's host, in which it runs no operators, belong to STEP001, overloaded experts
    to EP001. Steps that save are left out.
    """

    code: ClassVar[str] = "RANK005"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *stragglers.FACTS,
        *outlier_steps.OutlierStep.facts,
        *OverloadedExperts.facts,
    )
    min_lost_ratio: float = 0.03

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding per late rank, or group of ranks that are late together."""
        events = run.table(stragglers.occasional_stragglers)
        overloaded = overloaded_ranks(run) if events.height else frozenset()
        for _, rank_events in events.group_by("late_rank", maintain_order=True):
            if overloaded.issuperset(rank_events["late_ranks"][0]):
                continue
            windows = rank_events.unique("window")
            lost_ratio = int(rank_events["lost_ns"].sum()) / max(1, int(windows["window_ns"].sum()))
            if lost_ratio >= self.min_lost_ratio:
                yield self._finding(run, rank_events, lost_ratio, int(windows["steps"].sum()))

    def _finding(self, run: Run, events: pl.DataFrame, lost_ratio: float, steps: int) -> Finding:
        event = largest_first(events, "lost_ns", "window", "step").row(0, named=True)
        ranks = tuple(event["late_ranks"])
        name = units.numbered("rank", ranks)
        times = "once in" if events.height == 1 else f"in {events.height} of"
        has_more_ops = (event["ops_ratio"] or 0) >= trace_quality.MORE_OPS_RATIO
        waits = run.table(stragglers.late_calls).filter(pl.col("late_rank") == event["late_rank"])
        in_steps = waits.join(events.select("window", "step"), on=["window", "step"], how="semi")
        return Finding(
            self.code,
            Severity.WARNING if has_more_ops or breakdown.is_on_device(run) else Severity.INFO,
            f"{outlier_steps.where(event, event['lost_ns'])}the other ranks lose {units.duration(event['lost_ns'])} to "
            f"waiting for {name}{_work(event)}. It happens {times} {steps} profiled steps, so it may be rare; it "
            f"takes {units.duration(int(events['lost_ns'].sum()))} in total ({units.share(lost_ratio)} of the time).",
            (_FIX_WORK if has_more_ops else _FIX_SLOW).format(ranks=name),
            impact=min(1.0, lost_ratio),
            cost_ns=int(events["lost_ns"].sum()) // max(1, steps),
            confidence=0.8 if has_more_ops else 0.6,
            ranks=ranks,
            steps=distinct(events, "step"),
            evidence=largest_first(in_steps, "wait_ns", "start_ns")
            .head(_EVIDENCE_ROWS)
            .select("window", "rank", "step", "phase", "unit", "op", "late_rank", "start_ns", "dur_ns", "wait_ns"),
            subject=name,
        )


def _work(event: dict[str, Any]) -> str:
    """Clause on what the late rank does more of than in its other steps and than the other ranks."""
    longer_ns = (event["compute_ns"] or 0) - (event["usual_compute_ns"] or 0)
    parts = []
    if longer_ns >= event["lost_ns"] / 2:
        usual = units.duration(event["usual_compute_ns"])
        parts.append(f"computes for {units.duration(event['compute_ns'])} instead of {usual}")
    if (event["ops_ratio"] or 0) >= trace_quality.MORE_OPS_RATIO:
        parts.append(f"runs {event['ops_ratio']:.1f} times as many operators as usual")
    return f", which {' and '.join(parts)}" if parts else ""
