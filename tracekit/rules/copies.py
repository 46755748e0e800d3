"""The rule on exposed copies between host and device."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import steps_without_saves
from tracekit.analysis.host import launch_delay
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.rules import quoted_step, step_losses
from tracekit.rules.quoted_step import KEY
from tracekit.rules.rule import Finding, Rule, Severity, largest_first

_OWNER = ["op", "stack", "direction", "memory"]
_LARGE_BYTES = 1 << 20  # smaller copies measure latency, not bandwidth


@dataclass(frozen=True)
class ExposedCopy(Rule):
    """Copies between host and device during which the device computes nothing.

    What it does: reports runs in which copies from or to the host take more than `info_exposed_ratio` of the step while
    neither compute nor a collective runs; a warning from `max_exposed_ratio`. It names the op with most of that time,
    and its line where stacks were recorded.

    Why it costs: the device is idle during the copy. Each small copy takes some microseconds however few bytes it
    moves, and a copy from or to pageable memory also blocks the host and is staged through a pinned buffer.

    How it is measured: per copy, its time without concurrent compute and collectives on the device; copies of saves are
    left out. Together they cost at most the step's exposed copy time. Bandwidth is stated for copies of 1 MiB or more,
    and called slow below `slow_bytes_per_ns` GB/s: PCIe 3.0 x16 moves 12 GB/s. Steps that save are left out; the
    message quotes the median step of the worst device.

    How to fix: to the device: DataLoader(pin_memory=True) and .to(device, non_blocking=True) one batch ahead on a
    stream of its own, one large tensor instead of many small ones, or creation on the device. To the host: keep values
    on the device, stack them, and copy them once every N steps with non_blocking=True into pinned memory.

    Blind spots: the time for which the host waits for such a copy belongs to HOST002. Copies by kernels that read host
    memory (UVA, managed memory) look like compute. Copies between devices are not judged.
    """

    code: ClassVar[str] = "HOST004"
    facts: ClassVar[tuple[TraceFact, ...]] = (launch_delay.exposed_copies, *steps_without_saves.FACTS)
    info_exposed_ratio: float = 0.02
    max_exposed_ratio: float = 0.05
    slow_bytes_per_ns: float = 2.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        exposed = run.table(launch_delay.exposed_copies)
        lost = exposed.select(*KEY, pl.col("exposed_ns").alias("lost_ns"))
        steps = step_losses.by_step(run, lost, max_loss=pl.col("exposed_copy_ns"))
        loss = step_losses.worst(steps_without_saves.without_saves(run, steps), self.info_exposed_ratio)
        if loss is None:
            return
        rows = loss.rows(exposed)
        sums = rows.group_by(_OWNER).agg(pl.len().alias("count"), pl.col("bytes", "dur_ns", "exposed_ns").sum())
        largest = largest_first(sums, "exposed_ns", *_OWNER).row(0, named=True)
        yield loss.finding(
            self,
            Severity.WARNING if loss.row["lost_ratio"] >= self.max_exposed_ratio else Severity.INFO,
            f"Copies between host and device are exposed: {loss}, in {_count_text(rows.height)}. "
            f"{self._describe(largest)}",
            _fix(largest),
            confidence=0.8,
            evidence=quoted_step.evidence(exposed, loss.row, "exposed_ns"),
        )

    def _describe(self, largest: dict[str, Any]) -> str:
        """Return a sentence on the op with most of the exposed time: how many copies, how large, how fast, where."""
        count, moved = largest["count"], largest["bytes"] or 0
        memory = f", {largest['memory']} memory" if largest["memory"] else ""
        where = f" at {largest['stack']}" if largest["stack"] else ""
        speed = f", {units.size(moved)} in total" if moved else ""
        if moved >= _LARGE_BYTES * count and largest["dur_ns"]:
            per_ns = moved / largest["dur_ns"]
            slow = ", far below the bandwidth of any PCIe link" if per_ns < self.slow_bytes_per_ns else ""
            speed += f" at {per_ns:.1f} GB/s{slow}"
        return (
            f"{units.duration(largest['exposed_ns'])} of that is {_count_text(count)} ({largest['direction']}) by "
            f"{largest['op'] or 'an unknown op'}{where} ({units.duration(largest['dur_ns'] // count)} each"
            f"{memory}{speed})."
        )


def _count_text(count: int) -> str:
    return f"{count:,} {'copy' if count == 1 else 'copies'}"


def _fix(largest: dict[str, Any]) -> str:
    pinned = " Pageable memory blocks the host during the copy." if largest["memory"] == launch_delay.PAGEABLE else ""
    if largest["direction"] == launch_delay.TO_HOST:
        return (
            "Keep values on the device (metrics, losses, sampled tokens), stack them, and copy them once every N steps "
            f"with non_blocking=True into pinned memory.{pinned}"
        )
    return (
        "Copy one batch ahead on a stream of its own: DataLoader(pin_memory=True) and .to(device, non_blocking=True). "
        f"Merge many small tensors into one, or create them on the device.{pinned}"
    )
