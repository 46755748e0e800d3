"""Rules on streams that delay each other: the give-way effect, and streams that are serialized without need."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.communication import queueing
from tracekit.analysis.compute import contention, exposed_copies
from tracekit.analysis.parallelism import workload
from tracekit.analysis.time import breakdown
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.collectives import SHARED_COMMUNICATOR, SHARED_QUEUE
from tracekit.replay.graph.causes.contention import GIVE_WAY
from tracekit.replay.graph.causes.device_time import DEVICE_COPIES, HOST_COPIES
from tracekit.rules import quoted_step
from tracekit.rules.advice import Advice
from tracekit.rules.quoted_step import KEY
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, largest_first

_GAP = ("window", "rank", "communication_gap")
_OWNER = ["op", "stack", "direction", "memory"]
_NOT_OF_HOST = "not between host and device"
"""Subject of the finding on other copies and on memory sets."""
_LARGE_BYTES = 1 << 20  # smaller copies measure latency, not bandwidth


@dataclass(frozen=True)
class GiveWay(Rule):
    """The give-way effect: kernels that prepare collectives are slowed by compute, and compute then waits for them.

    What it does: reports the complete chain of the give-way effect of FSDP: a kernel that prepares a collective takes
    more than `min_slowdown` times as long during compute as alone, no collective runs meanwhile, and compute is idle
    until the delayed collective ends, or one that follows it without a gap, such as the next all-gather on its
    communicator. Costs below `min_cost_ratio` of the step are not reported.

    Why it costs: preparation (copies, casts and divides before a reduce-scatter) gets few SMs while the main compute
    runs, and compute then waits for the collectives as long as their preparation was delayed.

    How it is measured: preparation is the work launched under the same FSDP span before the collective, else the work
    directly before it on its communication stream. The time alone is the median of the same kernel (name, grid, block)
    without concurrent compute, else of the same kernel with another grid, scaled by the number of blocks (see the
    column sample). For each gap in communication, the smallest of three times counts: the extra time of its
    preparation; the part of the gap that this fills; and the idle time of compute behind it. The message quotes the
    median step of the worst device. The cost is the saving of a replay in which each preparation takes its time
    alone (`tracekit whatif`); below `min_cost_ratio` it is information.

    How to fix: move the preparation to the compute stream or out of the step: preallocated flat buffers (YaFSDP,
    fully_shard), fewer casts and divides before the reduce-scatter, gradients in the reduce dtype
    (MixedPrecisionPolicy.reduce_dtype).

    Blind spots: needs device streams, and samples of the same kernel alone: without any, all of its time counts as its
    own (COMM004). Slowed preparation that no compute waits for is not reported, nor is the time that compute loses to
    concurrent preparation.
    """

    code: ClassVar[str] = "STREAM001"
    fix_without_pytorch: ClassVar[str] = (
        "Launch what other streams wait for first, or give its stream a higher priority (cudaStreamCreateWithPriority)."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        contention.preparation,
        contention.device_count,
        breakdown.by_step,
        workload.strategy_marks,
    )
    min_slowdown: float = 1.5
    min_cost_ratio: float = 0.02

    def blind_spot(self, run: Run) -> str | None:
        """Return why a CPU run, or one in which preparation never runs alone, cannot be judged."""
        if not run.table(contention.device_count)["devices"].sum():
            return "no device activity was recorded, so contention between streams was not judged."
        unknown = run.table(contention.preparation).filter(
            pl.col("alone_ns").is_null(), pl.col("overlapped_ns") * 2 > pl.col("dur_ns"), pl.col("waited_ns") > 0
        )
        steps = quoted_step.by_step(run, unknown.select(*quoted_step.KEY, pl.col("dur_ns").alias("lost_ns")))
        loss = quoted_step.worst_loss(steps, self.min_cost_ratio)
        if loss is None:
            return None
        return (
            f"{units.duration(loss.row['lost_ns'])} of preparation ran only concurrently with compute in "
            f"{quoted_step.describe(loss.row)}, so its slowdown is unknown: {contention.RECORD}."
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if compute waits for slowed preparation."""
        # Slowed preparation; `lost_ns`, how long compute waited for it, is in the first row of a gap.
        preparation = quoted_step.in_steps(run, run.table(contention.preparation))
        slowed = (
            preparation.drop_nulls(["alone_ns", "communication_gap"])
            .filter(
                pl.col("dur_ns") > self.min_slowdown * pl.col("alone_ns"),
                pl.col("overlapped_ns") * 2 > pl.col("dur_ns"),
            )
            .with_columns((pl.col("dur_ns") - pl.col("alone_ns")).alias("delay_ns"))
            .sort("window", "rank", "start_ns")
        )
        lost_ns = pl.min_horizontal(pl.col("delay_ns").sum().over(_GAP), "contention_ns", "waited_ns")
        first = pl.int_range(pl.len()).over(_GAP) == 0
        chains = slowed.filter(lost_ns > 0).with_columns(pl.when(first).then(lost_ns).otherwise(0).alias("lost_ns"))
        steps = quoted_step.by_step(run, chains.select(*quoted_step.KEY, "lost_ns", "delay_ns"))
        loss = quoted_step.worst_for_replay(steps, self.min_cost_ratio)
        if loss is None:
            return
        quoted_chains = loss.rows(chains)
        slowdown = quoted_chains.select((pl.col("dur_ns") / pl.col("alone_ns")).median()).item()
        by_unit = (
            quoted_chains.drop_nulls("unit")
            .group_by("unit")
            .agg(pl.col("lost_ns").sum())
            .sort("lost_ns", "unit", descending=True)
        )
        unit = f", most for unit {by_unit['unit'][0] or 'the root'}" if by_unit.height > 1 else ""
        yield loss.finding(
            self,
            Severity.WARNING,
            f"Kernels that prepare collectives take {slowdown:.1f} times as long during compute as alone, "
            f"{units.duration(loss.row['delay_ns'])} longer in total. Compute then waits for them: {loss}{unit}.",
            _PREPARE_EARLIER.get(workload.run_strategy(run) or "", _PREPARE_ANY_EARLIER),
            confidence=0.8 if (quoted_chains["sample"] == "alone").any() else 0.6,
            evidence=quoted_step.evidence(chains, loss.row, "lost_ns"),
            what_if=WhatIf(GIVE_WAY, self.min_cost_ratio),
            claim="Kernels that prepare collectives give way to compute, which then waits for them",
        )


