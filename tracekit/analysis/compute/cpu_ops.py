"""Ops of a CPU run that take longer than they need to in every call: against the run's own rate, casts, small ones.

No comparison of steps or ranks shows what every step loses. The baseline is what other ops of the same trace achieve.
"""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.compute import kernels, op_bytes
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "device step phase activity_id op name shapes dtypes start_ns dur_ns usual_ns saved_ns", op=pl.String,
    dtypes=pl.String,
)  # fmt: skip
SMALL_COLUMNS = {**COLUMNS, "line": pl.String}
CAST_COLUMNS = schema.columns(
    "device step phase activity_id op name shapes cast_from cast_to is_reverted start_ns dur_ns saved_ns", op=pl.String,
    cast_from=pl.String, cast_to=pl.String, is_reverted=pl.Boolean,
)  # fmt: skip
_ARITHMETIC = frozenset(("add", "sub", "mul", "div", "neg", "abs", "sqrt", "lerp", "addcmul", "addcdiv", "relu"))
"""Elementwise operators that the memory limits: on one processor they moved 13 to 25 bytes in a nanosecond."""
_FLOATING = ("float", "double", "c10::Half", "c10::BFloat16")
_MIN_BYTES = 64 << 10  # below, the time of a call is that of the dispatcher
_MIN_KINDS = 3  # of calls of one size, of which the fast ones show what the machine achieves
_FAST_SHARE = 0.75
_SLOW_RATIO = 5
"""Times as long as usual from which ops are slow: strided ones of healthy trainings take up to twice, denormal numbers
take 26 times as long."""
_MOST_MEDIANS = 2
"""Medians of its kind up to which a call's time is that of its arithmetic: single calls of 38 ms, of a kind that takes
0.3 ms, were interrupted by other programs."""
_MIN_CALLS = 4  # of a kind in a trace
_SMALL_NS = 20_000
_SMALL_BYTES = 64 << 10
_MANY = 200  # calls of one kind in a step: loops over the parameters of a healthy model have 10 to 50
MAX_PAUSE_NS = 100_000
"""Longest pause between ops that counts as part of the second one; longer ones are Python's."""
_VIEWS = ("aten::split", "aten::split_with_sizes", "aten::unbind", "aten::chunk", "aten::tensor_split")
_ANOMALY_CHECKS = r"^aten::(isnan|_is_any_true|any|item|is_nonzero)$"
_ALLOCATES = r"^aten::(new_)?_?empty|^aten::resize_"
_AUTOGRAD_NODE = r"^autograd::engine::evaluate_function"
_CALL = ("name", "shapes", "dtypes", "arguments", "strides")


@trace_fact
@memoize
def slow_arithmetic(trace: Trace) -> pl.DataFrame:
    """Elementwise arithmetic of a CPU run far below the rate of other such ops of the same element type and size.

    Columns COLUMNS: usual_ns (at that rate), saved_ns (beyond it, up to twice the median of its kind); one row per
    call. The usual rate is the upper quartile over kinds of calls (operator, shapes) of each one's median. Calls of a
    kind are slow if their median takes five times as long as usual. Sizes are alike within a factor of 4.
    """
    calls = calls_with_inputs(trace)
    name = pl.col("name").str.strip_prefix("aten::").str.strip_suffix("_")
    arithmetic = calls.filter(name.is_in(_ARITHMETIC))
    if arithmetic.is_empty():
        return schema.empty(COLUMNS)
    kinds = arithmetic.group_by(_CALL, maintain_order=True).agg(pl.col("dur_ns").median().alias("median_ns"), pl.len())
    kinds = kinds.with_columns(_moved_bytes(kinds), pl.col("dtypes").str.json_path_match("$[0]").alias("dtype")).filter(
        pl.col("bytes") >= _MIN_BYTES, pl.col("len") >= _MIN_CALLS, pl.col("dtype").is_in(_FLOATING)
    )
    alike = ["dtype", pl.col("bytes").log(4).round().alias("size")]
    rate = (pl.col("bytes") / pl.col("median_ns").clip(1)).quantile(_FAST_SHARE, "nearest")
    rated = kinds.with_columns(rate.over(alike).alias("rate"), pl.len().over(alike).alias("kinds"))
    usual_ns = (pl.col("bytes") / pl.col("rate")).cast(pl.Int64)
    slow = rated.with_columns(usual_ns=usual_ns).filter(
        pl.col("kinds") >= _MIN_KINDS, pl.col("median_ns") > _SLOW_RATIO * pl.col("usual_ns")
    )
    rows = arithmetic.join(
        slow.select(*_CALL, "usual_ns", "median_ns"), on=_CALL, nulls_equal=True, maintain_order="left"
    )
    slow_ns = pl.min_horizontal("dur_ns", (_MOST_MEDIANS * pl.col("median_ns")).cast(pl.Int64))
    return schema.conform(rows.with_columns(op="name", saved_ns=(slow_ns - pl.col("usual_ns")).clip(0)), COLUMNS)


