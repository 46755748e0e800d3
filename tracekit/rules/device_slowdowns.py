"""Rules on devices that slow down: stalls with queued work, a clock that drops; and the clocks of late ranks."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import device_counters
from tracekit.analysis.compute.excess_time import EXTRA, LARGER, LATE
from tracekit.analysis.parallelism import device_comparison
from tracekit.analysis.parallelism.device_comparison import DeviceComparison
from tracekit.analysis.time import breakdown, device_stalls
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.device_time import CLOCK_DROP, DEVICE_STALL
from tracekit.rules import quoted_step
from tracekit.rules.late_work import Reason
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_SHARED = (
    "See which processes use the GPU: nvidia-smi pmon -c 1. Give the job the GPU alone: nvidia-smi -c "
    "EXCLUSIVE_PROCESS, or one pod per GPU without time-slicing replicas. Processes that must share it run at the same "
    "time under MPS, and apart in MIG instances. If there is no other process, see what throttles the GPU: nvidia-smi "
    "-q -d PERFORMANCE."
)
_UNKNOWN = (
    "Record with enable_cuda_sync_events=True and look at what runs before these kernels: a host function "
    "(cudaLaunchHostFunc), a stream memory operation or an event of another process is a wait of the program. Lost "
    "kernels of CUDA graphs look the same: record without graphs. If neither applies, look for another process on the "
    "GPU (nvidia-smi pmon -c 1)."
)
_GAPS = (
    "Record again without what else can delay every kernel: counters of a kernel profiler, a memory checker, a "
    "debugger, other processes on the GPU (nvidia-smi pmon -c 1). Compare with the time of a step "
    "without a profiler: if it is shorter by as much, the profiler causes it. Otherwise launch fewer kernels: "
    "torch.compile, fused optimizers and norms, larger batches; CUDA graphs shorten the time between kernels."
)
_FIX = (
    "See why the clock drops: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE. Improve cooling, raise the power "
    "limit (nvidia-smi -pl), or lock a clock that all GPUs can sustain (nvidia-smi -lgc)."
)
_WHILE_FIX = (
    "Find what else runs at that time: a save or an evaluation in the background, copies, another process "
    "(nvidia-smi pmon), or a clock that drops meanwhile (nvidia-smi -q -d PERFORMANCE). In the same part of every "
    "step, compare what is particular there: layout and alignment of its tensors, what runs on other streams."
)
_OTHER_FIX = "The clock does not fall, so look for other work on the device: nvidia-smi pmon -c 1 lists its processes."
_CONFIDENCES = {True: 0.9, None: 0.7, False: 0.4}
_LOWER = 0.97
"""A clock below this share of what it was before has fallen."""
_DEVICE = ["window", "rank", "device"]


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
    def ranks(self) -> tuple[int, ...]:
        return distinct(self.steps, "rank")

    @property
    def is_of_window(self) -> bool:
        return bool(self.steps["step"].is_null().all())

    @property
    def step_count(self) -> int:
        return self.steps.filter(pl.col("rank") == self.rank).select("window", "step").n_unique()


@dataclass(frozen=True)
class DeviceStall(Rule):
    """A stalled device: it runs nothing although work is queued, or pauses the kernels that it runs.

    What it does: reports devices that are idle although launched work waits, or whose kernels take longer by a time
    slice at times, for more than `min_stall_ratio` of the step: the GPU is shared with another process (time slices),
    or throttled. It reports devices that start most queued kernels late, if that takes `min_gap_ratio` of the step.
    Where idle times of `min_unexplained_ratio` always come before the same kernels, a wait of the program that the
    trace does not show is as likely: that is information.

    Why it costs: the device does nothing for this job meanwhile, and the ranks that exchange data with it wait.

    How it is measured: all devices of a trace are idle for 0.5 ms or more, and the work that runs next had been
    launched. An event of another stream cannot be what it waits for, since nothing runs. Five such stalls are needed,
    at places in the program that are passed without one at least as often. Kernels are counted as paused if they take
    longer than the same kernel in other steps or on other ranks by the length of these idle times or a multiple of it,
    and if most such excesses have one length. NVIDIA's driver switches between processes after time slices of 1 ms or
    more. Kernels start late where most idle times between queued kernels of one stream take 6 µs or more: NVIDIA's GPUs
    take 1 to 3 µs, MI300X 4 µs. Steps that save are left out. Stalls do not follow the steps, so the message quotes all
    steps of the worst device; the cost is the saving of a replay in which queued work runs at once.

    How to fix: find the other process (nvidia-smi, nvidia-smi pmon, rocm-smi --showpids); set the compute mode to
    EXCLUSIVE_PROCESS; share with MPS or MIG instead of time slices; without another process, look for throttling
    (nvidia-smi -q -d PERFORMANCE), a debugger, or memory that is paged (managed memory, UVM).

    Blind spots: needs recorded launches. Slices shorter than 0.5 ms are seen only where they delay most kernels; fewer
    than five in a window are not. Idle times inside CUDA graphs are information only, because profilers lose kernels of
    graphs. A sampled trace is not judged, and a CPU run has no queued work.
    """

    code: ClassVar[str] = "STREAM005"
    fix_without_pytorch: ClassVar[str] = (
        "Record again without other tools that attach to the process, and check for other processes on the device "
        "(nvidia-smi pmon -c 1); launch fewer kernels: merge small ones, or record them as a CUDA graph."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (*device_stalls.FACTS, *save_stages.FACTS)
    min_stall_ratio: float = 0.01
    min_gap_ratio: float = 0.03
    min_unexplained_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield a finding on stalls with a cause outside the program, one on late starts, and one on unknown causes."""
        stalls = run.table(device_stalls.paused_kernels)
        is_gap, is_recurring = pl.col("kind") == device_stalls.GAP, pl.col("is_recurring")
        recurring = _worst_device(run, stalls.filter(is_recurring, ~is_gap), self.min_stall_ratio)
        if recurring is not None:
            yield self._stops_of_device(recurring)
        gaps = _worst_device(run, stalls.filter(is_gap), self.min_gap_ratio)
        if gaps is not None:
            yield self._late_starts(gaps)
        unknown = _worst_device(run, stalls.filter(~is_recurring), self.min_unexplained_ratio)
        if unknown is not None:
            yield self._unexplained_finding(unknown)

    def _stops_of_device(self, loss: _Loss) -> Finding:
        of_kind = {kind: loss.stalls.filter(pl.col("kind") == kind).height for kind in device_stalls.KINDS}
        return _finding(
            self.code,
            Severity.WARNING,
            f"Another process, or throttling, stops the device of {units.numbers('rank', loss.ranks)}",
            f"The device does not run queued work for {loss}: it is time-sliced with another process, or throttled. It "
            f"is idle {of_kind[device_stalls.IDLE]} times although work is queued, and pauses "
            f"{of_kind[device_stalls.PAUSED]} kernels, typically for {units.duration(_median(loss.stalls))}. "
            f"{'Rank' if len(loss.ranks) == 1 else 'Ranks'} {units.ranges(loss.ranks)} "
            f"{'has' if len(loss.ranks) == 1 else 'have'} such stalls.",
            _SHARED,
            loss,
        )

    def _late_starts(self, loss: _Loss) -> Finding:
        return _finding(
            self.code,
            Severity.WARNING,
            f"The device of {units.numbers('rank', loss.ranks)} starts queued kernels late",
            f"The device is idle for {loss} although kernels are launched: {loss.stalls.height:,} times, typically "
            f"for {units.duration(_median(loss.stalls))} beyond the {units.duration(device_stalls.USUAL_GAP_NS)} that "
            "a GPU takes between two kernels.",
            _GAPS,
            loss,
            subject="late starts",
        )

    def _unexplained_finding(self, loss: _Loss) -> Finding:
        return _finding(
            self.code,
            Severity.INFO,
            f"Devices idle although work is queued, on {units.numbers('rank', loss.ranks)}",
            f"The device is idle for {loss} although work is queued, {loss.stalls.height} times, typically for "
            f"{units.duration(_median(loss.stalls))}. The idle times recur before the same kernels, lie in CUDA graphs "
            "or are few, so their cause is unknown: work or waits that were not recorded, or another process on the "
            "device.",
            _UNKNOWN,
            loss,
            subject="unknown cause",
        )


