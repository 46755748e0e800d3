"""Where the metrics' samples come from: a table of values per step, from one trace or from all ranks of a run.

A source returns the columns step and value, and metric where it measures several at once; one of a whole run also
window and rank. Rows without a value are left out. Values are in the unit of their metric: ns, bytes, a ratio, a count.
"""

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import saves
from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.compute import device_counters, efficiency, flops
from tracekit.analysis.host import step_parts
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.conventions import device_metrics
from tracekit.model import schema
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace

_COLUMNS = {"step": pl.Int64, "metric": pl.String, "value": pl.Float64}
_LOGGED = (
    conventions.TOKENS_METRIC,
    conventions.TOKENS_PER_GPU_METRIC,
    conventions.CPU_TIME_METRIC,
    conventions.DATA_WAIT_METRIC,
    conventions.COLLECTIVE_WAIT_METRIC,
)
_CHECKPOINT_COLUMNS = {
    "checkpoint_blocked_ns": "dur_ns",
    "checkpoint_cpu_ns": "cpu_ns",
    "checkpoint_written_bytes": "bytes",
    "checkpoint_calls": "calls",
}
_PEAKS = {conventions.ALLOCATED_METRIC: "peak_allocated_bytes", conventions.RESERVED_METRIC: "peak_reserved_bytes"}
LOGGED_METRICS = (*_LOGGED, *_PEAKS.values(), *_CHECKPOINT_COLUMNS, device_metrics.SM_CLOCK)
"""Metrics that a rank's logs hold: those of its process, not of a window."""
PART_PREFIX = "part/"
"""Samples of a step's parts have this prefix: they are no metrics, but show where a step takes longer."""
DEVICE_PARTS, HOST_PARTS = f"{PART_PREFIX}device/", f"{PART_PREFIX}host/"
FASTEST_PREFIX, FASTEST_SPREAD_PREFIX = "fastest/", "fastest_spread/"
"""Samples of what the calls of a part take where each is fastest, and by how much more in half of the steps."""
MIN_PART_RATIO = 0.0025
"""Names that take less of a typical step in every step are one part together."""
MAX_PART_NAME = 80


@trace_fact
def breakdown_samples(trace: Trace) -> pl.DataFrame:
    """Return the breakdown of each step's device window in ns, and its shares as ratios.

    Empty for logs of collectives: how long they are says when somebody stopped to log, not how fast the job is.
    """
    # A rank that drives several devices is as slow as the slowest of them.
    steps = breakdown.by_step(trace).sort("duration_ns").group_by("step", maintain_order=True).last().sort("step")
    steps = steps.filter(not _has_collectives_only(trace))
    communication = pl.col("communication_ns")
    wide = steps.select(
        "step",
        pl.col("duration_ns").alias("step_time_ns"),
        "compute_ns",
        "communication_ns",
        "exposed_communication_ns",
        (pl.col("exposed_communication_ns") / pl.col("duration_ns")).alias("exposed_communication_ratio"),
        pl.when(communication > 0).then(pl.col("overlapped_ns") / communication).alias("overlap_ratio"),
        "idle_ns",
    )
    return _long(wide)


def _has_collectives_only(trace: Trace) -> bool:
    return trace_columns.has_issue(trace, schema.COLLECTIVES_ONLY)


@trace_fact
def flop_samples(trace: Trace) -> pl.DataFrame:
    """Return the floating-point operations of each step, from recorded shapes.

    Without steps for much of whose compute they are not known: what is left out may differ from run to run.
    """
    per_op = flops.flops(trace)
    if per_op.is_empty():
        return schema.empty(_COLUMNS)
    ratio = pl.col("known_ns") / pl.col("compute_ns")
    uncovered = flops.coverage(trace).filter(ratio < efficiency.MIN_COVERAGE_RATIO).select("step")
    per_op = per_op.join(uncovered, on="step", how="anti")
    sums = per_op.group_by("step").agg(pl.col("flops").sum().alias("value")).sort("step")
    return sums.with_columns(pl.lit("flops").alias("metric"))


