"""Rules on the efficiency of kernels: matrix products, optimizers, elementwise chains."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.compute import avoidable_time, product_kernels
from tracekit.analysis.parallelism import workload
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.replay.graph.causes.cause import Cause
from tracekit.replay.graph.causes.device_time import (
    IDLE_TENSOR_CORES,
    MISALIGNED_PRODUCTS,
    PARTIAL_WAVES,
    UNFUSED_KERNELS,
    UNFUSED_OPTIMIZER,
)
from tracekit.rules import quoted_step
from tracekit.rules.advice import Advice
from tracekit.rules.quoted_step import KEY
from tracekit.rules.rule import Finding, Rule, Severity, WhatIf, largest_first

_MAX_NAMED = 3


@dataclass(frozen=True)
class AvoidableTime(Rule):
    """Kernels that take longer than they need to; each subclass is one reason.

    The first of its `facts` is the table of these kernels, with the time that they could save (saved_ns).
    """

    cause: ClassVar[Cause]
    claim: ClassVar[str]
    confidence: ClassVar[float] = 0.7
    min_saved_ratio: float = 0.02

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds a threshold."""
        kernels = run.table(self.facts[0])
        loss = quoted_step.worst_loss(save_stages.losses(run, kernels, "saved_ns"), self.min_saved_ratio)
        if loss is None:
            return
        message, fix = self.advise(run, loss)
        yield loss.finding(
            self,
            Severity.WARNING,
            message,
            fix,
            confidence=self.confidence,
            evidence=_evidence(kernels, loss),
            what_if=WhatIf(self.cause),
            claim=self.claim,
        )

    @abstractmethod
    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""


@dataclass(frozen=True)
class MisalignedProducts(AvoidableTime):
    """Matrix products whose rows in memory are not aligned for tensor cores.

    What it does: reports products of which a dimension is not a multiple of 16 bytes (8 elements of 16 bits, 4 of
    32 bits in TF32, 16 of 8 bits), if aligned ones would save `min_saved_ratio` of the step. It names the
    dimensions and the sizes to pad them to. Without shapes the saving is not known: then it is information if such
    kernels take `min_time_ratio` of the step.

    Why it costs: tensor cores are fed by loads of 16 bytes. If the rows of a matrix begin elsewhere, the library takes
    kernels with smaller loads, often those of an older architecture.

    How it is measured: the alignment in a kernel's name (align1, align2), or, where the name has none, a contiguous
    dimension that is not a multiple, of a call that reaches less than 35% of the roofline. The saving is the time
    beyond what the padded product needs at the share of the roofline that the median aligned product of the trace
    reaches (50% if there are fewer than five). Dimensions below 16 are not judged; steps that save are left out.

    How to fix: pad the dimension to the next multiple: vocabulary, hidden and head sizes in the model
    (pad_vocab_size_to_multiple_of), sequence lengths and batches in the collate function (pad_to_multiple_of=8).
    Attention as scaled_dot_product_attention needs no product of padded rows.

    Blind spots: needs record_shapes=True for the saving and a known device. Products in CUDA graphs have no shapes.
    Waves of blocks belong to COMP005.
    """

    code: ClassVar[str] = "COMP001"
    fix_without_pytorch: ClassVar[str] = "Pad the dimensions such that rows in memory begin at multiples of 16 bytes."
    cause: ClassVar[Cause] = MISALIGNED_PRODUCTS
    claim: ClassVar[str] = "Matrix products have dimensions that are not aligned for tensor cores"
    facts: ClassVar[tuple[TraceFact, ...]] = (product_kernels.misaligned_kernels, *save_stages.FACTS)
    min_time_ratio: float = 0.1

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""
        calls = loss.rows(run.table(self.facts[0])).drop_nulls("padding")
        by_shapes = calls.group_by("op", "shapes").agg(pl.len(), pl.col("dur_ns", "saved_ns").sum())
        row = largest_first(by_shapes, "saved_ns", "op", "shapes").row(0, named=True)
        # "5185 to 5192 and 18030 to 18032": the dimensions with most of the saving.
        sums = calls.group_by("padding").agg(pl.col("saved_ns").sum())
        ordered = largest_first(sums, "saved_ns", "padding")["padding"].to_list()
        dims = dict(pair for padding in reversed(ordered) for pair in reversed(product_kernels.pads(padding)))
        pairs = list(dims.items())[::-1][:_MAX_NAMED]
        pads = " and ".join(f"{size} to {to}" for size, to in pairs)
        return (
            f"Matrix products with misaligned dimensions take {_duration(calls)}; aligned ones would save {loss}. "
            f"Most of it: {row['len']:,} × {row['op']} {row['shapes']} ({units.duration(row['dur_ns'])}).",
            f"Pad {pads}, such that rows in memory begin at multiples of 16 bytes: sizes of the model "
            "(vocabulary, hidden, heads) in its configuration, sequence lengths in the collate function "
            "(pad_to_multiple_of=8). In attention, scaled_dot_product_attention avoids such products.",
        )

    def check(self, run: Run) -> Iterator[Finding]:
        """Yield one finding if the worst device's median step exceeds a threshold."""
        yield from tuple(super().check(run)) or self._without_price(run)

    def _without_price(self, run: Run) -> Iterator[Finding]:
        rows = run.table(self.facts[0])
        loss = quoted_step.worst_loss(save_stages.losses(run, rows, "dur_ns"), self.min_time_ratio)
        if loss is None or loss.rows(rows)["saved_ns"].null_count() * 2 < loss.rows(rows).height:
            return
        kernel = largest_first(loss.rows(rows), "dur_ns", "start_ns")["name"][0]
        yield Finding(
            self.code,
            Severity.INFO,
            f"Matrix products for rows that do not begin at multiples of 16 bytes take {loss}, most of it in kernels "
            f"such as {_short(kernel)}. Their shapes are not in the trace, so the saving is not known.",
            "Dimensions of 16-bit tensors should be multiples of 8, those of 32-bit tensors in TF32 multiples of 4. "
            "Record with record_shapes=True and without CUDA graphs to see which dimension to pad.",
            confidence=0.7,
            ranks=(loss.row["rank"],),
            evidence=_evidence(rows, loss),
            is_of_window=loss.row["step"] is None,
            claim=self.claim,
        )


