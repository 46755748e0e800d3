"""Device time that a known change of the program would save, by cause: the replay removes it."""

import json

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import (
    cpu_ops,
    exposed_copies,
    flops,
    interrupted_python,
    kernels,
    op_bytes,
    op_flops,
    product_kernels,
    side_work,
    value_reads,
)
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace, TraceFact

OPTIMIZER_COLUMNS = schema.columns(
    "device step phase activity_id op name optimizer implementation start_ns dur_ns saved_ns",
    op=pl.String, optimizer=pl.String, implementation=pl.String,
)  # fmt: skip
FOREACH, FOR_LOOP = "foreach", "for-loop"
FUSED_ACCESSES = {"Adam": 7, "AdamW": 7, "SGD": 5}
"""Optimizers of PyTorch that take fused=True on a device, and how often it reads or writes the elements of a parameter
(SGD with momentum)."""
_ACCESSES = {
    **dict.fromkeys(("lerp_", "add_", "sub_"), 3),
    **dict.fromkeys(("mul_", "div_", "sqrt", "sqrt_", "div", "neg", "neg_", "reciprocal", "reciprocal_"), 2),
    **dict.fromkeys(("mul", "add", "sub", "addcmul", "maximum", "maximum_"), 3),
    **dict.fromkeys(("addcmul_", "addcdiv_"), 4),
}
"""How often an elementwise operator reads or writes the elements of a parameter."""
_SLICE = r"^Optimizer\.step#(\w+)\.step$"
_SLICE_WITH_FUSED = rf"^Optimizer\.step#({'|'.join(FUSED_ACCESSES)})\.step$"
CHAIN_COLUMNS = schema.columns(
    "device step phase chain activity_id op shapes name bytes start_ns dur_ns reread_bytes saved_ns", op=pl.String
)
_CALL = ["name", "shapes", "dtypes", "arguments", "strides"]
COLUMNS = schema.columns("activity_id cause saved_ns")
(
    MISALIGNED, NO_TENSOR_CORES, UNFUSED_OPTIMIZER, UNFUSED_CHAIN, PARTIAL_WAVE, SLOW_ARITHMETIC, VALUE_READ, CAST,
    SMALL_OP, ANOMALY_CHECK, DETERMINISTIC_FILL, SIDE_WORK, INTERRUPTION, HOST_COPY, DEVICE_COPY,
) = range(1, 16)  # fmt: skip


@trace_fact
@memoize
def elementwise_chains(trace: Trace) -> pl.DataFrame:
    """Kernels of chains: consecutive ones of a stream, by different elementwise operators.

    The last one of a chain may be a reduction, a norm or a softmax. A kernel follows another if it is launched next by
    the same thread and has an input of the shape and element type of the other's result; the optimizer's kernels are
    left out. Columns CHAIN_COLUMNS: chain (its number), op (that launched the kernel), bytes (that it moves),
    reread_bytes (of the input that the kernel before wrote; 0 for the first), saved_ns (that input's share of the
    kernel's time); one row per kernel. The write of that input is not counted, since backward may need it.
    """
    if not trace.on_device or not _has_memory_bound_ops(trace):
        return schema.empty(CHAIN_COLUMNS)  # without the work of all products, which costs much more
    calls = flops.counted_calls(trace).filter(pl.col("flops").is_null())
    if calls.is_empty():
        return schema.empty(CHAIN_COLUMNS)
    # Kernels with the bytes of the input that the one before on their stream wrote.
    before = {name: pl.col(name).shift(1).over("lane") for name in ("result", "thread", "op", "step")}
    follows = (
        (pl.col("thread") == before["thread"])
        & (pl.col("op") != before["op"])
        & pl.col("step").eq_missing(before["step"])
        & pl.col("operands").str.contains(before["result"], literal=True)
    )
    size = before["result"].str.extract(r"\b([0-9]{1,18})\]$").cast(pl.Int64)
    linked = _kernels(trace, calls).with_columns(
        pl.when(follows).then(size).otherwise(0).fill_null(0).alias("reread_bytes")
    )
    is_first = (pl.col("reread_bytes") == 0) & (pl.col("reread_bytes").shift(-1, fill_value=0) > 0)
    chained = linked.filter(is_first | (pl.col("reread_bytes") > 0)).with_columns(
        (pl.col("reread_bytes") == 0).cum_sum().alias("chain"),
        (pl.col("dur_ns") * pl.col("reread_bytes") / pl.col("bytes")).round().alias("saved_ns"),
    )
    return schema.select(chained, CHAIN_COLUMNS)


