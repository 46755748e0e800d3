"""What late ranks, slow stages and outlier steps take longer for, in words: the claim, the evidence and the fix."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.communication import communication_gap_causes as gap_causes
from tracekit.analysis.compute.excess_time import EXTRA, KINDS, LARGER, LATE, LONGER, SLOWER, ExcessTime
from tracekit.analysis.time import breakdown, host_state
from tracekit.model import kernel_names, units
from tracekit.model.run import Run
from tracekit.rules.advice import Advice, DeviceAdvice

_MIN_EXPLAINED = 0.5
"""Share of what the others lose that must be found in the work of the late ranks to name it as the reason."""
_MIN_NAMED = 0.1
"""Kinds below this share of the excess are not mentioned."""
_MOST = 0.5
_MAX_NAME = 48
_HOST_SPENDS_TIME = {
    host_state.SYNCHRONIZE: "waiting for the device",
    host_state.DATA: "waiting for data",
    host_state.ALLOCATOR: "waiting for the allocator",
    host_state.COMPILE: "compiling",
    host_state.GARBAGE_COLLECTION: "in Python's garbage collector",
    host_state.PYTHON: "in Python or waiting for a core",
    host_state.OP: "calling PyTorch ops",
}


@dataclass(frozen=True)
class Subject:
    """Who is late, and than whom: "Rank 1", "the other ranks"."""

    name: str
    others: str = "the other ranks"
    is_plural: bool = False
    tail: str = ""
    """Ends the claim: ", and the others wait for it"."""

    @property
    def has(self) -> str:
        """Return the possessive: "Rank 1's", "Ranks 2 and 3's"."""
        return f"{self.name}'s"

    def verb(self, singular: str, plural: str) -> str:
        """Return the form of a verb for this subject."""
        return plural if self.is_plural else singular


@dataclass(frozen=True)
class Reason:
    """The kind of `excess_time.KINDS` with most of the excess, and it in words."""

    kind: str
    claim: str
    evidence: str
    """A sentence."""
    fix: str


def reason(
    run: Run, excess: ExcessTime | None, subject: Subject, *, lost_ns: int, balanced_ratio: float
) -> Reason | None:
    """Return the main reason of an excess; None if it explains less than half of what is lost.

    `balanced_ratio` is the part of the excess of larger inputs that ends if all have the mean: of n ranks (n - 1) / n.
    """
    if excess is None or excess.total_ns < _MIN_EXPLAINED * lost_ns or excess.total_ns <= 0:
        return None
    kind = excess.largest
    rows = excess.rows.filter(pl.col("excess_ns") > 0, kind=kind)
    if rows.is_empty():
        return None
    words = {EXTRA: _extra, LARGER: _larger, SLOWER: _slower, LONGER: _longer, LATE: _late}[kind]
    claim, fix = words(run, excess, rows, subject)
    fix = fix or SLOW_HOST.suited_to(run).format(ranks=subject.name[0].lower() + subject.name[1:])
    evidence = _evidence(excess, subject)
    if kind == LARGER:
        share = min(1.0, excess.kinds[LARGER] / max(lost_ns, 1))
        saved_ns = int(min(excess.kinds[LARGER], lost_ns) * balanced_ratio)
        evidence += f" Larger inputs explain {units.share(share)} of the wait; if they were balanced, a step would be "
        evidence += f"{units.duration(saved_ns)} shorter."
    return Reason(kind, f"{claim}{subject.tail}", evidence, fix)


def _evidence(excess: ExcessTime, subject: Subject) -> str:
    """Sentence on the parts of the excess: "It takes 22 ms longer a step: 22 ms for extra calls (spin_kernel)"."""
    verb = subject.verb("It takes", "They take")
    return f" {verb} {units.duration(excess.total_ns)} longer a step than {subject.others}: {excess_parts(excess)}."


def excess_parts(excess: ExcessTime) -> str:
    """The kinds with a tenth of the excess or more: "22 ms for extra calls (most in spin_kernel)"."""
    parts = []
    for kind, kind_ns in excess.kinds.items():
        if kind_ns >= max(_MIN_NAMED * excess.total_ns, 1):
            rows = excess.rows.filter(pl.col("excess_ns") > 0, kind=kind)
            parts.append(f"{units.duration(kind_ns)} for {_NOUNS[kind]}{_most_of(rows, kind_ns)}")
    return ", ".join(parts)


_NOUNS = dict(
    zip(
        KINDS,
        ("extra calls", "larger inputs", "the same calls, slower", "calls of unknown size", "idle time"),
        strict=True,
    )
)


def _most_of(rows: pl.DataFrame, kind_ns: int) -> str:
    """The kernel or operator with most of a kind, in brackets, or what the host does; "" where it has little of it."""
    if rows.is_empty() or rows["excess_ns"].sum() == 0:
        return ""
    if rows["kind"][0] == LATE:
        by = rows.group_by("cause", "detail").agg(pl.col("excess_ns").sum()).sort("excess_ns", "cause", descending=True)
        cause, detail, _ = by.row(0)
        if cause == gap_causes.HOST and detail in _HOST_SPENDS_TIME:
            return f" in which the host is {_HOST_SPENDS_TIME[detail]}"
        text = " ".join(name.replace("_", " ") for name in (cause or "unknown", detail) if name)
        return f" ({text})"
    kernel, excess_ns, module = _top(rows)
    if excess_ns < _MIN_NAMED * kind_ns:
        return ""
    return f" (most in {short_name(kernel)}{f' of {module}' if module else ''}{_line_of(rows, kernel)})"


def _top(rows: pl.DataFrame) -> tuple[str, int, str | None]:
    """The kernel with most of the excess, by name, with its module if it is in one alone."""
    module = pl.when(pl.col("module").n_unique() == 1).then(pl.col("module").first())
    sums = rows.group_by("kernel").agg(pl.col("excess_ns").sum(), module.alias("module"))
    kernel, excess_ns, module_name = sums.sort("excess_ns", "kernel", descending=[True, False]).row(0)
    return kernel or "unknown work", excess_ns, module_name


def _line_of(rows: pl.DataFrame, kernel: str) -> str:
    """The line of the user's code with most of a kernel's excess: " at train.py:20 (step)"; "" without stacks."""
    called = rows.filter(pl.col("kernel").eq_missing(kernel))
    sums = called.drop_nulls("line").group_by("line").agg(pl.col("excess_ns").sum())
    if sums.is_empty():
        return ""
    line, excess_ns = sums.sort("excess_ns", "line", descending=[True, False]).row(0)
    return f" at {kernel_names.code_line(line)}" if excess_ns >= _MOST * int(called["excess_ns"].sum()) else ""


def short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces, template and arguments, cut where it is long."""
    name = kernel_names.short(kernel)
    return name if len(name) <= _MAX_NAME else f"{name[: _MAX_NAME - 1]}…"