@trace_fact
@memoize
def casts(trace: Trace) -> pl.DataFrame:
    """Conversions between element types: ops that copy a tensor to another type, on a device their kernels.

    Columns CAST_COLUMNS: cast_from, cast_to, is_reverted (the next cast of its thread, or the one before, converts a
    tensor of the same shape back), saved_ns (its whole time, and the pause of its thread before it); one row per op. Of
    a device only kernels that the next or the last one of their stream reverts: mixed precision needs the others.
    """
    if trace.ops["dtypes"].null_count() == trace.ops.height:
        return schema.empty(CAST_COLUMNS)
    if trace.on_device:
        return _reverted_kernels(trace)
    launch = trace_columns.launch_rows(trace)
    outermost = np.zeros(trace.ops.height, np.bool_)
    outermost[launch[launch >= 0]] = True
    around = nesting.nearest(trace_columns.parent_rows(trace), outermost)
    copies = _casting_copies(trace, around)
    calls = calls_with_inputs(trace).drop("shapes").join(copies.drop("name").unique("row", keep="first"), on="row")
    calls = calls.sort("lane", "start_ns", maintain_order=True)
    is_reverted = _reverts("lane").alias("is_reverted")
    return schema.conform(
        calls.with_columns(is_reverted, op="name", saved_ns=pl.col("dur_ns") + pl.col("pause_ns")), CAST_COLUMNS
    )


def _casting_copies(trace: Trace, rows: npt.NDArray[np.int64]) -> pl.DataFrame:
    """Copies to another floating type: name, shapes, cast_to, cast_from, and the row of `rows` of each op."""
    copies = trace.ops.select(
        "name", "shapes", cast_to=pl.col("dtypes").str.json_path_match("$[0]"),
        cast_from=pl.col("dtypes").str.json_path_match("$[1]"), row=pl.Series(rows),
    ).filter(pl.col("name") == "aten::copy_", pl.col("cast_to") != pl.col("cast_from"), pl.col("row") >= 0)  # fmt: skip
    is_tensor = ~pl.col("shapes").str.starts_with("[[]")  # numbers are cast within arithmetic
    return copies.filter(is_tensor, pl.col("cast_from").is_in(_FLOATING), pl.col("cast_to").is_in(_FLOATING))


def _reverts(place: str) -> pl.Expr:
    """Whether the next cast of a lane in a step, or the last one, converts a tensor of the same shape back."""
    reverts = [
        (pl.col("cast_from") == pl.col("cast_to").shift(by).over(place))
        & (pl.col("cast_to") == pl.col("cast_from").shift(by).over(place))
        & (pl.col("shapes") == pl.col("shapes").shift(by).over(place))
        & pl.col("step").eq_missing(pl.col("step").shift(by).over(place))
        for by in (1, -1)
    ]
    return reverts[0].fill_null(value=False) | reverts[1].fill_null(value=False)


def _reverted_kernels(trace: Trace) -> pl.DataFrame:
    """Kernels that convert a tensor which the kernel before or after them on the stream converts back: as `casts`."""
    copies = _casting_copies(trace, np.arange(trace.ops.height))
    if copies.is_empty():
        return schema.empty(CAST_COLUMNS)
    computes = trace_columns.is_activity_kind(trace, "compute")
    kernels_in_order = (
        trace.activities.with_columns(activity_id="id", op="name", row=pl.Series(kernels.innermost_op(trace)))
        .filter(pl.Series(computes))
        .join(copies.drop("name"), on="row", how="left", maintain_order="left")
        .join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
        .sort("lane", "start_ns")
    )
    reverted = kernels_in_order.with_columns(is_reverted=_reverts("lane"), saved_ns="dur_ns").filter("is_reverted")
    return schema.conform(reverted, CAST_COLUMNS)


