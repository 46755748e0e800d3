"""Host slices by name, shapes, unit and more: total, self and device time, and distance from the roofline."""

import functools
from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths, efficiency, flops, kernels
from tracekit.analysis.memory import allocations
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

MEASURES = {
    "compute_ns": "Time of its compute kernels.",
    "communication_ns": "Time of its collectives, exposed or not.",
    "copy_ns": "Time of its copies and memory sets.",
    "host_ns": "Time that its slices take on the host without nested slices.",
    "flops": "Floating-point operations of its products, convolutions and attention.",
    "sent_bytes": "Bytes that its collectives send.",
    "allocated_bytes": "Memory that it allocates on devices, on a CPU run on the host.",
}
"""What a module has of its own, and as total_… with the modules inside it."""
MODULES = schema.table(
    "modules",
    "module of the model on a rank, its backward included; and one row for what is outside of all",
    schema.column("module", "Path of the module, such as Transformer.layers.0; null: outside modules.", pl.String()),
    schema.column("parent", "Path of the module around it; null for the outermost.", pl.String()),
    schema.column("depth", "Modules around it: 0 for the outermost."),
    schema.column("calls", "How often it was called; null where only FSDP's units are known."),
    *(schema.column(name, f"{meaning} Without the modules inside it.") for name, meaning in MEASURES.items()),
    *(schema.column(f"total_{name}", "The same with all modules inside it.") for name in MEASURES),
)
_KINDS = {"compute": "compute_ns", "communication": "communication_ns", "memcpy": "copy_ns", "memset": "copy_ns"}
_SEPARATOR = call_paths.MODULE_SEPARATOR
OUTSIDE = "outside modules"


def ops(
    run: Run, by: Sequence[str] = ("name",), kinds: Sequence[str] = ("cpu_op",), *, on_progress: OnTrace | None = None
) -> pl.DataFrame:
    """Host slices of `kinds` summed by kind and `by` (of KEYS), most self time first.

    Columns by, kind, `kernels.MEASURES`, self_ns, device_ns, self_ratio, flops, bytes, tflops_per_s, tbytes_per_s,
    roofline_ratio. self_ns excludes nested slices of any kind, so that self times add up to the time spent; total_ns
    counts a slice nested in another of its name twice. device_ns is the time of the activities that the op itself
    launched; null where none of the run's traces has a device. self_ratio is self_ns over that of all recorded slices.
    flops and bytes are those of calls with a formula (see `op_flops`, `op_bytes`), tflops_per_s and tbytes_per_s their
    rates in 10^12/s while kernels of the calls ran (on a CPU run: the calls), roofline_ratio the time that they need at
    least over the time that they took; null where not known. Raises ConfigError on an unknown key or kind.
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
    """Calls of all ranks whose distance from the roofline is known, by operator and shapes of its inputs.

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
    """Peaks of a trace's device: columns ROOF_COLUMNS, one row per element type; empty if it is unknown."""
    device = efficiency.device_of(trace.header)
    if device is None:
        return pl.DataFrame(schema=ROOF_COLUMNS)
    rows = [(device.name, dtype, peak, device.memory_bytes_per_s) for dtype, peak in device.peaks.items()]
    return pl.DataFrame(rows, ROOF_COLUMNS, orient="row")


@trace_fact(table=MODULES)
def modules(trace: Trace) -> pl.DataFrame:
    """Measures of the modules of a rank in the recorded window.

    Columns of MODULES; one row per module, and one with module null for what is outside of all, which total_… has in
    none. The own measures sum to those of the trace: compute_ns to copy_ns to the activities of `kernels`, host_ns to
    the self times of `ops`. Sorted by path.
    """
    sums = _own_measures(trace)
    total_columns = [pl.col(name).sum().alias(f"total_{name}") for name in MEASURES]
    # Each module with those inside it: rows once for their module, and once for each module around it.
    module, names = pl.col("module"), pl.col("module").str.split(_SEPARATOR)
    outer = pl.when(names.list.len() > 1).then(names.list.head(names.list.len() - 1).list.join(_SEPARATOR))
    levels = [sums.drop_nulls("module")]
    while levels[-1].height:
        levels.append(levels[-1].with_columns(outer.alias("module")).drop_nulls("module"))
    totals = pl.concat(levels).group_by("module").agg(total_columns)
    calls = call_paths.module_calls(trace)
    rows = pl.concat([totals.select("module"), sums.filter(pl.col("module").is_null()).select("module").head(1)])
    joined = (
        rows.join(sums, on="module", how="left", nulls_equal=True)
        .join(totals, on="module", how="left")
        .join(calls, on="module", how="left")
        .with_columns(
            outer.alias("parent"),
            module.str.count_matches(_SEPARATOR, literal=True).cast(pl.Int64).alias("depth"),
            pl.when(module.is_not_null() & (calls.height > 0)).then(pl.col("calls").fill_null(0)).alias("calls"),
            *(pl.col(name).fill_null(0) for name in MEASURES),
        )
        .with_columns(
            pl.when(module.is_null()).then(name).otherwise(f"total_{name}").alias(f"total_{name}") for name in MEASURES
        )
    )
    return MODULES.conform(joined.sort("module", nulls_last=True))