def _extra(run: Run, excess: ExcessTime, rows: pl.DataFrame, subject: Subject) -> tuple[str, str]:  # noqa: ARG001
    kernel, top_ns, _ = _top(rows)
    named = rows.filter(pl.col("kernel").eq_missing(kernel))
    is_most = top_ns >= _MOST * excess.kinds[EXTRA]
    count = round(float((named if is_most else rows)["count_change"].sum()) * excess.steps)
    calls = units.count(max(1, count), "call") + (
        f" of {short_name(kernel)}{_line_of(rows, kernel)}" if is_most else ""
    )
    is_new = bool((named if is_most else rows)["is_new"].all())
    does_not = f"{subject.others} {'does' if subject.others.startswith('rank ') else 'do'} not make"
    than = f"that {does_not}" if is_new else f"more than {subject.others}"
    claim = f"{subject.name} {subject.verb('makes', 'make')} {calls} {than}"
    what = f"calls {short_name(kernel)}" if is_most else "makes these calls (tracekit kernels --by rank)"
    return claim, (
        f"Find what {what} on {subject.name[0].lower()}{subject.name[1:]} only, such as an evaluation, metrics, "
        "logging or a test of the hardware: divide it among the ranks, do it less often, or remove it."
    )


def _larger(run: Run, excess: ExcessTime, rows: pl.DataFrame, subject: Subject) -> tuple[str, str]:  # noqa: ARG001
    ratio = excess.size_ratio or 1.0
    in_optimizer_ns = int(rows.filter(pl.col("path").fill_null("").str.contains("ptimizer"))["excess_ns"].sum())
    if in_optimizer_ns >= _MOST * int(rows["excess_ns"].sum()):
        claim = f"{subject.has} optimizer shard is {ratio:.1f} times as large as that of {subject.others}"
        return claim, "Divide the optimizer's state by size, not by parameter, so that each rank updates as much."
    claim = f"{subject.has} inputs are {ratio:.1f} times as large as those of {subject.others}"
    return claim, (
        "Give each rank as many tokens: pack or bucket sequences by length, or form batches by their number of tokens, "
        "not of samples (with experts: balance the router)."
    )


