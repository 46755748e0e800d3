"""The rule on clock drops: from some moment on, all kernels of a device are slower."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.compute import clock_drops
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.slow_ranks import CLOCK_DROP
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_FIX = (
    "See why the clock drops: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE (rocm-smi -a on AMD). Improve "
    "cooling, raise the power limit (nvidia-smi -pl), or lock a clock that all GPUs can sustain (nvidia-smi -lgc)."
)
_OTHER_FIX = (
    "The clock does not fall, so look for other work on the device: nvidia-smi pmon -c 1 and "
    "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv list its processes (rocm-smi --showpids on AMD)."
)
_CONFIDENCES = {True: 0.9, None: 0.7, False: 0.4}
_LOWER = 0.97
"""A clock below this share of what it was before has fallen."""
_DEVICE = ["window", "rank", "device"]


@dataclass(frozen=True)
class ClockDrop(Rule):
    """A clock drop: from some step on, all kernels of a device take longer by about the same factor.

    What it does: reports the ranks whose kernels become slower together during the window, by how much, and from which
    step on, if that costs `min_cost_ratio` of the window; below `warning_cost_ratio` it is information.

    Why it costs: the device runs at a lower clock, because it is too hot or draws too much power, and the ranks that
    exchange data with it wait.

    How it is measured: each kernel (name, grid, block, bytes, input shapes of its op; without recorded shapes, its
    neighbours on the stream) is compared with itself before, where no collective overlaps it. The moment is that after
    which kernels take longest. The slowdown is the median over kernels by their time. It must exceed 3% and how much
    the same kernel varies, and kernels with three quarters of the time must be slower by a third of it or more: a lower
    clock slows all kernels, those bound by memory less. The cost is the saving of a replay in which these kernels take
    time before, as a mean over all steps of the window. If the metrics log has counters of the GPU (tracekit record
    --device-metrics), the message says whether its clock fell, and why; if it did not, another process is likely.

    How to fix: nvidia-smi -q -d PERFORMANCE,CLOCK,POWER,TEMPERATURE shows why the clock drops (rocm-smi -a on AMD):
    improve cooling, raise the power limit (nvidia-smi -pl) or lock a clock that all GPUs can sustain (nvidia-smi -lgc);
    move the job off a node that stays slow.

    Blind spots: needs the same kernels before and after in one window, 30 on either side: a device that is slow in the
    whole window is a straggler (RANK001). Another process that computes on the device at the same time looks the same.
    """

    code: ClassVar[str] = "STEP003"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        clock_drops.clock_drops,
        clock_drops.slowed_kernels,
        clock_drops.recorded_clocks,
        *steps_without_saves.FACTS,
    )
    min_cost_ratio: float = 0.01
    warning_cost_ratio: float = 0.03

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for all ranks whose clock drops."""
        drops = run.table(clock_drops.clock_drops)
        if drops.is_empty():
            return
        slowed = run.table(clock_drops.slowed_kernels).join(drops.select(_DEVICE), on=_DEVICE, nulls_equal=True)
        losses = steps_without_saves.losses(run, slowed, "excess_ns")
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
        is_warning = worst["lost_ratio"] >= self.warning_cost_ratio
        since = "the middle of the window" if worst["step"] is None else f"step {worst['step']}"
        on = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {units.ranges(ranks)}"
        clock = _recorded_clock(run, worst)
        what = f"The clock of {on} drops" if clock.fell is not False else f"All kernels of {on} become slower"
        yield Finding(
            self.code,
            Severity.WARNING if is_warning else Severity.INFO,
            f"{what}: from {since} on, kernels of rank {worst['rank']} take {worst['slowdown']:.2f} "
            f"times as long as before in total ({worst['low']:.2f} to {worst['high']:.2f} for the middle half of "
            f"their time). That adds {units.duration(worst['lost_ns'])} to the window "
            f"({units.share(worst['lost_ratio'])}).{clock.text}",
            _FIX if clock.fell is not False else _OTHER_FIX,
            impact=min(1.0, worst["lost_ratio"]),
            cost_ns=worst["lost_ns"] // max(1, worst["steps"]),
            confidence=_CONFIDENCES[clock.fell],
            ranks=ranks,
            steps=distinct(places, "step"),
            evidence=largest_first(slowed, "excess_ns", "rank", "start_ns").head(_EVIDENCE_ROWS),
            what_if=WhatIf(CLOCK_DROP),
            is_of_window=bool(worst["is_of_window"]),
        )


class _RecordedClock(NamedTuple):
    """Whether the recorded clock fell, None if none is recorded, and what to say about it."""

    fell: bool | None
    text: str


def _recorded_clock(run: Run, drop: dict[str, Any]) -> _RecordedClock:
    """The GPU's clock around a drop, as its counters recorded it."""
    is_own = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(drop[name], pl.Int64)) for name in _DEVICE)
    rows = run.table(clock_drops.recorded_clocks).filter(is_own)
    if rows.is_empty():
        return _RecordedClock(None, "")
    before_mhz, since_mhz, reasons = rows.select("before_mhz", "since_mhz", "reasons").row(0)
    if since_mhz >= _LOWER * before_mhz:
        both = f"{before_mhz:,.0f} and {since_mhz:,.0f} MHz"
        return _RecordedClock(fell=False, text=f" Its recorded clock does not fall: {both}.")
    why = f" ({', '.join(reasons)})" if reasons else ""
    return _RecordedClock(
        fell=True, text=f" Its recorded clock falls from {before_mhz:,.0f} to {since_mhz:,.0f} MHz{why}."
    )
