"""Floating-point operations of a step, computed from the inputs of operators, and for how much of its time."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import kernels, op_flops, recomputation
from tracekit.model import nesting, schema
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

CALL_COLUMNS = {"name": pl.String, "calls": pl.Int64}
PRODUCT_COLUMNS = {"name": pl.String, "shapes": pl.String, "flops": pl.Float64}
COLUMNS = {"step": pl.Int64, "phase": pl.String, "name": pl.String, "flops": pl.Float64}
COUNTED_COLUMNS = {
    "id": pl.Int64, "flops": pl.Float64, "bytes": pl.Float64, "dtype": pl.String, "is_recomputed": pl.Boolean,
}  # fmt: skip
COVERAGE_COLUMNS = {"step": pl.Int64, "known_ns": pl.Int64, "compute_ns": pl.Int64}
UNKNOWN_COLUMNS = {"name": pl.String, "calls": pl.Int64, "dur_ns": pl.Int64}
_IN_STEP = pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)


def flops(trace: Trace) -> pl.DataFrame:
    """Return the floating-point operations of each step in products, convolutions and attention, saves excluded.

    Columns step, phase, name, flops; one row per step, phase and operator. Formulas: `op_flops`. Empty where the
    profiler recorded no shapes. `coverage` says for how much of the compute time the operations are known.
    """
    each = counted(trace).join(trace.ops.select("id", "step", "phase", "name"), on="id").filter(_IN_STEP)
    sums = each.group_by("step", "phase", "name").agg(pl.col("flops").sum())
    return schema.select(sums, COLUMNS).sort("step", "phase", "name")


def products(trace: Trace) -> pl.DataFrame:
    """Return the floating-point operations of the steps by operator and shapes: the work of a step, in any order.

    Columns PRODUCT_COLUMNS; one row per operator and shapes of its inputs.
    """
    each = counted(trace).join(trace.ops.select("id", "step", "phase", "name", "shapes"), on="id").filter(_IN_STEP)
    sums = each.group_by("name", "shapes").agg(pl.col("flops").sum())
    return schema.select(sums, PRODUCT_COLUMNS).sort("name", "shapes")


@memoize
def counted(trace: Trace) -> pl.DataFrame:
    """Return the calls whose operations are known: the outermost ones, so that nothing is counted twice.

    Columns COUNTED_COLUMNS: id (of ops), bytes (read and written at least: each input and output once; null where
    types were not recorded), dtype (element type of the first input, FP64 … INT8 of `devices`), is_recomputed (forward
    work that activation checkpointing repeats); one row per call, by id.
    """
    calls = trace.ops.filter(pl.col("shapes").is_not_null(), pl.col("kind") == "cpu_op")
    names = [name for name in calls["name"].unique().to_list() if op_flops.has_formula(name)]
    calls = calls.filter(pl.col("name").is_in(names)).pipe(_outermost)
    if calls.is_empty():
        return pl.DataFrame(schema=COUNTED_COLUMNS)
    repeated = _recomputed_ids(trace, calls["id"])
    return (
        calls.join(_work(calls), on=_CALL, nulls_equal=True)
        .drop_nulls("flops")
        .with_columns(pl.col("id").is_in(repeated.implode()).alias("is_recomputed"))
        .pipe(schema.select, COUNTED_COLUMNS)
        .sort("id")
    )


def coverage(trace: Trace) -> pl.DataFrame:
    """Return the compute time of each step whose operations are known: counted, or none of the counted kinds.

    Columns COVERAGE_COLUMNS; one row per step. Times of concurrent kernels add up.
    """
    return (
        _compute(trace)
        .filter(_IN_STEP)
        .group_by("step")
        .agg(
            pl.col("dur_ns").filter("is_known").sum().alias("known_ns"),
            pl.col("dur_ns").sum().alias("compute_ns"),
        )
        .pipe(schema.select, COVERAGE_COLUMNS)
        .sort("step")
    )


def unknown(trace: Trace) -> pl.DataFrame:
    """Return the operators and kernels whose operations are not known, saves excluded, most time first.

    Columns UNKNOWN_COLUMNS; one row per operator, or kernel without one. Times of concurrent kernels add up.
    """
    sums = (
        _compute(trace)
        .filter(~pl.col("is_known"), pl.col("phase").ne_missing(conventions.CHECKPOINT))
        .group_by(pl.coalesce("op", "name").alias("name"))
        .agg(pl.len().alias("calls"), pl.col("dur_ns").sum())
    )
    return schema.select(sums, UNKNOWN_COLUMNS).sort("dur_ns", "name", descending=[True, False])


def operator_calls(trace: Trace) -> pl.DataFrame:
    """Return how often the steps call each operator of the dispatcher, such as ``aten::mm``, saves excluded.

    Columns CALL_COLUMNS; one row per operator.
    """
    calls = trace.ops.filter(pl.col("name").str.starts_with("aten::"), _IN_STEP)
    return schema.select(calls.group_by("name").agg(pl.len().alias("calls")), CALL_COLUMNS).sort("name")


def counted_op_of_activities(trace: Trace, ids: pl.Series) -> nesting.Ints:
    """Return, for each activity, the row in ops of the call of `ids` that launched it or is around it; -1 for none."""
    owner = kernels.innermost_op(trace)
    if not trace.ops.height:
        return owner
    around = nesting.nearest(_parents(trace), trace.ops["id"].is_in(ids.implode()).to_numpy())
    return np.where(owner >= 0, around[np.maximum(owner, 0)], -1)


def _outermost(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls that are in no other of them."""
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    reached_ns = end_ns.cum_max().shift(1).over("lane")
    # Slices of a thread are sorted by start, outer ones first.
    return calls.sort("id").filter((pl.col("start_ns") >= reached_ns).fill_null(value=True))


