"""Rules on phases of the host that no step needs, however regular they are: compilation and garbage collection."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.host import host_phases, launch_delay
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.host import COMPILATION, GARBAGE_COLLECTION
from tracekit.rules import late_work, recurrence
from tracekit.rules.recurrence import Recurrence
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

FACTS: tuple[TraceFact, ...] = (host_phases.host_phases, breakdown.by_step)
_EVIDENCE_ROWS = 40
_MIN_STEP_RATIO = 0.01
"""In a step with less of it than this share of the mean step, a phase counts as absent: a call that does nothing."""
_MIN_LOST_RATIO = 0.03
_SAME_RATIO = 0.5
"""Ranks with this share of the worst rank's time in a phase have the same trouble."""
_MAX_OUTSIDE_RATIO = 0.25
"""Of a phase with more of its time before the first or after the last work of a window, a replay shows too little."""
_MOST_IDS = 4


@dataclass(frozen=True, eq=False)
class PhaseLoss:
    """Time that ranks lose to a phase of the host in a run."""

    steps: pl.DataFrame
    """Every step of the worst rank: columns window, rank, step, duration_ns, phase_ns."""
    ranks: tuple[int, ...]
    """The ranks with at least half of the worst rank's time."""
    recurrence: Recurrence

    @property
    def affected_steps(self) -> pl.DataFrame:
        """The steps that contain the phase."""
        least_ns = _MIN_STEP_RATIO * float(str(self.steps["duration_ns"].mean() or 0))
        return self.steps.filter(pl.col("phase_ns") > least_ns)

    @property
    def is_longer_warm_up(self) -> bool:
        """Whether several of the first steps contain the phase, and no later one."""
        return self.recurrence is Recurrence.WARM_UP and self.affected_steps.height > 1

    @property
    def lost_ratio(self) -> float:
        """Its share of the time of all steps of the worst rank."""
        return int(self.steps["phase_ns"].sum()) / max(1, int(self.steps["duration_ns"].sum()))


def loss_of(run: Run, phase: str) -> PhaseLoss | None:
    """Loss of a run to a phase of the host; None if it takes less than 3% of the time of each rank.

    A phase begins in the step in which the host is then: that of its annotation, not that of the device's window.
    """
    phases = run.table(host_phases.host_phases).filter(phase=phase)
    if phases.is_empty():
        return None
    key = ["window", "rank", "step"]
    lengths = run.table(breakdown.by_step).group_by(key).agg(pl.col("duration_ns").max())
    sums = phases.group_by(key).agg(pl.col("dur_ns").sum().alias("phase_ns"))
    steps = lengths.join(sums, on=key, how="left", nulls_equal=True).with_columns(pl.col("phase_ns").fill_null(0))
    totals = largest_first(steps.group_by("rank").agg(pl.col("phase_ns", "duration_ns").sum()), "phase_ns", "rank")
    worst = totals.row(0, named=True)
    if worst["phase_ns"] < _MIN_LOST_RATIO * worst["duration_ns"]:
        return None
    ranks = totals.filter(pl.col("phase_ns") >= _SAME_RATIO * worst["phase_ns"])["rank"].sort().to_list()
    of_rank = PhaseLoss(steps.filter(rank=worst["rank"]).sort(key), tuple(ranks), Recurrence.UNKNOWN)
    return PhaseLoss(of_rank.steps, of_rank.ranks, _recurrence(of_rank, phase))


def judged_phases(run: Run, *, is_repeated: bool = False) -> list[str]:
    """The phases of which HOST005 and HOST006 speak, or those of them that recur: no stall in them is a single one."""
    losses = ((phase, loss_of(run, phase)) for phase in (host_state.COMPILE, host_state.GARBAGE_COLLECTION))
    return [
        phase
        for phase, loss in losses
        if loss and (loss.recurrence.is_repeated or (loss.is_longer_warm_up and not is_repeated))
    ]


def _recurrence(loss: PhaseLoss, phase: str) -> Recurrence:
    steps, affected_steps = (distinct(table, "step") for table in (loss.steps, loss.affected_steps))
    if phase == host_state.COMPILE:
        return recurrence.of_first_uses(affected_steps, steps)
    return recurrence.of_count(len(affected_steps), len(steps))