@trace_fact
@memoize
def small_ops(trace: Trace) -> pl.DataFrame:
    """Ops of a CPU run that do almost nothing, hundreds of times in a step, and those that divide tensors for them.

    Columns SMALL_COLUMNS: saved_ns (its whole time, and the pause of its thread before it), line (of the program, where
    stacks were recorded), usual_ns (null); one row per op.
    Ops are small if a call of the same operator and shapes takes less than 20 µs in the median and moves less than 64
    KiB; there are 200 such calls or more in the step. One op on all of the data replaces them.
    """
    calls = calls_with_inputs(trace).sort("lane", "start_ns", maintain_order=True)
    kind = ["step", "name", "shapes"]
    is_many = pl.len().over(kind) >= _MANY
    is_small = (pl.col("dur_ns").median().over(kind) < _SMALL_NS) & pl.col("dtypes").is_not_null()
    many = calls.filter(is_many & is_small)
    if many.is_empty():
        return schema.empty(SMALL_COLUMNS)
    inputs = many.select(_CALL).unique(["name", "shapes"], maintain_order=True)
    small = inputs.with_columns(_moved_bytes(inputs)).filter(pl.col("bytes") < _SMALL_BYTES)
    of_small = many.join(small.select("name", "shapes"), on=["name", "shapes"], how="semi")
    loops = of_small.select("lane", "step").unique()
    views = calls.filter(pl.col("name").is_in(_VIEWS)).join(loops, on=["lane", "step"], how="semi", nulls_equal=True)
    chosen = pl.concat([of_small, views.select(of_small.columns)]).sort("lane", "start_ns", maintain_order=True)
    lines = allocations.code_locations(trace, chosen["launch_id"]).select(launch_id="op_id", line="stack")
    located = chosen.join(lines, on="launch_id", how="left", maintain_order="left")
    saved_ns = pl.col("dur_ns") + pl.col("pause_ns")
    return schema.conform(located.with_columns(op="name", usual_ns=None, saved_ns=saved_ns), SMALL_COLUMNS)


@trace_fact
@memoize
def anomaly_checks(trace: Trace) -> pl.DataFrame:
    """Ops of a CPU run that autograd's anomaly mode adds or lengthens: checks of gradients, and stacks of forward.

    Columns COLUMNS: usual_ns (null), saved_ns; one row per op. After each node of backward, autograd itself looks for
    NaN, so that only its own slice is around these ops: they save their whole time, and the pause before each. In
    forward, each op that backward needs records the Python stack: that takes as long as the cheapest kind of
    such ops takes itself, beyond ops of the same name that backward does not need.
    """
    if trace.on_device or not trace_columns.is_named(trace, r"^aten::isnan$").any():
        return schema.empty(COLUMNS)
    calls, parent = computing(trace), trace_columns.parent_rows(trace)
    outer = parent[np.maximum(calls["row"].to_numpy(), 0)]
    by_engine = (outer >= 0) & trace_columns.is_named(trace, _AUTOGRAD_NODE)[np.maximum(outer, 0)]
    checks = calls.filter(pl.col("name").str.contains(_ANOMALY_CHECKS), pl.Series(by_engine))
    if checks.is_empty():
        return schema.empty(COLUMNS)
    checks = checks.with_columns(saved_ns=pl.col("dur_ns") + pl.col("pause_ns"))
    stacks = _within_calls(trace, calls, _stack_ns(trace))
    return schema.conform(pl.concat([checks, stacks.select(checks.columns)]).with_columns(op="name"), COLUMNS)


@trace_fact
@memoize
def deterministic_fills(trace: Trace) -> pl.DataFrame:
    """Work by which deterministic mode overwrites each new tensor: ops of a CPU run, or kernels of a device.

    Columns COLUMNS: name (of the op that allocates), usual_ns (null), saved_ns; one row per op of a CPU run with such
    fills in it, or per kernel. Otherwise PyTorch leaves new memory as it is: only this mode calls aten::fill_ within
    ops that allocate, or with NaN within other ops.
    """
    names = trace.ops["name"]
    parent = trace_columns.parent_rows(trace)
    outer = np.maximum(parent, 0)
    is_nan = trace.ops["arguments"].str.contains(r"\bnan\b").fill_null(value=False).to_numpy()
    within = trace_columns.is_named(trace, _ALLOCATES)
    is_fill = trace_columns.is_named(trace, r"^aten::fill_$") & (parent >= 0)
    is_fill &= within[outer] | (is_nan & trace_columns.is_named(trace, r"^aten::")[outer])
    if not is_fill.any():
        return schema.empty(COLUMNS)
    if not trace.on_device:
        fill_ns = np.where(is_fill, trace.ops["dur_ns"].to_numpy(), 0)
        fills = _within_calls(trace, computing(trace), fill_ns)
        return schema.conform(fills.with_columns(op="name"), COLUMNS)
    row = kernels.innermost_op(trace)
    is_filling = is_fill[np.maximum(row, 0)] & (row >= 0)
    filling = trace.activities.with_columns(pl.Series("row", row)).filter(pl.Series(is_filling), trace.in_steps)
    allocated = filling.with_columns(op=names.gather(outer[filling["row"].to_numpy()]), saved_ns="dur_ns")
    on_lane = allocated.join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
    return schema.conform(on_lane.rename({"id": "activity_id"}), COLUMNS)


