"""Per-step samples of every number that a run is compared by."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.checkpoint import saves
from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.compute import flops
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown
from tracekit.model.run import Run
from tracekit.model.trace import Trace

COLUMNS = {"step": pl.Int64, "metric": pl.String, "value": pl.Float64}

LOWER_IS_BETTER = {
    "step_time_ns": True,
    "cpu_time_ns": True,
    "flops": True,
    "compute_ns": True,
    "communication_ns": True,
    "exposed_communication_ns": True,
    "exposed_communication_ratio": True,
    "overlap_ratio": False,
    "exposed_transfer_ns": True,
    "transfer_ns": True,
    "sent_bytes": True,
    "idle_ns": True,
    "data_wait_ns": True,
    "allocations": True,
    "allocated_bytes": True,
    "peak_allocated_bytes": True,
    "peak_reserved_bytes": True,
    "checkpoint_blocked_ns": True,
    "checkpoint_cpu_ns": True,
    "checkpoint_written_bytes": True,
    "checkpoint_calls": True,
    "tokens_per_second": False,
}
"""The metrics a comparison shows, in order, and which way is better."""

_LOGGED = ("tokens_per_second", conventions.CPU_TIME_METRIC, conventions.DATA_WAIT_METRIC)
_OF_CHECKPOINTS = {
    "checkpoint_blocked_ns": "dur_ns",
    "checkpoint_cpu_ns": "cpu_ns",
    "checkpoint_written_bytes": "bytes",
    "checkpoint_calls": "calls",
}
_PEAKS = {conventions.ALLOCATED_METRIC: "peak_allocated_bytes", conventions.RESERVED_METRIC: "peak_reserved_bytes"}


def samples(trace: Trace) -> pl.DataFrame:
    """Return per-step samples of the metrics in `LOWER_IS_BETTER`, but for those of `samples_across`.

    Columns step, metric, value; one row per step and metric that the trace can tell. `step_time_ns` is the device
    window of the step. `cpu_time_ns` is the time that the rank's process ran, all its threads, by the metrics log.
    `flops` are those of `arithmetic.flops`, `sent_bytes` those of the step's collectives, saves left out. `allocations`
    and `allocated_bytes` count allocator events of the step that take memory, on the device, or on the host in a CPU
    run; `peak_allocated_bytes` and `peak_reserved_bytes` are the most held and reserved in the step by the same events,
    or, in a run without them, up to the step by the metrics log. `checkpoint_blocked_ns` has one row per step that
    something is saved after: the time that the training thread waited for all of it, by the checkpoint log;
    `checkpoint_cpu_ns` the part of it in which that thread ran, and `checkpoint_written_bytes` and `checkpoint_calls`
    what was written meanwhile and by how many calls.
    """
    parts = (
        _of_breakdown(trace),
        _of_arithmetic(trace),
        _of_collectives(trace),
        _of_allocations(trace),
        _of_checkpoints(trace),
        _of_metrics(trace),
    )
    return pl.concat([_conformed(part) for part in parts])


def samples_across(run: Run) -> pl.DataFrame:
    """Return per-step samples of what only several ranks together tell; ask by ``run.run_table(samples_across)``.

    Columns window, rank, step, metric, value. `transfer_ns` is the time of the step's collectives from the last
    arrival to the end, saves left out: what communication takes when nobody is waited for. It is told of the lowest
    rank, for it is the same on all. `exposed_transfer_ns` is the part of each rank's exposed communication in which no
    rank is waited for.
    """
    in_step = pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)
    told = run.run_table(collective_instances.instances).filter(in_step, pl.col("transfer_ns").is_not_null())
    sums = told.group_by("window", "step").agg(pl.col("transfer_ns").sum().alias("value")).sort("window", "step")
    lowest = pl.lit(min(run.ranks, default=0), pl.Int64).alias("rank")
    transfers = sums.select("window", lowest, "step", pl.lit("transfer_ns").alias("metric"), "value")
    exposed = run.run_table(exposed_communication.exposed_by_step).filter(pl.col("step").is_not_null())
    by_rank = exposed.group_by("window", "rank", "step", maintain_order=True).agg(pl.col("exposed_ns").max())
    exposures = by_rank.select(
        "window", "rank", "step", pl.lit("exposed_transfer_ns").alias("metric"), pl.col("exposed_ns").alias("value")
    )
    place = {"window": pl.Int64, "rank": pl.Int64}
    casts = [pl.col(name).cast(dtype) for name, dtype in {**place, **COLUMNS}.items()]
    return pl.concat([transfers.select(casts), exposures.select(casts)])


def _conformed(part: pl.DataFrame) -> pl.DataFrame:
    return part.select(pl.col(name).cast(dtype) for name, dtype in COLUMNS.items())


def _of_breakdown(trace: Trace) -> pl.DataFrame:
    # A rank that drives several devices is as slow as the slowest of them.
    steps = breakdown.by_step(trace).sort("duration_ns").group_by("step", maintain_order=True).last().sort("step")
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
    return wide.unpivot(index="step", variable_name="metric", value_name="value").drop_nulls("value")


def _of_arithmetic(trace: Trace) -> pl.DataFrame:
    sums = flops.flops(trace).group_by("step").agg(pl.col("flops").sum().alias("value")).sort("step")
    return sums.with_columns(pl.lit("flops").alias("metric"))


def _of_collectives(trace: Trace) -> pl.DataFrame:
    sent = trace.collectives.filter(pl.col("sent_bytes").is_not_null()).select("activity_id", "sent_bytes")
    work = trace.activities.filter(
        pl.col("step").is_not_null(), pl.col("phase").ne_missing(conventions.CHECKPOINT)
    ).select(pl.col("id").alias("activity_id"), "step")
    sums = sent.join(work, on="activity_id").group_by("step").agg(pl.col("sent_bytes").sum().alias("value"))
    return sums.sort("step").with_columns(pl.lit("sent_bytes").alias("metric"))


def _of_allocations(trace: Trace) -> pl.DataFrame:
    mine = allocations.of_training(trace) & pl.col("step").is_not_null()
    taken = trace.allocations.filter(mine, pl.col("delta_bytes") > 0)
    wide = taken.group_by("step").agg(
        pl.len().cast(pl.Float64).alias("allocations"),
        pl.col("delta_bytes").sum().cast(pl.Float64).alias("allocated_bytes"),
    )
    peaks = allocations.live(trace).filter(mine).group_by("step").agg(
        pl.col("live_bytes").max().cast(pl.Float64).alias("peak_allocated_bytes"),
        pl.col("reserved_bytes").max().cast(pl.Float64).alias("peak_reserved_bytes"),
    )  # fmt: skip
    both = wide.join(peaks, on="step", how="left").sort("step")
    return both.unpivot(index="step", variable_name="metric", value_name="value").drop_nulls("value")


def _of_checkpoints(trace: Trace) -> pl.DataFrame:
    blocked = trace.checkpoints.filter(pl.col("operation") == "save", pl.col("stage") == "total", pl.col("blocking"))
    # A log has a line for each file, and training waits for all of them.
    sums = blocked.group_by("step", saves.save_without_step("checkpoint"), maintain_order=True).agg(
        pl.when(pl.col(column).is_not_null().any()).then(pl.col(column).sum()).alias(metric)
        for metric, column in _OF_CHECKPOINTS.items()
    )
    wide = sums.select("step", *_OF_CHECKPOINTS)
    return wide.unpivot(index="step", variable_name="metric", value_name="value").drop_nulls("value")


def _of_metrics(trace: Trace) -> pl.DataFrame:
    name = pl.col("name")
    known = trace.metrics.filter(name.is_in(_LOGGED))
    # The allocator's counters are of the process so far; what the trace says of each step is worth more.
    peaks = trace.metrics.clear() if trace.allocations.height else trace.metrics.filter(name.is_in(list(_PEAKS)))
    both = pl.concat([known, peaks.with_columns(name.replace(_PEAKS))])
    return both.select("step", name.alias("metric"), "value")
