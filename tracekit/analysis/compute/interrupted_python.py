"""Python of a CPU run that is interrupted at changing places in every step, as by other threads that hold the GIL.

The same Python runs between the same two ops in each step: what it takes beyond its fastest step is no work of its own.
"""

import polars as pl

from tracekit.analysis.communication import communication_gap_causes
from tracekit.analysis.compute import compute_gap_causes
from tracekit.analysis.time import cpu_times, host_state, trace_columns
from tracekit.model import columns, schema
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

COLUMNS = schema.columns("device step phase activity_id name nth start_ns dur_ns waited_ns saved_ns")
_MIN_STEPS = 4  # of fewer, the fastest may be interrupted, too
_MIN_RATIO = 0.1
"""Share of the step that even the step with the fewest interruptions loses: on quiet machines pauses take 1 to 8% of it
by the system, on a machine with load 9 up to 11%."""
_CALMEST = 0.25
"""Share of steps that may lose less where the metrics log shows other threads at work: a save ends before its step."""
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
    pause (the op's start, and 0, where there is none), waited_ns (the op's wait for a processor, below), saved_ns
    (that, and the pause beyond the fastest one of that place); one row per pause of a place that all steps have (but
    the first or the last of the window), and per op with such a wait. Empty unless even the calmest of four steps or
    more loses a tenth of its time to both, the median step to pauses, and half of all else that is slower than at its
    fastest is Python: where threads wait for a core that other programs use, ops are slower, too.

    What keeps the interpreter uses a processor, too. By the metrics log, the training's thread waited for one, and
    other threads of its process used some CPU time: the lesser of both is shared among the ops of the step by what each
    takes beyond the fastest identical one, and is no more than that. Where those threads used a tenth of the median
    step, three of four steps that lose a tenth are enough.
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
    times = _thread_times(trace, excess)
    waits = _processor_waits(trace, times)
    if not _is_interrupted(trace, _lost(steps, excess, waits, times), excess, waits):
        return schema.empty(COLUMNS)
    rows = excess.join(waits.join(ops, on="activity_id"), on="activity_id", how="full", coalesce=True).with_columns(
        pl.coalesce(column, f"{column}_right").alias(column) for column in ("step", "phase", "start_ns", *_PLACE[1:])
    )
    both_ns = pl.sum_horizontal("saved_ns", "waited_ns")
    rows = rows.with_columns(pl.col("dur_ns", "waited_ns").fill_null(0), both_ns.alias("saved_ns"))
    return schema.conform(rows.sort("start_ns"), COLUMNS)


def _thread_times(trace: Trace, excess: pl.DataFrame) -> pl.DataFrame:
    """CPU time of the process's other threads, and the training's wait for a processor, by the metrics log.

    Columns step, others_ns, processor_wait_ns. The training's thread ran for at most the step without its waits for a
    processor, for collectives and for the interpreter.
    """
    pauses = excess.group_by("step").agg(pl.col("saved_ns").sum())
    times = cpu_times.cpu_times(trace).drop_nulls("processor_wait_ns").join(pauses, on="step")
    waits_ns = pl.sum_horizontal("processor_wait_ns", "collective_wait_ns", "saved_ns")
    others_ns = (pl.col("cpu_ns") - (pl.col("wall_ns") - waits_ns).clip(0)).clip(0)
    return times.select("step", "processor_wait_ns", others_ns=others_ns)


def _lost(steps: pl.DataFrame, excess: pl.DataFrame, waits: pl.DataFrame, times: pl.DataFrame) -> pl.DataFrame:
    """Shares of each step: pauses, waits and CPU time of other threads; columns step, pauses, waits, others."""
    lost = steps.select("step", step_ns=pl.col("end_ns") - pl.col("start_ns"))
    parts = {"pauses": (excess, "saved_ns"), "waits": (waits, "waited_ns"), "others": (times, "others_ns")}
    for name, (rows, column) in parts.items():
        lost = lost.join(rows.group_by("step").agg(pl.col(column).sum().alias(name)), on="step", how="left")
    return lost.fill_null(0).select("step", pl.col(*parts) / pl.col("step_ns"))


def _is_interrupted(trace: Trace, lost: pl.DataFrame, excess: pl.DataFrame, waits: pl.DataFrame) -> bool:
    """Whether steps lose much to such pauses and waits, and Python most of all else that is slower.

    Ops that wait for other threads of the process are slower for the same reason.
    """
    medians = lost.select(pl.col("pauses", "others").median()).row(0, named=True)
    quantile = _CALMEST if medians["others"] >= _MIN_RATIO else 0.0
    calmest = (lost["pauses"] + lost["waits"]).quantile(quantile)
    if min(medians["pauses"], calmest or 0.0) < _MIN_RATIO:
        return False
    slower_ns, ops_ns = _slower_ops(trace).select(
        pl.col("slower_ns").sum(), (pl.col("dur_ns") - pl.col("slower_ns")).sum().alias("ops_ns")
    ).row(0)  # fmt: skip
    python_ns = int(excess["saved_ns"].sum())
    usual_ns = int(excess["dur_ns"].sum()) - python_ns
    usual_ratio = usual_ns / max(usual_ns + int(ops_ns), 1)
    least_ratio = max(_MIN_SHARE, min(usual_ratio + _MIN_MORE, (1 + usual_ratio) / 2))
    return python_ns >= least_ratio * (python_ns + int(slower_ns) - int(waits["waited_ns"].sum()))


def _slower_ops(trace: Trace) -> pl.DataFrame:
    """Ops of the steps, with what each takes beyond the fastest of its name and input shapes: slower_ns."""
    shapes = columns.rows_or_nulls(trace.ops.select("shapes"), trace_columns.launch_rows(trace))["shapes"]
    ops = trace.activities.with_columns(shapes).filter(pl.col("kind") == "compute", trace.in_steps)
    return ops.with_columns(slower_ns=pl.col("dur_ns") - pl.col("dur_ns").min().over("name", "shapes"))


def _processor_waits(trace: Trace, times: pl.DataFrame) -> pl.DataFrame:
    """Waits of ops for a processor that other threads of the process used.

    Columns activity_id, step, phase, start_ns, waited_ns; one row per op that waited.
    """
    most_ns = pl.min_horizontal("processor_wait_ns", "others_ns").alias("most_ns")
    slower = _slower_ops(trace).filter(pl.col("slower_ns") > 0).join(times.select("step", most_ns), on="step")
    share = (pl.col("most_ns") / pl.col("slower_ns").sum().over("step")).clip(upper_bound=1.0)
    waits = slower.select(
        "step", "phase", "start_ns", activity_id="id", waited_ns=(pl.col("slower_ns") * share).round().cast(pl.Int64)
    )
    return waits.filter(pl.col("waited_ns") > 0)
