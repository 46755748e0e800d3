"""Work of a training that no gradient needs: evaluation, metrics and copies of weights that run in every step.

It takes as long in each step and on each rank, so that no comparison of these shows it.
"""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import cpu_ops, kernels, value_reads
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace, TraceFact

COLUMNS = schema.columns(
    "device step phase activity_id op name shapes place line start_ns dur_ns saved_ns", op=pl.String,
    place=pl.String, line=pl.String,
)  # fmt: skip
AFTER_UPDATE, BEFORE_BACKWARD = "after the optimizer", "between loss and backward"
"""Places in a step from which nothing leads to its gradients."""
_FORWARD, _BACKWARD, _UPDATE, _OTHER_PHASE, _NONE = range(5)
_PHASES = {conventions.BACKWARD: _BACKWARD, conventions.OPTIMIZER: _UPDATE}
_COLLECTIVE = r"^c10d::|record_param_comms"
_OF_TRAINING = rf"^Optimizer\.|^FSDP|^DistributedDataParallel\.|{_COLLECTIVE}"
_IN_PLACE = r"^aten::(.*[^_]_|_foreach_copy_|ones_like)$"
"""They may write weights, as where an optimizer has copies of these in 32 bits; backward begins with ones_like."""
# They write what the op before them allocated, as copy.deepcopy of weights does.
_INTO_NEW_MEMORY = r"^aten::(copy_|fill_|zero_|set_)$"
_ALLOCATES = r"^aten::(new_)?empty|^aten::set_$"
_COUNTED_ELSEWHERE: tuple[TraceFact, ...] = (
    cpu_ops.slow_arithmetic, value_reads.value_reads, cpu_ops.casts, cpu_ops.small_ops, cpu_ops.anomaly_checks,
    cpu_ops.deterministic_fills,
)  # fmt: skip


@trace_fact
@memoize
def side_work(trace: Trace) -> pl.DataFrame:
    """Compute in the steps of a training whose results no gradient of its step uses.

    Columns COLUMNS: op (the outermost operator around it), shapes (of that operator's inputs), place (AFTER_UPDATE or
    BEFORE_BACKWARD), line (of the program, where stacks were recorded), saved_ns (its time in ns, and on a CPU run
    that of Python before it); one row per kernel, or op of a CPU run. AFTER_UPDATE follows the last operator of the
    optimizer in a step; BEFORE_BACKWARD follows the last operator that backward needs. Operators that write into a
    tensor (unless it was just allocated), collectives and the operator before each, which makes what it sends, and ops
    that another fact on avoidable time has are left out. Empty where the trace does not say which ops backward needs.
    """
    needed = trace.ops["forward_id"].drop_nulls().unique()
    if needed.is_empty() or not trace_columns.is_phase(trace, conventions.BACKWARD).any():
        return schema.empty(COLUMNS)
    outermost = _outermost_ops(trace)
    events = _events(trace, outermost, trace.ops["id"].is_in(needed.implode()).to_numpy())
    work = _work(trace, outermost)
    work = work.join(_placed_ops(trace, outermost, events), on="row", maintain_order="left")
    for fact in _COUNTED_ELSEWHERE:
        work = work.join(fact(trace).select("activity_id"), on="activity_id", how="anti", maintain_order="left")
    work = work.with_columns(saved_ns=pl.col("dur_ns") + _python_ns())
    lines = allocations.code_locations(trace, work["op_id"]).select("op_id", line="stack")
    return schema.conform(work.join(lines, on="op_id", how="left", maintain_order="left"), COLUMNS)


def _outermost_ops(trace: Trace) -> Ints:
    """Row of the outermost dispatcher op around each op, itself included, shape (ops,); -1 for none."""
    parent = trace_columns.parent_rows(trace)
    around = nesting.nearest(parent, trace_columns.is_kind(trace, "cpu_op"))
    outermost = around.copy()
    while True:  # once for each level of nesting
        above = parent[np.maximum(outermost, 0)]
        above = np.where((outermost >= 0) & (above >= 0), around[np.maximum(above, 0)], -1)
        if not (above >= 0).any():
            return outermost
        outermost = np.where(above >= 0, above, outermost)


def _events(trace: Trace, outermost: Ints, is_needed: Flags) -> Ints:
    """What each outermost op does in training (_FORWARD to _NONE), shape (ops,); _NONE for ops within others."""
    does = np.full(trace.ops.height, _NONE, np.int64)
    does[outermost[is_needed & (outermost >= 0)]] = _FORWARD
    for phase in conventions.PHASES:
        if phase != conventions.FORWARD:
            does[outermost[trace_columns.is_phase(trace, phase) & (outermost >= 0)]] = _PHASES.get(phase, _OTHER_PHASE)
    return does