@dataclass(frozen=True)
class IdleTensorCores(AvoidableTime):
    """32-bit matrix products that do not use the tensor cores.

    What it does: reports products and convolutions in 32 bits that run without tensor cores on a device whose tensor
    cores have TF32, if that would save `min_saved_ratio` of the step.

    Why it costs: the peak in TF32 is 7 to 8 times that in 32 bits on A100 and H100. PyTorch computes matrix products in
    full 32 bits by default, convolutions in TF32.

    How it is measured: kernels of 20 µs or more whose names say 32-bit arithmetic (sgemm, simt, f32f32) and no tensor
    cores. The saving is the time beyond half the peak in TF32 or 80% of the memory bandwidth, by the call's shapes; in
    a trace without shapes, by the ratio of the peaks. Convolutions are left out if others of the trace use TF32. Steps
    that save are left out.

    How to fix: torch.set_float32_matmul_precision("high"), which rounds the factors to 10 bits of mantissa and adds up
    in 32 bits, for convolutions torch.backends.cudnn.allow_tf32 = True; or torch.autocast(dtype=torch.bfloat16).
    Compare the loss of some hundred steps before and after.

    Blind spots: whether the model needs all 32 bits is not known. Devices without TF32 (V100) and unknown devices are
    not judged; kernels of Triton do not say which units they use.
    """

    code: ClassVar[str] = "COMP002"
    fix_without_pytorch: ClassVar[str] = (
        "Allow TF32 in the library that launches them (in cuBLAS CUBLAS_TF32_TENSOR_OP_MATH), if factors with 10 "
        "bits of mantissa are enough, or use 16-bit types. Compare the results before and after."
    )
    cause: ClassVar[Cause] = IDLE_TENSOR_CORES
    claim: ClassVar[str] = "Matrix products run in 32 bits without tensor cores"
    facts: ClassVar[tuple[TraceFact, ...]] = (product_kernels.without_tensor_cores, workload.marks, *save_stages.FACTS)

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""
        kernels = loss.rows(run.table(self.facts[0]))
        kernel = largest_first(kernels, "dur_ns", "start_ns")["name"][0]
        return (
            f"Tensor cores are unused: 32-bit matrix products without TF32 take {_duration(kernels)}, most of it in "
            f"kernels such as {_short(kernel)}; TF32 would save {loss}.",
            _TENSOR_CORES.suited_to(run),
        )