@trace_fact
def sent_samples(trace: Trace) -> pl.DataFrame:
    """Return the bytes that the collectives of each step send, saves left out; empty for logs of collectives."""
    sent = trace.collectives.filter(pl.col("sent_bytes").is_not_null() & (not _has_collectives_only(trace))).select(
        "activity_id", "sent_bytes"
    )
    work = trace.activities.filter(_in_step()).select(pl.col("id").alias("activity_id"), "step")
    sums = sent.join(work, on="activity_id").group_by("step").agg(pl.col("sent_bytes").sum().alias("value"))
    return sums.sort("step").with_columns(pl.lit("sent_bytes").alias("metric"))


@trace_fact
def allocation_samples(trace: Trace) -> pl.DataFrame:
    """Return allocations, allocated bytes and the peaks of each step by the allocator's events.

    On the device, or on the host in a CPU run.
    """
    if trace.allocations.is_empty():
        return schema.empty(_COLUMNS)
    in_training = allocations.of_training(trace) & pl.col("step").is_not_null()
    allocated = trace.allocations.filter(in_training, pl.col("delta_bytes") > 0)
    totals = allocated.group_by("step").agg(
        pl.len().cast(pl.Float64).alias("allocations"),
        pl.col("delta_bytes").sum().cast(pl.Float64).alias("allocated_bytes"),
    )
    peaks = allocations.live(trace).filter(in_training).group_by("step").agg(
        pl.col("live_bytes").max().cast(pl.Float64).alias("peak_allocated_bytes"),
        pl.col("reserved_bytes").max().cast(pl.Float64).alias("peak_reserved_bytes"),
    )  # fmt: skip
    return _long(totals.join(peaks, on="step", how="left").sort("step"))


@trace_fact
def checkpoint_samples(trace: Trace) -> pl.DataFrame:
    """Return the samples of blocking saves, one row per step after which something is saved and metric."""
    if trace.checkpoints.is_empty():
        return schema.empty(_COLUMNS)
    blocking = trace.checkpoints.filter(pl.col("operation") == "save", pl.col("stage") == "total", pl.col("blocking"))
    # A log has a line for each file, and training waits for all of them.
    sums = blocking.group_by("step", saves.save_without_step("checkpoint"), maintain_order=True).agg(
        pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(metric)
        for metric, column in _CHECKPOINT_COLUMNS.items()
    )
    return _long(sums.select("step", *_CHECKPOINT_COLUMNS))


@trace_fact
def logged_samples(trace: Trace) -> pl.DataFrame:
    """Return the metrics log's samples of each step: tokens a second, CPU time, wait for data, and memory peaks."""
    if trace.metrics.is_empty():
        return schema.empty(_COLUMNS)
    name = pl.col("name")
    logged = trace.metrics.filter(name.is_in(_LOGGED))
    # The allocator's counters cover the process so far; what the trace records of each step is more precise.
    peaks = trace.metrics.clear() if trace.allocations.height else trace.metrics.filter(name.is_in(list(_PEAKS)))
    rows = pl.concat([logged, peaks.with_columns(name.replace(_PEAKS))])
    return rows.select("step", name.alias("metric"), "value")


@trace_fact
def clock_samples(trace: Trace) -> pl.DataFrame:
    """Return the SM clock of the GPU, in MHz, in each step of the metrics log, while the GPU is busy."""
    counters = device_counters.device_counters(trace)
    return _long(counters.select("step", device_counters.busy_clock().alias(device_metrics.SM_CLOCK)))


