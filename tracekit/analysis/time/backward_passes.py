"""The backward passes of each step, one per micro-batch, and the gradient reductions of each pass."""

import polars as pl

from tracekit import conventions
from tracekit.analysis.time import breakdown, launches
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.trace import Trace

START_COLUMNS = {"device": pl.Int64, "step": pl.Int64, "backward": pl.Int64, "launched_ns": pl.Int64}
REDUCTION_COLUMNS = schema.columns(
    "device step backward backward_count lane op group dtype unit bytes activity_id start_ns dur_ns exposed_ns"
)
REDUCING = ("all_reduce", "reduce_scatter")
_KEY = ("op", "group", "bytes")
_MIN_FORWARD_RATIO = 0.05
"""A forward pass takes more than this share of the step's compute; less belongs to a backward pass."""


@memoize
def backward_starts(trace: Trace) -> pl.DataFrame:
    """Return when the first work of each backward pass was launched.

    Columns device, step, backward (from 0 in each step), launched_ns; one row per pass. A pass ends where other compute
    of more than 5% of the step's compute was launched: the next forward pass. Steps without known phases have no rows.
    """
    parts = [schema.empty(START_COLUMNS)]
    backward = pl.col("phase").eq_missing(conventions.BACKWARD)
    for device in breakdown.devices(trace):
        compute = launches.work(trace, device).filter((pl.col("kind") == "compute") & trace.in_steps)
        stretches = (
            compute.with_columns(pl.coalesce("launched_ns", "start_ns").alias("launched_ns"), backward.alias("is_back"))
            .sort("step", "launched_ns", "id")
            .group_by("step", pl.struct("step", "is_back").rle_id().alias("stretch"), maintain_order=True)
            .agg(pl.col("is_back").first(), pl.col("launched_ns").first(), pl.col("dur_ns").sum())
        )
        long = pl.col("is_back") | (pl.col("dur_ns") > _MIN_FORWARD_RATIO * pl.col("dur_ns").sum().over("step"))
        first = pl.col("is_back") & ~pl.col("is_back").shift(1, fill_value=False).over("step")
        found = stretches.filter(long).filter(first)
        number = pl.int_range(pl.len()).over("step").cast(pl.Int64).alias("backward")
        parts.append(found.select(pl.lit(device, pl.Int64).alias("device"), "step", number, "launched_ns"))
    return pl.concat(parts)


@memoize
def gradient_reductions(trace: Trace) -> pl.DataFrame:
    """Return the collectives that reduce gradients, each with its backward pass.

    Columns REDUCTION_COLUMNS (backward_count: passes of the step); one row per collective. These are the all-reduces
    and reduce-scatters launched in backward passes. A collective with the same op, group and size outside backward
    reduces activations (tensor parallelism), so that kind is left out.
    """
    starts = backward_starts(trace)
    if starts.is_empty():
        return schema.empty(REDUCTION_COLUMNS)
    calls = _reducing(trace)
    backward = pl.col("phase").eq_missing(conventions.BACKWARD)
    elsewhere = calls.filter(~backward & pl.col("phase").ne_missing(conventions.CHECKPOINT)).select(_KEY).unique()
    gradients = calls.filter(backward).join(elsewhere, on=_KEY, how="anti", nulls_equal=True).sort("launched_ns")
    counts = starts.group_by("device", "step").agg(pl.len().cast(pl.Int64).alias("backward_count"))
    in_pass = (
        with_passes(gradients, trace, "launched_ns")
        .drop_nulls("backward")
        .join(counts, on=["device", "step"], how="left", nulls_equal=True)
    )
    return breakdown.with_exposure(trace, in_pass.sort("start_ns")).pipe(schema.select, REDUCTION_COLUMNS)


def with_passes(rows: pl.DataFrame, trace: Trace, at_ns: str) -> pl.DataFrame:
    """Return rows (columns device, step and the time `at_ns`) by that time, with the backward pass begun last."""
    keyed = pl.col("device", "step").fill_null(-1).name.prefix("_")  # nulls would match nothing
    starts = backward_starts(trace).with_columns(keyed).drop("device", "step").rename({"launched_ns": at_ns})
    left = rows.with_columns(keyed).sort(at_ns)
    return left.join_asof(starts.sort(at_ns), on=at_ns, by=["_device", "_step"], check_sortedness=False)


def _reducing(trace: Trace) -> pl.DataFrame:
    """Return the all-reduces and reduce-scatters of all devices, with their messages."""
    calls = pl.concat([launches.collectives(trace, device) for device in breakdown.devices(trace)])
    calls = calls.select(
        "id", "device", "lane", "step", "phase", "unit", "op", "group", "dtype", "start_ns", "dur_ns", "launched_ns",
        bytes="message_bytes",
    ).filter(pl.col("op").is_in(REDUCING))  # fmt: skip
    return calls.filter(trace.in_steps).with_columns(
        pl.coalesce("launched_ns", "start_ns").alias("launched_ns"), pl.col("id").alias("activity_id")
    )