@memoize
def calls_with_inputs(trace: Trace) -> pl.DataFrame:
    """Ops as `computing` with their inputs (_CALL). Empty where a device was recorded, or no shapes."""
    inputs = trace.ops.select("id", *_CALL[1:]).rename({"id": "launch_id"})
    calls = computing(trace).filter(not trace.on_device)
    return calls.join(inputs, on="launch_id", how="inner", maintain_order="left").drop_nulls("shapes")


@memoize
def computing(trace: Trace) -> pl.DataFrame:
    """Activities of compute in the steps of a CPU run, with row in ops (or -1), and the pause of Python before each."""
    before_ns = pl.col("start_ns") - (pl.col("start_ns") + pl.col("dur_ns")).shift(1).over("lane")
    rows = trace.activities.with_columns(pl.Series("row", trace_columns.launch_rows(trace)))
    paused = (
        rows.filter(kind="compute")
        .sort("lane", "start_ns")
        .with_columns(
            pl.when(before_ns < MAX_PAUSE_NS).then(before_ns).otherwise(0).fill_null(0).clip(0).alias("pause_ns")
        )
    )
    return paused.filter(trace.in_steps).rename({"id": "activity_id"}).with_columns(device=pl.lit(None, pl.Int64))


def _within_calls(trace: Trace, calls: pl.DataFrame, part_ns: nesting.Ints) -> pl.DataFrame:
    """The calls that contain a part of ops' time, shape (ops,) in ns, with its sum as saved_ns."""
    outermost = np.zeros(trace.ops.height, np.bool_)
    outermost[calls.filter(pl.col("row") >= 0)["row"].to_numpy()] = True
    rows = np.flatnonzero(part_ns > 0)
    around = nesting.nearest(trace_columns.parent_rows(trace), outermost)[rows]
    parts = pl.DataFrame({"row": around, "saved_ns": part_ns[rows]}).filter(pl.col("row") >= 0)
    sums = parts.group_by("row").agg(pl.col("saved_ns").sum())
    return calls.join(sums, on="row", maintain_order="left")


def _stack_ns(trace: Trace) -> nesting.Ints:
    """Time of each op in anomaly mode for which it records a stack, shape (ops,): 0 for those that backward needs not.

    Self time without that of the ops within it; of one kind, the median.
    """
    parent = trace_columns.parent_rows(trace)
    self_ns = trace.ops["dur_ns"].to_numpy().copy()
    np.subtract.at(self_ns, parent[parent >= 0], trace.ops["dur_ns"].to_numpy()[parent >= 0])
    ops = trace.ops.select("id", "name", pl.Series("self_ns", np.maximum(self_ns, 0)))
    needed = trace.ops["forward_id"].drop_nulls().unique()
    ops = ops.with_columns(pl.col("id").is_in(needed.implode()).alias("is_needed"))
    needed_ns, other_ns = (pl.col("self_ns").filter(pl.col("is_needed") == flag).median() for flag in (True, False))
    kinds = ops.group_by("name").agg(needed_ns.alias("needed_ns"), other_ns.fill_null(0).alias("usual_ns"))
    cheapest = kinds.drop_nulls("needed_ns").sort("needed_ns", "name").head(1)
    stack_ns = int((cheapest["needed_ns"] - cheapest["usual_ns"]).clip(0).sum())
    return np.where(ops["is_needed"].to_numpy(), np.minimum(ops["self_ns"].to_numpy(), stack_ns), 0)


def _moved_bytes(calls: pl.DataFrame) -> pl.Series:
    """Column bytes: what each call of a table with columns _CALL reads and writes at least, or null."""
    moved = [
        op_bytes.of_call(name, shapes, dtypes, arguments, strides, None)
        for name, shapes, dtypes, arguments, strides in calls.select(_CALL).iter_rows()
    ]
    return pl.Series("bytes", moved, pl.Int64)
