"""Host slices by name, shapes, unit and more: total, self and device time, and distance from the roofline."""

import functools
from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths, efficiency, kernels
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import OnTrace, Run
from tracekit.model.trace import Trace, TraceFact

KEYS = ("name", "shapes", "module", "unit", "phase", "span", "step", "thread", "rank")
KINDS = ("cpu_op", "annotation", "runtime", "python", "overhead", "os_call")
_SUMS = ("self_ns", "device_ns", "flops", "bytes", "flops_ns", "bytes_ns", "ideal_ns", "rated_ns")

ROOFLINE_COLUMNS = {
    "name": pl.String, "shapes": pl.String, "count": pl.Int64, "work_ns": pl.Int64, "flops": pl.Float64,
    "bytes": pl.Float64, "flops_per_byte": pl.Float64, "tflops_per_s": pl.Float64, "tbytes_per_s": pl.Float64,
    "roofline_ratio": pl.Float64, "above_ns": pl.Int64,
}  # fmt: skip
ROOF_COLUMNS = {
    "device": pl.String, "dtype": pl.String, "flops_per_s": pl.Float64, "memory_bytes_per_s": pl.Float64,
}  # fmt: skip


def ops(
    run: Run,
    by: Sequence[str] = ("name",),
    kinds: Sequence[str] = ("cpu_op",),
    *,
    on_progress: OnTrace | None = None,
) -> pl.DataFrame:
    """Return the host slices of `kinds` summed by kind and `by` (of KEYS), most self time first.

    Columns by, kind, `kernels.MEASURES`, self_ns, device_ns, self_ratio, flops, bytes, tflops_per_s, tbytes_per_s,
    roofline_ratio.
    self_ns excludes nested slices of any kind, so that self times add up to the time spent; total_ns counts a slice
    nested in another of its name twice. device_ns is the time of the activities that the op itself launched; null where
    none of the run's traces has a device. self_ratio is self_ns over that of all recorded slices. flops and bytes are
    those of calls with a formula (see `op_flops`, `op_bytes`), tflops_per_s and tbytes_per_s their rates in 10^12/s
    while kernels of the calls ran (on a CPU run: the calls), roofline_ratio the time that they need at least over the
    time that they took; null where not known. Raises ConfigError on an unknown key or kind.
    """
    kernels.require_known("--by", by, KEYS)
    kernels.require_known("--kind", kinds, KINDS)
    keys = tuple(dict.fromkeys((*by, "kind")))
    fact = _ops_fact(tuple(key for key in keys if key != "rank"), tuple(kinds))
    run.measure((fact, _trace_totals), on_progress)
    run_totals = run.table(_trace_totals)
    rows = kernels.merge_durations(run.table(fact), keys, ranks=run.ranks, sums=_SUMS)
    rates = {"tflops_per_s": "flops", "tbytes_per_s": "bytes"}
    return (
        rows.with_columns(
            pl.when(run_totals["on_device"].any()).then("device_ns").alias("device_ns"),
            (pl.col("self_ns") / (run_totals["self_ns"].sum() or None)).cast(pl.Float64).alias("self_ratio"),
            pl.when(pl.col("flops") > 0).then("flops").alias("flops"),
            pl.when(pl.col("bytes") > 0).then("bytes").alias("bytes"),
            *(
                pl.when(pl.col(name) > 0, pl.col(f"{name}_ns") > 0)
                .then(pl.col(name) / pl.col(f"{name}_ns") / 1000)
                .alias(rate)
                for rate, name in rates.items()
            ),
            pl.when(pl.col("rated_ns") > 0).then(pl.col("ideal_ns") / pl.col("rated_ns")).alias("roofline_ratio"),
        )
        .drop("flops_ns", "bytes_ns", "ideal_ns", "rated_ns")
        .sort("self_ns", *keys, descending=[True, *(False for _ in keys)])
    )