@dataclass(frozen=True)
class SerializedStreams(Rule):
    """Streams that could run concurrently but take turns, because they share a hardware queue or a communicator.

    What it does: warns about devices on which no kernel starts before one that was launched earlier on another stream,
    although many could: one queue feeds all streams (`CUDA_DEVICE_MAX_CONNECTIONS=1`). And reports, as information,
    collectives of one process group on different streams that wait for each other without a dependency: they share a
    communicator. Costs below `min_cost_ratio` of the step are not reported.

    Why it costs: work at the head of the queue that waits for an event blocks everything launched after it: the next
    all-gather waits for a compute kernel to start, and compute for a collective to start.

    How it is measured: a kernel could start earlier if it was launched, everything launched before it on its own stream
    had ended, and a kernel launched earlier on another stream started more than 20 µs later. A shared queue is reported
    if at most `max_overtaking_ratio` of these kernels do overtake, and at least `min_blocked` start together with the
    earlier one. The loss is their delay while no work of their kind (compute, communication) ran, at most the step's
    duration minus its compute or its communication. A collective waits for its communicator if it starts within 20 µs
    of the end of another one of its group on another stream; a reduction cannot start before the compute launched
    before it. The message quotes the median step of the worst device. The cost is the saving of a replay
    without that order (`tracekit whatif`), where possible; else it is an upper bound, which is never reported as the
    costliest finding.

    How to fix: unset CUDA_DEVICE_MAX_CONNECTIONS or set it to 8 or more (unless tensor parallelism relies on 1 to order
    its kernels); for collectives, FSDPModule.set_separate_reduce_scatter_group, or a separate process group.

    Blind spots: needs device streams and launch times. The loss is an upper bound: most traces do not contain event
    waits, and collectives of two communicators share the links. Kernels of CUDA graphs are launched together and are
    not judged.
    """

    code: ClassVar[str] = "STREAM002"
    fix_without_pytorch: ClassVar[str] = (
        "Use streams of cudaStreamNonBlocking instead of the default stream, set CUDA_DEVICE_MAX_CONNECTIONS to 8 or"
        " more, and use separate communicators for collectives that need not wait for each other."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        queueing.launch_order,
        queueing.delayed_kernels,
        breakdown.by_step,
        workload.strategy_marks,
    )
    max_overtaking_ratio: float = 0.01
    min_blocked: int = 8
    min_cost_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield a finding for the queue and one for the communicators, if they cost enough."""
        order = self._in_launch_order(quoted_step.in_steps(run, run.table(queueing.launch_order)))
        delayed = run.table(queueing.delayed_kernels).with_columns(pl.col("delay_ns").alias("lost_ns"))
        upper_bound = pl.col("duration_ns") - pl.max_horizontal("compute_ns", "communication_ns")
        steps = quoted_step.by_step(run, order.rename({"delay_ns": "lost_ns"}), max_loss=upper_bound)
        queued = delayed.join(order.select("rank", "device").unique(), on=["rank", "device"], how="semi")
        yield from self._finding(run, steps, queued.filter(pl.col("reason") == queueing.ORDER), order)
        waits = delayed.filter(pl.col("reason") == queueing.COMMUNICATOR).join(
            queued, on=["rank", "device"], how="anti"
        )
        shared = quoted_step.by_step(
            run, waits.select(*quoted_step.KEY, "lost_ns"), max_loss=pl.col("exposed_communication_ns")
        )
        yield from self._finding(run, shared, waits, None)

    def _in_launch_order(self, order: pl.DataFrame) -> pl.DataFrame:
        """Return the rows of the devices that start all kernels in launch order."""
        sums = order.group_by("rank", "device").agg(pl.col("overtake_chances", "overtakes", "delayed").sum())
        queues = sums.filter(
            pl.col("delayed") >= self.min_blocked,
            pl.col("overtakes") <= self.max_overtaking_ratio * pl.col("overtake_chances"),
        )
        return order.join(queues.select("rank", "device"), on=["rank", "device"], how="semi")

    def _finding(
        self, run: Run, steps: pl.DataFrame, delayed: pl.DataFrame, order: pl.DataFrame | None
    ) -> Iterator[Finding]:
        loss = quoted_step.worst_for_replay(steps, self.min_cost_ratio)
        # A finding that is information at most is not worth a replay below the threshold.
        if loss is None or (order is None and loss.row["lost_ratio"] < self.min_cost_ratio):
            return
        queue = order is not None
        if order is None:
            rows = loss.rows(delayed)
            message = f"{rows.height} collectives wait {units.duration(int(rows['delay_ns'].sum()))} for another one "
            message += f"of the same process group on another stream. Up to {loss} is exposed."
        else:
            sums = loss.rows(order).select(pl.col("overtake_chances", "overtakes", "delayed").sum()).row(0)
            chances, overtaken, blocked = map(int, sums)
            message = f"All streams appear to share one hardware queue. It delays up to {loss}. {overtaken} of "
            message += f"{chances} kernels overtook an earlier launch on another stream, and {blocked} started only "
            message += "with it."
        yield loss.finding(
            self,
            Severity.WARNING if queue else Severity.INFO,
            message,
            _QUEUE_FIX if queue else _COMMUNICATOR_FIX.format(_SEPARATE.get(workload.run_strategy(run) or "", "")),
            confidence=0.8 if queue else 0.5,
            evidence=quoted_step.evidence(delayed, loss.row, "lost_ns"),
            what_if=WhatIf(SHARED_QUEUE if queue else SHARED_COMMUNICATOR, self.min_cost_ratio),
            subject="" if queue else queueing.COMMUNICATOR,
            is_upper_bound=True,
            claim=_SHARED_QUEUE if queue else _SHARED_GROUP,
        )


_SHARED_QUEUE = "All streams share one hardware queue"
_SHARED_GROUP = "Collectives of one process group wait for each other"
_QUEUE_FIX = (
    "Unset CUDA_DEVICE_MAX_CONNECTIONS, or set it to 8 or more: with 1, every stream waits for earlier launches on all "
    "other streams."
)
_COMMUNICATOR_FIX = (
    "Use separate communicators for collectives that need not wait for each other: {}another process group "
    "(dist.new_group). They still share the links."
)
_COPY_RESULTS = Advice(
    "Keep values on the device (metrics, losses, sampled tokens), stack them, and copy them once every N steps with "
    "non_blocking=True into pinned memory.",
    other="Keep results on the device, and copy several at once with cudaMemcpyAsync into pinned memory "
    "(cudaHostAlloc), while the next kernels run.",
)
_COPY_AHEAD = Advice(
    "Copy one batch ahead on a stream of its own: DataLoader(pin_memory=True) and .to(device, non_blocking=True). "
    "Merge many small tensors into one, or create them on the device.",
    "Copy the next inputs ahead on a stream of its own, from pinned memory with .to(device, non_blocking=True). "
    "Merge many small tensors into one, or create them on the device.",
    "Copy the next inputs ahead on a stream of its own: cudaMemcpyAsync from pinned memory (cudaHostAlloc), and "
    "cudaStreamWaitEvent before the kernels that read them. Merge small copies into one.",
)
_COPY_LESS = {
    exposed_copies.PEER: Advice(
        "Send to the other device on a stream of its own while compute goes on, in few large copies (.to(device, "
        "non_blocking=True), or isend and irecv); keep on each device what it needs in every step.",
        other="Send to the other device on a stream of its own while compute goes on, in few large copies.",
    ),
    exposed_copies.WITHIN_DEVICE: Advice(
        "Write results where they are needed: views in place of clone() and contiguous(), out=…, buffers allocated "
        "once in place of torch.cat. torch.compile fuses copies into the kernels around them.",
        other="Write results where they are needed, or copy on another stream while compute goes on.",
    ),
    exposed_copies.MANAGED: Advice(
        "Prefetch managed memory before it is needed (cudaMemPrefetchAsync, on a stream of its own), or allocate it on "
        "the device.",
        other="Prefetch managed memory before it is needed (cudaMemPrefetchAsync, on a stream of its own), or allocate "
        "it on the device.",
    ),
    exposed_copies.MEMORY_SET: Advice(
        "Set no memory that is overwritten: torch.empty in place of torch.zeros, zero_grad(set_to_none=True), buffers "
        "that are allocated once.",
        other="Set no memory that is overwritten, or set it on another stream while compute goes on.",
    ),
    exposed_copies.UNKNOWN: Advice(
        "Copy ahead on a stream of its own while compute goes on, or keep the data where it is used. The name of the "
        "copy does not say between which memories it moves data.",
        other="Copy ahead on another stream while kernels run, or keep the data where it is used.",
    ),
}
"""Advice on copies that are not between host and device, by direction."""
_COPIES = {exposed_copies.TO_HOST: _COPY_RESULTS, exposed_copies.TO_DEVICE: _COPY_AHEAD}
_SEPARATE = {workload.FSDP2: "FSDPModule.set_separate_reduce_scatter_group, or "}
_PREPARE_ANY_EARLIER = (
    "Prepare data on the compute stream into pre-allocated flat buffers, and avoid casts, copies and divides directly "
    "before a collective."
)
_PREPARE_IN_BUFFERS = (
    "Prepare gradients on the compute stream into pre-allocated flat buffers (fully_shard, YaFSDP), or avoid casts and "
    "divides before the reduce-scatter ({}.reduce_dtype)."
)
_PREPARE_EARLIER = {
    workload.DDP: "Let gradients share the buckets' memory, which saves a copy (gradient_as_bucket_view=True), and "
    "avoid casts before the all-reduce.",
    workload.FSDP1: _PREPARE_IN_BUFFERS.format("MixedPrecision"),
    workload.FSDP2: _PREPARE_IN_BUFFERS.format("MixedPrecisionPolicy"),
    workload.YAFSDP: _PREPARE_IN_BUFFERS.format("MixedPrecisionPolicy"),
}


@dataclass(frozen=True)
class ExposedCopy(Rule):
    """Copies and memory sets during which the device computes nothing.

    What it does: reports runs in which copies from or to the host take more than `min_exposed_ratio` of the step while
    neither compute nor a collective runs; and those in which other copies (between devices, within one, of managed
    memory) and memory sets together take more than `min_device_ratio`. It names the op with most of that time,
    and its line where stacks were recorded.

    Why it costs: the device computes nothing during the copy. Each small copy takes some microseconds however few bytes
    it moves, and a copy from or to pageable memory also blocks the host and is staged through a pinned buffer.

    How it is measured: per copy, its time without concurrent compute and collectives on the device; copies of saves are
    left out. Together they take at most the step's exposed copy time. The cost is the saving of a replay in which they
    take no exposed time, and the host does not wait for those from pageable memory to the device (`tracekit whatif`):
    what another bottleneck hides is not saved. Bandwidth is stated for copies of 1 MiB or more, and called slow below
    `slow_bytes_per_ns` GB/s if they are from or to the host: PCIe 3.0 x16 moves 12 GB/s. Steps that save are left out;
    the message quotes the median step of the worst device.

    How to fix: to the device: DataLoader(pin_memory=True) and .to(device, non_blocking=True) one batch ahead on a
    stream of its own, one large tensor instead of many small ones, or creation on the device. To the host: keep values
    on the device, stack them, and copy them once every N steps with non_blocking=True into pinned memory. Between
    devices: send on a stream of its own while compute goes on. Within a device: views in place of clone(), out=…,
    torch.compile. Memory sets: torch.empty in place of torch.zeros where all is overwritten.

    Blind spots: the time for which the host waits for a copy to the host belongs to HOST002. Copies by kernels that
    read host memory (UVA, managed memory) look like compute.
    """

    code: ClassVar[str] = "HOST004"
    fix_without_pytorch: ClassVar[str] = (
        "Copy with cudaMemcpyAsync between pinned memory (cudaHostAlloc) and the device, on a stream other than that"
        " of the kernels; merge small copies into one."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (exposed_copies.exposed_copies, workload.marks, *save_stages.FACTS)
    min_exposed_ratio: float = 0.02
    min_device_ratio: float = 0.03
    """A report without findings states that no cause takes 3% or more. In ten public recordings of training, copies
    within the device and memory sets are exposed for 0.0% to 2.5% of the time: the work of clone() and zeros()."""
    slow_bytes_per_ns: float = 2.0

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield a finding for copies from or to the host, and one for others, whose loss exceeds the threshold."""
        exposed = run.table(exposed_copies.exposed_copies)
        is_of_host = pl.col("direction").is_in(exposed_copies.OF_HOST)
        if loss := self._loss(run, exposed.filter(is_of_host), self.min_exposed_ratio):
            yield self._host_copies(run, exposed.filter(is_of_host), loss)
        if loss := self._loss(run, exposed.filter(~is_of_host), self.min_device_ratio):
            yield self._device_copies(run, exposed.filter(~is_of_host), loss)

    @staticmethod
    def _loss(run: Run, exposed: pl.DataFrame, min_ratio: float) -> quoted_step.StepLoss | None:
        lost = exposed.select(*KEY, pl.col("exposed_ns").alias("lost_ns"))
        steps = quoted_step.by_step(run, lost, max_loss=pl.col("exposed_copy_ns"))
        return quoted_step.worst_loss(save_stages.without_saves(run, steps), min_ratio)

    def _host_copies(self, run: Run, exposed: pl.DataFrame, loss: quoted_step.StepLoss) -> Finding:
        rows = loss.rows(exposed)
        largest = _largest_owner(rows)
        pinned = (
            " Pageable memory blocks the host during the copy." if largest["memory"] == exposed_copies.PAGEABLE else ""
        )
        copies = f"({largest['direction']}) by {largest['op'] or 'an unknown op'}"
        fix, by_direction = _COPIES[largest["direction"]].suited_to(run), ""
        other = self._other_direction(rows, largest["direction"], loss.row["duration_ns"])
        if other is not None:
            direction_ns = dict(rows.group_by("direction").agg(pl.col("exposed_ns").sum()).iter_rows())
            both = [f"{name}, {units.duration(direction_ns[name])}" for name in (largest["direction"], other)]
            copies, by_direction = f"({'; '.join(both)})", f" By direction: {'; '.join(both)}."
            fix = fix + " " + _COPIES[other].suited_to(run)
        return loss.finding(
            self,
            Severity.WARNING,
            f"Copies between host and device are exposed: {loss}, in {_count_text(rows.height)}. "
            f"{self._describe(largest)}{by_direction}",
            fix + pinned,
            confidence=0.8,
            evidence=quoted_step.evidence(exposed, loss.row, "exposed_ns"),
            what_if=WhatIf(HOST_COPIES),
            claim=f"Copies {copies} are not overlapped",
        )

    def _device_copies(self, run: Run, exposed: pl.DataFrame, loss: quoted_step.StepLoss) -> Finding:
        rows = loss.rows(exposed)
        largest = _largest_owner(rows)
        is_set = largest["direction"] == exposed_copies.MEMORY_SET
        work = "Memory sets" if is_set else f"Copies ({largest['direction']})"
        return loss.finding(
            self,
            Severity.WARNING,
            f"Copies other than between host and device, and memory sets, are exposed: {loss}, in {rows.height:,} of "
            f"them. {self._describe(largest)}",
            _COPY_LESS[largest["direction"]].suited_to(run),
            confidence=0.8,
            evidence=quoted_step.evidence(exposed, loss.row, "exposed_ns"),
            subject=_NOT_OF_HOST,
            what_if=WhatIf(DEVICE_COPIES),
            claim=f"{work} by {largest['op'] or 'an unknown op'} are not overlapped",
        )

    def _other_direction(self, rows: pl.DataFrame, direction: str, duration_ns: int) -> str | None:
        """The direction that is not `direction`, if its copies alone take enough of the step for a finding."""
        others = rows.filter(pl.col("direction") != direction)
        if others["exposed_ns"].sum() < self.min_exposed_ratio * duration_ns:
            return None
        return str(others["direction"][0])

    def _describe(self, largest: dict[str, Any]) -> str:
        """Return a sentence on the op with most of the exposed time: how many copies, how large, how fast, where."""
        count, moved = largest["count"], largest["bytes"] or 0
        memory = f", {largest['memory']} memory" if largest["memory"] else ""
        where = f" at {largest['stack']}" if largest["stack"] else ""
        speed = f", {units.size(moved)} in total" if moved else ""
        if moved >= _LARGE_BYTES * count and largest["dur_ns"]:
            per_ns = moved / largest["dur_ns"]
            is_slow = per_ns < self.slow_bytes_per_ns and largest["direction"] in exposed_copies.OF_HOST
            slow = ", far below the bandwidth of any PCIe link" if is_slow else ""
            speed += f" at {per_ns:.1f} GB/s{slow}"
        is_set = largest["direction"] == exposed_copies.MEMORY_SET
        work = units.count(count, "memory set") if is_set else f"{_count_text(count)} ({largest['direction']})"
        return (
            f"{units.duration(largest['exposed_ns'])} of that is {work} by "
            f"{largest['op'] or 'an unknown op'}{where} ({units.duration(largest['dur_ns'] // count)} each"
            f"{memory}{speed})."
        )


def _largest_owner(rows: pl.DataFrame) -> dict[str, Any]:
    """The op, line, direction and memory with most exposed time, with their sums."""
    sums = rows.group_by(_OWNER).agg(pl.len().alias("count"), pl.col("bytes", "dur_ns", "exposed_ns").sum())
    return largest_first(sums, "exposed_ns", *_OWNER).row(0, named=True)


def _count_text(count: int) -> str:
    return f"{count:,} {'copy' if count == 1 else 'copies'}"
