"""Rules on steps that are not like the others: outlier steps, and the cold start of a window."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.host import host_stalls
from tracekit.analysis.memory import steady_state
from tracekit.analysis.parallelism import late_ranks, outlier_steps, workload
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph import causes
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.stalls import SINGLE_STALL, Removal
from tracekit.replay.graph.nodes import HostSpan
from tracekit.rules import host_phases, late_work, recurrence
from tracekit.rules.advice import Advice
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, distinct, largest_first, warnings
from tracekit.sync import collective_matching

_FACTS: tuple[TraceFact, ...] = (
    host_stalls.host_stalls,
    breakdown.by_step,
    breakdown.by_rank,
    save_stages.save_spans,
    collective_matching.calls,
    workload.marks,
    steady_state.device_calls,
    *host_phases.FACTS,
)
_EVIDENCE_ROWS = 40
_PAIR = 2
_HOST_DOES = {
    host_stalls.RETRY: "frees the allocator's cache and allocates again (cudaMalloc failed: an allocation retry)",
    host_stalls.ALLOCATION: "allocates device memory",
    host_stalls.PROFILER: "writes the profiler's buffers, which does not happen without the profiler",
    host_stalls.COMPILE: "compiles",
    host_stalls.AUTOTUNE: "benchmarks kernels (autotuning)",
    host_stalls.GRAPH_CAPTURE: "captures or instantiates a graph",
    host_stalls.KERNEL_LOADING: "loads kernels at their first use",
    host_stalls.GARBAGE_COLLECTION: "runs Python's garbage collector",
    host_stalls.DATA: "waits for data",
    host_stalls.LAUNCH: "is blocked in one launch",
    host_stalls.SYNC: "waits for the device, which is idle",
}
_STATE_IS = {
    host_state.PYTHON: "is in Python or waits for a core",
    host_state.OP: "is inside an op",
    host_state.LAUNCH: "is inside a runtime call",
    host_state.LOCK: "waits for a lock",
    host_state.RATE_LIMITER: "waits in FSDP's rate limiter",
}
_EXPANDABLE = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"
_FIXES = {
    host_stalls.RETRY: Advice(
        f"Lower the peak (smaller batch, activation checkpointing), or set {_EXPANDABLE}: the next retry may end in an "
        "out-of-memory error.",
        f"Lower the peak (smaller batch, smaller cache), or set {_EXPANDABLE}: the next retry may end in an "
        "out-of-memory error.",
        "Lower the peak of device memory: the next retry may end in an out-of-memory error.",
    ),
    host_stalls.ALLOCATION: Advice(
        f"Allocate the largest sizes before training (one step with the longest input), or set {_EXPANDABLE}.",
        f"Allocate the largest sizes before serving (one request with the longest input), or set {_EXPANDABLE}.",
        "Allocate device memory once, for the largest sizes, or from a pool (cudaMallocAsync).",
    ),
    host_stalls.PROFILER: Advice("Ignore this step, or record fewer steps and events in a window."),
    host_stalls.COMPILE: Advice(
        late_work.FIX_COMPILATION, other="Compile before the first iteration, and cache the compiled code."
    ),
    host_stalls.AUTOTUNE: Advice(
        "Fix the input sizes, or autotune before training: each new size is benchmarked.",
        "Fix the input sizes, or autotune before serving: each new size is benchmarked.",
    ),
    host_stalls.GRAPH_CAPTURE: Advice(
        "Capture each graph once before training, for the largest sizes, and launch it again.",
        "Capture a graph of each batch size once before serving or measuring, and launch it again.",
        "Capture and instantiate each graph once, and launch it again (cudaGraphExecUpdate for other arguments).",
    ),
    host_stalls.KERNEL_LOADING: Advice(
        "Run every kind of step once before training, or set CUDA_MODULE_LOADING=EAGER.",
        "Run every kind of iteration once before serving or measuring, or set CUDA_MODULE_LOADING=EAGER.",
    ),
    host_stalls.GARBAGE_COLLECTION: Advice(
        late_work.FIX_GARBAGE,
        "Call gc.freeze() once the model is loaded, and gc.collect() between requests.",
        "Collect garbage at chosen times only.",
    ),
    host_stalls.DATA: Advice(
        "Prefetch more batches (prefetch_factor, num_workers), with persistent_workers=True.",
        other="Load data ahead, on another thread.",
    ),
    host_stalls.LAUNCH: Advice(
        "Check what else uses the GPU and the driver at that time (other processes, monitoring, a module loaded at its "
        "first use)."
    ),
    host_stalls.SYNC: Advice(
        "Check what the host waits for; read values from the device later (non_blocking=True).",
        other="Check what the host waits for; copy results asynchronously into pinned memory.",
    ),
}
_FIX_ONE = Advice(
    "Check what that rank's host does there: garbage collection (gc.freeze, gc.disable and gc.collect on all ranks in "
    "the same step), logging, other processes on its cores. Record with_stack=True to see the line.",
    "Check what that rank's host does there: garbage collection (gc.freeze once the model is loaded), tokenization, "
    "logging, other processes on its cores. Record with_stack=True to see the line.",
    "Check what that rank's host does there, and which other processes use its cores. Record CPU samples "
    "(nsys profile --sample=process-tree) to see the function.",
)
_FIX_GRAPH = Advice(
    "The first launch of a graph instantiates and uploads it: launch each graph once before serving or measuring "
    "(cudaGraphUpload), and capture few, small graphs. If it recurs, check what else uses the GPU and the driver."
)
_FIX_ALL = Advice(
    "Check what all ranks do there, such as a save, an evaluation or logging, and do it in the background. Mark it "
    "with torch.profiler.record_function to see its name.",
    "Check what the host does there, such as loading, tokenization or logging, and do it in the background. Mark it "
    "with torch.profiler.record_function to see its name.",
    "Check what the host does there, such as input or output, and do it on another thread. Mark it with NVTX ranges to "
    "see its name.",
)


@dataclass(frozen=True)
class OutlierStep(Rule):
    """A step that takes longer than the others because the host of a rank, or of all ranks, stalled once.

    What it does: reports single stalls that the other steps do not have, with step, rank, cause and the time that the
    job loses to them over the window: allocation retries, garbage collection, kernels loaded or compiled at their
    first use, a save or an evaluation that no span names, a launch that blocks.

    Why it costs: the device has no work while the host stalls, and all other ranks wait for that rank in the next
    collective. Rules on the median step do not see it.

    How it is measured: gaps in compute of 1 ms or more that the host causes, compared with the same place and with the
    longest stall of the same cause in the other steps of the rank. With up to three other steps, all of them must be
    without such a stall; in a window of one step it must be four times as long as the others of that step; unless calls
    in it prove the cause, it is then information, and left out above `max_alone_ratio` of the window. Stalls that
    overlap in time on several ranks are one event: of all ranks if three quarters stall as long. The job loses at most
    what the steps are shorter in a replay without the stall; where there is no replay, the stall, and at most what the
    step takes longer than the median of the steps without stalls. It is a warning from `min_lost_ratio` of the window;
    from `min_step_ratio` of a step it is information. On a CPU run, whose ops run on
    the host and whose threads are often interrupted, only pauses in Python of `min_cpu_step_ratio` of a step count. In
    the last step of a window, where no other rank can wait, the ranks that stall show what is lost; there, a stall also
    lasts from the last work to the end of the step on the host.
    Saves that have a span belong to CKPT001.

    How to fix: see the cause: for retries a lower peak; gc.disable() and gc.collect() on all ranks in the same step;
    background saves.

    Blind spots: the window does not show how often it happens. Python and a thread that is not scheduled can be
    distinguished only with recorded stacks. Steps in which all kernels are slower have no stall.
    """

    code: ClassVar[str] = "STEP001"
    fix_without_pytorch: ClassVar[str] = (
        "Check what the host does there, such as input or output, and do it on another thread. Mark it with NVTX "
        "ranges to see its name."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = _FACTS
    finding_facts: ClassVar[tuple[TraceFact, ...]] = late_ranks.EXCESS_FACTS
    min_lost_ratio: float = 0.03
    min_step_ratio: float = 0.1
    min_cpu_step_ratio: float = 0.5
    max_alone_ratio: float = 0.75

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding for each cause and set of ranks, the costliest first."""
        events = _single_events(run).filter(~is_cold())
        ranks = pl.when("is_everyone").then(None).otherwise("ranks").alias("_of")
        for _, similar in largest_first(events, "lost_ns", "start_ns").group_by("cause", ranks, maintain_order=True):
            on_device = breakdown.is_on_device(run)
            # A replay shows what a stall costs with others in the same step; the step's length shows only the sum.
            cost = "stall_ns" if on_device else "lost_ns"
            cost_ns, window_ns = int(similar[cost].sum()), int(similar.unique("window")["window_ns"].sum())
            longest = similar.row(0, named=True)
            is_of_known_cause = longest["cause"] != host_stalls.OTHER
            if on_device:  # one step has no other to compare with
                is_part = longest["stall_ns"] <= self.max_alone_ratio * longest["window_ns"]
                stands_out = longest["reference_ns"] is not None or is_part
            else:  # on a CPU ops are work
                stands_out = longest["steps"] > _PAIR and longest["detail"] == host_state.PYTHON
            if not (is_of_known_cause or stands_out):
                continue
            step_ns = longest["reference_ns"] or window_ns
            least_ns = step_ns * (self.min_step_ratio if on_device else self.min_cpu_step_ratio)
            if cost_ns >= self.min_lost_ratio * window_ns and longest[cost] >= least_ns / 2:
                is_proven = longest["reference_ns"] is not None or is_of_known_cause
                is_of_training = longest["cause"] != host_stalls.PROFILER
                severity = Severity.WARNING if is_proven and is_of_training else Severity.INFO
                yield self._finding(run, similar, severity, self.min_lost_ratio)
            elif longest[cost] >= least_ns:
                yield self._finding(run, similar, Severity.INFO, least_ns / window_ns)

    def _finding(self, run: Run, events: pl.DataFrame, severity: Severity, min_saved_ratio: float) -> Finding:
        event, windows = events.row(0, named=True), events.unique("window")
        lost_ns, window_ns, steps = (
            int(events["lost_ns"].sum()),
            int(windows["window_ns"].sum()),
            int(windows["steps"].sum()),
        )
        everyone = event["is_everyone"]
        cause = event["cause"]
        if event["cause"] == host_stalls.LAUNCH and "GraphLaunch" in (event["name"] or ""):
            fix = _FIX_GRAPH
        else:
            fix = _FIXES.get(event["cause"], _FIX_ALL if event["is_everyone"] else _FIX_ONE)
        if event["is_everyone"]:
            who = "the host of every rank stalls"
            is_unnamed = event["cause"] == host_stalls.OTHER
            waits = ", as in a save, an evaluation or logging without a span" if is_unnamed else ""
        else:
            waits = ", and the other ranks wait for it" if len(run.ranks) > 1 else ""
            ranks = event["ranks"]
            who = f"the host of {'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} stalls"
        stall_ns = int(events["stall_ns"].sum())
        took, share = units.duration(stall_ns), units.share(stall_ns / max(window_ns, 1))
        how_often = f"It takes {took} ({share}) of the window."
        if steps > 1:
            count = events.select(pl.struct("window", "step").n_unique()).item()
            how_often = f"{recurrence.sentence(count, steps)}; it takes {took} in total ({share} of the time)."
        subject = "Every rank" if everyone else units.numbers("rank", event["ranks"]).capitalize()
        in_steps = distinct(events, "step")
        in_step = f" in {units.numbers('step', in_steps)}" if in_steps else ""
        return Finding(
            self.code,
            severity,
            f"{where(event, event['stall_ns'])}{who} for {units.duration(event['stall_ns'])}, "
            f"while it {_what(event)}{waits}. {how_often}{_excess(run, events)}",
            fix.suited_to(run),
            impact=min(1.0, lost_ns / max(window_ns, 1)),
            cost_ns=lost_ns // max(steps, 1),
            confidence=0.8 if event["reference_ns"] is not None else 0.5,
            claim=f"{subject}'s host {_what(event)}{in_step}{waits if not everyone else ''}",
            ranks=() if everyone else tuple(event["ranks"]),
            steps=distinct(events, "step"),
            evidence=_evidence(run, events),
            # After the last work there is nothing that a replay could show.
            what_if=WhatIf(SINGLE_STALL, min_saved_ratio)
            if breakdown.is_on_device(run) and not event["is_last"]
            else None,
            subject=f"{cause} {'all ranks' if everyone else event['ranks']}",
            stall=cause,
        )