@trace_fact
@memoize
def unfused_optimizer_kernels(trace: Trace) -> pl.DataFrame:
    """Elementwise kernels that a step of Adam, AdamW or SGD launches one operator after another.

    Columns OPTIMIZER_COLUMNS: op (that launched it), name (of the kernel), optimizer (its class), implementation
    (foreach or for-loop), saved_ns (by the accesses to memory of a fused kernel over those of all operators of the
    step); one row per kernel. Fused kernels are left out. Empty on a CPU run.
    """
    if not trace.on_device or not trace_columns.is_named(trace, _SLICE_WITH_FUSED).any():
        return schema.empty(OPTIMIZER_COLUMNS)
    op = kernels.innermost_op(trace)
    of_slice = nesting.nearest(trace_columns.parent_ids(trace), trace_columns.is_named(trace, _SLICE))
    around = np.where(op >= 0, of_slice[np.maximum(op, 0)], -1)
    rows = np.flatnonzero((around >= 0) & trace_columns.is_activity_kind(trace, "compute"))
    launched = trace.activities[rows].with_columns(
        pl.Series("activity_id", trace.activities["id"][rows]),
        pl.Series("op_id", op[rows]),
        pl.Series("slice", around[rows]),
        trace.ops["name"][op[rows]].alias("op"),
        trace.ops["name"][around[rows]].str.extract(_SLICE).alias("optimizer"),
    )
    operator = pl.col("op").str.strip_prefix("aten::").str.strip_prefix("_foreach_")
    elementwise = launched.filter(
        pl.col("optimizer").is_in(list(FUSED_ACCESSES)), operator.is_in(list(_ACCESSES))
    ).with_columns(operator.replace_strict(_ACCESSES, default=None, return_dtype=pl.Int64).alias("accesses"))
    is_foreach = pl.col("op").str.starts_with("aten::_foreach_")
    # Share of each step's accesses that a fused kernel saves: columns slice, saved_share. How many tensors (or lists)
    # the step updates is the median over operators of how often each is called.
    calls = elementwise.unique("op_id").group_by("slice", "optimizer", "op").agg(pl.len(), pl.col("accesses").first())
    fused = pl.col("optimizer").first().replace_strict(FUSED_ACCESSES, return_dtype=pl.Int64)
    accesses = (pl.col("len") * pl.col("accesses")).sum() / pl.col("len").median()
    # Without momentum, SGD reads gradient and parameter and writes the parameter.
    is_plain = (pl.col("optimizer").first() == "SGD") & (pl.len() == 1)
    shares = calls.group_by("slice").agg(
        (1 - pl.when(is_plain).then(accesses).otherwise(fused) / accesses).alias("saved_share")
    )
    priced = elementwise.join(
        shares.with_columns(pl.col("saved_share").clip(0)), on="slice", maintain_order="left"
    ).with_columns(
        pl.when(is_foreach).then(pl.lit(FOREACH)).otherwise(pl.lit(FOR_LOOP)).alias("implementation"),
        (pl.col("dur_ns") * pl.col("saved_share")).round().alias("saved_ns"),
    )
    return schema.select(
        priced.join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left"), OPTIMIZER_COLUMNS
    )


_FACTS: tuple[TraceFact, ...] = (
    product_kernels.misaligned_kernels,
    product_kernels.without_tensor_cores,
    unfused_optimizer_kernels,
    elementwise_chains,
    product_kernels.partial_waves,
    cpu_ops.slow_arithmetic,
    value_reads.value_reads,
    cpu_ops.casts,
    cpu_ops.small_ops,
    cpu_ops.anomaly_checks,
    cpu_ops.deterministic_fills,
    side_work.side_work,
    interrupted_python.interrupted_python,
    exposed_copies.of_host,
    exposed_copies.of_device,
)


@memoize
def avoidable(trace: Trace) -> pl.DataFrame:
    """Kernels, copies, or ops of a CPU run, that would take less time, each by its first cause.

    Columns COLUMNS: cause (MISALIGNED to DEVICE_COPY), saved_ns; one row per kernel, copy or op.
    """
    parts = [
        kernels.select("activity_id", "saved_ns", cause=pl.lit(cause, pl.Int64))
        for cause, fact in enumerate(_FACTS, MISALIGNED)
        if (kernels := fact(trace)).height
    ]
    if not parts:
        return schema.empty(COLUMNS)
    kernels = pl.concat(parts).filter(pl.col("saved_ns") > 0)
    return schema.select(kernels.unique("activity_id", keep="first", maintain_order=True), COLUMNS)


def _has_memory_bound_ops(trace: Trace) -> bool:
    """Return whether the trace has an operator with shapes of which bytes are known, but no operations."""
    if trace.ops["shapes"].null_count() == trace.ops.height:
        return False
    names, _ = trace_columns.op_names(trace)
    return any(op_bytes.has_formula(name) and not op_flops.has_formula(name) for name in names)


def _kernels(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Compute by stream and time, with the memory-bound call of each kernel, its result and operands."""
    ids = calls["id"]
    row = pl.Series("call_id", flops.counted_op_of_activities(trace, ids))
    called = trace.ops["id"].gather(row.set(row < 0, None)).alias("call_id")
    direct = kernels.innermost_op(trace)
    described = trace.ops.filter(pl.col("id").is_in(ids.implode())).select("id", "lane", *_CALL)
    # Inputs and outputs of each kind of call: columns _CALL, result and operands (JSON, or null).
    rows = []
    for inputs in described.select(_CALL).unique(maintain_order=True).iter_rows():
        flow = op_bytes.flow_of_call(*inputs)
        result = json.dumps(flow.result) if flow and flow.result else None
        rows.append((*inputs, result, json.dumps(flow.operands) if flow else None))
    kinds = dict.fromkeys((*_CALL, "result", "operands"), pl.String)
    of_call = described.join(calls.select("id", "bytes"), on="id").join(
        pl.DataFrame(rows, kinds, orient="row"), on=_CALL, nulls_equal=True
    )
    of_call = of_call.rename({"id": "call_id", "name": "op", "lane": "thread"})
    work = trace.activities.drop("bytes").with_columns(called, pl.Series("direct", direct))
    work = work.filter(pl.col("kind") == "compute").rename({"id": "activity_id"})
    joined = work.join(of_call, on="call_id", how="left", maintain_order="left")
    # A call of several kernels may keep its data in between.
    is_only = pl.len().over("call_id") == 1
    with_flows = joined.with_columns(
        pl.when(is_only & (pl.col("phase").ne_missing(conventions.PHASES[4]))).then(pl.col(name)).alias(name)
        for name in ("result", "operands")
    )
    return with_flows.join(trace.lanes.select("lane", "device"), on="lane").sort("lane", "start_ns", "activity_id")