def _slower(run: Run, excess: ExcessTime, rows: pl.DataFrame, subject: Subject) -> tuple[str, str]:
    stalled_ns = int(rows.filter(cause=gap_causes.DEVICE_STALL)["excess_ns"].sum())
    who = subject.name[0].lower() + subject.name[1:]
    if stalled_ns >= _MOST * excess.kinds[SLOWER]:
        claim = f"{subject.has} GPU runs nothing at times although work is queued"
        return claim, f"Find what else uses the GPU of {who} (nvidia-smi pmon; time slicing, MIG, another job)."
    if excess.is_uniform:
        claim = f"All {_work(run)} of {who} take {excess.slowdown:.2f} times as long as on {subject.others}"
        return claim, SLOW_KERNELS.suited_to(run).format(ranks=who)
    kernel, top_ns, _ = _top(rows)
    if top_ns >= _MOST * excess.kinds[SLOWER]:
        ratio = _time_ratio(rows.filter(pl.col("kernel").eq_missing(kernel)))
        claim = f"{short_name(kernel)} takes {ratio} longer on {who} than on {subject.others}"
    else:
        claim = f"Some {_work(run)} of {who} take longer than on {subject.others}"
    return claim, _DIFFERENT_KERNELS.suited_to(run).format(ranks=who, others=subject.others)


def _longer(run: Run, excess: ExcessTime, rows: pl.DataFrame, subject: Subject) -> tuple[str, str]:
    kernel, top_ns, _ = _top(rows)
    who = subject.name[0].lower() + subject.name[1:]
    is_most = top_ns >= _MOST * excess.kinds[LONGER]
    what = short_name(kernel) if is_most else "Some operators"
    claim = f"{what} {'takes' if is_most else 'take'} longer on {who} than on {subject.others}"
    return claim, (
        "Record the shapes of inputs (record_shapes=True), which separate larger inputs from a slower device. "
        + SLOW_KERNELS.suited_to(run).format(ranks=who)
    )


def _late(run: Run, excess: ExcessTime, rows: pl.DataFrame, subject: Subject) -> tuple[str, str]:  # noqa: ARG001
    who = subject.name[0].lower() + subject.name[1:]
    by_cause = rows.group_by("cause", "detail").agg(pl.col("excess_ns").sum())
    cause, detail, _ = by_cause.sort("excess_ns", "cause", "detail", descending=[True, False, False]).row(0)
    if cause != gap_causes.HOST:
        claim = f"{subject.has} device is idle for longer than {_that_of(subject)}"
        return claim, UNKNOWN.suited_to(run).format(ranks=who)
    is_launching = detail == host_state.OP or detail not in _HOST_SPENDS_TIME
    launches = "launches kernels" if breakdown.is_on_device(run) else "calls operators"
    longer = f"{launches} late" if is_launching else f"spends longer {_HOST_SPENDS_TIME[detail]}"
    claim = f"{subject.has} host {longer}"
    fixes = {host_state.COMPILE: FIX_COMPILATION, host_state.GARBAGE_COLLECTION: FIX_GARBAGE}
    return claim, fixes.get(detail, "")  # else SLOW_HOST, by what the run is


