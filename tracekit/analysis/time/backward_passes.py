"""The backward passes of each step, one per micro-batch: gradient reductions, and forward work that runs again."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, launched_work, trace_columns
from tracekit.model import columns, nesting, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

START_COLUMNS = {"device": pl.Int64, "step": pl.Int64, "backward": pl.Int64, "launched_ns": pl.Int64}
REDUCTION_COLUMNS = schema.columns(
    "device step backward backward_count lane op group dtype unit bytes activity_id start_ns dur_ns exposed_ns"
) | {"updates": pl.Int64}
REDUCING = ("all_reduce", "reduce_scatter")
_KEY = ("op", "group", "message_bytes")
_MIN_FORWARD_RATIO = 0.05
"""A forward pass takes more than this share of the step's compute; less belongs to a backward pass."""

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
@memoize
def backward_starts(trace: Trace) -> pl.DataFrame:
    """Launch time of the first work of each backward pass.

    Columns device, step, backward (from 0 in each step), launched_ns; one row per pass. A pass ends where other compute
    of more than 5% of the step's compute was launched: the next forward pass. Steps without known phases have no rows.
    """
    parts = []
    for device in breakdown.devices(trace):
        work, arrays = launched_work.work(trace, device), launched_work.work_columns(trace, device)
        is_back = columns.flags(work["phase"] == conventions.BACKWARD)
        if not is_back.any():
            continue
        step, launched_ns = columns.to_ints(work["step"], -1), arrays.launched_or_start_ns
        rows = np.flatnonzero(arrays.computes & trace_columns.in_steps(trace, work))
        rows = rows[np.lexsort((arrays.id[rows], launched_ns[rows], step[rows]))]
        # Stretches of compute of one step, either backward or not.
        bounds = columns.starts_of_groups(step[rows], is_back[rows].astype(np.int64))
        first = rows[bounds[:-1]]
        dur_ns = np.diff(np.append(0, np.cumsum(arrays.spans[rows, 1] - arrays.spans[rows, 0]))[bounds])
        _, of_step = np.unique(step[first], return_inverse=True)
        step_ns = np.bincount(of_step, dur_ns)[of_step]
        first = first[is_back[first] | (dur_ns > _MIN_FORWARD_RATIO * step_ns)]
        is_same_step = np.append(False, step[first][1:] == step[first][:-1])
        begins = is_back[first] & ~(np.append(False, is_back[first][:-1]) & is_same_step)
        first = first[begins]
        number = np.arange(len(first)) - np.searchsorted(step[first], step[first])
        parts.append(pl.DataFrame([
            pl.Series("device", [device], pl.Int64).new_from_index(0, len(first)),
            columns.with_nulls(step[first], "step"),
            pl.Series("backward", number, pl.Int64),
            pl.Series("launched_ns", launched_ns[first], pl.Int64),
        ]))  # fmt: skip
    return schema.concat(parts, START_COLUMNS)


