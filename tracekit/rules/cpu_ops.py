"""Rules on ops of a CPU run that take longer than they need to in every call, however regular that is."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import cpu_ops
from tracekit.analysis.parallelism import workload
from tracekit.model import kernel_names, units
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.device_time import (
    ANOMALY_CHECKS,
    CASTS,
    DETERMINISTIC_FILLS,
    SLOW_ARITHMETIC,
    SMALL_OPS,
)
from tracekit.rules import quoted_step
from tracekit.rules.advice import Advice
from tracekit.rules.compute import AvoidableTime
from tracekit.rules.rule import Finding, Severity, largest_first


@dataclass(frozen=True)
class SlowArithmetic(AvoidableTime):
    """Elementwise arithmetic on the CPU far below the rate that the same machine reaches.

    What it does: reports steps of a CPU run in which additions, multiplications and the like take five times as long in
    every call as others of the same element type and size in the same trace, if that is `min_saved_ratio` of the step.

    Why it costs: processors compute with denormal numbers (below 1.2e-38 in 32 bits) in microcode, 10 to 100 times as
    slowly. Tensors with large strides load a cache line for each element.

    How it is measured: bytes that a call moves, by its shapes, over its median time; the usual rate is the upper
    quartile over kinds of calls of a similar size, at least three. The saving is the time beyond that rate. Steps that
    save are left out.

    How to fix: torch.set_flush_denormal(True), in each process and thread that computes; find what underflows (very
    small factors, an average that decays to zero, masks of -1e38); for strides .contiguous() once, before the loop.

    Blind spots: needs record_shapes=True. Denormal numbers in matrix products and other ops are not judged. Values are
    not recorded: that they are denormal is inferred from the time.
    """

    code: ClassVar[str] = "COMP006"
    cause: ClassVar[Cause] = SLOW_ARITHMETIC
    claim: ClassVar[str] = "Elementwise ops take many times as long as others of their size"
    confidence: ClassVar[float] = 0.8
    facts: ClassVar[tuple[TraceFact, ...]] = (cpu_ops.slow_arithmetic, *save_stages.FACTS)
    min_saved_ratio: float = 0.03

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the ops of the quoted step."""
        kind, count, took_ns = _largest_kind(loss.rows(run.table(self.facts[0])))
        return (
            f"{units.count(count, 'call')} of {kind['op']} on {kind['shapes']} take {units.duration(took_ns)} each, "
            f"ops of the same size and element type in this run {units.duration(kind['usual_ns'])}. Such ops lose "
            f"{loss}. Their numbers may be denormal, or their tensors strided.",
            "Call torch.set_flush_denormal(True) and find what underflows (tiny factors, averages that decay to zero); "
            "if the tensors are strided, make them contiguous once.",
        )


