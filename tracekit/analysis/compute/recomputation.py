"""Activation checkpointing: forward work that runs again in backward, its time and the memory it saves."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import backward_passes, trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "step device backward region unit evidence kernels start_ns dur_ns compute_ns activation_bytes"
)
CHECKPOINT_NODE, FORWARD_OPS = "checkpoint_node", "forward_ops"
_REENTRANT = r"^CheckpointFunctionBackward$"
_NODE = r"^autograd::engine::evaluate_function: |Backward\d*$"
# Ops that only forward passes call, never a derivative.
_FORWARD_ONLY = (
    r"^aten::(linear|conv[123]d|convolution|embedding|dropout|native_dropout|silu|gelu|relu|softmax|_softmax|"
    r"layer_norm|native_layer_norm|rms_norm|_fused_rms_norm|group_norm|native_group_norm|batch_norm|native_batch_norm|"
    r"scaled_dot_product_attention|_scaled_dot_product_\w*attention|_flash_attention_forward|"
    r"_efficient_attention_forward)$"
)
_GATHERS = r"gather|unshard|pre_forward|pre_backward"


@trace_fact
def regions(trace: Trace) -> pl.DataFrame:
    """Return each part of a backward pass in which a checkpointed part of the model runs forward again.

    Columns COLUMNS: backward (pass of the step), region (ops.id of the enclosing slice), evidence (checkpoint_node:
    under CheckpointFunctionBackward; forward_ops: ops that no derivative calls, under an autograd node, as in the
    non-reentrant variant), kernels, start_ns and dur_ns (from its first to its last kernel), compute_ns (sum over its
    kernels), activation_bytes (allocated and not freed by the host thread in the region, without all-gather buffers:
    about the activations that the part would keep from forward to backward; null without memory events); one row per
    region. Empty on a CPU run, which has no kernels.
    """
    if not trace.on_device or trace.ops.is_empty():
        return schema.empty(COLUMNS)
    repeated = recomputed_activities(trace)
    if repeated.is_empty():
        return schema.empty(COLUMNS)
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    region_rows = repeated.group_by("step", "device", "region", maintain_order=True).agg(
        pl.col("unit").drop_nulls().first(),
        pl.col("evidence", "from_ns", "until_ns").first(),
        pl.len().cast(pl.Int64).alias("kernels"),
        pl.col("start_ns").min(),
        (end_ns.max() - pl.col("start_ns").min()).alias("dur_ns"),
        pl.col("dur_ns").sum().alias("compute_ns"),
    )
    in_passes = backward_passes.with_passes(region_rows, trace, "from_ns").with_columns(
        pl.col("backward").fill_null(0), _allocated_bytes(region_rows.sort("from_ns"), trace)
    )
    return in_passes.sort("start_ns").pipe(schema.select, COLUMNS)


def recomputed_activities(trace: Trace) -> pl.DataFrame:
    """Return the compute that runs again in backward, also of a CPU run.

    Columns those of activities, device, region, evidence, from_ns and until_ns (when the host was in the region); one
    row per activity. Without columns where there is none.
    """
    ops = trace.ops
    parent = trace_columns.parent_ids(trace)
    checkpoint = trace_columns.is_named(trace, _REENTRANT)
    forward = trace_columns.is_phase(trace, conventions.BACKWARD) & trace_columns.is_named(trace, _FORWARD_ONLY)
    if not checkpoint.any() and not forward.any():
        return pl.DataFrame()
    node = trace_columns.is_named(trace, _NODE) & ~trace_columns.is_kind(trace, "runtime")
    around = nesting.nearest(parent, node | checkpoint)
    in_node = forward & (around >= 0) & ~checkpoint[np.maximum(around, 0)]
    last_ns = np.full(len(parent), np.iinfo(np.int64).min)
    ends = (ops["start_ns"] + ops["dur_ns"]).to_numpy()
    np.maximum.at(last_ns, around[in_node], ends[in_node])
    launch = trace.activities["launch_id"].fill_null(-1).to_numpy()
    launch = np.where(launch < len(parent), launch, -1)
    region = np.where(launch >= 0, around[np.maximum(launch, 0)], -1)
    at_ns = np.where(launch >= 0, ops["start_ns"].to_numpy()[np.maximum(launch, 0)], 0)
    inside = np.maximum(region, 0)
    reentrant = (region >= 0) & checkpoint[inside]
    is_recomputed = reentrant | ((region >= 0) & (at_ns <= last_ns[inside]))
    # The host leaves a checkpoint node's region with its last launch there; later work is the node's own.
    marked = trace.activities.with_columns(
        pl.Series("region", region), pl.Series("at_ns", at_ns), pl.Series("reentrant", reentrant)
    ).filter(pl.Series(is_recomputed) & (pl.col("kind") == "compute"))
    from_ns = ops.select(pl.col("id").alias("region"), pl.col("start_ns").alias("from_ns"))
    return (
        marked.join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
        .join(from_ns, on="region", how="left", maintain_order="left")
        .with_columns(
            pl.when("reentrant").then(pl.lit(CHECKPOINT_NODE)).otherwise(pl.lit(FORWARD_OPS)).alias("evidence"),
            pl.col("at_ns").max().over("region").alias("until_ns"),
        )
        .filter(trace.in_steps)
    )


def _allocated_bytes(region_rows: pl.DataFrame, trace: Trace) -> pl.Series:
    """Return the bytes allocated and not freed while the host was in each region."""
    span = pl.col("span").fill_null("")
    events = trace.allocations.filter(pl.col("device").is_not_null(), ~span.str.contains(_GATHERS)).sort("at_ns")
    if events.is_empty():
        return pl.Series("activation_bytes", [None] * region_rows.height, pl.Int64)
    sums = np.concatenate(([0], np.cumsum(events["delta_bytes"].to_numpy())))
    at_ns = events["at_ns"].to_numpy()
    first = np.searchsorted(at_ns, region_rows["from_ns"].to_numpy(), side="left")
    past = np.searchsorted(at_ns, region_rows["until_ns"].to_numpy(), side="right")
    return pl.Series("activation_bytes", sums[past] - sums[first], pl.Int64)