def part_samples(trace: Trace) -> pl.DataFrame:
    """Return the time of each step by part and name: the parts of a step sum to its time exactly.

    Columns step, metric, value; the metric is the part, such as ``part/device/compute/aten::mm``. Names that take less
    than MIN_PART_RATIO of the typical step in every step are one part without a name, such as ``part/device/compute/``.
    """
    typical_ns = breakdown.by_step(trace)["duration_ns"].median()
    least_ns = MIN_PART_RATIO * float(str(typical_ns or 0))
    key = ["step", "device", "part", "name"]
    named = of_slowest_device(step_parts.step_parts(trace)).group_by(key).agg(pl.col("dur_ns").sum())
    is_small = pl.col("dur_ns").max().over("part", "name") < least_ns
    rows = named.with_columns(pl.when(is_small).then(pl.lit("")).otherwise("name").alias("name"))
    sums = rows.group_by("step", part_metric()).agg(pl.col("dur_ns").sum().cast(pl.Float64).alias("value"))
    return sums.sort("metric", "step")


@trace_fact
def part_places(trace: Trace) -> pl.DataFrame:
    """Return the function of the program in which each part's time is spent, of several the one with most time.

    Columns metric, place; one row per part of which one is recorded.
    """
    located = of_slowest_device(step_parts.step_parts(trace)).drop_nulls("place")
    sums = located.group_by(part_metric(), "place").agg(pl.col("dur_ns").sum())
    longest = sums.sort("metric", "dur_ns", "place", descending=[False, True, False])
    return longest.unique("metric", keep="first", maintain_order=True).select("metric", "place")


def of_slowest_device(parts: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of `step_parts` of the device on which each step takes longest."""
    totals = parts.group_by("step", "device").agg(pl.col("dur_ns").sum().alias("total_ns"))
    slowest = totals.sort("total_ns", "device", descending=[True, False]).unique("step", maintain_order=True)
    return parts.join(slowest.select("step", "device"), on=["step", "device"], how="semi", nulls_equal=True)


def part_metric() -> pl.Expr:
    """Return the name of a part's samples, by the columns device, part and name."""
    prefix = pl.when(pl.col("device").is_null()).then(pl.lit(HOST_PARTS)).otherwise(pl.lit(DEVICE_PARTS))
    return pl.concat_str(prefix, "part", pl.lit("/"), pl.col("name").str.head(MAX_PART_NAME)).alias("metric")


TRACE_SOURCES = (
    breakdown_samples, flop_samples, sent_samples, allocation_samples, checkpoint_samples, logged_samples,
)  # fmt: skip
"""In the order of their rows in saved reports."""


def transfer_samples(run: Run) -> pl.DataFrame:
    """Return the time of each step's collectives from the last arrival to the end, in ns, without those of saves.

    It is the same on all ranks; its row has the lowest rank.
    """
    transfers = run.table(collective_instances.instances).filter(_in_step(), pl.col("transfer_ns").is_not_null())
    sums = transfers.group_by("window", "step").agg(pl.col("transfer_ns").sum().alias("value")).sort("window", "step")
    lowest = pl.lit(min(run.ranks, default=0), pl.Int64).alias("rank")
    return sums.select("window", lowest, "step", "value")


def exposed_transfer_samples(run: Run) -> pl.DataFrame:
    """Return the exposed communication of each rank and step during which no rank is waited for."""
    exposed = run.table(exposed_communication.exposed_by_step).filter(pl.col("step").is_not_null())
    by_rank = exposed.group_by("window", "rank", "step", maintain_order=True).agg(pl.col("exposed_ns").max())
    return by_rank.select("window", "rank", "step", pl.col("exposed_ns").alias("value"))


def checkpoint_overhead(run: Run) -> pl.DataFrame:
    """Return the share of training time that all saves after a step take together. Column value, a row per step."""
    together = saves.by_training_step(run.table(saves.by_save), run.table(saves.by_rank))
    return together.select(pl.col("overhead_ratio").alias("value")).drop_nulls()


def _in_step() -> pl.Expr:
    return pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)


def _long(wide: pl.DataFrame) -> pl.DataFrame:
    return wide.unpivot(index="step", variable_name="metric", value_name="value").drop_nulls("value")
