"""The module (torch.nn.Module) that each host slice and activity belongs to, backward and recomputation included."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import call_paths
from tracekit.model import nesting
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, at
from tracekit.model.trace import Trace

SEPARATOR = "."
ROOT_UNIT = "(root)"
"""The module of FSDP's root unit, whose path is empty."""


@memoize
def op_modules(trace: Trace) -> pl.Series:
    """Return, for each row of the trace's ops, the path of its module, such as ``Transformer.layers.0.attention``.

    Modules are those of the spans that `record --modules` opens, else of the profiler's frames such as
    ``nn.Module: Linear_3``, whose path is that of the modules around it, else FSDP's units. A slice belongs to the
    innermost one around it; a backward op to that of the forward op whose gradient it computes. Null outside modules.
    """
    marks, paths = _marks(trace)
    if not marks.any():
        return _unit_modules(trace.ops)
    parent = trace.ops["parent_id"].fill_null(-1).to_numpy().astype(np.int64)
    forward = trace.ops["forward_id"].fill_null(-1).to_numpy().astype(np.int64)
    around = nesting.nearest(parent, marks)
    # The gradient of an op belongs to the op's module, whichever module called backward; work that a checkpointed
    # module repeats in backward runs inside that module.
    inner = nesting.nearest(parent, marks | (forward >= 0))
    of_forward = at(around, at(forward, inner, -1), -1)
    row = np.where((inner != around) & (of_forward >= 0), of_forward, around)
    index = pl.Series(row, dtype=pl.Int64)
    return paths.gather(index.set(index < 0, None)).alias("module")


def activity_modules(trace: Trace) -> pl.Series:
    """Return, for each activity, the path of the module that launched it; null outside modules."""
    launch = trace.activities["launch_id"]
    op_row = launch.set(((launch < 0) | (launch >= trace.ops.height)).fill_null(value=True), None)
    marks, _ = _marks(trace)
    if not marks.any():
        return _unit_modules(trace.activities)
    return op_modules(trace).gather(op_row).alias("module")


@memoize
def module_calls(trace: Trace) -> pl.DataFrame:
    """Count the calls of each module. Columns module, calls; empty where only FSDP's units are known."""
    marks, paths = _marks(trace)
    called = pl.DataFrame({"module": paths.filter(pl.Series(marks))}, schema={"module": pl.String})
    return called.group_by("module").agg(pl.len().cast(pl.Int64).alias("calls")).sort("module")


@memoize
def _marks(trace: Trace) -> tuple[Flags, pl.Series]:
    """Mark the rows of ops that are calls of modules, with the path of each of these."""
    ops = trace.ops
    is_module = ops["name"].str.starts_with(conventions.MODULE_PREFIX)
    recorded = (is_module & (ops["kind"] == "annotation")).to_numpy()
    names = ops["name"].str.strip_prefix(conventions.MODULE_PREFIX)
    if recorded.any() or not is_module.any():
        return recorded, names
    frames = (is_module & (ops["kind"] == "python")).to_numpy()
    return frames, _frame_paths(ops, names, frames)


def _frame_paths(ops: pl.DataFrame, names: pl.Series, frames: Flags) -> pl.Series:
    """Return the path of each frame: the modules around it where it was called from the most of them.

    A module that activation checkpointing calls again in backward has none around it there.
    """
    parent = ops["parent_id"].fill_null(-1).to_numpy().astype(np.int64)
    around = nesting.nearest(parent, frames)
    above = at(around, parent, -1)
    chains = call_paths.chains(names, above, np.flatnonzero(frames), separator=SEPARATOR)
    depth = chains.str.count_matches(SEPARATOR, literal=True)
    of_name = pl.DataFrame({"name": names, "path": chains, "depth": depth}).drop_nulls("path")
    longest = of_name.sort("depth", "path", descending=[True, False]).unique("name", keep="first", maintain_order=True)
    return names.to_frame("name").join(longest, on="name", how="left", maintain_order="left")["path"]


def _unit_modules(rows: pl.DataFrame) -> pl.Series:
    unit = pl.when(pl.col("unit") == "").then(pl.lit(ROOT_UNIT)).otherwise("unit").alias("module")
    return rows.select(unit)["module"]