@dataclass(frozen=True)
class RepeatedCasts(AvoidableTime):
    """Conversions between element types, again and again.

    What it does: reports steps in which conversions between floating types take `min_saved_ratio` of the step: on a
    CPU all of them, on a device those that the next kernel reverts. It is a warning if most of that time is of
    conversions that the next one reverts.

    Why it costs: a conversion reads and writes the whole tensor and computes nothing.

    How it is measured: ops that copy a tensor to another floating type, and the pause in Python before each; on a
    device their kernels. One is reverted if the next one of its thread, on a device the next kernel of its stream,
    converts a tensor of the same shape back. Steps that save are left out.

    How to fix: keep the tensor in one type, convert once outside of the loop, or let autocast cache the converted
    weights; accumulate in 64 bits where that is needed, not everything.

    Blind spots: needs record_shapes=True. Conversions that mixed precision needs look the same: without their reversal
    they are information on a CPU, and left out on a device, as are those with other kernels between (COMP004).
    """

    code: ClassVar[str] = "COMP007"
    cause: ClassVar[Cause] = CASTS
    claim: ClassVar[str] = "Tensors are converted to another element type and back"
    facts: ClassVar[tuple[TraceFact, ...]] = (cpu_ops.casts, *save_stages.FACTS)
    min_saved_ratio: float = 0.05

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst rank's median step exceeds the threshold."""
        sums = run.table(self.facts[0]).group_by("is_reverted").agg(pl.col("saved_ns").sum())
        reverted_ns = sums.filter("is_reverted")["saved_ns"].sum()
        for finding in super().check(run):
            is_certain = 2 * reverted_ns > sums["saved_ns"].sum()
            claim = finding.claim if is_certain else "Tensors are converted between element types"
            yield replace(finding, severity=Severity.WARNING if is_certain else Severity.INFO, claim=claim)

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the conversions of the quoted step."""
        rows = loss.rows(run.table(self.facts[0]))
        by_types = rows.group_by("cast_from", "cast_to").agg(pl.len(), pl.col("saved_ns").sum())
        most = largest_first(by_types, "saved_ns", "cast_from", "cast_to").row(0, named=True)
        reverted = int(rows["is_reverted"].sum())
        return (
            f"{units.count(rows.height, 'conversion')} between element types take {loss}, most of them "
            f"{most['cast_from']} to {most['cast_to']} ({most['len']:,}). {reverted:,} are reverted by the next one or "
            "revert the one before.",
            "Keep these tensors in one element type, or convert them once outside of the loop; autocast caches weights "
            "that it converts.",
        )


@dataclass(frozen=True)
class SmallOps(AvoidableTime):
    """Hundreds of ops on the CPU that do almost nothing each.

    What it does: reports steps of a CPU run with 200 calls or more of an op with the same small inputs, if these take
    `min_saved_ratio` of the step: a Python loop over parameters, rows or samples.

    Why it costs: Python and the dispatcher take some microseconds for each call, whatever its size; the arithmetic of a
    few hundred elements takes a tenth of one.

    How it is measured: calls on less than 64 KiB that take less than 20 µs in the median, the pause in Python before
    each (up to 100 µs), and the ops that divide tensors for them (split, unbind, chunk). The saving is all of that: one
    op on the whole data takes next to nothing. Steps that save are left out.

    How to fix: one op on the whole tensor instead of a loop over its parts; a flat buffer for all parameters;
    torch._foreach_* or fused=True in optimizers; torch.vmap or batched ops; torch.compile of the loop.

    Blind spots: needs record_shapes=True. The profiler adds about a microsecond to each op. On a GPU such loops make
    the step launch-bound (HOST001).
    """

    code: ClassVar[str] = "COMP008"
    cause: ClassVar[Cause] = SMALL_OPS
    claim: ClassVar[str] = "A loop calls hundreds of ops that do almost nothing"
    facts: ClassVar[tuple[TraceFact, ...]] = (cpu_ops.small_ops, workload.marks, *save_stages.FACTS)
    min_saved_ratio: float = 0.05

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the ops of the quoted step."""
        rows = loss.rows(run.table(self.facts[0]))
        kind, count, took_ns = _largest_kind(rows)
        lines = rows.drop_nulls("line").group_by("line").agg(pl.col("saved_ns").sum())
        place = ""
        if lines.height:
            place = (
                f" Most are called at {kernel_names.code_line(largest_first(lines, 'saved_ns', 'line')['line'][0])}."
            )
        return (
            f"{rows.height:,} small ops take {loss}, with the Python between them. {count:,} of them are "
            f"{kind['op']} on {kind['shapes']}, {units.duration(took_ns)} each.{place}",
            _ONE_OP.suited_to(run),
        )


