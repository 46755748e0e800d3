"""Rules on the host: late launches, blocking synchronization, and data loading."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import contention, value_reads
from tracekit.analysis.host import host_stalls, idle_after_sync, launch_delay, recurring_pauses
from tracekit.analysis.parallelism import workload
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import escaping, intervals, kernel_names, units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.device_time import VALUE_READS
from tracekit.replay.graph.causes.host import (
    BLOCKING_SYNC,
    DATA_LOADING,
    LATE_LAUNCH,
)
from tracekit.rules import quoted_step
from tracekit.rules.advice import Advice
from tracekit.rules.quoted_step import DEVICE, KEY
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first

_EVIDENCE_ROWS = 40
_MOST_CHARACTERS = 160
"""Of a place in a sentence: names of annotations are of any length."""
_FACTS: tuple[TraceFact, ...] = (
    launch_delay.host_gaps,
    launch_delay.wait_counts,
    *save_stages.FACTS,
    contention.device_count,
    workload.marks,
)
_LATE = (host_state.PYTHON, host_state.OP, host_state.LAUNCH, host_state.LOCK)
_ACTIVITIES = {
    host_state.PYTHON: Advice(
        "in Python or waiting for a core", other="outside of recorded calls, or waiting for a core"
    ),
    host_state.OP: Advice("busy calling PyTorch ops", other="inside recorded ranges"),
    host_state.LAUNCH: Advice("inside kernel launches"),
    host_state.LOCK: Advice("waiting for a lock"),
}
_LATER_STEPS = "Profile later steps: schedule(wait=…, warmup=2, …), or Recorder(warmup=2)."
_FEWER_LAUNCHES = Advice("Launch fewer kernels: {}.")
_LESS_PYTHON = Advice(
    "Shorten Python between launches (hooks, logging, gc), or launch fewer kernels: {}.",
    "If requests were waiting, shorten Python between launches (hooks, logging, gc), or launch fewer kernels: {}.",
)
_PREPARES = {
    host_stalls.AUTOTUNE: Advice("benchmarking kernels (autotuning)"),
    host_stalls.GRAPH_CAPTURE: Advice("capturing or instantiating graphs"),
    host_stalls.KERNEL_LOADING: Advice("loading kernels"),
}
_PREPARE_ONCE = {
    host_stalls.AUTOTUNE: Advice(
        "Autotune once: keep input sizes few (padding, buckets) and the tuned kernels cached (Triton: a key of "
        "@triton.autotune that rarely changes; cuDNN: benchmark=False where sizes vary)."
    ),
    host_stalls.GRAPH_CAPTURE: Advice(
        "Capture each graph once, for the largest sizes, and launch it again: with torch.compile, keep sizes and "
        "addresses of inputs (mark_static_address, padding); else copy new inputs into the graph's own.",
        other="Capture and instantiate each graph once, and launch it again (cudaGraphExecUpdate for other arguments).",
    ),
    host_stalls.KERNEL_LOADING: Advice(
        "Find what loads kernels again in each step: code that is compiled or loaded again (keep the compiled function "
        "or the extension), or other kernels for other sizes (padding); CUDA_MODULE_LOADING=EAGER loads those of the "
        "program at its start.",
        other="Load modules once (cuModuleLoad, cuLibraryLoad), and keep the function that a launch needs.",
    ),
}
_PLACE = [*DEVICE, "phase", "name", "nth"]


@dataclass(frozen=True)
class LateLaunch(Rule):
    """A launch-bound step: the device is idle because the host has not launched the next kernel.

    What it does: reports steps in which compute is idle for more than `min_late_ratio` of the time because the next
    kernel has not been launched, while the host neither waits for the device nor loads data, saves or allocates memory.
    On a CPU run, where ops run on the host itself, it reports pauses between ops of at least `min_pause_ns` that occur
    at the same place in every step, or for long in more than half of the steps; those of one place, or of one loop,
    from `min_place_ratio` on.

    Why it costs: the device is idle until the launch, and never makes up for that time.

    How it is measured: a gap in compute, less the time for which its next kernel waited for a collective, is the host's
    until the end of the runtime call that launched that kernel. Gaps after a synchronization that left the device
    without queued work belong to HOST002. Steps that save are left out. The message quotes the median step of
    the worst device; on a CPU run a pause counts up to the median of its place over the steps and twice the median
    deviation from it, so that an interruption of one step does not count. In a recording without steps, one pause that
    is more than half of the loss need not recur: it is information. So is a window of one step, or without steps, that
    spends more than half of the loss on first uses (kernels loaded, compiled or tried out, long first launches of a
    kernel): it is warm-up. A recording begins in the first step: there the replay counts, before the first launch, at
    most what it saves before the first work of the other steps, in the median.

    Where the host loads or benchmarks kernels, or captures graphs, for most of it in most steps, the message says so.

    How to fix: shorten Python between launches (hooks, logging, metrics, gc.freeze or gc.collect at chosen steps);
    launch fewer and larger kernels: torch.compile, CUDA graphs (mode="reduce-overhead"), fused or foreach optimizers,
    larger micro-batches.

    Blind spots: Python and a descheduled thread can be distinguished only with recorded stacks. The profiler itself
    slows launches, most with stacks and shapes. Work without a recorded launch is not judged.
    """

    code: ClassVar[str] = "HOST001"
    fix_without_pytorch: ClassVar[str] = (
        "Shorten what the host does between launches, or launch fewer and larger kernels: merge small kernels, "
        "record the sequence as a CUDA graph (cudaStreamBeginCapture, cudaGraphLaunch), process more elements in "
        "each launch."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (*_FACTS, host_stalls.host_stalls, breakdown.by_step)
    min_late_ratio: float = 0.05
    min_place_ratio: float = 0.03
    min_pause_ns: int = recurring_pauses.PAUSE_NS

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        on_device = _on_device(run)
        late = idle_after_sync.with_pauses_of_one_rank(_host_gaps(run, _LATE), run.table(launch_delay.wait_counts))
        late = late.filter(~pl.col("synced")) if on_device else self._recurring(run, late)
        has_long_place = not on_device and self._pauses_at_one_place(run, late)
        min_ratio = min(self.min_late_ratio, self.min_place_ratio) if has_long_place else self.min_late_ratio
        loss = quoted_step.worst_loss(save_stages.losses(run, late, "dur_ns"), min_ratio)
        if loss is None:
            return
        # Without steps, a place that recurs on the host of a CPU run may be a coincidence.
        is_certain = on_device or loss.row["step"] is not None
        # One pause in a recording without steps need not recur: it is no launch-bound loop.
        longest_ns = loss.rows(late).group_by("gap").agg(pl.col("dur_ns").sum())["dur_ns"].sort()[-1]
        is_pause = loss.row["step"] is None and 2 * longest_ns > loss.row["lost_ns"]
        pause = f" One pause is {units.duration(longest_ns)} of that." if is_pause else ""
        # Time of the quoted step in first uses, if that is most of the loss and the window has no other.
        stalls = run.table(host_stalls.host_stalls).with_columns(pl.col("gap_step").alias("step"))
        first = loss.rows(stalls.filter(host_stalls.is_first_use(), pl.col("detail").is_in(_LATE)))
        device = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(loss.row[name])) for name in DEVICE)
        is_only = run.table(breakdown.by_step).filter(device)["step"].n_unique() == 1
        # A stall goes on where the device has work again: only its part in the quoted idle time is of that time.
        idle = intervals.union(intervals.from_table(loss.rows(late)))
        first_ns = intervals.length(intervals.intersect(intervals.union(intervals.from_table(first)), idle))
        cold_ns = first_ns if is_only and 2 * first_ns > loss.row["lost_ns"] else 0
        cold = (
            f" {units.duration(cold_ns)} of it is for kernels that run for the first time: warm-up." if cold_ns else ""
        )
        doing = loss.rows(late).group_by("detail").agg(pl.col("dur_ns").sum())
        longest = largest_first(doing, "dur_ns", "detail").row(0, named=True)
        preparation = None if is_only else _repeated_preparation(run, loss, idle)
        prepared_ns, doing_what = preparation or (longest["dur_ns"], longest["detail"])
        activity = (_PREPARES if preparation else _ACTIVITIES)[doing_what].suited_to(run)
        is_in_torch = doing_what in (host_state.OP, host_state.LAUNCH)
        usual_advice = _FEWER_LAUNCHES if is_in_torch else _LESS_PYTHON
        advice = _PREPARE_ONCE[doing_what] if preparation else usual_advice
        yield loss.finding(
            self,
            Severity.WARNING if is_certain and not is_pause and not cold_ns else Severity.INFO,
            f"The {quoted_step.noun(loss.row)} is launch-bound: compute is idle {loss} because no kernel "
            f"has been launched. During {units.duration(prepared_ns)} of that, the host is "
            f"{activity}.{pause}{cold}{_line(loss.rows(late)) or _surrounding_ops(loss.rows(late))}",
            _LATER_STEPS if cold_ns else advice.suited_to(run).format(", ".join(_fewer_launches(run))),
            confidence=0.8 if on_device else 0.6,
            evidence=_evidence(loss, late),
            what_if=None if cold_ns else WhatIf(LATE_LAUNCH),
            claim=f"The host of rank {loss.row['rank']} {'launches kernels' if on_device else 'calls operators'} late: "
            f"it is {activity}" + _place(loss.rows(late)),
        )

    def _pauses_at_one_place(self, run: Run, late: pl.DataFrame) -> bool:
        """Whether the pauses before ops of one name are `min_place_ratio` of the mean step.

        Python that any loop needs (data, zero_grad, hooks) is spread: 2 to 3% of a step of 80 ms, 1.5% at one place.
        """
        mean_ns = save_stages.steps(run)["duration_ns"].mean()
        place_ns = late.drop_nulls("step").group_by(*DEVICE, "step", "phase", "name").agg(pl.col("dur_ns").sum())
        longest_ns = place_ns["dur_ns"].max()
        if mean_ns is None or longest_ns is None:
            return False
        return float(str(longest_ns)) >= self.min_place_ratio * float(str(mean_ns))

    def _recurring(self, run: Run, late: pl.DataFrame) -> pl.DataFrame:
        """The long Python pauses that recur at the same place of the steps, with the durations that count.

        A pause before the first op of the loop's body is at the end of the previous step's window, so the last step of
        a window need not have it. Where no steps are marked: pauses before the same compute that occur several times in
        the window, each as long as the shortest.
        """
        steps = save_stages.steps(run)
        counts = steps.group_by(DEVICE).agg(
            pl.len().alias("steps"),
            pl.col("step").max().alias("last_step"),
            pl.col("duration_ns").mean().alias("mean_ns"),
        )
        python = late.filter(pl.col("detail") == host_state.PYTHON).rename({"dur_ns": "pause_ns"})
        longest_ns = (
            pl.when(pl.col("step").is_null())
            .then("pause_ns")
            .otherwise(pl.col("pause_ns").max().over(*DEVICE, "step", "phase", "name"))
        )
        pauses = python.filter(
            longest_ns >= self.min_pause_ns,
            pl.col("pause_ns") >= min(recurring_pauses.LOOP_PAUSE_NS, self.min_pause_ns),
        )
        pauses = pauses.join(steps, on=KEY, how="semi", nulls_equal=True)
        in_steps = pauses.filter(pl.col("step").is_not_null()).join(
            counts, on=DEVICE, nulls_equal=True, maintain_order="left"
        )
        by_name = [*DEVICE, "phase", "name"]
        in_window = pauses.filter(pl.col("step").is_null(), pl.len().over(by_name) > 1)
        of_steps = recurring_pauses.recurring(in_steps, _PLACE, pl.col("step").max().over(_PLACE) < pl.col("last_step"))
        counted = pl.concat(
            [of_steps.select(python.columns), in_window.with_columns(pl.col("pause_ns").min().over(by_name))]
        )
        return counted.rename({"pause_ns": "dur_ns"})


@dataclass(frozen=True)
class BlockingSync(Rule):
    """A host that synchronizes with the device within a step, after which the device is idle.

    What it does: reports steps in which the device is idle for more than `min_idle_ratio` of the time after the host
    waited for it: .item(), .cpu(), a boolean of a tensor, torch.cuda.synchronize(). On a CPU run, where a read waits
    for nothing, it reports reads that take `min_read_ratio` of the step, with the copies and reductions that only they
    need; otherwise values read in every step's forward or backward are information.

    Why it costs: the host launches nothing while it waits. When the device has finished, no work is queued, and it is
    idle until the host has launched more.

    How it is measured: gaps in compute that are the host's and began during a synchronizing call (Stream-, Event- or
    DeviceSynchronize, a blocking memcpy, aten::item), or contain one. Without the call, the host could have launched
    earlier by the time that it waited: gaps count for at most as long as it has waited in the step; the rest belongs to
    HOST001. The saving by replay also counts later gaps, in which compute waits for one launch after the other, as the
    host no longer leads the device. Ranks that are late because they alone wait are its consequence. What one rank
    pauses for after waits of all ranks, beyond the others, belongs to HOST001, too, if that is most of its gaps: it
    makes that rank a straggler (RANK001). Before the first launch of a recording the replay counts what the other steps
    lose there, in the median. Where the host would launch later than the device ends its work without the waits, too,
    only the waits are saved, and not the pauses after them. Time in which a copy runs belongs to HOST004, and so does a
    wait for a copy from pageable memory to the device: the saving is without these copies. FSDP1's rate limiter does
    not count. On a CPU run: ops that give values to Python, and copies, norms, sums and the like directly before them,
    unless backward needs their results. Steps that save are left out. The message quotes the median step of the worst
    device.

    How to fix: keep values on the device and read them every N steps, after the step's launches; copy with
    non_blocking=True into pinned memory and an event; use torch.where instead of an if on a tensor, and clip_grad_norm_
    without reading the norm.

    Blind spots: a synchronization that ends before the queued work does costs nothing and is not reported. Its caller
    is known only with recorded stacks. On a CPU run, input shapes have to be recorded, and values that the loop needs
    (clipping by hand) look like those that it only logs.
    """

    code: ClassVar[str] = "HOST002"
    fix_without_pytorch: ClassVar[str] = (
        "Copy results asynchronously (cudaMemcpyAsync into memory of cudaHostAlloc), and wait for an event "
        "(cudaEventSynchronize) only where the host needs them, after the next launches, instead of "
        "cudaDeviceSynchronize or cudaStreamSynchronize; decide on the device what the host does not have to know."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (
        *_FACTS, host_stalls.host_stalls, breakdown.by_step, launch_delay.device_reads, value_reads.value_reads,
    )  # fmt: skip
    min_idle_ratio: float = 0.02
    min_read_ratio: float = 0.03

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold, or the host reads."""
        if not _on_device(run):
            yield from tuple(self._costly_reads(run)) or self._reads(run)
            return
        gaps = _host_gaps(run, (*_LATE, host_state.SYNCHRONIZE))
        late = idle_after_sync.with_pauses_of_one_rank(gaps, run.table(launch_delay.wait_counts)).filter("synced")
        loss = quoted_step.worst_loss(save_stages.losses(run, late, "dur_ns"), self.min_idle_ratio)
        if loss is None:
            return
        idle = intervals.union(intervals.from_table(loss.rows(late)))
        preparation = _repeated_preparation(run, loss, idle)
        prepared = ""
        advice = _READ_LATER
        if preparation is not None:
            prepared_ns, cause = preparation
            prepared = f" During {units.duration(prepared_ns)} of that, the host is {_PREPARES[cause].suited_to(run)}."
            advice = _PREPARE_ONCE[cause]
        yield loss.finding(
            self,
            Severity.WARNING,
            f"The host synchronizes with the device: compute is idle {loss} after "
            f"{loss.rows(late)['gap'].n_unique()} such waits.{prepared}{_line(loss.rows(late))}",
            advice.suited_to(run),
            confidence=0.8,
            evidence=_evidence(loss, late),
            # Without the waits, a pause of one rank would be hidden, too: that one is a cause of its own.
            what_if=WhatIf(BLOCKING_SYNC, is_partial=late.height < gaps["synced"].sum()),
            claim=f"The host of rank {loss.row['rank']} waits for the device{_place(loss.rows(late))}",
        )

    def _costly_reads(self, run: Run) -> Iterator[Finding]:
        reads = run.table(value_reads.value_reads)
        loss = quoted_step.worst_loss(save_stages.losses(run, reads, "saved_ns"), self.min_read_ratio)
        if loss is None:
            return
        rows = loss.rows(reads)
        kinds = rows.group_by("op", "shapes").agg(pl.len(), pl.col("saved_ns").sum())
        kind = largest_first(kinds, "saved_ns", "op", "shapes").row(0, named=True)
        lines = rows.drop_nulls("line").group_by("line").agg(pl.col("saved_ns").sum())
        line = kernel_names.code_line(largest_first(lines, "saved_ns", "line")["line"][0]) if lines.height else ""
        yield loss.finding(
            self,
            Severity.WARNING,
            f"Python reads values of tensors: {units.count(rows.height, 'op')} that only these reads need take {loss}. "
            f"Most of it: {kind['len']:,} × {kind['op']} {kind['shapes']}, {units.duration(kind['saved_ns'])} with the "
            f"pauses before.{f' Most are called at {line}.' if line else ''}",
            _READ_RARELY,
            confidence=0.8,
            evidence=largest_first(rows, "saved_ns", "start_ns").head(_EVIDENCE_ROWS),
            what_if=WhatIf(VALUE_READS),
            claim=f"Python reads values of tensors in every step on rank {loss.row['rank']}",
        )

    def _reads(self, run: Run) -> Iterator[Finding]:
        reads = run.table(launch_delay.device_reads)
        steps = save_stages.steps(run)
        counts = reads.group_by("window", "rank", "step").agg(pl.len().cast(pl.Int64).alias("reads"))
        counted = steps.join(counts, on=["window", "rank", "step"], how="left", nulls_equal=True).with_columns(
            pl.col("reads").fill_null(0)
        )
        worst = quoted_step.worst(counted, "reads")
        if worst is None or not worst["reads"]:
            return
        reading = counted.filter(pl.col("reads") > 0)
        yield Finding(
            self.code,
            Severity.INFO,
            f"The host reads {worst['reads']} values in forward and backward of {quoted_step.describe(worst)}. "
            "On the CPU that costs nothing; on a GPU, each read waits for all queued work.",
            _READ_LATER.suited_to(run),
            confidence=0.9,
            ranks=distinct(reading, "rank"),
            steps=distinct(reading, "step"),
            evidence=quoted_step.rows_of(reads, worst).head(_EVIDENCE_ROWS),
            is_of_window=worst["step"] is None,
            claim="The host reads values of tensors in forward and backward",
        )