@trace_fact
@memoize
def gradient_reductions(trace: Trace) -> pl.DataFrame:
    """Collectives that reduce gradients, each with its backward pass.

    Columns REDUCTION_COLUMNS (backward_count: passes of the step; updates: compute of optimizers before it, so that
    equal numbers mean that no optimizer ran in between); one row per collective. These are the all-reduces and
    reduce-scatters launched in backward passes. A collective with the same op, group and size outside backward reduces
    activations (tensor parallelism), so that kind is left out.
    """
    starts = backward_starts(trace)
    if starts.is_empty():
        return schema.empty(REDUCTION_COLUMNS)
    calls = pl.concat([launched_work.collectives(trace, device) for device in breakdown.devices(trace)])
    reduces = pl.col("op").is_in(REDUCING) & trace.in_steps
    backward = pl.col("phase").eq_missing(conventions.BACKWARD)
    elsewhere = reduces & ~backward & pl.col("phase").ne_missing(conventions.CHECKPOINT)
    gradients = calls.filter(reduces & backward & ~elsewhere.fill_null(value=False).any().over(_KEY))
    gradients = gradients.rename({"id": "activity_id", "message_bytes": "bytes"})
    at_ns = np.where(
        gradients["launched_ns"].is_null(), gradients["start_ns"], columns.to_ints(gradients["launched_ns"], 0)
    )
    row = _rows_of_passes(starts, gradients, at_ns)
    key, of_gradients = _places(starts, gradients)
    counts = np.bincount(key, minlength=int(of_gradients.max(initial=-1)) + 1)[of_gradients]
    # Number of optimizers' compute activities launched before each time, shape (n,).
    parts = []
    for device in breakdown.devices(trace):
        work, arrays = launched_work.work(trace, device), launched_work.work_columns(trace, device)
        updates = arrays.computes & columns.flags(work["phase"] == conventions.OPTIMIZER)
        parts.append(arrays.launched_or_start_ns[updates])
    reduced = gradients.hstack([
        columns.with_nulls(sweep_line.at(starts["backward"].to_numpy(), row, -1), "backward"),
        pl.Series("backward_count", counts, pl.Int64),
        pl.Series("updates", np.searchsorted(np.sort(np.concatenate(parts)), at_ns).astype(np.int64), pl.Int64),
    ])[np.flatnonzero(row >= 0)].sort("start_ns")  # fmt: skip
    return breakdown.with_exposure(trace, reduced).pipe(schema.select, REDUCTION_COLUMNS)


def with_passes(rows: pl.DataFrame, trace: Trace, at_ns: str) -> pl.DataFrame:
    """Return rows (columns device, step and the time `at_ns`) by that time, with the backward pass begun last."""
    starts, ordered = backward_starts(trace), rows.sort(at_ns)
    row = _rows_of_passes(starts, ordered, ordered[at_ns].to_numpy())
    passes = sweep_line.at(starts["backward"].to_numpy(), row, -1)
    return ordered.hstack([columns.with_nulls(passes, "backward")])


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
    in_passes = with_passes(region_rows, trace, "from_ns").with_columns(
        pl.col("backward").fill_null(0), _allocated_bytes(region_rows.sort("from_ns"), trace)
    )
    return in_passes.sort("start_ns").pipe(schema.select, COLUMNS)


def recomputed_activities(trace: Trace) -> pl.DataFrame:
    """Compute that runs again in backward, also of a CPU run.

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


def recomputed_ids(trace: Trace) -> Ints:
    """Ids of the activities in `recomputed_activities`, shape (n,)."""
    again = recomputed_activities(trace)
    return again["id"].to_numpy() if again.height else np.empty(0, np.int64)


def _rows_of_passes(starts: pl.DataFrame, rows: pl.DataFrame, at_ns: Ints) -> Ints:
    """Row in `starts` of the backward pass of each row's device and step that began last; -1 for none."""
    key, row_key = _places(starts, rows)
    return columns.last_rows(key, starts["launched_ns"].to_numpy(), row_key, at_ns)


def _places(*tables: pl.DataFrame) -> list[Ints]:
    """Number, 0 or more, for the device and step of each row; equal for equal ones, also across tables."""
    both = pl.concat([table.select("device", "step") for table in tables])
    place = columns.to_ints(both.select(pl.struct("device", "step").rank("dense")).to_series(), 0)
    return np.split(place.astype(np.int64), np.cumsum([table.height for table in tables])[:-1])


def _allocated_bytes(region_rows: pl.DataFrame, trace: Trace) -> pl.Series:
    """Bytes allocated and not freed while the host was in each region."""
    span = pl.col("span").fill_null("")
    events = trace.allocations.filter(pl.col("device").is_not_null(), ~span.str.contains(_GATHERS)).sort("at_ns")
    if events.is_empty():
        return pl.Series("activation_bytes", [None] * region_rows.height, pl.Int64)
    sums = np.concatenate(([0], np.cumsum(events["delta_bytes"].to_numpy())))
    at_ns = events["at_ns"].to_numpy()
    first = np.searchsorted(at_ns, region_rows["from_ns"].to_numpy(), side="left")
    past = np.searchsorted(at_ns, region_rows["until_ns"].to_numpy(), side="right")
    return pl.Series("activation_bytes", sums[past] - sums[first], pl.Int64)