@dataclass(frozen=True)
class AnomalyMode(AvoidableTime):
    """Autograd's anomaly mode, left on: a debugging aid that checks every gradient.

    What it does: reports steps of a CPU run in which autograd looks for NaN after each node of backward, if that takes
    `min_saved_ratio` of the step.

    Why it costs: each gradient is read again, by two ops and a read of their result. Forward formats the Python stack
    for each operator that backward needs.

    How it is measured: aten::isnan and what tests its result, where autograd itself calls them. A stack takes as long
    as the cheapest kind of operator that backward needs (views such as aten::t) takes beyond calls of the same name
    that it does not need; each such operator has one. Steps that save are left out.

    How to fix: torch.autograd.set_detect_anomaly(False); turn it on for the steps that are investigated; check the loss
    or the norm of the gradients instead.

    Blind spots: stacks that take longer than that of a view are counted too low. On a GPU, each read waits for the
    device (HOST002).
    """

    code: ClassVar[str] = "COMP009"
    cause: ClassVar[Cause] = ANOMALY_CHECKS
    claim: ClassVar[str] = "Autograd's anomaly mode checks every gradient for NaN"
    confidence: ClassVar[float] = 0.9
    facts: ClassVar[tuple[TraceFact, ...]] = (cpu_ops.anomaly_checks, *save_stages.FACTS)
    min_saved_ratio: float = 0.03

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the checks of the quoted step."""
        checks = loss.rows(run.table(self.facts[0]))
        gradients = units.count(checks.filter(op="aten::isnan").height, "gradient")
        return (
            f"Anomaly mode is on: autograd checks {gradients} for NaN, and forward records stacks; that takes {loss}.",
            "Turn off torch.autograd.set_detect_anomaly, or turn it on for the steps that are investigated only; check "
            "the loss or the norm of the gradients instead.",
        )


@dataclass(frozen=True)
class DeterministicFills(AvoidableTime):
    """Deterministic mode that overwrites each new tensor before it is used.

    What it does: reports steps in which ops that allocate tensors fill them, if that takes `min_saved_ratio` of the
    step: torch.use_deterministic_algorithms(True) does it with NaN, or the largest integer.

    Why it costs: all memory that a step allocates is written once more, and on a GPU by a kernel for each tensor.

    How it is measured: aten::fill_ directly within aten::empty and its like, or with NaN within other ops; on a GPU its
    kernels. PyTorch calls it there in this mode only. Where run.json states that the mode is off, the finding is
    information: the program switched it on for a part of the run, or fills tensors itself. Steps that save are left
    out.

    How to fix: torch.utils.deterministic.fill_uninitialized_memory = False keeps the deterministic algorithms without
    the fills; turn the mode off where a run need not be reproduced bit by bit.

    Blind spots: deterministic variants of algorithms (index_add, scatter_add, interpolation, cuDNN) have the names of
    others; what they take beyond these is not known.
    """

    code: ClassVar[str] = "COMP010"
    cause: ClassVar[Cause] = DETERMINISTIC_FILLS
    claim: ClassVar[str] = "Deterministic mode overwrites each new tensor before its use"
    confidence: ClassVar[float] = 0.9
    facts: ClassVar[tuple[TraceFact, ...]] = (cpu_ops.deterministic_fills, *save_stages.FACTS)

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds the threshold."""
        is_on = Manifest.of(run.manifest).determinism.deterministic_algorithms
        for finding in super().check(run):
            if is_on is False:
                yield replace(finding, severity=Severity.INFO, confidence=_CONTRADICTED_CONFIDENCE)
            else:
                yield replace(finding, confidence=_STATED_CONFIDENCE) if is_on else finding

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the fills of the quoted step."""
        fills = loss.rows(run.table(self.facts[0]))
        sums = fills.group_by("op").agg(pl.len(), pl.col("saved_ns").sum())
        most = largest_first(sums, "saved_ns", "op").row(0, named=True)
        return (
            f"{units.count(fills.height, 'op')} fill the tensors that they allocate, which takes {loss}; most of it is "
            f"in {most['op']} ({most['len']:,}). {_mode(run)}",
            "Set torch.utils.deterministic.fill_uninitialized_memory = False: algorithms stay deterministic. Or turn "
            "off torch.use_deterministic_algorithms where the run need not be reproduced.",
        )


_STATED_CONFIDENCE = 1.0
_CONTRADICTED_CONFIDENCE = 0.4
_ONE_OP = Advice(
    "Replace the loop by one op on the whole data: a flat buffer for all parameters, torch._foreach_* ops, fused=True "
    "in the optimizer, batched ops instead of a loop over rows; or torch.compile the loop.",
    "Replace the loop by one op on the whole data: batched ops instead of a loop over rows or samples; or "
    "torch.compile the loop.",
)


def _mode(run: Run) -> str:
    """Sentence on deterministic mode: what run.json states of it, or what the fills show."""
    stated = Manifest.of(run.manifest).determinism
    if stated.deterministic_algorithms is None:
        return "Deterministic mode is on, with its fills of new memory."
    if not stated.deterministic_algorithms:
        return "Such fills are those of deterministic mode, although run.json states that the mode is off."
    cudnn = " torch.backends.cudnn.deterministic is set, too." if stated.cudnn_deterministic else ""
    return f"run.json states that deterministic mode is on.{cudnn}"


def _largest_kind(rows: pl.DataFrame) -> tuple[dict[str, Any], int, int]:
    """Kind of call with most to save, with how many there are and their median time."""
    sums = rows.group_by("op", "shapes").agg(
        pl.len(), pl.col("dur_ns").median().cast(pl.Int64), pl.col("saved_ns").sum(), pl.col("usual_ns").first()
    )
    kind = largest_first(sums, "saved_ns", "op", "shapes").row(0, named=True)
    return kind, kind["len"], kind["dur_ns"]
