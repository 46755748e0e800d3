"""Communication of tensor parallelism: how long it is exposed, per step and per collective of a layer."""

import polars as pl

from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.compute import efficiency
from tracekit.analysis.parallelism import axis_communication, group_axes, rank_places
from tracekit.analysis.time import breakdown
from tracekit.conventions.strategies import TP
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact

COLUMNS = schema.columns(
    "window rank step calls passes exposed_ns transfer_ns waited_ns per_pass_ns start_ns duration_ns exposed_ratio"
)


@trace_fact
def links(trace: Trace) -> pl.DataFrame:
    """Return the bandwidth of the links inside a node that a device of this kind has, to all devices and to one.

    Columns link_bytes_per_s, peer_bytes_per_s; one row; null where the device or its links are not known, and
    peer_bytes_per_s where links go to a switch (`conventions.devices`).
    """
    device = efficiency.device_of(trace.header)
    rates = (device.link_bytes_per_s, device.peer_bytes_per_s) if device else (None, None)
    return pl.DataFrame([rates], schema=_LINKS, orient="row")


_LINKS = pl.Schema({"link_bytes_per_s": pl.Float64, "peer_bytes_per_s": pl.Float64})
FACTS: tuple[TraceFact, ...] = (
    *axis_communication.FACTS,
    exposed_communication.exposed_calls,
    exposed_communication.save_collectives,
    rank_places.rank_hosts,
    links,
)
_ACTIVITY = ["window", "rank", "activity_id"]
_LARGE_BYTES = 1 << 20
FULL_RATE_BYTES = 16 << 20
"""Collectives of so many bytes get near to the bandwidth of NVLink; latency dominates smaller ones."""
_CALLS_PER_PASS = 2
"""All-reduces of a transformer layer in one direction: after attention and after the feed-forward part."""
_HALVES = ("all_gather", "reduce_scatter")
"""With sequence parallelism, these two are what an all-reduce is without."""


@run_fact
def exposed_calls(run: Run) -> pl.DataFrame:
    """Return the collectives of axis tp in steps with their exposed time; use ``run.table``.

    Columns of `axis_communication.calls`, all_exposed_ns (no compute runs), exposed_ns (of that, with all ranks
    present: the transfer).
    """
    calls = run.table(axis_communication.calls).filter(pl.col("axis") == TP)
    exposed = run.table(exposed_communication.exposed_calls).select(*_ACTIVITY, all_exposed_ns="exposed_ns")
    moving = run.table(exposed_communication.exposed_transfers).select(*_ACTIVITY, "exposed_ns")
    joined = calls.join(exposed, on=_ACTIVITY, how="left").join(moving, on=_ACTIVITY, how="left")
    return joined.with_columns(pl.col("all_exposed_ns", "exposed_ns").fill_null(0)).sort("window", "rank", "start_ns")


@run_fact
def exposed_by_step(run: Run) -> pl.DataFrame:
    """Return the exposed communication of tensor parallelism per rank and step; use ``run.table``.

    Columns COLUMNS: passes (of a micro-batch through a layer: half of the all-reduces in forward, or of all if phases
    are not known, that are large or of unknown size; an all-gather and a reduce-scatter count as one), exposed_ns =
    transfer_ns + waited_ns, per_pass_ns (exposed_ns over passes), exposed_ratio (of the step's duration). Empty without
    tensor parallelism.
    """
    if not axis_communication.has_calls(run, TP):
        return schema.empty(COLUMNS)
    calls = run.table(exposed_calls)
    is_large = pl.col("bytes").is_null() | (pl.col("bytes") >= _LARGE_BYTES)
    reduces = pl.when(pl.col("op").is_in(_HALVES)).then(0.5).otherwise(1.0)
    in_forward = reduces.filter(is_large & (pl.col("phase") == "forward")).sum()
    of_passes = pl.when(in_forward > 0).then(in_forward).otherwise(reduces.filter(is_large).sum())
    passes = (of_passes / _CALLS_PER_PASS).floor().cast(pl.Int64)
    sums = calls.group_by("window", "rank", "step").agg(
        pl.len().alias("calls"),
        passes.alias("passes"),
        pl.col("all_exposed_ns").sum(),
        pl.col("exposed_ns").sum().alias("transfer_ns"),
        pl.col("start_ns").min(),
    )
    steps = run.table(breakdown.by_step).group_by("window", "rank", "step").agg(pl.col("duration_ns").max())
    joined = sums.join(steps, on=["window", "rank", "step"], nulls_equal=True).filter(pl.col("duration_ns") > 0)
    table = joined.rename({"all_exposed_ns": "exposed_ns"}).with_columns(
        (pl.col("exposed_ns") - pl.col("transfer_ns")).alias("waited_ns"),
        (pl.col("exposed_ns") // pl.col("passes").clip(1)).alias("per_pass_ns"),
        (pl.col("exposed_ns") / pl.col("duration_ns")).alias("exposed_ratio"),
    )
    return schema.conform(table, COLUMNS).sort("window", "rank", "step")


def named_groups(run: Run) -> pl.DataFrame:
    """Return the tensor-parallel groups that collectives name. Columns as `group_axes`."""
    return run.table(group_axes.group_axes).filter(pl.col("axis") == TP)


def groups_across_nodes(run: Run) -> list[list[int]]:
    """Return the tensor-parallel groups whose ranks are on several nodes; [] where nodes are not known.

    Where collectives name no group (gloo), the groups are those that run.json or descriptions list.
    """
    node_of = rank_places.node_of_rank(run)
    groups = named_groups(run)["ranks"].to_list() or group_axes.listed_groups(run, TP)
    return [ranks for ranks in groups if len({node_of.get(rank) for rank in ranks} - {None}) > 1]


def link_bandwidth(run: Run, size: int) -> float | None:
    """Bandwidth of a device's links in one direction inside a node, to a group of `size` ranks, in bytes/s.

    None where the kind of device or its links are not known.
    """
    rates = run.table(links).select(_LINKS.names()).unique()
    if rates.height != 1:
        return None
    link: float | None
    peer: float | None
    link, peer = rates.row(0)
    return link if peer is None or link is None else min(link, max(size - 1, 1) * peer)


def bus_bandwidth(run: Run, groups: list[list[int]], *, inside: bool, least_bytes: int = _LARGE_BYTES) -> float | None:
    """Return the median bus bandwidth of large collectives of groups, or of all others (inside), in bytes per s."""
    group_ranks = {tuple(sorted(ranks)) for ranks in groups}
    instances = run.table(collective_instances.instances).drop_nulls("bus_bytes_per_s")
    node_of = rank_places.node_of_rank(run)
    large = instances.filter(pl.col("bytes") >= least_bytes).select("ranks", "bus_bytes_per_s")
    rates = [
        rate
        for ranks, rate in large.iter_rows()
        if (len({node_of.get(rank) for rank in ranks}) == 1 if inside else tuple(ranks) in group_ranks)
    ]
    return float(pl.Series(rates).median() or 0) if rates else None  # type: ignore[arg-type]
