"""The rule on stalled devices: work is queued, and the device does not run it."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.time import device_stalls, paused_kernels
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.slow_ranks import DEVICE_STALL
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_SHARED = (
    "See which processes use the GPU: nvidia-smi, nvidia-smi pmon (rocm-smi --showpids on AMD). Give the job the GPU "
    "alone: nvidia-smi -c EXCLUSIVE_PROCESS, or one pod per GPU without time-slicing replicas. Processes that must "
    "share it run at the same time under MPS, and apart in MIG instances. If there is no other process, see what "
    "throttles the GPU: nvidia-smi -q -d PERFORMANCE."
)
_UNKNOWN = (
    "Record with enable_cuda_sync_events=True and look at what runs before these kernels: a host function "
    "(cudaLaunchHostFunc), a stream memory operation or an event of another process is a wait of the program. Lost "
    "kernels of CUDA graphs look the same: record without graphs. If neither applies, look for another process on the "
    "GPU (nvidia-smi)."
)


@dataclass(frozen=True)
class DeviceStall(Rule):
    """A stalled device: it runs nothing although work is queued, or pauses the kernels that it runs.

    What it does: reports devices that are idle although launched work waits, or whose kernels take longer by a time
    slice at times, for more than `min_stall_ratio` of the step: the GPU is shared with another process (time slices),
    or throttled. Where idle times of `min_unexplained_ratio` always come before the same kernels, a wait of the program
    that the trace does not show is as likely: that is information.

    Why it costs: the device does nothing for this job meanwhile, and the ranks that exchange data with it wait.

    How it is measured: all devices of a trace are idle for 0.5 ms or more, and the work that runs next had been
    launched. An event of another stream cannot be what it waits for, since nothing runs. Five such stalls are needed,
    at places in the program that are passed without one at least as often. Kernels are counted as paused if they take
    longer than the same kernel in other steps or on other ranks by the length of these idle times or a multiple of it,
    and if most such excesses have one length. NVIDIA's driver switches between processes after time slices of 1 ms or
    more. Steps that save are left out. Stalls do not follow the steps, so the message quotes all steps of the worst
    device; the cost is the saving of a replay in which queued work runs at once.

    How to fix: find the other process (nvidia-smi, nvidia-smi pmon, rocm-smi --showpids); set the compute mode to
    EXCLUSIVE_PROCESS; share with MPS or MIG instead of time slices; without another process, look for throttling
    (nvidia-smi -q -d PERFORMANCE), a debugger, or memory that is paged (managed memory, UVM).

    Blind spots: needs recorded launches. Slices shorter than 0.5 ms, and fewer than five in a window, are not seen.
    Idle times inside CUDA graphs are information only, because profilers lose kernels of graphs. A sampled trace is not
    judged, and a CPU run has no queued work.
    """

    code: ClassVar[str] = "STREAM005"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *paused_kernels.FACTS,
        *steps_without_saves.FACTS,
    )
    min_stall_ratio: float = 0.01
    min_unexplained_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding on stalls with a cause outside the program, and one on those of unknown cause."""
        stalls = run.table(paused_kernels.stalls)
        recurring = _worst_device(run, stalls.filter("is_recurring"), self.min_stall_ratio)
        if recurring is not None:
            yield _finding(self.code, Severity.WARNING, _stall_message(recurring), _SHARED, recurring)
        unknown = _worst_device(run, stalls.filter(~pl.col("is_recurring")), self.min_unexplained_ratio)
        if unknown is not None:
            yield _finding(self.code, Severity.INFO, _unexplained_message(unknown), _UNKNOWN, unknown)


@dataclass(frozen=True, eq=False)
class _Loss:
    """What the worst device loses to stalls in all its steps: stalls do not follow steps."""

    rank: int
    lost_ns: int
    duration_ns: int
    steps: pl.DataFrame
    """The steps of all devices that lose enough."""
    stalls: pl.DataFrame
    """The stalls of the worst device, the longest first."""

    def __str__(self) -> str:
        share = units.share(self.lost_ns / self.duration_ns)
        where = "the window" if self.is_of_window else f"{self.step_count} steps"
        lost = f"{units.duration(self.lost_ns)} of {units.duration(self.duration_ns)}"
        return f"{lost} ({share}) in {where} of rank {self.rank}"

    @property
    def is_of_window(self) -> bool:
        return bool(self.steps["step"].is_null().all())

    @property
    def step_count(self) -> int:
        return self.steps.filter(pl.col("rank") == self.rank).select("window", "step").n_unique()


def _worst_device(run: Run, stalls: pl.DataFrame, min_ratio: float) -> _Loss | None:
    """Return the loss of the device that loses most; None if it loses a smaller share."""
    steps = steps_without_saves.losses(run, stalls, "dur_ns")
    device = ["rank", "device"]
    sums = steps.group_by(device).agg(pl.col("lost_ns", "duration_ns").sum())
    ratio = (pl.col("lost_ns") / pl.col("duration_ns")).alias("ratio")
    losing = sums.with_columns(ratio).filter(pl.col("ratio") >= min_ratio)
    if losing.is_empty():
        return None
    worst = largest_first(losing, "ratio", *device).row(0, named=True)
    is_worst = (pl.col("rank") == worst["rank"]) & pl.col("device").eq_missing(worst["device"])
    return _Loss(
        worst["rank"],
        worst["lost_ns"],
        worst["duration_ns"],
        steps.join(losing, on=device, how="semi", nulls_equal=True),
        largest_first(stalls.filter(is_worst), "dur_ns", "start_ns"),
    )


def _finding(code: str, severity: Severity, message: str, fix: str, loss: _Loss) -> Finding:
    is_warning = severity > Severity.INFO
    return Finding(
        code,
        severity,
        message,
        fix,
        impact=min(1.0, loss.lost_ns / loss.duration_ns),
        cost_ns=loss.lost_ns // max(1, loss.step_count),
        confidence=0.8 if is_warning else 0.4,
        ranks=distinct(loss.steps, "rank"),
        steps=distinct(loss.steps, "step"),
        evidence=loss.stalls.head(_EVIDENCE_ROWS),
        what_if=WhatIf(DEVICE_STALL) if is_warning else None,
        subject="" if is_warning else "unknown cause",
        is_of_window=loss.is_of_window,
    )


def _stall_message(loss: _Loss) -> str:
    idle, paused = (loss.stalls.filter(pl.col("kind") == kind) for kind in device_stalls.KINDS)
    ranks = distinct(loss.steps, "rank")
    return (
        f"The device does not run queued work for {loss}: it is time-sliced with another process, or throttled. It is "
        f"idle {idle.height} times although work is queued, and pauses {paused.height} kernels, typically for "
        f"{units.duration(_median(loss.stalls))}. {'Rank' if len(ranks) == 1 else 'Ranks'} {units.ranges(ranks)} "
        f"{'has' if len(ranks) == 1 else 'have'} such stalls."
    )


def _unexplained_message(loss: _Loss) -> str:
    return (
        f"The device is idle for {loss} although work is queued, {loss.stalls.height} times, typically for "
        f"{units.duration(_median(loss.stalls))}. The idle times recur before the same kernels, lie in CUDA graphs or "
        "are few, so their cause is unknown: work or waits that were not recorded, or another process on the device."
    )


def _median(stalls: pl.DataFrame) -> int:
    return int(stalls["dur_ns"].sort()[(stalls.height - 1) // 2])