_READ_RARELY = (
    "Read values (.item(), .cpu(), .numpy(), .tolist()) every N steps instead of in each. For norms of all parameters, "
    "read one number: torch.nn.utils.get_total_norm, or torch._foreach_norm and torch.stack(norms).norm().item()."
)
_READ_LATER = Advice(
    "Keep values on the device and read them (.item(), .cpu(), print) every N steps, after the step's launches, or "
    "copy them with non_blocking=True into pinned memory. Use torch.where instead of an if on a tensor.",
    "Keep values on the device and read them (.item(), .cpu()) after the launches of the next iteration, or copy them "
    "with non_blocking=True into pinned memory: sampled tokens for several iterations at once. Use torch.where instead "
    "of an if on a tensor.",
)


@dataclass(frozen=True)
class DataStall(Rule):
    """A device that waits for the next batch.

    What it does: reports steps in which compute is idle for more than `min_stall_ratio` of the time because the host is
    loading data; or, where the device still had queued work, in which a replay without data loading is faster by
    `min_saved_ratio`.

    Why it costs: the device is idle until the batch is loaded and copied. With queued work it is idle later, when the
    launches that the loading delayed are missing.

    How it is measured: gaps in compute that are the host's, as far as it is in the phase data or in the data loader's
    __next__; for the replay, all of that time in a step's device window, and of a load before the first step the share
    that the others cost. The next step's batch is loaded at the end of a step's device window; the last step of a
    window shows no loading and is left out if there are others. Steps that save are left out. The message quotes the
    median step of the worst device.

    How to fix: DataLoader(num_workers=…, prefetch_factor=…, persistent_workers=True, pin_memory=True), cheaper decoding
    and augmentation, data on faster or local storage, batches prepared ahead on another thread.

    Blind spots: loading without a DataLoader and outside a span of phase data looks like Python (HOST001). If workers
    load the data, the trace of the training process does not show why they are slow; with an I/O log of theirs
    (DFTracer), the message says which file system calls run meanwhile.
    """

    code: ClassVar[str] = "HOST003"
    fix_without_pytorch: ClassVar[str] = (
        "Read input ahead on another thread, into pinned memory (cudaHostAlloc); use faster storage."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = (*_FACTS, launch_delay.data_waits, host_stalls.io_calls)
    min_stall_ratio: float = 0.05
    min_saved_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        late = run.scan(launch_delay.host_gaps).filter(pl.col("detail") == host_state.DATA).collect()
        loss = quoted_step.worst_loss(_all_but_last(run, late), self.min_stall_ratio)
        if loss is None:
            yield from self._hidden_stall(run)
            return
        yield loss.finding(
            self,
            Severity.WARNING,
            f"Data loading stalls the {quoted_step.noun(loss.row)}: compute is idle {loss} while the host "
            f"waits for a batch.{_line(loss.rows(late))}{_io(run, loss, late)}",
            _PREFETCH,
            confidence=0.9,
            evidence=_evidence(loss, late),
            what_if=WhatIf(DATA_LOADING),
            claim=f"Rank {loss.row['rank']} waits for data{_place(loss.rows(late))}",
        )

    def _hidden_stall(self, run: Run) -> Iterator[Finding]:
        """Yield a finding if the host loads data while the device works on queued kernels: a replay sets its cost."""
        waits = run.table(launch_delay.data_waits)
        loss = quoted_step.worst_loss(_all_but_last(run, waits), self.min_saved_ratio)
        if loss is None or not _on_device(run):
            return
        evidence = quoted_step.evidence(waits, loss.row, "dur_ns")
        finding = loss.finding(
            self,
            Severity.WARNING,
            f"Data loading delays launches: the host waits {loss} for a batch. The device works on queued kernels "
            f"meanwhile, and is idle later because the next ones are launched late.{_io(run, loss, waits)}",
            _PREFETCH,
            confidence=0.9,
            evidence=evidence.select("window", "rank", "step", "device", "start_ns", "dur_ns"),
            what_if=WhatIf(DATA_LOADING, self.min_saved_ratio),
            claim=f"Rank {loss.row['rank']} launches late because it waits for data{_place(loss.rows(waits))}",
        )
        yield replace(finding, impact=0.0, cost_ns=0)


_PREFETCH = (
    "Prefetch batches: DataLoader(num_workers=…, prefetch_factor=…, persistent_workers=True, pin_memory=True). "
    "Or make decoding and augmentation cheaper, or use faster storage."
)


def io_sentence(run: Run, rank: int, spans: intervals.Spans, span_name: str, kinds: Collection[str] = ()) -> str:
    """Return a sentence on the file system calls of a rank during the spans, shape (n, 2) in ns.

    It names the function and file with most of that time; `span_name` is the name of that time, such as "the save".
    `kinds` limits it to calls of these kinds, if there are any. Empty where no I/O log has a call in the spans.
    """
    rank_calls = run.table(host_stalls.io_calls_of_run).filter(pl.col("rank") == rank)
    if rank_calls.is_empty():
        return ""
    overlapping = host_stalls.io_during(rank_calls, spans)
    of_kinds = overlapping.filter(pl.col("kind").is_in(list(kinds)))
    overlapping = overlapping if of_kinds.is_empty() else of_kinds
    if overlapping.is_empty():
        return ""
    longest = (
        overlapping.group_by("name", "file", maintain_order=True)
        .agg(pl.len().alias("calls"), pl.col("overlap_ns", "dur_ns", "bytes").sum())
        .sort("overlap_ns", descending=True, maintain_order=True)
        .row(0, named=True)
    )
    took = units.duration(host_stalls.io_covered_ns(overlapping, spans))
    what = f"{' and '.join(sorted(kinds))} calls" if not of_kinds.is_empty() else "calls"
    count, moved, dur_ns = (int(str(longest[name])) for name in ("calls", "bytes", "dur_ns"))
    calls = units.count(count, f"{longest['name']} call")
    path = "an unknown file" if longest["file"] is None else escaping.inert(str(longest["file"]), 80)
    rate = f", {units.size(moved)} at {units.rate(moved * 1e9 / dur_ns)}" if moved and dur_ns else ""
    of_file = f"in {calls} of {path} ({units.duration(dur_ns)}{rate})"
    return f" File system {what} take {took} of {span_name}, most of that {of_file}."


def _repeated_preparation(run: Run, loss: quoted_step.StepLoss, idle: intervals.Spans) -> tuple[int, str] | None:
    """Time of the quoted step's idle spans in which the host prepares kernels or graphs, and which of its PREPARATION.

    None if that is at most half of the loss, or happens in at most half of the device's steps: then it is a first use.
    """
    device = pl.all_horizontal(pl.col(name).eq_missing(pl.lit(loss.row[name])) for name in DEVICE)
    stalls = run.table(host_stalls.host_stalls).filter(device).with_columns(pl.col("gap_step").alias("step"))
    steps = run.table(breakdown.by_step).filter(device)["step"]
    for cause in host_stalls.PREPARATION:
        of_cause = stalls.filter(cause=cause)
        spans = intervals.union(intervals.from_table(loss.rows(of_cause)))
        prepared_ns = intervals.length(intervals.intersect(spans, idle))
        if 2 * prepared_ns > loss.row["lost_ns"] and 2 * of_cause["step"].n_unique() > steps.n_unique():
            return prepared_ns, cause
    return None


def _fewer_launches(run: Run) -> Iterator[str]:
    """Yield what reduces the number of launches and is not in use yet."""
    if not workload.is_compiled(run):
        yield "torch.compile"
    if workload.launches_graphs(run):
        yield "more of the step in each CUDA graph"
    elif workload.can_use_graphs(run):
        yield 'mode="reduce-overhead" (CUDA graphs)'
    yield from (
        ["larger batches"] if workload.is_inference(run) else ["fused optimizers (fused=True)", "larger micro-batches"]
    )


def _all_but_last(run: Run, late: pl.DataFrame) -> pl.DataFrame:
    """Return the loss of each step but the last, in whose window no data is loaded."""
    last = pl.col("step").eq_missing(pl.col("step").max().over(DEVICE)) & (pl.len().over(DEVICE) > 1)
    return save_stages.losses(run, late, "dur_ns").filter(~last)


def _host_gaps(run: Run, details: Collection[str]) -> pl.DataFrame:
    """Gaps in compute while the host is in some states: rows of `launch_delay.host_gaps` of all ranks."""
    return run.scan(launch_delay.host_gaps).filter(pl.col("detail").is_in(list(details))).collect()


def _on_device(run: Run) -> bool:
    return bool(run.table(contention.device_count)["devices"].sum())


def _io(run: Run, loss: quoted_step.StepLoss, waits: pl.DataFrame) -> str:
    """Return a sentence on the file system calls during these waits of the quoted step, where they were logged."""
    return io_sentence(run, loss.row["rank"], intervals.from_table(loss.rows(waits)), "that wait")


def _line(rows: pl.DataFrame) -> str:
    """Sentence on the function or annotation with most of the time of host gaps, where one was recorded; else ""."""
    sums = _by_function(rows)
    return f" {units.duration(sums['dur_ns'][0])} of it is at {_shown(sums['stack'][0])}." if sums.height else ""


def _surrounding_ops(rows: pl.DataFrame) -> str:
    """Sentence on the ops of a CPU run around most of the time of host gaps; "" where none ran before."""
    sums = rows.drop_nulls(["after", "name"]).group_by("after", "name", "unit").agg(pl.col("dur_ns").sum())
    if sums.is_empty():
        return ""
    most = largest_first(sums, "dur_ns", "after", "name", "unit").row(0, named=True)
    unit = f" of {most['unit']}" if most["unit"] else ""
    return f" {units.duration(most['dur_ns'])} of it is between {most['after']} and {most['name']}{unit}."


def _place(rows: pl.DataFrame) -> str:
    """Clause on the function or annotation with more than half of the time of host gaps; "" without one."""
    sums = _by_function(rows)
    is_most = sums.height > 0 and 2 * sums["dur_ns"][0] > rows["dur_ns"].sum()
    return f" at {kernel_names.code_line(_shown(sums['stack'][0]))}" if is_most else ""


def _shown(place: str) -> str:
    return escaping.inert(place, _MOST_CHARACTERS)


def _by_function(rows: pl.DataFrame) -> pl.DataFrame:
    if "stack" not in rows.columns:
        return pl.DataFrame(schema={"stack": pl.String, "dur_ns": pl.Int64})
    return largest_first(rows.drop_nulls("stack").group_by("stack").agg(pl.col("dur_ns").sum()), "dur_ns", "stack")


def _evidence(loss: quoted_step.StepLoss, late: pl.DataFrame) -> pl.DataFrame:
    rows = quoted_step.evidence(late, loss.row, "dur_ns")
    return rows.select("window", "rank", "step", "device", "phase", "unit", "name", "detail", "start_ns", "dur_ns")