def _work(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the work of the distinct calls: columns name, shapes, dtypes, arguments, flops, bytes, dtype."""
    kinds = calls.select(_CALL).unique(maintain_order=True)
    backward = kinds.filter(pl.col("name").is_in(op_flops.CONVOLUTION_BACKWARDS)).select("name", "shapes").rows()
    outputs = op_flops.convolution_outputs(backward)
    rows = []
    for name, shapes, dtypes, arguments in kinds.iter_rows():
        done, sizes = op_flops.work(name, shapes, arguments, outputs), op_flops.input_bytes(shapes, dtypes)
        flops_of, moved = (None, None) if done is None else (done.flops, op_flops.moved_bytes(done, sizes))
        rows.append((flops_of, moved, sizes.dtype))
    work = pl.DataFrame(rows, {"flops": pl.Float64, "bytes": pl.Float64, "dtype": pl.String}, orient="row")
    return kinds.hstack(work)


_CALL = ["name", "shapes", "dtypes", "arguments"]


def _recomputed_ids(trace: Trace, ids: pl.Series) -> pl.Series:
    repeated = recomputation.recomputed_activities(trace)
    if repeated.is_empty():
        return pl.Series("id", [], pl.Int64)
    rows = counted_op_of_activities(trace, ids)
    rows = rows[trace.activities["id"].is_in(repeated["id"].implode()).to_numpy() & (rows >= 0)]
    return trace.ops["id"].gather(rows).unique()


def _compute(trace: Trace) -> pl.DataFrame:
    """Return the compute: columns of activities, op (the operator that launched it, or null), is_known."""
    work, owner = trace.activities, kernels.innermost_op(trace)
    if not trace.ops.height:
        return work.with_columns(op=pl.lit(None, pl.String), is_known=pl.lit(value=False)).filter(_IS_COMPUTE)
    ids = counted(trace)["id"]
    launcher = pl.Series("op", owner).set(pl.Series(owner < 0), None)
    op = trace.ops["name"].gather(launcher).alias("op")
    names, kernel_names = (each.drop_nulls().unique().to_list() for each in (op, work["name"]))
    with_formula = [name for name in names if op_flops.has_formula(name)]
    memory_bound = op.is_in([name for name in names if op_flops.has_no_products(name)]).fill_null(value=False)
    if trace.on_device:
        by_kernel = [name for name in kernel_names if op_flops.is_memory_bound_kernel(name)]
        memory_bound |= work["name"].is_in(by_kernel) & ~op.is_in(with_formula).fill_null(value=False)
    is_counted = counted_op_of_activities(trace, ids) >= 0
    encloses = np.where(owner >= 0, _enclosing(trace, ids)[np.maximum(owner, 0)], False)
    return work.with_columns(op, is_known=pl.Series(is_counted | encloses) | memory_bound).filter(_IS_COMPUTE)


_IS_COMPUTE = pl.col("kind") == "compute"


def _enclosing(trace: Trace, ids: pl.Series) -> nesting.Flags:
    """Return which ops have one of the calls `ids` in them: on a CPU run, an activity is an outermost op."""
    parent = _parents(trace)
    encloses = np.zeros(trace.ops.height, np.bool_)
    if trace.on_device:
        return encloses
    around = parent[trace.ops["id"].is_in(ids.implode()).to_numpy()]
    while (around := np.unique(around[around >= 0])).size:
        around = around[~encloses[around]]
        encloses[around] = True
        around = parent[around]
    return encloses


def _parents(trace: Trace) -> nesting.Ints:
    return trace.ops["parent_id"].fill_null(-1).to_numpy()