@dataclass(frozen=True)
class ClockDrop(Rule):
    """A clock drop: from some step on, or for a while, all kernels of a device take longer by about the same factor.

    What it does: reports the ranks whose kernels become slower together during the window, at once or steadily, by how
    much, and from which step on, if that costs `min_cost_ratio` of the window. So it does where they are slower for a
    while only, once or in the same part of every step.

    Why it costs: the device runs at a lower clock, because it is too hot or draws too much power, or shares its memory
    with something else for a while, such as a save in the background; and the ranks that exchange data with it wait.

    How it is measured: each kernel (name, grid, block, bytes, input shapes of its op; without recorded shapes, its
    neighbours on the stream) is compared with itself before, where no collective overlaps it. The moment is that after
    which kernels take longest. The slowdown is the median over kernels by their time. It must exceed 3% and how much
    the same kernel varies, and kernels with three quarters of the time must be slower by a third of it or more: a lower
    clock slows all kernels, those bound by memory less. One drop, at once or steady, must explain three quarters of how
    steps differ, and the work of no other rank may vary from step to step by half of the slowdown: sequences of uneven
    lengths make each step take another time. A while is the part of the window, or of all steps, in which the same
    kernels take longest, by 10% or more; it does not begin and end with steps. The cost is the saving of a replay in
    which these kernels take time before, as a mean over all steps of the window. If the metrics log has counters of the
    GPU (tracekit record --device-metrics), the message says whether its clock fell, and why; if it did not, another
    process is likely.

    How to fix: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE shows why the clock drops (rocm-smi -a on AMD):
    improve cooling, raise the power limit (nvidia-smi -pl) or lock a clock that all GPUs can sustain (nvidia-smi -lgc);
    move the job off a node that stays slow.

    Blind spots: needs the same kernels before and after in one window, 30 on either side: a device that is slow in the
    whole window is a straggler (RANK001). Another process that computes on the device at the same time looks the same.
    """

    code: ClassVar[str] = "STEP003"
    fix_without_pytorch: ClassVar[str] = (
        "Check clocks, power limit and temperature of the device (nvidia-smi -q -d "
        "CLOCK,PERFORMANCE,POWER,TEMPERATURE)."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        device_counters.clock_drops,
        device_counters.work_variation,
        device_counters.slowed_kernels,
        device_counters.recorded_clocks,
        *save_stages.FACTS,
    )
    min_cost_ratio: float = 0.01

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all ranks whose clock drops."""
        drops = run.table(device_counters.confirmed_drops)
        if drops.is_empty():
            return
        slowed = run.table(device_counters.slowed_kernels).join(drops.select(_DEVICE), on=_DEVICE, nulls_equal=True)
        losses = save_stages.losses(run, slowed, "excess_ns")
        sums = losses.group_by(_DEVICE).agg(
            pl.col("lost_ns", "duration_ns").sum(),
            pl.len().alias("steps"),
            pl.col("step").is_null().all().alias("is_of_window"),
        )
        joined = drops.join(sums, on=_DEVICE, nulls_equal=True).with_columns(
            (pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio")
        )
        costly = joined.filter(pl.col("lost_ratio") >= self.min_cost_ratio)
        if costly.is_empty():
            return
        worst = largest_first(costly, "lost_ratio", "rank").row(0, named=True)
        ranks, places = distinct(costly, "rank"), losses.join(costly, on=_DEVICE, how="semi", nulls_equal=True)
        since = "the middle of the window" if worst["step"] is None else f"step {worst['step']}"
        longer = f"{worst['slowdown']:.2f} times as long as before in total "
        longer += f"({worst['low']:.2f} to {worst['high']:.2f} for the middle half of their time)"
        if worst["spans"]:
            longer = longer.replace("as before", "as at other times")
        if worst["is_gradual"]:
            longer = f"longer and longer, in the end {worst['slowdown']:.2f} times as long as before"
        on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {units.ranges(ranks)}"
        fell, clock = None, ""
        clocks = quoted_step.rows_of(run.table(device_counters.recorded_clocks), worst, _DEVICE)
        if clocks.height:
            before_mhz, after_mhz, reasons = clocks.select("before_mhz", "since_mhz", "reasons").row(0)
            fell = after_mhz < _LOWER * before_mhz
            why = f" ({', '.join(reasons)})" if reasons else ""
            clock = f"does not fall: {before_mhz:,.0f} and {after_mhz:,.0f} MHz"
            clock = f"falls from {before_mhz:,.0f} to {after_mhz:,.0f} MHz{why}" if fell else clock
            clock = f" Its recorded clock {clock}."
        when = f"from {since} on"
        what = f"The clock of {on} drops" if fell is not False else f"All kernels of {on} become slower"
        if worst["spans"]:
            what = f"All kernels of {on} are slower for a while"
            when = f"for {units.duration(worst['slow_ns'])} in {since.removeprefix('the middle of ')}"
            if worst["spans"] > 1:
                when = f"for {units.duration(worst['slow_ns'])}, in the same part of {worst['spans']} steps"
        lasting_fix = _FIX if fell is not False else _OTHER_FIX
        yield Finding(
            self.code,
            Severity.WARNING,
            f"{what}: {when}, kernels of rank {worst['rank']} take {longer}. That adds "
            f"{units.duration(worst['lost_ns'])} to the window ({units.share(worst['lost_ratio'])}).{clock}",
            _WHILE_FIX if worst["spans"] else lasting_fix,
            impact=min(1.0, worst["lost_ratio"]),
            cost_ns=worst["lost_ns"] // max(1, worst["steps"]),
            confidence=_CONFIDENCES[fell],
            ranks=ranks,
            steps=distinct(places, "step"),
            evidence=largest_first(slowed, "excess_ns", "rank", "start_ns").head(_EVIDENCE_ROWS),
            what_if=WhatIf(CLOCK_DROP),
            is_of_window=bool(worst["is_of_window"]),
            claim=f"{what}{',' if worst['spans'] else ''} {when}",
        )


def _worst_device(run: Run, stalls: pl.DataFrame, min_ratio: float) -> _Loss | None:
    """Return the loss of the device that loses most; None if it loses a smaller share."""
    steps = save_stages.losses(run, stalls, "dur_ns")
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


def _finding(
    code: str, severity: Severity, claim: str, message: str, fix: str, loss: _Loss, subject: str = ""
) -> Finding:
    is_warning = severity > Severity.INFO
    return Finding(
        code,
        severity,
        message,
        fix,
        impact=min(1.0, loss.lost_ns / loss.duration_ns),
        cost_ns=loss.lost_ns // max(1, loss.step_count),
        confidence=0.8 if is_warning else 0.4,
        ranks=loss.ranks,
        steps=distinct(loss.steps, "step"),
        evidence=loss.stalls.head(_EVIDENCE_ROWS),
        what_if=WhatIf(DEVICE_STALL) if is_warning else None,
        subject=subject,
        is_of_window=loss.is_of_window,
        claim=claim,
    )


def _median(stalls: pl.DataFrame) -> int:
    return int(stalls["dur_ns"].sort()[(stalls.height - 1) // 2])


_CLOCK_FIXES = {
    device_comparison.THERMAL: (
        "Heat slows {ranks}: check fans, airflow and inlet temperature of the node "
        "(nvidia-smi -q -d TEMPERATURE,PERFORMANCE), and remove the node from the job until it is cool."
    ),
    device_comparison.POWER_BRAKE: (
        "The power supply slows {ranks}: check the power supplies and cables of the node "
        "(nvidia-smi -q -d POWER,PERFORMANCE), and remove the node from the job until it is repaired."
    ),
    device_comparison.POWER_CAP: (
        "The power limit slows {ranks}: compare the limits (nvidia-smi -q -d POWER), raise a limit that is lower than "
        "the others' (nvidia-smi -pl), or replace a GPU that needs more power for the same clock."
    ),
    device_comparison.HARDWARE: (
        "The GPU hardware lowers the clock of {ranks}: find out why (nvidia-smi -q -d "
        "PERFORMANCE,TEMPERATURE,POWER), and remove the node from the job until it is repaired."
    ),
    device_comparison.CLOCK_SETTING: (
        "The clock of {ranks} is set lower than that of the others: reset it (nvidia-smi -rgc, nvidia-smi -rac)."
    ),
    device_comparison.SYNC_BOOST: (
        "Another GPU of a sync boost group slows {ranks}: find out which (nvidia-smi -q -d PERFORMANCE)."
    ),
}
_UNEXPLAINED_CLOCK = (
    "See why the clock of {ranks} is lower (nvidia-smi -q -d CLOCK,PERFORMANCE,POWER,TEMPERATURE), or use another node."
)
_MORE_WORK = (
    "The clocks are equal, so check the work of {ranks}: uneven batches (sequence lengths, experts), or other jobs on "
    "the same GPU."
)
_DATA_OR_HOST = (
    "The clocks are equal, so check the data and the host of {ranks}: uneven batches, a busy host (HOST001, HOST003), "
    "other jobs on the node."
)
_RECORD_CLOCKS = " Or record the clocks of the GPUs: tracekit record --device-metrics."
_RESET_DEVICE = " Reset the GPU with memory errors (nvidia-smi --gpu-reset), and replace it if they return."


def compare_late_devices(run: Run, ranks: tuple[int, ...], steps: pl.DataFrame, reason: Reason) -> tuple[str, str]:
    """Sentences on the GPUs of late ranks by their counters, each after a space, and the fix; "" and its own without.

    `steps` are those in which they are late, columns window and step. A slow GPU does not explain a late host, extra
    calls or larger inputs.
    """
    is_explained = reason.kind in (EXTRA, LARGER, LATE)
    fix, who = reason.fix, units.numbers("rank", ranks)
    compared, errors = device_comparison.compare(run, ranks, steps), device_comparison.memory_errors(run, ranks)
    several, message = len(ranks) > 1, ""
    reset = _RESET_DEVICE if errors.uncorrected or errors.is_remap_pending else ""
    if compared is None:
        fix += reset + ("" if is_explained or not breakdown.is_on_device(run) else _RECORD_CLOCKS)
    else:
        own, peers = f"{compared.clock_mhz:,.0f} MHz", f"{compared.others_clock_mhz:,.0f} MHz"
        message = f" {'Their GPUs run' if several else 'Its GPU runs'} at {own}"
        message += (
            f" against {peers}: {_slow_clock(compared)}."
            if compared.is_slower
            else (f", the others at {peers}: the hardware is not slower.")
        )
        if not is_explained and compared.is_slower:
            fix = (_CLOCK_FIXES[compared.cause] if compared.cause else _UNEXPLAINED_CLOCK).format(ranks=who)
        elif not is_explained:
            fix = (_MORE_WORK if reason.kind else _DATA_OR_HOST).format(ranks=who)
        fix += reset
    if errors.uncorrected:
        count = units.count(errors.uncorrected, "uncorrected memory error")
        message += f" {'Their GPUs have' if several else 'Its GPU has'} {count} (ECC)."
    if errors.is_remap_pending:
        message += " A memory row is to be replaced at the next reset."
    return message, fix


def _slow_clock(compared: DeviceComparison) -> str:
    """Why the clock is lower, as far as counters show it."""
    cause = f"{compared.cause} in {compared.cause_steps} of {compared.steps} steps"
    parts = [cause if compared.cause else "no throttle reason is reported"]
    hot_c, peer_c = compared.temperature_c, compared.others_temperature_c
    if hot_c is not None and peer_c is not None:
        parts.append(f"{hot_c:.0f} °C against {peer_c:.0f} °C")
    limit_w, peer_limit_w = compared.power_limit_w, compared.others_power_limit_w
    if limit_w is not None and peer_limit_w is not None and limit_w < peer_limit_w:
        parts.append(f"power limit {limit_w:,.0f} W against {peer_limit_w:,.0f} W")
    return ", ".join(parts)