def _work(run: Run) -> str:
    """What a run consists of, in words: kernels of a device, or operators of the CPU."""
    return "kernels" if breakdown.is_on_device(run) else "operators"


def _that_of(subject: Subject) -> str:
    return f"that of {subject.others}" if subject.others.startswith("rank ") else f"those of {subject.others}"


def _time_ratio(rows: pl.DataFrame) -> str:
    ratios = rows.drop_nulls("time_ratio")
    if ratios.is_empty():
        return "much"
    weighted = float(np.average(ratios["time_ratio"].to_numpy(), weights=ratios["excess_ns"].to_numpy()))
    return f"{weighted:.1f} times" if weighted >= 2 else f"{units.share(weighted - 1)}"


SLOW_KERNELS = DeviceAdvice(
    "Check the devices of {ranks}: GPU clocks and temperature (nvidia-smi -q -d PERFORMANCE), other jobs on the node; "
    "move the work to another node to separate hardware from data.",
    "Check the cores of {ranks}: other processes on them (top), which and how many they are (taskset -p, "
    "OMP_NUM_THREADS), their frequency (cpupower frequency-info); move the work to another node to separate hardware "
    "from data.",
)
_DIFFERENT_KERNELS = DeviceAdvice(
    "Compare these kernels on {ranks} and on {others} (tracekit kernels --by rank): what runs at the same time on its "
    "GPU, other data (sparse or masked inputs), clocks; move the work to another node to separate hardware from data.",
    "Compare these operators on {ranks} and on {others} (tracekit kernels --by rank): other processes on its cores, "
    "how many cores it has (taskset -p, OMP_NUM_THREADS), their frequency, other data (sparse inputs, denormal "
    "numbers); move the work to another node to separate hardware from data.",
)
_NODE = "CPU load and frequency, other processes and the binding of CPUs on the node (HOST001, HOST003)."
SLOW_HOST = Advice(
    "Check the host side of {ranks}: what Python does before the launches (garbage collection: gc.freeze(), "
    f"gc.disable() and gc.collect(1) at one time on all ranks; data loading, logging), {_NODE}",
    "Check the host side of {ranks}: what Python does before the launches (tokenization, sampling, scheduling of "
    f"requests, logging; garbage collection: gc.freeze() once the model is loaded), {_NODE}",
    f"Check the host side of {{ranks}}: what the program does before the launches, {_NODE}",
)
FIX_COMPILATION = (
    "Find the guard that fails (TORCH_LOGS=recompiles), and compile for dynamic shapes (torch.compile(dynamic=True), "
    "torch._dynamo.mark_dynamic) or pad the inputs to a few sizes. Keep Python numbers and modules constant."
)
FIX_GARBAGE = (
    "Call gc.freeze() after model and data are built and gc.disable(), and gc.collect(1) at one time on all ranks, "
    "every few hundred steps."
)
UNKNOWN = DeviceAdvice(
    "Check what {ranks} does before its collectives: GPU clocks and temperature, uneven work, a busy host "
    "(HOST001, HOST003), other jobs on its node; move the rank to another node to separate hardware from data.",
    "Check what {ranks} does before its collectives: uneven work, a busy host (HOST001, HOST003), other processes on "
    "its cores; move the rank to another node to separate hardware from data.",
)


def names(ranks: Sequence[int], all_ranks: Sequence[int]) -> str:
    """Return the ranks that late ones are compared with: "rank 0" if there is one, else "the other ranks"."""
    others = [rank for rank in all_ranks if rank not in ranks]
    return f"rank {others[0]}" if len(others) == 1 else "the other ranks"