@dataclass(frozen=True)
class UnfusedOptimizer(AvoidableTime):
    """An optimizer that passes over the parameters once per operator.

    What it does: reports steps of Adam, AdamW and SGD that launch elementwise kernels one operator after
    another (for-loop or foreach), if a fused kernel would save `min_saved_ratio` of the step.

    Why it costs: memory bandwidth limits these kernels. Adam reads or writes each parameter, its gradient and its state
    7 times in one fused kernel, 18 times or more operator by operator.

    How it is measured: the kernels launched in Optimizer.step# by elementwise operators, less the share of their
    accesses to memory that a fused kernel needs. How many tensors a step updates is the median over operators of how
    often each is called. Steps that save are left out.

    How to fix: fused=True, such as torch.optim.AdamW(parameters, fused=True); it also launches fewer kernels. Custom
    optimizers: torch.compile(optimizer.step).

    Blind spots: idle time between the launches is HOST001. Optimizers without a fused variant in PyTorch are not
    judged. Small kernels are bound by latency, so that more is saved. Fused SGD needs torch 2.3.
    """

    code: ClassVar[str] = "COMP003"
    fix_without_pytorch: ClassVar[str] = "Update all arrays in one kernel that reads and writes each element once."
    cause: ClassVar[Cause] = UNFUSED_OPTIMIZER
    claim: ClassVar[str] = "The optimizer launches one kernel per operator instead of a fused one"
    facts: ClassVar[tuple[TraceFact, ...]] = (avoidable_time.unfused_optimizer_kernels, *save_stages.FACTS)
    min_saved_ratio: float = 0.01

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""
        kernels = loss.rows(run.table(self.facts[0]))
        by_optimizer = kernels.group_by("optimizer", "implementation").agg(pl.len(), pl.col("dur_ns").sum())
        row = largest_first(by_optimizer, "dur_ns", "optimizer", "implementation").row(0, named=True)
        return (
            f"The optimizer is not fused: {row['optimizer']} ({row['implementation']}) launches {kernels.height:,} "
            f"elementwise kernels, {_duration(kernels)} in all; fused ones would save {loss}.",
            f"Use torch.optim.{row['optimizer']}(…, fused=True): one kernel per group of tensors reads and writes "
            "parameters, gradients and state once.",
        )


@dataclass(frozen=True)
class UnfusedKernels(AvoidableTime):
    """Elementwise kernels in a row, each of which reads what the one before wrote.

    What it does: reports steps in which one fused kernel instead of each chain of elementwise ones would save
    `min_saved_ratio` of the step. It names the chain that costs most.

    Why it costs: memory bandwidth limits elementwise kernels. Each one in a row reads again from memory what the kernel
    before has just written; a fused kernel keeps it in registers.

    How it is measured: consecutive kernels of one stream by different elementwise operators, launched one after the
    other by one thread, of which the next has an input of the shape and element type of the result before; a reduction,
    a norm or a softmax may end a chain. The saving is the share of each kernel's bytes that it reads again. Writes are
    not counted, since backward may need them; the optimizer's kernels belong to COMP003. Steps that save are left out.

    How to fix: torch.compile the model or the module with these operators. Where the run is compiled already: graph
    breaks (TORCH_LOGS=graph_breaks) leave them outside of the compiled code. Or use a fused operator (RMSNorm,
    SwiGLU, a fused loss).

    Blind spots: needs record_shapes=True. That a kernel reads the result before is inferred from shapes. Data in the
    cache is read faster than from memory, and then less is saved.
    """

    code: ClassVar[str] = "COMP004"
    fix_without_pytorch: ClassVar[str] = (
        "Fuse these kernels into one, so that what they share is read and written once."
    )
    confidence: ClassVar[float] = 0.6
    cause: ClassVar[Cause] = UNFUSED_KERNELS
    claim: ClassVar[str] = "Elementwise kernels in a row are not fused"
    facts: ClassVar[tuple[TraceFact, ...]] = (
        avoidable_time.elementwise_chains,
        *save_stages.FACTS,
        workload.marks,
    )

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""
        kernels = loss.rows(run.table(self.facts[0]))
        chains = kernels.group_by("chain", maintain_order=True).agg(
            pl.col("op").str.strip_prefix("aten::").str.join(" → ").alias("ops"),
            pl.col("shapes").last(),
            pl.col("saved_ns").sum(),
        )
        alike = chains.group_by("ops").agg(pl.len(), pl.col("saved_ns").sum())
        largest = largest_first(alike, "saved_ns", "ops").row(0, named=True)
        return (
            f"Elementwise kernels in a row are not fused: {kernels.height:,} kernels in {chains.height:,} chains read "
            f"again what the kernel before wrote, {loss}. {largest['len']:,} chains are {largest['ops']} "
            f"({units.duration(largest['saved_ns'])} of that).",
            _LEFT_OUT if workload.is_compiled(run) else _COMPILE.suited_to(run),
        )