def by_module(run: Run) -> pl.DataFrame:
    """Modules of all ranks and windows: columns of MODULES without those of ranks, summed; by path."""
    sums = pl.col(*MEASURES, *(f"total_{name}" for name in MEASURES)).sum()
    calls = pl.col("calls").sum() + pl.when(pl.col("calls").count() > 0).then(0)  # the sum of no values is 0, not null
    summed = run.table(modules).group_by("module").agg(pl.col("parent", "depth").first(), calls, sums)
    return MODULES.conform(summed.sort("module", nulls_last=True))


def tree(table: pl.DataFrame, measure: str) -> pl.DataFrame:
    """Return one of MEASURES of modules, as by `by_module`, as a tree: columns `call_trees.TREE`.

    self_ns and total_ns have the measure, without and with the modules inside, in its own unit. Work outside of all
    modules is a node without a parent, too.
    """
    ordered = table.sort("depth", "module", nulls_last=True).with_columns(pl.int_range(pl.len()).alias("node"))
    parents = ordered.select(parent="module", above="node").drop_nulls()
    joined = ordered.join(parents, on="parent", how="left", maintain_order="left")
    return joined.select(
        "node",
        pl.col("above").fill_null(-1).alias("parent"),
        pl.col("module").str.split(_SEPARATOR).list.last().fill_null(OUTSIDE).alias("name"),
        pl.col("calls").fill_null(0).alias("count"),
        pl.col(measure).alias("self_ns"),
        pl.col(f"total_{measure}").alias("total_ns"),
    )


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
    return pl.DataFrame({"self_ns": [self_times(trace.ops).sum()], "on_device": [trace.on_device]})


def _own_measures(trace: Trace) -> pl.DataFrame:
    """Measures of each module without those inside it, null for outside: columns module and MEASURES."""
    of_op = pl.DataFrame({"op_id": trace.ops["id"]}).with_columns(call_paths.op_modules(trace))
    of_activity = trace.activities.select(
        pl.col("id").alias("activity_id"), call_paths.activity_modules(trace), "kind", "dur_ns"
    )
    in_training = trace.allocations.filter(allocations.of_training(trace), pl.col("delta_bytes") > 0)
    parts = [
        of_activity.select("module", pl.col("kind").replace_strict(_KINDS).alias("measure"), value="dur_ns"),
        of_op.select("module", pl.lit("host_ns").alias("measure"), value=self_times(trace.ops)),
        _module_values(flops.counted_calls(trace).drop_nulls("flops").rename({"id": "op_id"}), of_op, "op_id", "flops"),
        _module_values(trace.collectives.drop_nulls("sent_bytes"), of_activity, "activity_id", "sent_bytes"),
        _module_values(in_training, of_op, "op_id", "delta_bytes", measure="allocated_bytes"),
    ]
    long = pl.concat(part.with_columns(pl.col("value").cast(pl.Int64)) for part in parts)
    value = pl.col("value")
    return long.group_by("module").agg(value.filter(pl.col("measure") == name).sum().alias(name) for name in MEASURES)


def _module_values(
    rows: pl.DataFrame, modules_of: pl.DataFrame, key: str, column: str, *, measure: str | None = None
) -> pl.DataFrame:
    joined = rows.join(modules_of.select(key, "module"), on=key, how="left")
    return joined.select("module", pl.lit(measure or column).alias("measure"), pl.col(column).alias("value"))
