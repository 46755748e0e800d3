"""Owners of memory: the op that requested it, and the module and code location around that op."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import columns, nesting, sweep_line
from tracekit.model.sweep_line import Ints, distinct
from tracekit.model.trace import Trace

# Ops that allocate on behalf of another op, which is the owner.
_FOR_ANOTHER = (
    "aten::empty", "aten::empty_strided", "aten::empty_like", "aten::new_empty", "aten::new_empty_strided",
    "aten::resize_", "aten::zeros", "aten::zeros_like", "aten::ones_like", "aten::full", "aten::full_like",
    "aten::new_zeros", "aten::empty_permuted", "aten::clone", "aten::to", "aten::_to_copy", "aten::contiguous",
)  # fmt: skip
_MOST_CLIMBS = 6


def of_ops(trace: Trace, op_ids: pl.Series) -> pl.DataFrame:
    """Return, for ops that allocated, the name of the requesting op: columns op_id, op."""
    ids = distinct(op_ids.drop_nulls().to_numpy())
    names, code = trace_columns.op_names(trace)
    is_for_another = np.isin(names, _FOR_ANOTHER)[code]
    # A step phase is not an owner; an op or an FSDP span is.
    is_dispatched = trace_columns.is_named(trace, r"^\w+::") & ~trace_columns.is_named(trace, "^tracekit::")
    row, above = columns.rows_of(trace.ops["id"].to_numpy(), ids), trace_columns.parent_rows(trace)
    for _ in range(_MOST_CLIMBS):
        climbing = np.flatnonzero((row >= 0) & is_for_another[row])
        climbing = climbing[above[row[climbing]] >= 0]
        climbing = climbing[is_dispatched[above[row[climbing]]]]
        if not len(climbing):
            break
        row[climbing] = above[row[climbing]]
    return pl.DataFrame([pl.Series("op_id", ids), columns.values_at(trace.ops["name"], row).alias("op")])


def code_locations(trace: Trace, op_ids: pl.Series) -> pl.DataFrame:
    """Return, for ops, the innermost module and code location around them: columns op_id, module, stack."""
    table = pl.DataFrame({"op_id": op_ids.drop_nulls().unique().sort()})
    if not trace_columns.is_kind(trace, "python").any():
        return table.with_columns(module=pl.lit(None, pl.String), stack=pl.lit(None, pl.String))
    ops, python = trace.ops.sort("id"), pl.col("kind") == "python"
    names = ops.filter(python)["name"].unique()
    name = names.str
    user_code = names.filter(name.contains(r"\.py\(\d+\): ") & ~name.contains("^(torch/|<)|/torch/"))
    modules = names.filter(name.starts_with(conventions.MODULE_PREFIX))
    marks = ops.select(
        module=python & pl.col("name").is_in(modules.implode()),
        stack=python & pl.col("name").is_in(user_code.implode()),
    )
    ids, up = ops["id"].to_numpy(), _row_of(ops, "parent_id")
    rows = np.minimum(np.searchsorted(ids, table["op_id"].to_numpy()), len(ids) - 1)
    forward = _row_of(ops, "forward_id")[rows]
    locations = {}
    for kind in ("module", "stack"):
        marked = nesting.nearest(up, marks[kind].to_numpy())
        around, before = (sweep_line.at(marked, start, -1) for start in (rows, forward))
        row = np.where(around >= 0, around, before)
        names_of_rows = ops["name"].gather(np.maximum(row, 0)).str.strip_prefix(conventions.MODULE_PREFIX)
        locations[kind] = pl.select(pl.when(pl.Series(row >= 0)).then(names_of_rows)).to_series()
    return table.with_columns(**locations)


def _row_of(ops: pl.DataFrame, column: str) -> Ints:
    """Return, for each row of `ops`, the row of the op whose id a column holds; -1 for none. Sorted by id."""
    ids, targets = ops["id"].to_numpy(), ops[column].fill_null(-1).to_numpy()
    row = np.minimum(np.searchsorted(ids, targets), max(len(ids) - 1, 0))
    return np.where((targets >= 0) & (ids[row] == targets), row, -1) if len(ids) else row