def self_times(slices: pl.DataFrame) -> pl.Series:
    """Return, for each row of an ops table, its duration without nested slices, in ns.

    The rows are numbered by `id` from 0. Nested slices that overlap each other count once.
    """
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    covered = (
        slices.filter(pl.col("parent_id") >= 0)
        .select("parent_id", "start_ns", end_ns.alias("end_ns"))
        .sort("parent_id", "start_ns")
        .with_columns(pl.col("end_ns").cum_max().shift(1).over("parent_id").alias("reached_ns"))
        .with_columns(pl.max_horizontal("start_ns", "reached_ns").alias("from_ns"))
        .group_by("parent_id")
        .agg((pl.col("end_ns") - pl.col("from_ns")).clip(lower_bound=0).sum().alias("covered_ns"))
    )
    joined = slices.select("id", "dur_ns").join(
        covered, left_on="id", right_on="parent_id", how="left", maintain_order="left"
    )
    return joined.select((pl.col("dur_ns") - pl.col("covered_ns").fill_null(0)).alias("self_ns")).to_series()


def device_times(trace: Trace) -> pl.Series:
    """Return, for each row of the trace's ops, the duration of the activities that it launched itself, in ns.

    An activity counts for the innermost dispatcher op around its launch, and for no other.
    """
    owner = kernels.innermost_op(trace)
    has_owner = owner >= 0
    dur_ns = trace.activities["dur_ns"].to_numpy()[has_owner]
    added_ns = np.zeros(trace.ops.height, np.int64)
    np.add.at(added_ns, owner[has_owner], dur_ns)
    return pl.Series("device_ns", added_ns)


def rooflines(run: Run) -> pl.DataFrame:
    """Return the calls of all ranks whose distance from the roofline is known, by operator and shapes of its inputs.

    Columns ROOFLINE_COLUMNS: work_ns (time of their kernels), flops_per_byte (null where memory bandwidth limits the
    operator), roofline_ratio (of `ops`), above_ns (work_ns less what the roofline needs: the most that faster kernels
    can save); one row per name and shapes, largest above_ns first. Empty where the device or the shapes are not known.
    """
    rows = ops(run, by=("name", "shapes")).filter(pl.col("roofline_ratio") > 0, pl.col("tbytes_per_s") > 0)
    work_ns = pl.col("bytes") / pl.col("tbytes_per_s") / 1000
    return (
        rows.with_columns(
            work_ns.round().cast(pl.Int64).alias("work_ns"),
            (pl.col("flops") / pl.col("bytes")).alias("flops_per_byte"),
            (work_ns * (1 - pl.col("roofline_ratio")).clip(0)).round().cast(pl.Int64).alias("above_ns"),
        )
        .pipe(schema.select, ROOFLINE_COLUMNS)
        .sort("above_ns", "name", "shapes", descending=[True, False, False], nulls_last=True)
    )


@trace_fact
def roofs(trace: Trace) -> pl.DataFrame:
    """Return the peaks of a trace's device: columns ROOF_COLUMNS, one row per element type; empty if it is unknown."""
    device = efficiency.device_of(trace.header)
    if device is None:
        return pl.DataFrame(schema=ROOF_COLUMNS)
    rows = [(device.name, dtype, peak, device.memory_bytes_per_s) for dtype, peak in device.peaks.items()]
    return pl.DataFrame(rows, ROOF_COLUMNS, orient="row")


@functools.cache
def _ops_fact(keys: tuple[str, ...], kinds: tuple[str, ...]) -> TraceFact:
    def fact(trace: Trace) -> pl.DataFrame:
        slices = trace.ops.with_columns(self_times(trace.ops), device_times(trace)).join(
            efficiency.of_ops(trace), on="id", how="left", maintain_order="left"
        )
        if "module" in keys:
            slices = slices.with_columns(call_paths.op_modules(trace))
        slices = slices.filter(pl.col("kind").is_in(kinds))
        if "thread" in keys:
            slices = slices.join(trace.lanes.select("lane", pl.col("name").alias("thread")), on="lane", how="left")
        return kernels.collect_durations(slices, keys, _SUMS)

    return fact


@trace_fact
def _trace_totals(trace: Trace) -> pl.DataFrame:
    """Return the trace's total self time. Columns self_ns, on_device; one row."""
    return pl.DataFrame({"self_ns": [self_times(trace.ops).sum()], "on_device": [trace.on_device]})