class _HostPhase(Rule):
    """Judgement of one phase; subclasses say it in words."""

    phase: ClassVar[str]
    cause: ClassVar[Cause]
    verb: ClassVar[str]

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the phase recurs, or if the window is too short to show that it does."""
        loss = loss_of(run, self.phase)
        if loss is None:
            return
        steps, affected_steps = loss.steps, loss.affected_steps
        is_single_step = steps.height == 1
        if not (loss.recurrence.is_repeated or is_single_step or loss.is_longer_warm_up):
            return  # STEP001 and STEP002 speak of single stalls, and of the first step
        count, row = max(1, affected_steps.height), largest_first(affected_steps, "phase_ns", "step").row(0, named=True)
        often = recurrence.sentence(count, steps.height) if steps.height > 1 else ""
        is_warm_up = loss.recurrence is Recurrence.WARM_UP
        if is_warm_up:
            often = f"It happens in the first {count} of {steps.height} profiled steps only: this is warm-up"
        # The steps of a replay begin and end with work, so that they contain no phase before or after it.
        outside_ns = self._outside_ns(run, row["rank"])
        cost_ns = (self._idle_ns(run, row["rank"]) + outside_ns) // steps.height
        step_ns = (int(steps["duration_ns"].sum()) + outside_ns) // steps.height
        is_priced_alone = outside_ns > _MAX_OUTSIDE_RATIO * cost_ns * steps.height
        yield Finding(
            self.code,
            Severity.WARNING if loss.recurrence.is_repeated else Severity.INFO,
            f"The host of {units.numbers('rank', loss.ranks)} {self.verb} for {_time_in_step(row)}. "
            f"{often + '; it' if often else 'It'} takes {units.share(min(1.0, loss.lost_ratio))} of the time."
            f"{self._details(run, row['rank'])}",
            self._fix(loss),
            impact=0.0 if is_warm_up else min(1.0, cost_ns / max(1, step_ns)),
            cost_ns=0 if is_warm_up else cost_ns,
            confidence=0.9 if loss.recurrence.is_repeated else 0.6,
            ranks=loss.ranks,
            steps=distinct(affected_steps, "step"),
            evidence=self._evidence(run, loss.ranks),
            claim=self._claim(run, loss),
            what_if=None if is_priced_alone or is_warm_up else WhatIf(self.cause),
            is_of_window=row["step"] is None,
        )

    def _claim(self, run: Run, loss: PhaseLoss) -> str:
        count, steps = loss.affected_steps.height, loss.steps.height
        if loss.recurrence is Recurrence.WARM_UP:
            in_steps = f" in the first {count} steps only, which are warm-up"
        elif loss.recurrence is Recurrence.STEADY:
            in_steps = " in every step"
        else:
            in_steps = f" in {count} of {steps} steps" if steps > 1 else ""
        is_straggling = len(loss.ranks) < len(run.ranks) / 2 + 1 and len(loss.ranks) < len(run.ranks)
        if not is_straggling:
            whose = f"rank {loss.ranks[0]}'s host" if len(run.ranks) == 1 else "every rank's host"
            return f"{whose[0].upper()}{whose[1:]} {self.verb}{in_steps}"
        others = late_work.names(loss.ranks, run.ranks)
        waits = "waits" if others.startswith("rank ") else "wait"
        name = units.numbers("rank", loss.ranks).capitalize()
        return f"{name}'s host {self.verb}{in_steps}; {others} {waits} for {'them' if len(loss.ranks) > 1 else 'it'}"

    def _idle_ns(self, run: Run, rank: int) -> int:
        """Time that the devices of a rank are idle for the phase: of the device with most of it."""
        gaps = run.scan(launch_delay.host_gaps).filter(pl.col("detail") == self.phase, pl.col("rank") == rank).collect()
        by_device = gaps.group_by("device").agg(pl.col("dur_ns").sum())["dur_ns"]
        return int(str(by_device.max() or 0))

    def _outside_ns(self, run: Run, rank: int) -> int:
        """Time of the phase before the first and after the last work of the windows of a rank, while no device works.

        Before the first launch of a recording a device may still run what was queued before.
        """
        bounds = (
            run.table(breakdown.by_step)
            .filter(rank=rank)
            .group_by("window")
            .agg(
                pl.col("start_ns").min().alias("first_ns"),
                (pl.col("start_ns") + pl.col("duration_ns")).max().alias("end_ns"),
            )
        )
        phases = run.table(host_phases.host_phases).filter(rank=rank, phase=self.phase).join(bounds, on="window")
        is_inside = pl.col("start_ns").is_between("first_ns", "end_ns")
        return int(phases.filter(~is_inside)["idle_ns"].sum())

    def _evidence(self, run: Run, ranks: tuple[int, ...]) -> pl.DataFrame:
        rows = run.table(host_phases.host_phases).filter(pl.col("rank").is_in(list(ranks)), phase=self.phase)
        return largest_first(rows, "dur_ns", "rank", "start_ns").drop("phase").head(_EVIDENCE_ROWS)

    def _details(self, run: Run, rank: int) -> str:  # noqa: ARG002
        return ""

    def _fix(self, loss: PhaseLoss) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class Recompilation(_HostPhase):
    """Steps in which the program is compiled again.

    What it does: reports runs in which torch.compile, Triton or a run-time compiler takes 3% of the time or more in
    several steps, with the compile ids that the profiler recorded.

    Why it costs: compilation takes seconds, in which the host launches nothing, and its result serves one step only if
    the next one has other sizes, other Python values or another module.

    How it is measured: the time on the host in spans and Python functions of compilers, in every step, against doing
    without it: however regular it is, no step of a steady state compiles. What the compiler runs to trace the program
    (fake tensors, constant folding) is no compute. Operators of a CPU run that it runs are left out of compute, too.
    Compiling in the first steps only, at most half of them, is warm-up, and a single step belongs to STEP001 or
    STEP002. The cost is the saving of a replay without compilation (`tracekit whatif`), else the time for which the
    device is idle meanwhile; both are means over all steps.

    How to fix: find what changes (TORCH_LOGS=recompiles); for sizes: torch.compile(dynamic=True), mark_dynamic, or
    padding to few sizes; for Python values and modules: make them constant, or tensors.

    Blind spots: a window of one step cannot show whether it recurs: it is information. Compilers that write no spans
    look like Python (HOST001) without recorded stacks.
    """

    code: ClassVar[str] = "HOST005"
    fix_without_pytorch: ClassVar[str] = (
        "Compile before the first iteration, and keep the compiled code: nvcc -arch for this device, a cache for what "
        "NVRTC compiles."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (*FACTS, launch_delay.host_gaps)
    phase: ClassVar[str] = host_state.COMPILE
    cause: ClassVar[Cause] = COMPILATION
    verb: ClassVar[str] = "compiles"

    def _details(self, run: Run, rank: int) -> str:
        rows = run.table(host_phases.host_phases).filter(phase=self.phase, rank=rank).sort("start_ns")
        ids = rows["compile_id"].drop_nulls().unique(maintain_order=True).to_list()
        if not ids:
            return ""
        more = f" and {len(ids) - _MOST_IDS} more" if len(ids) > _MOST_IDS else ""
        return f" Compile {'ids' if len(ids) > 1 else 'id'} {', '.join(ids[:_MOST_IDS])}{more}."

    def _fix(self, loss: PhaseLoss) -> str:
        if loss.recurrence is Recurrence.WARM_UP:
            return "Profile later steps: schedule(wait=…, warmup=2, …), or Recorder(warmup=2)."
        return late_work.FIX_COMPILATION


@dataclass(frozen=True)
class GarbageCollection(_HostPhase):
    """Steps in which Python collects garbage.

    What it does: reports runs in which Python's garbage collector takes 3% of the time or more in several steps, on all
    ranks or on some, for which the others wait.

    Why it costs: a full collection visits every object of the process, hundreds of milliseconds with a large model or
    data set, in which the host launches nothing. Ranks collect in different steps, and all others wait each time.

    How it is measured: the time on the host in calls of gc.collect, which traces with stacks contain, and in spans of
    gc.callbacks, which the recorder writes for full collections, in every step, against doing without it. The cost is
    the saving of a replay without it (`tracekit whatif`), else the time for which the device is idle meanwhile; both
    are means over all steps.

    How to fix: gc.freeze() after the model and the data are built, gc.disable(), and gc.collect(1) on all ranks in the
    same step, every few hundred steps.

    Blind spots: other recorders write no span for a collection that Python starts itself: it looks like Python
    (HOST001, STEP001, RANK005). A single collection belongs to STEP001.
    """

    code: ClassVar[str] = "HOST006"
    facts: ClassVar[tuple[TraceFact, ...]] = (*FACTS, launch_delay.host_gaps)
    phase: ClassVar[str] = host_state.GARBAGE_COLLECTION
    cause: ClassVar[Cause] = GARBAGE_COLLECTION
    verb: ClassVar[str] = "runs Python's garbage collector"

    def _fix(self, loss: PhaseLoss) -> str:  # noqa: ARG002
        return late_work.FIX_GARBAGE


def _time_in_step(row: dict[str, Any]) -> str:
    """Time of a phase, and the step's; that of the host may begin before, or end after, the work of its step."""
    phase_time, step_time = units.duration(row["phase_ns"]), units.duration(row["duration_ns"])
    if row["phase_ns"] > row["duration_ns"]:
        return f"{phase_time} in {_place(row)}, whose work takes {step_time}"
    return f"{phase_time} of {step_time} in {_place(row)}"


def _place(row: dict[str, Any]) -> str:
    return "the window" if row["step"] is None else f"step {row['step']}"