@dataclass(frozen=True)
class PartialWaves(AvoidableTime):
    """Matrix products whose last wave of blocks leaves most of the device idle.

    What it does: reports products of two to four waves of blocks of which the last leaves 20% or more of the product's
    time on the multiprocessors idle, if that is `min_saved_ratio` of the step. It
    names the sizes that take one wave less, and those that take no longer.

    Why it costs: each multiprocessor computes one tile of the result at a time. If the tiles are a few more than the
    multiprocessors, a second wave takes as long as the first, for a few tiles.

    How it is measured: the tile in the kernel's name, its grid, the shapes of the call and the number of
    multiprocessors in the trace's header. Only kernels with one block per tile are judged, of 20 µs or more and below
    70% of the roofline. The saving is the idle part of the last wave. Steps that save are left out.

    How to fix: choose batch, sequence, hidden or vocabulary size such that the tiles fill their waves; or let the
    library choose another tile: torch.compile(mode="max-autotune"), a newer cuBLAS (which divides the inner dimension,
    or keeps blocks for several tiles).

    Blind spots: needs record_shapes=True and a known device. Small tiles, of which a multiprocessor computes several
    at a time, lose less. Kernels that keep their blocks for several tiles (nvjet on H100) are not judged.
    """

    code: ClassVar[str] = "COMP005"
    fix_without_pytorch: ClassVar[str] = (
        "Change a size such that the tiles fill their waves, or let the library choose another tile (a newer cuBLAS)."
    )
    confidence: ClassVar[float] = 0.5
    cause: ClassVar[Cause] = PARTIAL_WAVES
    claim: ClassVar[str] = "The last wave of matrix products leaves most of the device idle"
    facts: ClassVar[tuple[TraceFact, ...]] = (product_kernels.partial_waves, *save_stages.FACTS)

    def advise(self, run: Run, loss: quoted_step.StepLoss) -> tuple[str, str]:
        """Message and fix for a loss, by the kernels of the quoted step."""
        kernels = loss.rows(run.table(self.facts[0]))
        largest = largest_first(kernels, "saved_ns", "start_ns").row(0, named=True)
        return (
            f"The last wave of blocks leaves the device idle in {kernels.height:,} matrix products of "
            f"{_duration(kernels)}: {loss}. Most of it: {largest['op']} {largest['shapes']}, whose "
            f"{largest['blocks']:,} tiles take "
            f"{largest['wave_count']} waves on {largest['multiprocessors']} multiprocessors.",
            f"Change a size such that the tiles fill their waves: of {_sizes(largest, 'rows')}, or of "
            f"{_sizes(largest, 'columns')}. Or let the library choose another tile "
            '(torch.compile(mode="max-autotune"), a newer cuBLAS).',
        )


_TENSOR_CORES = Advice(
    'Set torch.set_float32_matmul_precision("high"), for convolutions torch.backends.cudnn.allow_tf32 = True, '
    "if factors with 10 bits of mantissa are enough (sums stay in 32 bits), or train under "
    "torch.autocast(dtype=torch.bfloat16). Compare the loss before and after.",
    'Set torch.set_float32_matmul_precision("high"), for convolutions torch.backends.cudnn.allow_tf32 = True, '
    "if factors with 10 bits of mantissa are enough (sums stay in 32 bits), or infer in bfloat16 "
    "(model.to(torch.bfloat16), torch.autocast). Compare the outputs before and after.",
)
_COMPILE = Advice(
    "torch.compile the model, or the module with these operators: it fuses them into one kernel, forward and backward. "
    "Or use a fused operator (RMSNorm, SwiGLU, a fused loss).",
    "torch.compile the model, or the module with these operators: it fuses them into one kernel. Or use a fused "
    "operator (RMSNorm, SwiGLU).",
)
_LEFT_OUT = (
    "Move these operators into the compiled code: TORCH_LOGS=graph_breaks shows where it ends. Or use a fused operator "
    "(RMSNorm, SwiGLU, a fused loss)."
)


def _duration(rows: pl.DataFrame) -> str:
    return units.duration(int(rows["dur_ns"].sum()))


def _evidence(rows: pl.DataFrame, loss: quoted_step.StepLoss) -> pl.DataFrame:
    evidence = quoted_step.evidence(rows.with_columns(pl.col("saved_ns").fill_null(0)), loss.row, "saved_ns")
    first = [*KEY, "phase", "op", "name", "start_ns", "dur_ns", "saved_ns"]
    return evidence.select(*first, *(name for name in ("shapes", "padding") if name in evidence.columns))


def _sizes(row: dict[str, Any], name: str) -> str:
    """Return "the 4096 columns, 3456 take one wave less, and up to 6912 no longer"."""
    fewer, more = row[f"fewer_{name}"], row[f"more_{name}"]
    less = f"{fewer} take one wave less, and " if fewer else ""
    return f"the {row[name]} {name}, {less}up to {more} {'no longer' if less else 'take no longer'}"


def _short(kernel: str) -> str:
    return kernel.removeprefix("void ").partition("(")[0][:80]
