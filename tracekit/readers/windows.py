"""The device windows of steps: from the first work a step launched on the main lane to the next step's first."""

import polars as pl

from tracekit.readers.steps import Steps


def table(steps: Steps, activities: pl.DataFrame, lanes: pl.DataFrame) -> pl.DataFrame:
    """Return the steps table: one row per step and device; without steps, one window of all the work on each device."""
    placed = activities.join(lanes.select("lane", "device"), on="lane", maintain_order="left").with_columns(
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns")
    )
    if not len(steps.step):
        whole = placed.group_by("device").agg(pl.col("start_ns").min(), pl.col("end_ns").max())
        return whole.with_columns(pl.lit(None, pl.Int64).alias("step"))
    marks = pl.DataFrame({"step": steps.step, "host_start_ns": steps.start_ns, "host_end_ns": steps.end_ns})
    busiest = (
        placed.filter(pl.col("kind") == "compute")
        .group_by("device", "lane")
        .agg(pl.col("dur_ns").sum())
        .sort("dur_ns", "lane", descending=[True, False])
        .group_by("device", maintain_order=True)
        .first()
    )
    main = placed.join(busiest.select("lane"), on="lane", how="semi")
    starts = main.drop_nulls("step").group_by("step", "device").agg(pl.col("start_ns").min())
    last = placed.drop_nulls("step").group_by("step", "device").agg(pl.col("end_ns").max())
    return (
        marks.join(starts, on="step")
        .join(last, on=["step", "device"], nulls_equal=True)
        .sort("device", "start_ns")
        .with_columns(pl.coalesce(pl.col("start_ns").shift(-1).over("device"), "end_ns").alias("end_ns"))
        .sort("start_ns", "device")
    )
