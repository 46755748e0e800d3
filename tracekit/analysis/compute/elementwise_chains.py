"""Chains of elementwise kernels, each of which reads what the one before wrote: work that one fused kernel does."""

import json

import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import flops, kernels, op_bytes, op_flops
from tracekit.analysis.time import trace_columns
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "device step phase chain activity_id op shapes name bytes start_ns dur_ns reread_bytes saved_ns", op=pl.String
)
_CALL = ["name", "shapes", "dtypes", "arguments", "strides"]


@trace_fact
@memoize
def chains(trace: Trace) -> pl.DataFrame:
    """Return the kernels of chains: consecutive ones of a stream, by different elementwise operators.

    The last one of a chain may be a reduction, a norm or a softmax. A kernel follows another if it is launched next by
    the same thread and has an input of the shape and element type of the other's result; the optimizer's kernels are
    left out. Columns COLUMNS: chain (its number), op (that launched the kernel), bytes (that it moves), reread_bytes
    (of the input that the kernel before wrote; 0 for the first), saved_ns (that input's share of the kernel's time);
    one row per kernel. The write of that input is not counted, since backward may need it.
    """
    if not trace.on_device or not _has_memory_bound_ops(trace):
        return schema.empty(COLUMNS)  # without the work of all products, which costs much more
    calls = flops.counted_calls(trace).filter(pl.col("flops").is_null())
    if calls.is_empty():
        return schema.empty(COLUMNS)
    linked = _link_kernels(_kernels(trace, calls))
    is_first = (pl.col("reread_bytes") == 0) & (pl.col("reread_bytes").shift(-1, fill_value=0) > 0)
    chained = linked.filter(is_first | (pl.col("reread_bytes") > 0)).with_columns(
        (pl.col("reread_bytes") == 0).cum_sum().alias("chain"),
        (pl.col("dur_ns") * pl.col("reread_bytes") / pl.col("bytes")).round().alias("saved_ns"),
    )
    return schema.select(chained, COLUMNS)


def _has_memory_bound_ops(trace: Trace) -> bool:
    """Return whether the trace has an operator with shapes of which bytes are known, but no operations."""
    if trace.ops["shapes"].null_count() == trace.ops.height:
        return False
    names, _ = trace_columns.op_names(trace)
    return any(op_bytes.has_formula(name) and not op_flops.has_formula(name) for name in names)


def _kernels(trace: Trace, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the compute by stream and time, with the memory-bound call of each kernel, its result and operands."""
    ids = calls["id"]
    row = pl.Series("call_id", flops.counted_op_of_activities(trace, ids))
    called = trace.ops["id"].gather(row.set(row < 0, None)).alias("call_id")
    direct = kernels.innermost_op(trace)
    described = trace.ops.filter(pl.col("id").is_in(ids.implode())).select("id", "lane", *_CALL)
    of_call = described.join(calls.select("id", "bytes"), on="id").join(_flows(described), on=_CALL, nulls_equal=True)
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


def _flows(described: pl.DataFrame) -> pl.DataFrame:
    """Inputs and outputs of each kind of call: columns _CALL, result and operands (JSON, or null)."""
    rows = []
    for inputs in described.select(_CALL).unique(maintain_order=True).iter_rows():
        flow = op_bytes.flow_of_call(*inputs)
        result = json.dumps(flow.result) if flow and flow.result else None
        rows.append((*inputs, result, json.dumps(flow.operands) if flow else None))
    kinds = dict.fromkeys((*_CALL, "result", "operands"), pl.String)
    return pl.DataFrame(rows, kinds, orient="row")


def _link_kernels(work: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels with the bytes of the input that the one before on their stream wrote."""
    before = {name: pl.col(name).shift(1).over("lane") for name in ("result", "thread", "op", "step")}
    follows = (
        (pl.col("thread") == before["thread"])
        & (pl.col("op") != before["op"])
        & pl.col("step").eq_missing(before["step"])
        & pl.col("operands").str.contains(before["result"], literal=True)
    )
    size = before["result"].str.extract(r"\b(\d{1,18})\]$").cast(pl.Int64)
    return work.with_columns(pl.when(follows).then(size).otherwise(0).fill_null(0).alias("reread_bytes"))
