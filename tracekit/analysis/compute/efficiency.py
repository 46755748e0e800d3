"""How far compute is from the device's peak: FLOPs utilization of steps, rates and roofline of operators.

The roofline bounds a call by the longer of its operations over the peak rate of their element type and its bytes over
the memory bandwidth (Williams, Waterman, Patterson, https://doi.org/10.1145/1498765.1498785). Model FLOPs utilization
(MFU) leaves out what activation checkpointing repeats, hardware FLOPs utilization (HFU) counts it (arXiv 2204.02311,
appendix B).
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import device_counters, flops, op_bytes, op_flops
from tracekit.analysis.time import breakdown
from tracekit.conventions import devices
from tracekit.conventions.devices import Device
from tracekit.model import environment, schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

COLUMNS = {
    "step": pl.Int64, "flops": pl.Float64, "flops_coverage_ratio": pl.Float64, "work_coverage_ratio": pl.Float64,
    "mfu_ratio": pl.Float64, "hfu_ratio": pl.Float64,
}  # fmt: skip
OP_COLUMNS = {
    "id": pl.Int64, "flops": pl.Float64, "bytes": pl.Float64, "flops_ns": pl.Int64, "bytes_ns": pl.Int64,
    "ideal_ns": pl.Float64, "rated_ns": pl.Int64,
}  # fmt: skip
MIN_COVERAGE_RATIO = 0.9
"""Operations of steps are compared and have budgets only where they are known for this share of the compute time."""
_NS = 1e9
_STEP = ("window", "rank", "step")

_TEXT = pl.String()
NO_OPERATOR = "no operator recorded"
NO_SHAPES = "no shapes recorded"
NO_FORMULA = "no formula"
INSUFFICIENT = "inputs insufficient"

UNKNOWN_WORK = schema.table(
    "unknown_work",
    "operator, or kernel without one, and reason: compute whose operations or bytes are not known",
    schema.column("name", "Innermost operator around the launch; the kernel where there is none.", _TEXT),
    schema.column("reason", f"'{NO_OPERATOR}' (as in CUDA graphs), '{NO_SHAPES}', '{NO_FORMULA}', "
                  f"'{INSUFFICIENT}' (such as lengths of packed sequences), or what a kernel's name lacks.", _TEXT),
    schema.column("count", "Kernels; on a CPU run, ops."),
    schema.column("total_ns", "Their time; times of concurrent kernels add up."),
    schema.column("flops_unknown_ns", "The part of it whose floating-point operations are not known."),
    schema.column("compute_ratio", "Share of total_ns in the compute of the rank.", pl.Float64()),
)  # fmt: skip
_KEYS = ("name", "reason")


@trace_fact
def by_step(trace: Trace) -> pl.DataFrame:
    """Operations of each step, and how much of the device's peak they are.

    Columns step, flops (of `flops.each_product`; null where there are none), flops_coverage_ratio (share of the compute
    time for which they are known), work_coverage_ratio (share of the compute time of calls whose operations or bytes
    are known, so that the roofline applies), mfu_ratio (time that the known operations need at the peak of their
    element types, over the step's device window; null where the device is unknown), hfu_ratio (the same with the
    operations that activation checkpointing repeats); one row per step. Below a coverage of 1, flops and both ratios
    are lower bounds.
    """
    steps = breakdown.by_step(trace).group_by("step").agg(pl.col("duration_ns").max())
    products = _with_bounds(flops.each_product(trace), device_of(trace.header))
    is_timed = pl.col("compute_bound_ns").is_not_null().all()
    sums = products.group_by("step").agg(
        pl.col("flops").sum(),
        pl.when(is_timed).then(pl.col("compute_bound_ns").sum()).alias("hfu_ns"),
        pl.when(is_timed).then(pl.col("compute_bound_ns").filter(~pl.col("is_recomputed")).sum()).alias("mfu_ns"),
    )
    compute_ns = pl.when(pl.col("compute_ns") > 0).then("compute_ns")
    coverage = flops.coverage(trace).select(
        "step",
        (pl.col("known_ns") / compute_ns).alias("flops_coverage_ratio"),
        (pl.col("work_ns") / compute_ns).alias("work_coverage_ratio"),
    )
    return (
        steps.join(sums, on="step", how="left")
        .join(coverage, on="step", how="left")
        .with_columns((pl.col(f"{name}_ns") / pl.col("duration_ns")).alias(f"{name}_ratio") for name in ("mfu", "hfu"))
        .pipe(schema.select, COLUMNS)
        .sort("step")
    )


def of_ops(trace: Trace) -> pl.DataFrame:
    """Operations of each call that has a formula, the time they took, and the time that they need at least.

    Columns OP_COLUMNS: id (of ops), flops_ns and bytes_ns (the kernels that the call and the ops in it launched, on a
    CPU run its own duration, where flops or bytes are known), ideal_ns (by the roofline; null where device, element
    type or bytes are unknown), rated_ns (that duration where ideal_ns is known); one row per call.
    """
    counted = flops.counted_calls(trace)
    if counted.is_empty():
        return schema.empty(OP_COLUMNS)
    timed = _with_bounds(counted, device_of(trace.header))
    is_counted = trace.ops["id"].is_in(counted["id"].implode()).to_numpy()
    work_ns = trace.ops["dur_ns"].to_numpy()
    if trace.on_device:
        owner = flops.counted_op_of_activities(trace, counted["id"])
        work_ns = np.zeros(trace.ops.height, np.int64)
        np.add.at(work_ns, owner[owner >= 0], trace.activities["dur_ns"].to_numpy()[owner >= 0])
    is_bounded = pl.col("memory_bound_ns").is_not_null() & (
        pl.col("flops").is_null() | pl.col("compute_bound_ns").is_not_null()
    )
    ideal_ns = pl.when(is_bounded).then(pl.max_horizontal("compute_bound_ns", "memory_bound_ns"))
    times = {"flops_ns": "flops", "bytes_ns": "bytes", "rated_ns": "ideal_ns"}
    return (
        timed.with_columns(pl.Series("work_ns", work_ns[is_counted]), ideal_ns.alias("ideal_ns"))
        .with_columns(pl.when(pl.col(work).is_not_null()).then("work_ns").alias(name) for name, work in times.items())
        .pipe(schema.select, OP_COLUMNS)
    )


def device_of(header: Mapping[str, Any]) -> Device | None:
    """Kind of device that a header lists; None for none, several kinds, or one that is not known.

    What a user states of devices (`environment.DEVICE_OVERRIDES`) replaces the values of the table.
    """
    names, overrides = environment.device_names(header), header.get(environment.DEVICE_OVERRIDES, ())
    kinds = [devices.find_overridden(name, overrides) for name in names.split(", ")] if names else []
    return kinds[0] if kinds and all(kind == kinds[0] for kind in kinds) else None


def breakdown_by_step(run: Run) -> pl.DataFrame:
    """Breakdown of each rank's steps: columns of `slowest_device_by_step`, `by_step`, and `device_counters.OF_STEPS`.

    The last are null without counters of the GPUs.
    """
    rows = breakdown.slowest_device_by_step(run)
    counters = run.table(device_counters.device_counters).select(*_STEP, *device_counters.OF_STEPS)
    for table in (run.table(by_step), counters):
        rows = rows.join(table.drop_nulls("step"), on=_STEP, how="left", maintain_order="left")
    return rows


@trace_fact(table=UNKNOWN_WORK)
def unknown_work(trace: Trace) -> pl.DataFrame:
    """Compute of the steps whose operations or bytes are not known: columns UNKNOWN_WORK, longest first.

    Where no steps are marked, that of the window; saves are left out. Operators that multiply no matrices have known
    operations, none, and may have unknown bytes.
    """
    work = _step_compute(trace)
    unknown = work.filter(~(pl.col("is_known") & pl.col("has_work")))
    sums = unknown.group_by(pl.coalesce("op", "name").alias("name"), _reason(unknown).alias("reason")).agg(
        pl.len().alias("count"),
        pl.col("dur_ns").sum().alias("total_ns"),
        pl.col("dur_ns").filter(~pl.col("is_known")).sum().alias("flops_unknown_ns"),
    )
    shares = sums.with_columns(compute_ratio=_compute_ratio(int(work["dur_ns"].sum())))
    return UNKNOWN_WORK.conform(shares).pipe(_longest_first)


def by_operator(run: Run) -> pl.DataFrame:
    """Unknown work of all ranks and windows: the columns of UNKNOWN_WORK, one row per operator and reason.

    compute_ratio is the share in the compute of all ranks.
    """
    rank_rows = run.table(unknown_work)
    whole_ns = int(run.table(_total_compute)["compute_ns"].sum())
    sums = rank_rows.group_by(_KEYS).agg(pl.col("count", "total_ns", "flops_unknown_ns").sum())
    return (
        sums.with_columns(compute_ratio=_compute_ratio(whole_ns))
        .select(UNKNOWN_WORK.schema.names())
        .pipe(_longest_first)
    )


def note(run: Run) -> str | None:
    """Describe what is missing where operations are known for too little of the compute to compare; else None."""
    known_ns, whole_ns = run.table(flops.coverage).select("known_ns", "compute_ns").sum().row(0)
    if not whole_ns or known_ns / whole_ns >= MIN_COVERAGE_RATIO:
        return None
    missing = by_operator(run).filter(pl.col("flops_unknown_ns") > 0).sort("flops_unknown_ns", descending=True)
    listing = ", ".join(
        f"{row['name']} {row['flops_unknown_ns'] / whole_ns:.1%} ({row['reason']})"
        for row in missing.head(3).to_dicts()
    )
    return (
        f"operations are known for {known_ns / whole_ns:.1%} of the compute time, less than "
        f"{MIN_COVERAGE_RATIO:.0%}: flops and MFU are lower bounds, and are not compared. Not known are "
        f"{listing}; all are in --by unknown-work"
    )


def _with_bounds(counted: pl.DataFrame, device: Device | None) -> pl.DataFrame:
    """Calls with the least time that operations and bytes need on the device, null where unknown."""
    peaks = dict(device.peaks) if device else {}
    peak = pl.col("dtype").replace_strict(peaks, default=None, return_dtype=pl.Float64)
    bandwidth = pl.lit(device.memory_bytes_per_s if device else None, pl.Float64)
    return counted.with_columns(
        (pl.col("flops") * _NS / peak).alias("compute_bound_ns"),
        (pl.col("bytes") * _NS / bandwidth).alias("memory_bound_ns"),
    )


def _compute_ratio(whole_ns: int) -> pl.Expr:
    """Share of total_ns in the whole compute; null where no compute takes time."""
    return pl.col("total_ns") / pl.when(whole_ns > 0).then(whole_ns)


def _step_compute(trace: Trace) -> pl.DataFrame:
    work = flops.compute(trace).filter(pl.col("phase").ne_missing(conventions.CHECKPOINT))
    in_steps = work.filter(pl.col("step").is_not_null())
    return work if in_steps.is_empty() else in_steps


@trace_fact
def _total_compute(trace: Trace) -> pl.DataFrame:
    return _step_compute(trace).select(compute_ns=pl.col("dur_ns").sum())


def _reason(work: pl.DataFrame) -> pl.Expr:
    names = work["op"].drop_nulls().unique().to_list()
    with_formula = [name for name in names if op_flops.has_formula(name) or op_bytes.has_formula(name)]
    kernel_names = work["name"].unique().to_list()
    lacks = {name: lacking for name in kernel_names if (lacking := flops.unknown_part(name))}
    tiled = [name for name in kernel_names if flops.has_tile_only(name)]
    has_op_formula = pl.col("op").is_in(with_formula).fill_null(value=False)
    return (
        pl.when(pl.col("name").is_in(list(lacks)) & ~has_op_formula)
        .then(pl.col("name").replace_strict(lacks, default=None, return_dtype=pl.String))
        .when(pl.col("op").is_null() & pl.col("name").is_in(tiled)).then(pl.lit(flops.TILE_ONLY))
        .when(pl.col("op").is_null()).then(pl.lit(NO_OPERATOR))
        .when(pl.col("shapes").is_null()).then(pl.lit(NO_SHAPES))
        .when(~pl.col("op").is_in(with_formula)).then(pl.lit(NO_FORMULA))
        .otherwise(pl.lit(INSUFFICIENT))
    )  # fmt: skip


def _longest_first(rows: pl.DataFrame) -> pl.DataFrame:
    return rows.sort("total_ns", "name", "reason", descending=[True, False, False])


FACTS: tuple[TraceFact, ...] = (unknown_work, flops.coverage, _total_compute)
"""What `by_operator` and `note` need of each trace."""
