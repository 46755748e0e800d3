"""Kernels of optimizers that pass over the parameters several times, where a fused one passes once."""

import numpy as np
import polars as pl

from tracekit.analysis.compute import kernels
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
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


@trace_fact
@memoize
def unfused_kernels(trace: Trace) -> pl.DataFrame:
    """Return the elementwise kernels that a step of Adam, AdamW or SGD launches one operator after another.

    Columns COLUMNS: op (that launched it), name (of the kernel), optimizer (its class), implementation (foreach or
    for-loop), saved_ns (by the accesses to memory of a fused kernel over those of all operators of the step); one row
    per kernel. Fused kernels are left out. Empty on a CPU run.
    """
    if not trace.on_device or not trace_columns.is_named(trace, _SLICE_WITH_FUSED).any():
        return schema.empty(COLUMNS)
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
    priced = elementwise.join(_saved_shares(elementwise), on="slice", maintain_order="left").with_columns(
        pl.when(is_foreach).then(pl.lit(FOREACH)).otherwise(pl.lit(FOR_LOOP)).alias("implementation"),
        (pl.col("dur_ns") * pl.col("saved_share")).round().alias("saved_ns"),
    )
    return schema.select(priced.join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left"), COLUMNS)


def _saved_shares(kernel_rows: pl.DataFrame) -> pl.DataFrame:
    """Return the share of each step's accesses that a fused kernel saves: columns slice, saved_share.

    How many tensors (or lists) the step updates is the median over operators of how often each is called.
    """
    calls = kernel_rows.unique("op_id").group_by("slice", "optimizer", "op").agg(pl.len(), pl.col("accesses").first())
    fused = pl.col("optimizer").first().replace_strict(FUSED_ACCESSES, return_dtype=pl.Int64)
    accesses = (pl.col("len") * pl.col("accesses")).sum() / pl.col("len").median()
    # Without momentum, SGD reads gradient and parameter and writes the parameter.
    is_plain = (pl.col("optimizer").first() == "SGD") & (pl.len() == 1)
    shares = calls.group_by("slice").agg(
        (1 - pl.when(is_plain).then(accesses).otherwise(fused) / accesses).alias("saved_share")
    )
    return shares.with_columns(pl.col("saved_share").clip(0))
