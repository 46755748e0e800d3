"""Call paths: the operators, annotations and modules around each host slice, outermost first, as one text."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints, at
from tracekit.model.trace import Trace

SEPARATOR = " > "
BACKWARD = "backward"
MAX_LEVELS = 100
"""Deeper slices have the path of the one at this level: otherwise the texts grow with the square of the depth."""
_ENGINE = "autograd::engine::"
_DISPATCHED = r"^\S+::\S+$"
_KINDS = ("cpu_op", "annotation")
_STEP = r"^ProfilerStep#\d+$"

MODULE_SEPARATOR = "."
ROOT_UNIT = "(root)"
"""The module of FSDP's root unit, whose path is empty."""


@memoize
def call_paths(trace: Trace) -> pl.Series:
    """Return, for each row of the trace's ops, the names from the outermost slice down to it; null outside of all.

    Only operators and annotations count, but not the markers of steps and modules: these, python frames and runtime
    calls depend on how a run was recorded. A slice of another kind has the path of the one around it: the launch of a
    linear layer's kernel has ``aten::linear > aten::addmm``.
    """
    ops = trace.ops
    if ops.is_empty():
        return pl.Series("path", dtype=pl.String)
    is_left_out = ops["name"].str.contains(_STEP) | ops["name"].str.starts_with(conventions.MODULE_PREFIX)
    is_named = (ops["kind"].is_in(_KINDS) & ~is_left_out).to_numpy()
    parent = trace_columns.parent_ids(trace)
    around = nesting.nearest(parent, is_named)
    above = np.where(parent >= 0, around[np.maximum(parent, 0)], -1)
    index = pl.Series(around, dtype=pl.Int64)
    paths = chains(ops["name"], above, np.flatnonzero(is_named), separator=SEPARATOR)
    return paths.gather(index.set(index < 0, None)).alias("path")


@memoize
def dispatch_chains(trace: Trace) -> pl.Series:
    """Return, for each row of the trace's ops, the dispatcher's operators down to it; null outside of all.

    They are those of one call, such as ``aten::conv2d > aten::convolution > aten::_convolution``, whatever annotations
    are around it, and a repeated name (by autocast, for one) counts once. What the backward pass calls has the chain of
    the operator in the forward pass, BACKWARD, then its own.
    """
    ops = trace.ops
    if ops.is_empty():
        return pl.Series("chain", dtype=pl.String)
    start_ns = ops["start_ns"].to_numpy()
    forward = ops["forward_id"].fill_null(-1).to_numpy().astype(np.int64)
    # The engine adds gradients up around the node: that is not the operator's work.
    is_engine = ops["name"].str.starts_with(_ENGINE).to_numpy()
    is_known = (forward >= 0) & (forward < ops.height) & ~is_engine
    forward = np.where(is_known, forward, 0)
    is_node = is_known & (start_ns[forward] < start_ns)  # any other link is broken, and may make a loop
    is_dispatched = ((ops["kind"] == "cpu_op") & ops["name"].str.contains(_DISPATCHED)).to_numpy()
    names = ops["name"].zip_with(pl.Series(~is_node), pl.repeat(BACKWARD, ops.height, eager=True))
    above = _above(trace, is_dispatched | is_node, forward, is_node)
    is_repeat = (above >= 0) & (names == names.gather(np.maximum(above, 0))).to_numpy()
    is_named = (is_dispatched | is_node) & ~is_repeat
    rows = np.flatnonzero(is_named)
    texts = chains(names, _above(trace, is_named, forward, is_node), rows, separator=SEPARATOR)
    index = pl.Series(nesting.nearest(trace_columns.parent_ids(trace), is_named), dtype=pl.Int64)
    return texts.gather(index.set(index < 0, None)).alias("chain")


def _above(trace: Trace, is_named: nesting.Flags, forward: Ints, is_node: nesting.Flags) -> Ints:
    """Named row around each row; of an autograd node, that of its operator in the forward pass."""
    parent = trace_columns.parent_ids(trace)
    around = nesting.nearest(parent, is_named)
    above = np.where(parent >= 0, around[np.maximum(parent, 0)], -1)
    return np.where(is_node, around[forward], above)


def chains(names: pl.Series, above: Ints, rows: Ints, *, separator: str) -> pl.Series:
    """Names from the outermost row down to each of `rows`, joined; null for other rows.

    `above` is the row around each row, one of `rows` too; -1 for none.
    """
    name_of = names.rank("dense").to_numpy().astype(np.int64)
    codes = np.full(len(name_of), -1, np.int64)
    levels = nesting.levels(above, rows)
    parts = [outer_texts := pl.Series("path", dtype=pl.String)]
    first = before = 0
    for level in levels[:MAX_LEVELS]:
        outer = np.where(above[level] >= 0, codes[np.maximum(above[level], 0)] - before, -1)
        _, pos, code = np.unique(outer * (len(name_of) + 1) + name_of[level], return_index=True, return_inverse=True)
        codes[level] = first + code
        prefix = pl.Series("prefix", outer[pos], pl.Int64)
        around = outer_texts.gather(prefix.set(prefix < 0, None)).alias("prefix")
        frame = pl.DataFrame({"name": names.gather(level[pos]), "prefix": around})
        outer_texts = frame.select(path=pl.concat_str("prefix", "name", separator=separator, ignore_nulls=True))["path"]
        parts.append(outer_texts)
        before, first = first, first + len(outer_texts)
    for level in levels[MAX_LEVELS:]:
        codes[level] = codes[above[level]]
    index = pl.Series(codes, dtype=pl.Int64)
    return pl.concat(parts).gather(index.set(index < 0, None))


@memoize
def op_modules(trace: Trace) -> pl.Series:
    """Return, for each row of the trace's ops, the path of its module, such as ``Transformer.layers.0.attention``.

    Modules are those of the spans that `record --modules` opens, else of the profiler's frames (``nn.Module: Linear``),
    whose path is that of the modules around it, else FSDP's units. A slice belongs to the innermost one around it; a
    backward op to that of the forward op whose gradient it computes. Null outside modules.
    """
    marks, paths = _marks(trace)
    if not marks.any():
        return _unit_modules(trace.ops)
    parent = trace_columns.parent_ids(trace)
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
    """Return, for each activity, the path of the module that launched it; null outside modules.

    Modules of a CUDA graph ran when it was captured: of its kernels, it is what the graph's annotation states.
    """
    stated = trace.activities["graph_annotation"]
    launched = _launching_modules(trace)
    return launched if stated.null_count() == len(stated) else stated.zip_with(stated.is_not_null(), launched)


def _launching_modules(trace: Trace) -> pl.Series:
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
    # Path of each frame: the modules around it where it was called from the most of them. A module that activation
    # checkpointing calls again in backward has none around it there.
    parent = trace_columns.parent_ids(trace)
    around = nesting.nearest(parent, frames)
    above = at(around, parent, -1)
    op_chains = chains(names, above, np.flatnonzero(frames), separator=MODULE_SEPARATOR)
    depth = op_chains.str.count_matches(MODULE_SEPARATOR, literal=True)
    of_name = pl.DataFrame({"name": names, "path": op_chains, "depth": depth}).drop_nulls("path")
    longest = of_name.sort("depth", "path", descending=[True, False]).unique("name", keep="first", maintain_order=True)
    return frames, names.to_frame("name").join(longest, on="name", how="left", maintain_order="left")["path"]


def _unit_modules(rows: pl.DataFrame) -> pl.Series:
    unit = pl.when(pl.col("unit") == "").then(pl.lit(ROOT_UNIT)).otherwise("unit").alias("module")
    return rows.select(unit)["module"]