def _excess(run: Run, events: pl.DataFrame) -> str:
    """Sentence on what the ranks of events take longer for in their steps than in those without a stall; "" if none."""
    event = events.row(0, named=True)
    stalled = run.table(outlier_steps.outlier_steps).select("window", "step").unique()
    usual = (
        run.table(breakdown.by_step).select("window", "step").unique().join(stalled, on=["window", "step"], how="anti")
    )
    ranks = run.ranks if event["is_everyone"] else event["ranks"]
    excess = late_ranks.excess_of_steps(run, ranks, events, usual)
    if excess is None or excess.total_ns <= 0:
        return ""
    longer = units.duration(excess.total_ns)
    return f" Its work takes {longer} longer than in steps without a stall: {late_work.excess_parts(excess)}."


@dataclass(frozen=True)
class ColdStart(Rule):
    """A window whose first step does things for the first time: it is warm-up, not steady state.

    What it does: reports what the first profiled step spends on first use: device memory that is allocated, kernels
    that are loaded, compiled or tried out.

    Why it costs: nothing in a long training, but the step is not like the others: its time, its allocations and its
    launches are not those of steady state.

    How it is measured: stalls of the first step, as in STEP001, whose calls show a first use: cudaMalloc without a
    flush of the cache, module loading, compiling, autotuning, and long launches on all ranks. From `min_step_ratio` of
    a step.

    How to fix: profile later steps: schedule(wait=…, warmup=2, …).

    Blind spots: a window of a single step cannot be compared; there the calls are reported where they are.
    """

    code: ClassVar[str] = "STEP002"
    fix_without_pytorch: ClassVar[str] = (
        "Record later iterations (nsys profile --delay, or --capture-range=cudaProfilerApi)."
    )
    facts: ClassVar[tuple[TraceFact, ...]] = _FACTS
    min_step_ratio: float = 0.1

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield at most one finding, on all first uses of the run."""
        events = _single_events(run).filter(is_warm_up(self.min_step_ratio))
        if events.is_empty():
            return
        event = largest_first(events, "lost_ns", "start_ns").row(0, named=True)
        lost_ns = int(events["lost_ns"].sum())
        longest = f"{units.duration(event['stall_ns'])} while the host {_what(event)}"
        yield Finding(
            self.code,
            Severity.INFO,
            f"The first profiled step ({event['step']}) is warm-up: it takes {units.duration(lost_ns)} longer than the "
            f"others ({units.duration(event['reference_ns'])}), {longest}. Judge the other steps.",
            "Profile later steps: schedule(wait=…, warmup=2, …), or Recorder(warmup=2).",
            confidence=0.8,
            claim=f"Step {event['step']} is warm-up: the host {_what(event)}",
            steps=distinct(events, "step"),
            evidence=_evidence(run, events),
        )


def _single_events(run: Run) -> pl.DataFrame:
    """Events of `outlier_steps.outlier_steps` without those of which HOST005 and HOST006 speak."""
    return run.table(outlier_steps.outlier_steps).filter(~pl.col("cause").is_in(host_phases.judged_phases(run)))


def is_warm_up(min_step_ratio: float = ColdStart.min_step_ratio) -> pl.Expr:
    """Return whether an event of `outlier_steps.outlier_steps` is a first use that takes this share of a step."""
    return is_cold() & (pl.col("lost_ns") >= min_step_ratio * pl.col("reference_ns")).fill_null(value=False)


def is_cold() -> pl.Expr:
    """Return whether an event of `outlier_steps.outlier_steps` is a first use in the first step."""
    return pl.col("is_first") & is_first_use()


def is_first_use() -> pl.Expr:
    """Return whether an event of `outlier_steps.outlier_steps` is of a kind that first uses cause, in any step."""
    lazy = pl.col("cause").eq(host_stalls.LAUNCH) & pl.col("is_everyone")
    return pl.col("cause").is_in(host_stalls.FIRST_USE) | lazy


def removal(run: Run, finding: Finding) -> Removal:
    """Removal in a replay for a finding of STEP001: its stalls."""
    stalls = _single_events(run).filter(_belongs_to(finding))
    return Removal(SINGLE_STALL, (), tuple(_spans(run, stalls)))


def reported_stalls(run: Run, findings: Iterable[Finding]) -> pl.DataFrame:
    """The single stalls that a warning of STEP001 reports, or first uses: columns of `outlier_steps.outlier_steps`."""
    is_reported = is_warm_up() & pl.lit(any(finding.code == ColdStart.code for finding in findings))
    for finding in (warning for warning in warnings(findings) if warning.code == OutlierStep.code):
        is_reported |= _belongs_to(finding)
    return _single_events(run).filter(is_reported)


def remaining_spans(run: Run, stalls: pl.DataFrame, cause: Cause) -> tuple[HostSpan, ...]:
    """Host spans of `reported_stalls` that stay where a cause is removed.

    None in a window of one step, whose stalls may be steady or single.
    """
    if stalls.is_empty():
        return ()
    is_apart = pl.col("cause").is_in(cause.excluded_stalls)
    return tuple(_spans(run, stalls.filter(pl.col("steps") > 1, ~is_apart)))


def downgrade_repeated(finding: Finding, findings: Iterable[Finding], stalls: pl.DataFrame) -> Finding:
    """A finding of STEP001 as information if the rules of its causes warn of the same of some `stalls`.

    That is so in a window of one step, whose stalls may be steady or single. Other findings are returned as they are.
    """
    if finding.code != OutlierStep.code or finding.severity <= Severity.INFO:
        return finding
    matching = stalls.filter(_belongs_to(finding))
    kinds = set(matching["cause"])
    codes = {cause.code() for cause in causes.all_causes() if kinds & set(cause.removed_stalls)}
    is_only_step = bool((matching["steps"] <= 1).all()) and matching.height > 0
    is_reported = codes <= {warning.code for warning in warnings(findings)}
    return replace(finding, severity=Severity.INFO) if is_only_step and is_reported else finding


def _spans(run: Run, stalls: pl.DataFrame) -> Iterator[HostSpan]:
    """Yield when the hosts are in these stalls.

    A rank whose device still has work while all others stall has no stall of its own: its host pauses as theirs do.
    """
    pieces = run.table(outlier_steps.outlier_stalls).with_columns(end_ns=pl.col("run_start_ns") + pl.col("dur_ns"))
    for stall in stalls.iter_rows(named=True):
        events = pieces.filter(pl.col("event").is_in(stall["events"]), pl.col("window") == stall["window"])
        all_spans = events.select("run_start_ns", "end_ns").rows()
        by_rank: dict[int, list[tuple[int, int]]] = {}
        for rank, span in zip(events["rank"].to_list(), all_spans, strict=True):
            by_rank.setdefault(rank, []).append(span)
        for rank in run.ranks if stall["is_everyone"] else dict.fromkeys(stall["ranks"]):
            for start_ns, end_ns in by_rank.get(rank, all_spans):
                yield HostSpan(stall["window"], rank, start_ns, end_ns, f"{stall['cause']} in step {stall['step']}")


def _belongs_to(outliers: Finding) -> pl.Expr:
    """Whether a row of `outlier_steps.outlier_steps` belongs to a finding of STEP001."""
    differing = pl.col("ranks").list.set_symmetric_difference(list(outliers.ranks)).list.len()
    same_ranks = (differing == 0) & ~pl.col("is_everyone") if outliers.ranks else pl.col("is_everyone")
    in_steps = pl.col("step").is_in(outliers.steps) if outliers.steps else pl.col("step").is_null()
    return in_steps & (pl.col("cause") == outliers.stall) & same_ranks & ~is_cold()


def where(event: dict[str, Any], lost_ns: int) -> str:
    """Begin of a sentence about an event: by how much its step is longer, if that shows half of `lost_ns`.

    `event` has step, step_ns and reference_ns (of the step, and usually). '' where no step is marked.
    """
    if event["step"] is None or event["step_ns"] is None:
        return ""
    if event["reference_ns"] is None:
        return f"In step {event['step']}, "
    longer_ns = max(0, event["step_ns"] - event["reference_ns"])
    return (
        f"Step {event['step']} takes {units.duration(longer_ns)} longer than the others "
        f"({units.duration(event['reference_ns'])}): "
        if longer_ns >= lost_ns / 2
        else f"In step {event['step']}, "
    )


def _what(event: dict[str, Any]) -> str:
    if event["cause"] in _HOST_DOES:
        inside = event["cause"] in (host_stalls.LAUNCH, host_stalls.SYNC, host_stalls.DATA) and event["name"]
        return _HOST_DOES[event["cause"]] + (f" ({event['name']})" if inside else "")
    state = _STATE_IS.get(event["detail"], "is not launching work")
    return state + (f" ({event['name']})" if event["name"] else "")


def _evidence(run: Run, events: pl.DataFrame) -> pl.DataFrame:
    stalls = run.table(outlier_steps.outlier_stalls)
    event_stalls = stalls.join(
        events.select("window", "step", "cause").unique(), on=["window", "step", "cause"], how="semi", nulls_equal=True
    )
    columns = ("window", "rank", "step", "device", "cause", "detail", "name", "start_ns", "dur_ns", "expected_ns")
    return largest_first(event_stalls, "excess_ns", "rank", "start_ns").select(columns).head(_EVIDENCE_ROWS)