def _placed_ops(trace: Trace, outermost: Ints, does: Ints) -> pl.DataFrame:
    """Outermost ops that lead to no gradient: columns row, place, op, shapes, op_id."""
    is_outermost = outermost == np.arange(len(outermost))
    is_of_training = trace_columns.is_named(trace, _OF_TRAINING)
    is_inside = nesting.nearest(trace_columns.parent_rows(trace), is_of_training) >= 0
    ops = trace.ops.select("lane", "start_ns", "name", "shapes", "step", op_id="id", op="name").with_columns(
        pl.Series("row", np.arange(len(outermost))), pl.Series("does", does), pl.Series("is_inside", is_inside)
    )
    ops = ops.filter(pl.Series(is_outermost)).sort("start_ns", maintain_order=True)
    event = pl.when(pl.col("does") != _NONE).then("does")
    event_step = pl.when(pl.col("does") != _NONE).then("step")
    ops = ops.with_columns(
        before=event.forward_fill(), step_before=event_step.forward_fill(),
        after=event.backward_fill(), step_after=event_step.backward_fill(),
        name_before=pl.col("name").shift(1).over("lane"), name_after=pl.col("name").shift(-1).over("lane"),
    )  # fmt: skip
    is_last = pl.col("after").is_null() | pl.col("step_after").ne_missing(pl.col("step"))
    is_after_update = (pl.col("before") == _UPDATE) & (pl.col("step_before") == pl.col("step")) & is_last
    # A stage of a pipeline copies what it sends between the passes.
    has_stages = trace_columns.is_activity_named(trace, r"(?i)send|recv").any()
    is_before_backward = (pl.col("before") == _FORWARD) & (pl.col("after") == _BACKWARD) & pl.lit(not has_stages)
    threads = ops.filter(pl.col("does") == _FORWARD)["lane"].unique()
    name = pl.col("name").str
    is_new = name.contains(_INTO_NEW_MEMORY) & pl.col("name_before").str.contains(_ALLOCATES)
    is_side = pl.col("lane").is_in(threads.implode()) & (pl.col("does") == _NONE) & ~pl.col("is_inside")
    is_side &= ~pl.col("name_after").str.contains(_COLLECTIVE).fill_null(value=False)
    is_side &= name.starts_with("aten::") & (~name.contains(_IN_PLACE) | is_new.fill_null(value=False))
    place = pl.when(is_after_update).then(pl.lit(AFTER_UPDATE)).when(is_before_backward).then(pl.lit(BEFORE_BACKWARD))
    placed = ops.with_columns(place=place).filter(is_side)
    return placed.drop_nulls("place").select("row", "place", "op", "shapes", "op_id")


def _work(trace: Trace, outermost: Ints) -> pl.DataFrame:
    """Compute in the steps, with row of the outermost op that launched it, device and activity_id.

    Also, of a CPU run, number (in its thread), pause_ns and before_ns (the time since the op before); else 0.
    """
    if trace.on_device:
        row, none = kernels.innermost_op(trace), pl.lit(0, pl.Int64)
        work = trace.activities.with_columns(pl.Series("inner", row), pause_ns=none, before_ns=none, number=none)
        work = work.filter(pl.col("kind") == "compute", trace.in_steps, pl.col("inner") >= 0)
        work = work.join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
        work = work.rename({"id": "activity_id"})
    else:
        ops = cpu_ops.computing(trace).rename({"row": "inner"})
        end_ns = pl.col("start_ns") + pl.col("dur_ns")
        before_ns = (pl.col("start_ns") - end_ns.shift(1).over("lane")).clip(0).fill_null(0)
        work = ops.with_columns(before_ns=before_ns, number=pl.int_range(pl.len()).over("lane"))
        work = work.filter(pl.col("inner") >= 0)
    return work.with_columns(pl.Series("row", outermost[work["inner"].to_numpy()]))


def _python_ns() -> pl.Expr:
    """Pause of Python before each op: whole between two such ops in a row, for only their own Python runs there."""
    follows = pl.all_horizontal(
        pl.col("number") == pl.col("number").shift(1) + 1,
        *(pl.col(name).eq_missing(pl.col(name).shift(1)) for name in ("lane", "step")),
    )
    return pl.when(follows).then("before_ns").otherwise("pause_ns")
