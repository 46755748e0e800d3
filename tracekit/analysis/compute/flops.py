"""Floating-point operations of a step, computed from the shapes of ops."""

import json
import math
import re
from collections.abc import Sequence

import polars as pl

from tracekit import conventions
from tracekit.model import schema
from tracekit.model.trace import Trace

CALL_COLUMNS = {"name": pl.String, "calls": pl.Int64}
PRODUCT_COLUMNS = {"name": pl.String, "shapes": pl.String, "flops": pl.Float64}
COLUMNS = {"step": pl.Int64, "phase": pl.String, "name": pl.String, "flops": pl.Float64}

_MATRICES = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Matrix products, and the index of the left matrix among the arguments; the right one is next."""
_ATTENTION = re.compile(r"^aten::_(scaled_dot_product_\w*attention|flash_attention|efficient_attention)\w*$")
_BACKWARD = "_backward"
_BACKWARD_RATIO = 2.5
"""Attention's backward multiplies five times where its forward does twice (Dao 2023, section 3.2)."""

Shape = Sequence[int]


def flops(trace: Trace) -> pl.DataFrame:
    """Return the floating-point operations of each step in matrix products and attention, saves excluded.

    Columns step, phase, name, flops; one row per step, phase and op. A product of an m by k and a k by n matrix has 2 m
    n k. Empty where the profiler recorded no shapes. Elementwise (memory-bound) work and fused ops of compiled graphs
    are not counted.
    """
    rows = _counted_ops(trace)
    counted = rows.group_by("step", "phase", "name", "shapes").len()
    kinds = counted.select("name", "shapes").unique()
    each = [_of_op(name, shapes) for name, shapes in kinds.iter_rows()]
    known = kinds.with_columns(pl.Series("flops", each, pl.Float64))
    joined = counted.join(known, on=["name", "shapes"]).with_columns(pl.col("flops") * pl.col("len"))
    sums = joined.group_by("step", "phase", "name").agg(pl.col("flops").sum())
    return schema.select(sums, COLUMNS).sort("step", "phase", "name")


def products(trace: Trace) -> pl.DataFrame:
    """Return the floating-point operations of the steps by op and shapes: the work of a step, in any order.

    Columns PRODUCT_COLUMNS; one row per op and shapes of its inputs.
    """
    counts = _counted_ops(trace).group_by("name", "shapes").agg(pl.len().alias("calls"))
    once = [_of_op(name, shapes) for name, shapes in counts.select("name", "shapes").iter_rows()]
    sums = counts.with_columns(pl.Series("flops", once, pl.Float64) * pl.col("calls"))
    return schema.select(sums, PRODUCT_COLUMNS).sort("name", "shapes")


def operator_calls(trace: Trace) -> pl.DataFrame:
    """Return how often the steps call each operator of the dispatcher, such as ``aten::mm``, saves excluded.

    Columns CALL_COLUMNS; one row per operator.
    """
    calls = trace.ops.filter(
        pl.col("name").str.starts_with("aten::"),
        pl.col("step").is_not_null(),
        pl.col("phase").ne_missing(conventions.CHECKPOINT),
    )
    return schema.select(calls.group_by("name").agg(pl.len().alias("calls")), CALL_COLUMNS).sort("name")


def _counted_ops(trace: Trace) -> pl.DataFrame:
    return trace.ops.filter(
        pl.col("shapes").is_not_null(),
        pl.col("step").is_not_null(),
        pl.col("phase").ne_missing(conventions.CHECKPOINT),
        pl.col("name").is_in(list(_MATRICES)) | pl.col("name").str.contains(_ATTENTION.pattern),
    )


def _of_op(name: str, shapes: str) -> float:
    try:
        dims = json.loads(shapes)
        if name in _MATRICES:
            return _of_product(*dims[_MATRICES[name] : _MATRICES[name] + 2])
        first = 1 if _BACKWARD in name else 0
        once = _of_attention(*dims[first : first + 2])
        return once * _BACKWARD_RATIO if first else once
    except (ValueError, TypeError, IndexError):
        return 0.0  # shapes that are not those of the op


def _of_product(left: Shape, right: Shape) -> float:
    return 2.0 * math.prod(left) * right[-1]


def _of_attention(query: Shape, key: Shape) -> float:
    """Return the operations of both products of attention; shapes are batch, heads, tokens, width."""
    return 4.0 * math.prod(query) * key[-2]
