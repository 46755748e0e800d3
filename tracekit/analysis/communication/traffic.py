"""Messages of a run: bandwidth of each collective, and totals by kind of message."""

import polars as pl

from tracekit.analysis.communication import collective_instances, group_bandwidth
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact
from tracekit.sync import collective_matching

SPEED_COLUMNS = schema.columns(
    "window step op group axis group_size bytes transfer_ns algorithm_bytes_per_s bus_bytes_per_s is_whole"
)
KIND_COLUMNS = schema.columns(
    "op group axis group_size dtype bytes ranks calls total_ns p50_ns waited_ns exposed_ns algorithm_bytes_per_s "
    "bus_bytes_per_s is_whole"
)
FACTS: tuple[TraceFact, ...] = group_bandwidth.FACTS
"""The facts that the run tables of this module read."""
_PLACE = ["window", "rank", "activity_id"]


@run_fact
def speeds(run: Run) -> pl.DataFrame:
    """Return the bandwidth of each message of known size; use ``run.run_table``.

    Columns SPEED_COLUMNS; one row per collective. Where every rank of the group has a trace (is_whole), as
    `collective_instances.instances`: size over the time from the last arrival to the end; transfers not longer than the
    clocks' residual are left out. Where ranks are missing, the time on the rank that waited least gives a lower bound.
    bus_bytes_per_s is nccl-tests' bus bandwidth.
    """
    instances = run.table(collective_instances.instances)
    group = ["window", "group"]
    axes = run.table(group_bandwidth.group_axes).select(*group, "axis").unique(group, keep="first")
    complete = instances.drop_nulls("bus_bytes_per_s").join(axes, on=group, how="left", maintain_order="left")
    transfers = run.table(group_bandwidth.transfers).filter(pl.col("transfer_ns") > 0)
    matched_groups = instances.select(group).unique()
    lone = transfers.join(matched_groups, on=group, how="anti", nulls_equal=True)
    partly = transfers.join(matched_groups, on=group, how="semi", nulls_equal=True)
    partly = partly.filter(pl.col("ranks").list.len() < pl.col("group_size"))
    rate = pl.col("bytes") * collective_instances.SECOND_NS / pl.col("transfer_ns")
    lower_bounds = (
        pl.concat([lone, partly])
        .with_columns(rate.alias("algorithm_bytes_per_s"))
        .with_columns((pl.col("algorithm_bytes_per_s") * collective_instances.bus_factor()).alias("bus_bytes_per_s"))
        .drop_nulls("bus_bytes_per_s")
    )
    return pl.concat(
        part.with_columns(is_whole=pl.lit(is_whole)).pipe(schema.select, SPEED_COLUMNS)
        for part, is_whole in ((complete, True), (lower_bounds, False))
    )


@run_fact
def by_kind(run: Run) -> pl.DataFrame:
    """Return totals of collectives by op, group, element type and size, most time first; use ``run.run_table``.

    Columns KIND_COLUMNS: ranks (with a trace of it), calls and total_ns (of all ranks), p50_ns (of one call), waited_ns
    (until the last known arrival), exposed_ns (concurrent collectives each count it), and the medians of `speeds`.
    """
    waits = run.table(collective_instances.waits).select(*_PLACE, "wait_ns").unique(_PLACE)
    axes = run.table(group_bandwidth.group_axes).select("group", "axis").unique("group", keep="first")
    key = ["op", "group", "group_size", "dtype", "bytes"]
    dur_ns = pl.col("end_ns") - pl.col("start_ns")
    sums = (
        run.table(collective_matching.calls)
        .join(waits, on=_PLACE, how="left", maintain_order="left")
        .join(run.table(group_bandwidth.exposed_times), on=_PLACE, how="left", maintain_order="left")
        .group_by(key, maintain_order=True)
        .agg(
            pl.col("rank").n_unique().alias("ranks"),
            pl.len().alias("calls"),
            dur_ns.sum().alias("total_ns"),
            dur_ns.median().round().alias("p50_ns"),
            pl.col("wait_ns").sum().alias("waited_ns"),
            pl.col("exposed_ns").sum(),
        )
    )
    kind = ["op", "group", "group_size", "bytes"]
    rates = run.table(speeds).group_by(kind).agg(
        pl.col("algorithm_bytes_per_s", "bus_bytes_per_s").median(), pl.col("is_whole").all()
    )  # fmt: skip
    return (
        sums.join(axes, on="group", how="left", maintain_order="left")
        .join(rates, on=kind, how="left", nulls_equal=True, maintain_order="left")
        .pipe(schema.select, KIND_COLUMNS)
        .sort("total_ns", descending=True, maintain_order=True)
    )
