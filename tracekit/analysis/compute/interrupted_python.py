"""Python of a CPU run that is interrupted at changing places in every step, as by other threads that hold the GIL.

The same Python runs between the same two ops in each step: what it takes beyond its fastest step is no work of its own.
"""

import polars as pl

from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.time import host_state, trace_columns
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns("device step phase activity_id name nth start_ns dur_ns saved_ns")
_MIN_STEPS = 4  # of fewer, the fastest may be interrupted, too
_MIN_RATIO = 0.1
"""Share of the step that even the step with the fewest interruptions loses: on quiet machines it loses 1 to 8% to the
system, on a machine with load 9 up to 11%."""
_MIN_SHARE = 0.5
"""Share of Python in all that takes longer than at its fastest: a thread that waits for a core stops within ops, too
(there up to 0.2 of it was Python's), one that waits for the GIL does not (0.64 to 0.9)."""
_MIN_MORE = 0.3
"""By so much that share exceeds Python's share of the fastest steps: other programs take the core at any time, so as
often in Python as that (0.61 for 0.63 in a training of small ops at load 6), threads with the GIL only there (0.53 to
0.65 for 0.07 to 0.16)."""
_PLACE = ("phase", "name", "nth")


@trace_fact
@memoize
def interrupted_python(trace: Trace) -> pl.DataFrame:
    """Pauses of Python between ops of a CPU run, beyond what the same pause takes in the fastest step.

    Columns COLUMNS: activity_id, name and nth (of the op after the pause, as `host_gaps`), start_ns and dur_ns of the
    pause, saved_ns (beyond the fastest one of that place); one row per pause of a place that all steps have (but the
    first or the last of the window). Empty unless even the calmest of four steps or more loses a tenth of its time to
    this, and half of all that is slower than at its fastest is Python: where threads wait for a core, ops are
    slower, too.
    """
    steps = trace_columns.windows(trace)
    pieces = compute_gap_causes.compute_gap_causes(trace)
    if trace.on_device or steps.height < _MIN_STEPS or pieces.is_empty():
        return schema.empty(COLUMNS)
    is_python = (pl.col("cause") == communication_gap_causes.HOST) & (pl.col("detail") == host_state.PYTHON)
    pauses = pieces.filter(is_python, pl.col("step").is_not_null()).group_by("activity_id", maintain_order=True).agg(
        pl.col("device", "step", "phase", "start_ns").first(), pl.col("dur_ns").sum()
    )  # fmt: skip
    number = pl.int_range(pl.len()).over("step", *_PLACE[:2]).alias("nth")
    ops = trace.activities.filter(pl.col("kind") == "compute").sort("start_ns", maintain_order=True)
    ops = ops.with_columns(number).select("name", "nth", activity_id="id")
    at_places = pauses.join(ops, on="activity_id", maintain_order="left")
    # The first op of a loop's body follows a pause of the step before.
    in_all = pl.col("step").n_unique().over(_PLACE) >= steps.height - 1
    excess_ns = (pl.col("dur_ns") - pl.col("dur_ns").min().over(_PLACE)).alias("saved_ns")
    excess = at_places.filter(in_all).with_columns(excess_ns)
    return schema.conform(excess, COLUMNS) if _is_interrupted(trace, steps, excess) else schema.empty(COLUMNS)


def _is_interrupted(trace: Trace, steps: pl.DataFrame, excess: pl.DataFrame) -> bool:
    """Whether every step loses much to such pauses, and Python most of what is slower than at its fastest."""
    by_step = excess.group_by("step").agg(pl.col("saved_ns").sum())
    durations = steps.select("step", dur_ns=pl.col("end_ns") - pl.col("start_ns"))
    lost = durations.join(by_step, on="step", how="left").fill_null(0)
    if lost.filter(pl.col("saved_ns") < _MIN_RATIO * pl.col("dur_ns")).height:
        return False
    shapes = columns.rows_or_nulls(trace.ops.select("shapes"), trace_columns.launch_rows(trace))["shapes"]
    ops = trace.activities.with_columns(shapes).filter(pl.col("kind") == "compute", trace.in_steps)
    fastest_ns = pl.col("dur_ns").min().over("name", "shapes")
    slower_ns, ops_ns = ops.select((pl.col("dur_ns") - fastest_ns).sum(), fastest_ns.sum().alias("ops_ns")).row(0)
    python_ns = int(excess["saved_ns"].sum())
    usual_ns = int(excess["dur_ns"].sum()) - python_ns
    usual_ratio = usual_ns / max(usual_ns + int(ops_ns), 1)
    least_ratio = max(_MIN_SHARE, min(usual_ratio + _MIN_MORE, (1 + usual_ratio) / 2))
    return python_ns >= least_ratio * (python_ns + int(slower_ns))
