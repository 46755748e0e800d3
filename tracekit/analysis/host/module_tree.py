"""Modules of a model with their time, operations, traffic and memory: their own, and with the modules inside them."""

import polars as pl

from tracekit.analysis.compute import call_paths, flops
from tracekit.analysis.host import ops
from tracekit.analysis.memory import allocations
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

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


@trace_fact(table=MODULES)
def modules(trace: Trace) -> pl.DataFrame:
    """Measures of the modules of a rank in the recorded window.

    Columns of MODULES; one row per module, and one with module null for what is outside of all, which total_… has in
    none. The own measures sum to those of the trace: compute_ns to copy_ns to the activities of `kernels`, host_ns to
    the self times of `ops`. Sorted by path.
    """
    sums = _own_measures(trace)
    paths = sums.select("module").drop_nulls()
    nested = pl.concat([paths, *(paths.select(_ancestor(level)) for level in range(1, _max_depth(paths)))])
    calls = call_paths.module_calls(trace)
    rows = pl.concat([nested.drop_nulls().unique(), sums.filter(pl.col("module").is_null()).select("module").head(1)])
    module, names = pl.col("module"), pl.col("module").str.split(_SEPARATOR)
    parent = pl.when(names.list.len() > 1).then(names.list.head(names.list.len() - 1).list.join(_SEPARATOR))
    joined = (
        rows.join(sums, on="module", how="left", nulls_equal=True)
        .join(_totals(sums), on="module", how="left")
        .join(calls, on="module", how="left")
        .with_columns(
            parent.alias("parent"),
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
    """Return the modules of all ranks and windows: columns of MODULES without those of ranks, summed; by path."""
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


def _own_measures(trace: Trace) -> pl.DataFrame:
    """Return the measures of each module without those inside it, null for outside: columns module and MEASURES."""
    of_op = pl.DataFrame({"op_id": trace.ops["id"]}).with_columns(call_paths.op_modules(trace))
    of_activity = trace.activities.select(
        pl.col("id").alias("activity_id"), call_paths.activity_modules(trace), "kind", "dur_ns"
    )
    in_training = trace.allocations.filter(allocations.of_training(trace), pl.col("delta_bytes") > 0)
    parts = [
        of_activity.select("module", pl.col("kind").replace_strict(_KINDS).alias("measure"), value="dur_ns"),
        of_op.select("module", pl.lit("host_ns").alias("measure"), value=ops.self_times(trace.ops)),
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
    """Return the values of a column with their modules: columns module, measure, value."""
    joined = rows.join(modules_of.select(key, "module"), on=key, how="left")
    return joined.select("module", pl.lit(measure or column).alias("measure"), pl.col(column).alias("value"))


def _totals(sums: pl.DataFrame) -> pl.DataFrame:
    """Return the measures of each module with those inside it: columns module, total_…."""
    in_modules = sums.drop_nulls("module")
    levels = [in_modules, *(in_modules.with_columns(_ancestor(level)) for level in range(1, _max_depth(in_modules)))]
    nested = pl.concat(levels).drop_nulls("module")
    return nested.group_by("module").agg(pl.col(name).sum().alias(f"total_{name}") for name in MEASURES)


def _ancestor(levels: int) -> pl.Expr:
    """Return the path of the module so many levels up; null where there is none."""
    names = pl.col("module").str.split(_SEPARATOR)
    length = names.list.len().cast(pl.Int64) - levels
    return pl.when(length > 0).then(names.list.head(length).list.join(_SEPARATOR)).alias("module")


def _max_depth(rows: pl.DataFrame) -> int:
    """Count the names of the longest path."""
    return int(rows.select(pl.col("module").str.split(_SEPARATOR).list.len().max().fill_null(0)).item())
