"""Reads of tensor values by Python in a CPU run, such as .item() and .cpu().numpy(), and the ops that only they need.

Nothing waits for a device there: what reads cost are the copies, norms and sums whose results nothing else uses.
"""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import cpu_ops
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import trace_columns
from tracekit.model import nesting, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = {**cpu_ops.COLUMNS, "line": pl.String}
_READS = r"^aten::(item|is_nonzero|_local_scalar_dense|resolve_neg)$"
"""Ops that give values to Python: numbers, or arrays and lists (.numpy() and .tolist() call aten::resolve_neg last)."""
_COPIES = (
    r"^aten::(to|_to_copy|clone|contiguous|detach|alias|view|reshape|flatten|ravel|select|slice|narrow|squeeze|"
    r"unsqueeze|t|transpose|permute|resolve_conj)$"
)
_ELEMENTWISE = r"^aten::(abs|square|pow|mul|isnan|isinf|isfinite|eq|ne|lt|le|gt|ge)$"
_REDUCTIONS = r"^aten::(norm|linalg_norm|linalg_vector_norm|sum|mean|std|var|max|min|amax|amin|any|all|count_nonzero)$"
_TENSOR, _REDUCED, _NUMBER, _READ = range(4)  # stages of the calls that lead to a read
_MAX_READ_NS = 20_000  # a read of one number takes 2 µs; if it takes ms, its thread was not scheduled
_DETACH = "aten::detach"
_DEVICE_MOVE = r"^\[\[[^\]]*\](, \[[^\]]*\]){7}\]$"  # aten::to has eight inputs where a device is given (.cpu())
_OTHER_READERS = (conventions.DATA, conventions.OPTIMIZER, conventions.CHECKPOINT)


@trace_fact
@memoize
def value_reads(trace: Trace) -> pl.DataFrame:
    """Ops of a CPU run that give values of tensors to Python, and ops whose results only these need.

    Columns COLUMNS: saved_ns (its time, of a read at most 20 µs, and the pause of its thread before it), line (of the
    program, where stacks were recorded), usual_ns (null); one row per op. The calls directly before a read lead to it:
    copies, views and elementwise ops of one tensor, its reduction, and arithmetic on numbers, unless backward needs
    them or they change their input. Copies of a detached tensor that .cpu() is called on need no read. In a loop of
    reads, Python may work with the values for as long as it took to copy them. Data loading, optimizers and saves are
    left out.
    """
    if trace.on_device or not trace_columns.is_named(trace, rf"{_READS}|^{_DETACH}$").any():
        return schema.empty(COLUMNS)
    calls = cpu_ops.calls_with_inputs(trace)
    checks = cpu_ops.anomaly_checks(trace).select("activity_id")
    calls = calls.join(checks, on="activity_id", how="anti").sort("lane", "start_ns", maintain_order=True)
    reads = _with_loop_pauses(_chains(calls, _needed_rows(trace, calls))).filter("is_read")
    lines = allocations.code_locations(trace, reads["launch_id"]).select(launch_id="op_id", line="stack")
    located = reads.join(lines, on="launch_id", how="left", maintain_order="left")
    is_reading = (pl.col("stage") == _READ).fill_null(value=False)
    dur_ns = pl.when(is_reading).then(pl.col("dur_ns").clip(upper_bound=_MAX_READ_NS)).otherwise("dur_ns")
    saved_ns = dur_ns + pl.col("pause_ns")
    return schema.conform(located.with_columns(op="name", usual_ns=None, saved_ns=saved_ns), COLUMNS)


def _needed_rows(trace: Trace, calls: pl.DataFrame) -> pl.Series | None:
    """Rows of the calls of which backward needs a part; None where the trace does not say so of any op."""
    needed = trace.ops["forward_id"].drop_nulls().unique()
    if needed.is_empty():
        return None
    is_call = np.zeros(trace.ops.height, np.bool_)
    is_call[calls.filter(pl.col("row") >= 0)["row"].to_numpy()] = True
    around = nesting.nearest(trace_columns.parent_rows(trace), is_call)
    return pl.Series(around[trace.ops["id"].is_in(needed.implode()).to_numpy()]).unique()


def _chains(calls: pl.DataFrame, needed: pl.Series | None) -> pl.DataFrame:
    """Calls with is_read, whether each leads to a read. Without `needed`, ops that compute do not lead to one."""
    name, stage = pl.col("name"), pl.col("stage")
    is_copy, is_computed = name.str.contains(_COPIES), needed is not None
    is_needed = pl.col("row").is_in(needed.implode()) if needed is not None else pl.lit(value=False)
    is_number = pl.col("shapes").str.starts_with("[[]") & ~name.str.ends_with("_")
    stages = (
        pl.when(pl.col("phase").is_in(_OTHER_READERS)).then(None)
        .when(name.str.contains(_READS)).then(_READ)
        .when(is_needed).then(None)
        .when(is_copy & ~is_number).then(_TENSOR)
        .when(not is_computed).then(None)
        .when(is_number).then(_NUMBER)
        .when(name.str.contains(_REDUCTIONS)).then(_REDUCED)
        .when(name.str.contains(_ELEMENTWISE)).then(_TENSOR)
    )  # fmt: skip
    size = pl.col("shapes").str.extract(r"^\[(\[[^\]]*\])")
    calls = calls.with_columns(stages.alias("stage"), is_copy.alias("is_copy"), size.alias("size"))
    is_same = [pl.col(key).eq_missing(pl.col(key).shift(1)) for key in ("lane", "step", "phase")]
    is_of_tensor = (stage > _REDUCED) | pl.col("is_copy").shift(1) | (pl.col("size") == pl.col("size").shift(1))
    is_later = (stage.shift(1) < stage) | ((stage.shift(1) == stage) & stage.is_in([_TENSOR, _NUMBER]))
    leads = is_later & (name != _DETACH) & is_of_tensor
    # Loops that copy several tensors have no other op between them: each detached tensor begins a chain.
    leads = pl.all_horizontal(leads, *is_same).fill_null(value=False)
    chained = calls.with_columns((~leads).cum_sum().alias("chain"))
    is_moved = (name.first() == _DETACH) & ((name == "aten::to") & pl.col("shapes").str.contains(_DEVICE_MOVE)).any()
    is_read = ((stage.last() == _READ) | is_moved).fill_null(value=False)
    return chained.with_columns(is_read.over("chain").alias("is_read"))


def _with_loop_pauses(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with a pause between two reads for as long as the ops since the pause before it took, at most."""
    before_ns = pl.col("start_ns") - (pl.col("start_ns") + pl.col("dur_ns")).shift(1)
    is_next = pl.col("is_read") & pl.col("is_read").shift(1)
    is_next &= pl.all_horizontal(pl.col(key).eq_missing(pl.col(key).shift(1)) for key in ("lane", "step"))
    is_in_loop = (is_next & (before_ns >= cpu_ops.MAX_PAUSE_NS)).fill_null(value=False)
    begins = is_in_loop | ~is_next.fill_null(value=False)
    parts = calls.with_columns(begins.cum_sum().alias("part"), is_in_loop.alias("is_in_loop"), before_ns=before_ns)
    took = parts.group_by("part", maintain_order=True).agg(pl.col("dur_ns").sum().alias("copied_ns"))
    took = took.select(pl.col("part") + 1, "copied_ns")
    paused = parts.join(took, on="part", how="left", maintain_order="left")
    loop_pause_ns = pl.min_horizontal("before_ns", "copied_ns")
    return paused.with_columns(pl.when("is_in_loop").then(loop_pause_ns).otherwise("pause_ns").alias("pause_ns"))
