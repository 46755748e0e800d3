"""Device activities by name, launching op, shapes, unit and more; on a CPU run, the compute of its threads."""

import functools
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import polars as pl

from tracekit.analysis.compute import module_paths, totals
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import nesting
from tracekit.model.memoize import memoize
from tracekit.model.run import OnTrace, Run
from tracekit.model.trace import Trace, TraceFact

KEYS = ("name", "op", "shapes", "module", "unit", "phase", "span", "step", "device", "stream", "rank")
"""Keys to group kernels by; kind is always one, so that work of two kinds is never merged."""
OpColumns: TypeAlias = Callable[[Trace], Sequence[pl.Series]]
"""What names the operator of each activity, and the shapes of its inputs: two columns of a trace's activities."""


def recorded_ops(trace: Trace) -> list[pl.Series]:
    """Return name and shapes of the innermost op around the launch of each activity; null where unknown."""
    return launching_op_columns(trace, ("name", "shapes"))


def kernels(
    run: Run,
    by: Sequence[str] = ("name",),
    *,
    ops: OpColumns = recorded_ops,
    on_progress: OnTrace | None = None,
) -> pl.DataFrame:
    """Return the activities of a run summed by kind and `by` (of KEYS), most total time first.

    Columns by, kind, `totals.MEASURES` and time_ratio: total_ns over the device time of all ranks, first activity to
    last. Concurrent kernels on two streams both count. `op` and `shapes` are those of `ops`, by default of the
    innermost op around the launch, `module` is as in `module_paths`. One row per combination; names are never cut or
    merged. Raises ConfigError on an unknown key.
    """
    totals.require_known("--by", by, KEYS)
    keys = tuple(dict.fromkeys((*by, "kind")))
    fact = _durations_fact(tuple(key for key in keys if key != "rank"), ops)
    run.measure((fact, breakdown.by_rank), on_progress)
    device_ns = run.table(breakdown.by_rank)["duration_ns"].sum()
    table = totals.merge_durations(run.table(fact), keys, ranks=run.ranks)
    time_ratio = pl.col("total_ns") / device_ns if device_ns else pl.lit(None, pl.Float64)
    return table.with_columns(time_ratio.alias("time_ratio"))


def with_launch_delays(
    run: Run,
    by: Sequence[str] = ("name",),
    *,
    ops: OpColumns = recorded_ops,
    on_progress: OnTrace | None = None,
) -> pl.DataFrame:
    """Return `kernels` with the columns delay_p50_ns and delay_p95_ns of `launch_delays`, if any launch is known."""
    totals.require_known("--by", by, KEYS)
    keys = tuple(key for key in dict.fromkeys((*by, "kind")) if key != "rank")
    run.measure(
        (_durations_fact(keys, ops), _delays(keys, ops), breakdown.by_rank), on_progress
    )  # in one pass over the traces
    table, delays = kernels(run, by, ops=ops), launch_delays(run, by, ops)
    if delays.is_empty():
        return table
    shared = [name for name in table.columns if name in (*by, "kind")]
    return table.join(delays.drop("launched"), on=shared, how="left", nulls_equal=True, maintain_order="left")


def launch_delays(run: Run, by: Sequence[str] = ("name",), ops: OpColumns = recorded_ops) -> pl.DataFrame:
    """Return the time from launch to start of the activities of `kernels`.

    Columns by, kind, launched (how many have a recorded launch), delay_p50_ns and delay_p95_ns: median and 95th
    percentile of the time from the end of the launching runtime call to the start. Short delays mean that the device
    waited for the host, long ones that work was queued. One row per combination with a known launch; empty on a CPU
    run. Raises ConfigError on an unknown key.
    """
    totals.require_known("--by", by, KEYS)
    keys = tuple(dict.fromkeys((*by, "kind")))
    fact = _delays(tuple(key for key in keys if key != "rank"), ops)
    ordered = pl.col("delay_ns").sort()
    return (
        run.table(fact)
        .select(*keys, "delay_ns")
        .explode("delay_ns")
        .group_by(keys)
        .agg(
            pl.len().cast(pl.Int64).alias("launched"),
            *(
                ordered.get((pl.len() * share).ceil().cast(pl.Int64) - 1).alias(f"delay_{name}_ns")
                for name, share in (("p50", 0.5), ("p95", 0.95))
            ),
        )
        .sort(keys)
    )


@functools.cache
def _delays(keys: tuple[str, ...], ops: OpColumns) -> TraceFact:
    def fact(trace: Trace) -> pl.DataFrame:
        work = _with_keys(trace, keys, ops)
        launched_ns = (pl.col("start_ns") + pl.col("dur_ns")).alias("launched_ns")
        calls = trace.ops.select(pl.col("id").alias("launch_id"), launched_ns)
        launched = work.clear() if not trace.on_device else work.drop_nulls("launch_id")
        delayed = launched.join(calls, on="launch_id", maintain_order="left").with_columns(
            (pl.col("start_ns") - pl.col("launched_ns")).clip(0).alias("delay_ns")
        )
        return delayed.group_by(keys, maintain_order=True).agg("delay_ns")

    return fact


@functools.cache
def _durations_fact(keys: tuple[str, ...], ops: OpColumns) -> TraceFact:
    def fact(trace: Trace) -> pl.DataFrame:
        return totals.collect_durations(_with_keys(trace, keys, ops), keys)

    return fact


def _with_keys(trace: Trace, keys: Sequence[str], ops: OpColumns) -> pl.DataFrame:
    """Return the activities with whatever of the keys is not a column of theirs."""
    work = trace.activities
    if "stream" in keys or "device" in keys:
        lanes = trace.lanes.select("lane", "device", stream="name")
        work = work.join(lanes, on="lane", maintain_order="left")
    if "op" in keys or "shapes" in keys:
        op, shapes = ops(trace)
        work = work.with_columns(op=op, shapes=shapes)
    if "module" in keys:
        work = work.with_columns(module_paths.activity_modules(trace))
    return work


def launching_op_columns(trace: Trace, columns: Sequence[str]) -> list[pl.Series]:
    """Return, for each activity, columns of the innermost op around its launch, named op_…; null where unknown."""
    row = pl.Series(innermost_op(trace))
    row = row.set(row < 0, None)
    return [trace.ops[name].gather(row).alias(f"op_{name}") for name in columns]


@memoize
def innermost_op(trace: Trace) -> nesting.Ints:
    """Return, for each activity, the row in ops of the innermost dispatcher op around its launch; -1 for none."""
    launch = trace.activities["launch_id"].fill_null(-1).to_numpy()
    if not trace.ops.height:
        return np.full(len(launch), -1, np.int64)
    of_slice = nesting.nearest(trace_columns.parent_ids(trace), trace_columns.is_kind(trace, "cpu_op"))
    is_known = (launch >= 0) & (launch < len(of_slice))
    return np.where(is_known, of_slice[np.where(is_known, launch, 0)], -1)
