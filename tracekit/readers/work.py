"""Activities: what ran on device streams, or, where no device activity was recorded, on host threads."""

import re

import polars as pl

from tracekit import intervals
from tracekit.readers import nesting

DEVICE_KINDS = {"kernel": "compute", "gpu_memcpy": "memcpy", "gpu_memset": "memset"}
_COLLECTIVE_KERNEL = r"(?i)^(nccl|rccl|mscclpp)|nccl(Dev)?Kernel"
_HOST_COLLECTIVE = r"^(gloo|mpi|ucc):"
_DISPATCHER_OP = r"^\w+::"
_NOT_COMPUTE = r"^(autograd|torch|c10d|_c10d_functional|gloo|mpi|ucc)::"
_CONTEXT = ("step", "phase", "unit", "span")


def streams(device: pl.DataFrame, first_lane: int) -> pl.DataFrame:
    """Return the device lanes, numbered from `first_lane`."""
    known = device.select(_device(), _stream()).unique().sort("device", "stream")
    return known.with_row_index("lane", offset=first_lane).with_columns(
        pl.col("lane").cast(pl.Int64),
        pl.col("device").cast(pl.String).alias("pid"),
        pl.col("stream").cast(pl.String).alias("tid"),
        pl.format("stream {}", "stream").alias("name"),
    )


def on_device(device: pl.DataFrame, lanes: pl.DataFrame, ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the activities of the streams, and what is known of the collectives among them, one row each."""
    launches = ops.filter(pl.col("kind") == "runtime").drop_nulls("correlation").unique("correlation", keep="first")
    owners = ops.filter(pl.col("kind") == "cpu_op").drop_nulls("external_id").unique("external_id", keep="first")
    lane_of = lanes.drop_nulls("device").select("device", "stream", "lane")
    is_collective = pl.col("name").str.contains(_COLLECTIVE_KERNEL) | pl.col("arg_collective").is_not_null()
    work = (
        device.filter(pl.col("start_ns").is_not_null(), pl.col("dur_ns") >= 0)
        .with_columns(_device(), _stream())
        .join(lane_of, on=["device", "stream"], nulls_equal=True)
        .sort("start_ns", maintain_order=True)
        .with_row_index("id")
        .join(
            launches.select(pl.col("id").alias("launch_id"), pl.col("correlation").alias("arg_correlation"), *_CONTEXT),
            on="arg_correlation",
            how="left",
            maintain_order="left",
        )
        .join(
            owners.select(pl.col("external_id").alias("arg_external_id"), *_CONTEXT),
            on="arg_external_id",
            how="left",
            maintain_order="left",
            suffix="_owner",
        )
        .with_columns(
            pl.when((pl.col("cat") == "kernel") & is_collective)
            .then(pl.lit("communication"))
            .otherwise(pl.col("cat").replace_strict(DEVICE_KINDS))
            .alias("kind"),
            *(pl.coalesce(name, name + "_owner").alias(name) for name in _CONTEXT),
        )
    )
    return work, work.filter(pl.col("kind") == "communication")


def on_host(ops: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return the activities of a CPU run, and what is known of the collectives among them, one row each.

    Communication: slices that run a collective. Compute: outermost dispatcher ops on the other threads, minus the c10d
    slices inside them. A collective takes step, phase, unit and span of the op that issued it: the i-th issued is the
    i-th run, by start.
    """
    running = ops.filter(pl.col("name").str.contains(_HOST_COLLECTIVE)).sort("start_ns")
    issued = ops.filter(
        pl.col("name").str.contains(r"^c10d::"), ~pl.col("name").str.contains("barrier|monitored")
    ).sort("start_ns")
    if len(issued) == len(running):
        context = issued.select("id", *_CONTEXT, "input_dims", "input_type", pl.col("name").alias("issuer")).rename(
            {"id": "launch_id"}
        )
    else:
        context = running.select(
            pl.lit(None, pl.Int64).alias("launch_id"),
            *_CONTEXT,
            "input_dims",
            "input_type",
            pl.col("name").alias("issuer"),
        )
    collectives = pl.concat(
        [running.select("lane", "name", "start_ns", "dur_ns"), context], how="horizontal"
    ).with_columns(pl.lit("communication").alias("kind"))
    parent = ops["parent_id"].to_numpy()
    communicates = ops["lane"].is_in(running["lane"].unique().to_list())
    dispatches = (
        (ops["kind"] == "cpu_op")
        & ops["name"].str.contains(_DISPATCHER_OP)
        & ~ops["name"].str.contains(_NOT_COMPUTE)
        & ~communicates
    )
    nearest_above = nesting.nearest(parent, dispatches.to_numpy())
    parent_series = pl.Series(parent)
    above = pl.Series(nearest_above)[parent_series.clip(0, None)] if len(ops) else parent_series
    outermost = dispatches & ((parent_series < 0) | (above < 0))
    compute = ops.filter(outermost).select(
        "lane",
        "name",
        "start_ns",
        "dur_ns",
        pl.col("id").alias("launch_id"),
        *_CONTEXT,
        pl.lit("compute").alias("kind"),
    )
    compute = _without_waits(compute, ops.filter(pl.col("name").str.contains(r"^(c10d|_c10d_functional)::")))
    work = pl.concat([compute, collectives], how="diagonal_relaxed").sort("start_ns").with_row_index("id")
    return work, work.filter(pl.col("kind") == "communication")


def roles(activities: pl.DataFrame) -> pl.DataFrame:
    """Return the role of each lane that did work: the kind with most busy time on it."""
    time = (
        activities.group_by("lane", "kind").agg(pl.col("dur_ns").sum()).sort("dur_ns", "kind", descending=[True, False])
    )
    return time.group_by("lane", maintain_order=True).first().select("lane", pl.col("kind").alias("role"))


def is_collective_name(name: str) -> bool:
    """Return whether a kernel or slice of this name is a collective."""
    return bool(re.search(_COLLECTIVE_KERNEL, name) or re.match(_HOST_COLLECTIVE, name))


def _without_waits(compute: pl.DataFrame, waits: pl.DataFrame) -> pl.DataFrame:
    """Return `compute` with the ops that contain a c10d slice cut into the pieces outside of it."""
    parts = []
    for (lane,), group in compute.group_by("lane", maintain_order=True):
        mine = waits.filter(pl.col("lane") == lane)
        blocked = intervals.union(intervals.from_columns(mine["start_ns"], mine["dur_ns"]))
        spans = intervals.from_columns(group["start_ns"], group["dur_ns"])
        cut = intervals.coverage(spans, blocked) > 0
        parts.append(group.filter(~pl.Series(cut)))
        for row, span in zip(group.filter(pl.Series(cut)).iter_rows(named=True), spans[cut], strict=True):
            pieces = intervals.subtract(span.reshape(1, 2), blocked)
            rows = [row | {"start_ns": int(a), "dur_ns": int(b - a)} for a, b in pieces]
            parts.append(pl.DataFrame(rows, schema=group.schema))
    return pl.concat(parts) if parts else compute


def _device() -> pl.Expr:
    return pl.coalesce(pl.col("arg_device"), pl.col("pid").cast(pl.Int64, strict=False), pl.lit(0)).alias("device")


def _stream() -> pl.Expr:
    return pl.coalesce(
        pl.col("arg_stream"), pl.col("tid").str.extract(r"(\d+)").cast(pl.Int64, strict=False), pl.lit(0)
    ).alias("stream")
