"""Predictions for more GPUs, or fewer: the recorded ranks' work, with collectives of data parallelism over other sizes.

Each rank does what it did (the batch of a rank stays, so the job's batch grows); tensor, context, expert and pipeline
parallelism stay as they are.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import collective_instances, latency
from tracekit.analysis.compute import contention
from tracekit.analysis.parallelism import group_axes, rank_places
from tracekit.conventions.strategies import (
    ALL_GATHER,
    ALL_REDUCE,
    BROADCAST,
    CP,
    DP,
    DP_REPLICATE,
    DP_SHARD,
    PP,
    REDUCE_SCATTER,
    RING_PASSES,
    TP,
)
from tracekit.errors import InputError
from tracekit.model import units
from tracekit.model.manifest import Manifest
from tracekit.model.run import Run
from tracekit.replay.graph import savings, strategies
from tracekit.replay.graph.causes import collectives
from tracekit.replay.graph.dependency_graph import COLLECTIVE, Graph, InsufficientDataError
from tracekit.replay.graph.group_spans import Span, recorded_span, span_at_stride, stride
from tracekit.replay.graph.strategies import Prediction
from tracekit.sync import collective_matching

MOST_GPUS = 1 << 20
"""As many ranks as a manifest or a dump may state (docs/robustness.md)."""
Floats: TypeAlias = npt.NDArray[np.float64] | float
_OF_DATA = (DP, DP_REPLICATE, DP_SHARD, "dp_cp", "dp_expert", "batch", group_axes.WORLD)
"""Axes whose groups grow with the job."""
_HOP_NS, _NETWORK_HOP_NS = 5_000.0, 10_000.0
"""Latency of a hop where neither the run nor an option shows it: inside a node, and over InfiniBand or Ethernet."""
_ASSUMED_HOPS = 0.5, 2.0
"""Range of an assumed latency, as factors: 5 to 20 µs between nodes."""
_RATE_DOUBT, _HOP_DOUBT = 0.1, 0.3
"""Shares by which bandwidth and latency of larger rings may differ from those that are known: assumed, more for
latency, which grows with switches on the way. With the replay's error and half or double the waits they bound the
prediction.
"""
_MOST_SENSITIVITY = _HOP_DOUBT / _RATE_DOUBT
"""Sensitivity of a fitted latency (`latency.by_group`) from which times that are off by the doubt of bandwidth make it
wrong by more than its own doubt. It was 1.0 for fits that were right within 5%, and 4 and more for those that were
wrong by any factor: fits to large messages, whose latency is a small share of their time."""
_LEAST_DOUBT = 0.01
_NS = 1e9
_RINGS = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE, BROADCAST)


@dataclass(frozen=True)
class Network:
    """What connects nodes, where the recording does not show it.

    `bytes_per_s` is the bus bandwidth of a ring across nodes, as nccl-tests prints it, `hop_ns` the latency of a hop.
    `node_gpus` are the GPUs of a node.
    """

    node_gpus: int = 8
    bytes_per_s: float | None = None
    hop_ns: float | None = None
    has_trees: bool = False
    """Whether all-reduces are trees (2 log₂ n hops), as NCCL's are over many nodes, not rings."""


def predict(run: Run, gpus: int, network: Network | None = None) -> Prediction:
    """Return the predicted step time of the same job on `gpus` GPUs.

    Collectives of data-parallel groups take the time of a ring of the new size: latency and bandwidth are those that
    the run's own collectives of several sizes show. Of a group that was inside a node and no longer is, they are those
    of `network`. The optimizer's work on shards grows or shrinks with these. A rank waits for the latest of more ranks:
    how late one is, is drawn from the recorded arrivals, less what is typical of each rank.

    Raises InputError where the job cannot have so many GPUs, the axes of its groups are unknown, or the bandwidth
    between nodes is needed and not given.
    """
    network = network or Network()
    recorded = _world_size(run)
    replica = _replica_gpus(run, recorded)
    if gpus < 1 or gpus % replica:
        raise InputError(f"--gpus is {gpus}; it must be a multiple of {replica}, the GPUs of a replica of the model")
    changed = _changed_groups(run, recorded, recorded // replica, gpus, network)
    waits_ns = _longer_waits(run, changed.filter("grows"), gpus / recorded)
    assumed = _assumptions(run, changed.filter("grows"), network)
    units_of_job = "GPUs" if run.table(contention.device_count)["devices"].sum() else "ranks"

    def predict_with(scales: _Scales) -> Prediction:
        def change(graph: Graph) -> Graph:
            return _on_more_gpus(graph, changed, waits_ns, scales, has_trees=network.has_trees)

        return strategies.predict_change(run, f"{gpus} GPUs", change, assumed, slow_preparation=True)

    hops = (1 - _HOP_DOUBT, 1 + _HOP_DOUBT) if changed["knows_hop"].all() else _ASSUMED_HOPS
    fast, likely, slow = (
        predict_with(_Scales(1 + _RATE_DOUBT, hops[0], 0.5)),
        predict_with(_Scales()),
        predict_with(_Scales(1 - _RATE_DOUBT, hops[1], 2.0)),
    )
    doubt = max(_LEAST_DOUBT, abs(savings.worst_error_ratio(savings.replayed_steps(run))))
    return replace(
        likely,
        name=f"{gpus} {units_of_job} instead of {recorded}",
        range_ns=(round(fast.predicted_ns * (1 - doubt)), round(slow.predicted_ns * (1 + doubt))),
        throughput_ratio=gpus / recorded * likely.step_ns / max(1, likely.predicted_ns),
    )


def ring_ns(
    op: str, size_bytes: Floats, ranks: int, hop_ns: Floats, bytes_per_ns: Floats, *, has_trees: bool = False
) -> Floats:
    """Time in ns of collectives of `ranks` over messages of these sizes in bytes; 0 for one rank.

    A send and its receive take one hop and all bytes.

    >>> ring_ns("all_gather", np.array([8e6]), 8, 1000.0, 10.0).tolist()
    [707000.0]
    >>> ring_ns("all_reduce", np.array([8e6]), 8, 1000.0, 10.0, has_trees=True).tolist()
    [1406000.0]
    """
    if op == collective_matching.PAIRED:
        return hop_ns + size_bytes / bytes_per_ns
    passes = RING_PASSES[op]
    hops = passes * (ranks - 1)
    if has_trees and op == ALL_REDUCE:
        hops = passes * math.ceil(math.log2(ranks))
    return hops * hop_ns + passes * size_bytes * (ranks - 1) / ranks / bytes_per_ns


def _world_size(run: Run) -> int:
    sizes = run.table(collective_matching.run_calls)["group_size"].drop_nulls().to_list()
    return Manifest.of(run.manifest).world_size or max([*sizes, len(run.ranks)], default=1)


def _replica_gpus(run: Run, recorded: int) -> int:
    """GPUs of a replica of the model: the product of the axes that divide the work on one batch."""
    sizes = {axis: len(groups[0]) for axis, groups in rank_places.groups_of(run.manifest).items() if groups}
    for axis, ranks in run.table(group_axes.group_axes).select("axis", "ranks").drop_nulls().iter_rows():
        sizes.setdefault(axis, len(ranks))
    replica = math.prod(max(1, size) for axis, size in sizes.items() if axis in (PP, TP, CP))
    return replica if recorded % replica == 0 else recorded


def _changed_groups(run: Run, recorded: int, data_ranks: int, gpus: int, network: Network) -> pl.DataFrame:
    """Groups that grow or whose links become those between nodes: columns of _GROUPS.

    Raises InputError where none grows, or where the axis of a group is unknown.
    """
    groups = _sized_groups(run, recorded, data_ranks)
    growing = [group for group in groups if group.grows]
    if not growing:
        raise InputError(
            f"--gpus: {run.path} has no collective of data parallelism, so nothing shows what those of {gpus} GPUs cost"
        )
    nodes = _Nodes.of(run, network)
    # Ranks of an axis outside of data parallelism, such as pipeline stages, get as many times apart as data parallelism
    # grows.
    data_stride = min(stride(group.ranks) for group in growing)
    rows = []
    for group in groups:
        new_size = max(1, group.size * gpus // recorded) if group.grows else group.size
        is_outside = not group.grows and stride(group.ranks) > data_stride
        distance = stride(group.ranks) * (max(1, gpus // recorded) if is_outside else 1)
        was_inside = recorded_span([group.ranks], nodes.node_of).is_inside
        span = span_at_stride(new_size, distance, nodes.size)
        leaves_node = was_inside and not span.is_inside
        if not leaves_node and not group.grows:
            continue
        new_link = _between_nodes(gpus, span, nodes.size, network) if leaves_node else (None, None)
        assumed_ns = _HOP_NS if was_inside else (network.hop_ns or _NETWORK_HOP_NS)
        is_fitted = group.hop_ns is not None
        link = group.hop_ns if group.hop_ns is not None else assumed_ns, group.bytes_per_ns
        is_known = (
            network.hop_ns is not None if leaves_node else is_fitted or (not was_inside and network.hop_ns is not None)
        )
        rows.append((group.name, group.members, group.size, new_size, *link, *new_link, is_known, group.grows))
    return pl.DataFrame(rows, schema=_GROUPS, orient="row")


@dataclass(frozen=True)
class _Group:
    """A process group, the latency and bandwidth that its collectives show, and whether it grows with the job."""

    name: str | None
    members: str | None
    ranks: Sequence[int]
    size: int
    hop_ns: float | None
    bytes_per_ns: float | None
    grows: bool


def _sized_groups(run: Run, recorded: int, data_ranks: int) -> list[_Group]:
    """Groups of two ranks and more in which collectives ran. Raises InputError where an axis is unknown."""
    calls = run.table(collective_matching.run_calls).select("group", "members", "group_size").unique()
    is_separate = pl.col("hop_sensitivity") <= _MOST_SENSITIVITY
    fitted = (pl.when(is_separate).then(name).fill_nan(None).alias(name) for name in ("hop_ns", "bytes_per_ns"))
    lines = run.table(latency.by_group).select("group", "group_size", *fitted)
    axes = run.table(group_axes.group_axes).join(calls, on=["group", "members"], how="left", nulls_equal=True)
    axes = axes.join(lines, on=["group", "group_size"], how="left", nulls_equal=True)
    is_hsdp = {DP_REPLICATE, DP_SHARD} <= set(axes["axis"].drop_nulls())
    groups = []
    for row in axes.iter_rows(named=True):
        is_pair = ">" in (row["members"] or "")
        # gloo names no group: its ranks are those with a trace, of which there may be one.
        stated = row["group_size"] or (len(row["ranks"] or ()) if row["group"] is not None else data_ranks)
        size = 2 if is_pair else min(stated, recorded)
        if size < 2:
            continue
        if row["axis"] is None and size < recorded:
            raise InputError(
                f"--gpus: the axis of group {row['group'] or row['members']} of {run.path} is unknown, and so "
                "whether it would grow; state the mesh in run.json (docs/parallelism.md)"
            )
        grows = row["axis"] in (*_OF_DATA, None) and not (is_hsdp and row["axis"] == DP_SHARD)
        # Of a group of which only some ranks have a trace, the others are taken for those that follow.
        known = sorted(row["ranks"] or ())
        ranks = known if len(known) == size else range(min(known, default=0), min(known, default=0) + size)
        groups.append(
            _Group(row["group"], row["members"], ranks, size, row["hop_ns"], row["bytes_per_ns"], grows and not is_pair)
        )
    return groups


_GROUPS = {
    "group": pl.String, "members": pl.String, "size": pl.Int64, "new_size": pl.Int64, "hop_ns": pl.Float64,
    "bytes_per_ns": pl.Float64, "new_hop_ns": pl.Float64, "new_bytes_per_ns": pl.Float64, "knows_hop": pl.Boolean,
    "grows": pl.Boolean,
}  # fmt: skip
"""bytes_per_ns is null where only a collective's own duration shows it, new_hop_ns and new_bytes_per_ns where the links
stay. knows_hop: whether the latency in the new job is fitted or given, not assumed."""


@dataclass(frozen=True)
class _Nodes:
    """Node of each recorded rank, and the ranks of a node in both jobs."""

    node_of: Mapping[int, object]
    size: int

    @classmethod
    def of(cls, run: Run, network: Network) -> "_Nodes":
        """Nodes that the recording shows; else consecutive ranks share one of `network.node_gpus`."""
        recorded = rank_places.node_of_rank(run)
        size = max(Counter(recorded.values()).values()) if recorded else network.node_gpus
        node_of: dict[int, object] = {rank: rank // size for rank in range(_world_size(run))}
        return cls(node_of | recorded, size)


def _between_nodes(gpus: int, span: Span, node_gpus: int, network: Network) -> tuple[float, float]:
    """Latency of a hop, and bandwidth, of groups across nodes. Raises InputError where the bandwidth is not given.

    A ring of all GPUs uses all of a node's network, one of fewer the share of its ranks there: the rings of the others
    run at the same time.
    """
    if network.bytes_per_s is None:
        raise InputError(
            f"--gpus {gpus}: the recording shows only links inside a node of {node_gpus} GPUs of a group that then "
            "spans nodes; give the bus bandwidth of a ring across nodes (all_gather_perf of nccl-tests) by "
            "--network-bandwidth, such as 45e9, or a --topology"
        )
    return network.hop_ns or _NETWORK_HOP_NS, network.bytes_per_s / _NS * span.ranks_per_node / node_gpus


def _longer_waits(run: Run, growing: pl.DataFrame, growth: float) -> dict[str, float]:
    """By op of growing groups, how much longer ranks wait for the latest of `growth` times as many ranks, in ns.

    Lateness is drawn from the recorded one, less what is usual for a rank: the mean of the largest of n draws. Beyond
    as many ranks as there are recorded arrivals it is that of the latest of these.
    """
    waits = run.table(collective_instances.waits).join(growing, on="group", how="semi", nulls_equal=True)
    usual_ns = pl.col("wait_ns").median().over("op", "rank")
    late = waits.with_columns((usual_ns - pl.col("wait_ns")).alias("late_ns"))
    longer_ns = {}
    for (op,), rows in late.group_by("op"):
        late_ns = np.sort(rows["late_ns"].to_numpy())
        ranks = int(rows["group_size"].drop_nulls().max() or rows["rank"].n_unique())  # type: ignore[arg-type]
        if rows["rank"].n_unique() > 1 and growth > 1:
            longer_ns[str(op)] = max(0.0, _mean_of_latest(late_ns, ranks * growth) - _mean_of_latest(late_ns, ranks))
    return longer_ns


def _mean_of_latest(sorted_ns: npt.NDArray[np.float64], ranks: float) -> float:
    """Mean of the largest of so many independent draws.

    >>> _mean_of_latest(np.array([0.0, 8.0]), 2)
    6.0
    """
    up_to = np.arange(len(sorted_ns) + 1) / len(sorted_ns)
    return float((sorted_ns * np.diff(up_to**ranks)).sum())


def _on_more_gpus(
    graph: Graph, changed: pl.DataFrame, waits_ns: Mapping[str, float], scales: "_Scales", *, has_trees: bool
) -> Graph:
    """Return the graph with transfers, waits and optimizer of the larger job."""
    calls = collectives.transfers(graph).join(changed, on=["group", "members"], how="inner", nulls_equal=True)
    calls = calls.filter(pl.col("op").is_in((*_RINGS, collective_matching.PAIRED)), pl.col("bytes") > 0)
    calls = _with_split_ratio(calls)
    growing = calls.filter("grows")
    if growing.is_empty():
        raise InsufficientDataError("the sizes of its collectives of data parallelism are not recorded")
    own_ns = graph.own_ns.astype(np.float64)
    for (op, size, new_size), alike in calls.group_by("op", "size", "new_size"):
        done, size_bytes = alike["done"].to_numpy(), alike["bytes"].to_numpy().astype(np.float64)
        took_ns = own_ns[done]
        hops, moved_bytes = _ring_load(op, size_bytes, size)
        # What is not latency moves bytes: at least half of the time.
        hop_ns = np.minimum(alike["hop_ns"].to_numpy(), took_ns / hops / 2)
        measured_rate = moved_bytes / np.maximum(took_ns - hops * hop_ns, 1.0)
        rate = _known(alike, "bytes_per_ns", measured_rate)
        new_hop_ns, new_rate = _known(alike, "new_hop_ns", hop_ns), _known(alike, "new_bytes_per_ns", rate)
        before_ns = ring_ns(op, size_bytes, size, hop_ns, rate)
        new_links = new_hop_ns * scales.hop, new_rate * scales.rate
        split = alike["split_ratio"].to_numpy()
        after_ns = split * ring_ns(op, size_bytes / split, new_size, *new_links, has_trees=has_trees)
        # What a transfer took more or less than its model, by jitter, stays; no ring is twice as fast as its model.
        own_ns[done] = np.maximum(took_ns - before_ns + after_ns, after_ns / 2)
    grown = replace(graph, own_ns=np.round(own_ns).astype(np.int64))
    return _with_waits(_with_optimizer(grown, growing), growing, waits_ns, scales.wait)


def _with_split_ratio(calls: pl.DataFrame) -> pl.DataFrame:
    """Calls with the column split_ratio: how many collectives of the larger job a recorded one becomes.

    If as many broadcasts as the group has ranks, or a multiple of it, run in a step, each rank hands on its part of the
    weights (ZeRO-1): more ranks hand on smaller parts.
    """
    count = pl.len().over("group", "members", "step", "op")
    hands_on_parts = (pl.col("op") == BROADCAST) & (count % pl.col("size") == 0)
    growth = pl.col("new_size") / pl.col("size")
    return calls.with_columns(pl.when(hands_on_parts).then(growth).otherwise(1.0).alias("split_ratio"))


def _ring_load(op: str, size_bytes: npt.NDArray[np.float64], ranks: int) -> tuple[int, npt.NDArray[np.float64]]:
    """Hops of collectives, and the bytes that each rank sends in them."""
    if op == collective_matching.PAIRED:
        return 1, size_bytes
    hops = RING_PASSES[op] * (ranks - 1)
    return hops, hops * size_bytes / ranks


def _known(calls: pl.DataFrame, column: str, otherwise: Floats) -> npt.NDArray[np.float64]:
    """Values of a column; where they are null, others."""
    values = calls[column].to_numpy().astype(np.float64)
    return np.where(np.isnan(values), otherwise, values)


@dataclass(frozen=True)
class _Scales:
    """Factors of bandwidth, of latency, and of the longer waits."""

    rate: float = 1.0
    hop: float = 1.0
    wait: float = 1.0


def _with_optimizer(graph: Graph, calls: pl.DataFrame) -> Graph:
    """Return the graph with an optimizer that steps other shards, if a growing group shards what it steps."""
    by_group = calls.group_by("group", "members", "size", "new_size").agg(
        pl.col("op").unique(), (pl.col("split_ratio") != 1).any().alias("hands_on_parts")
    )
    is_sharded = pl.col("op").list.contains(ALL_GATHER) & pl.col("op").list.contains(REDUCE_SCATTER)
    shards = by_group.filter(is_sharded | pl.col("hands_on_parts"))
    if shards.is_empty():
        return graph
    largest = shards.sort("size").row(-1, named=True)
    steps = np.flatnonzero(graph.matches("phase", "optimizer") & graph.matches("kind", "compute"))
    return graph.with_durations(steps, np.round(graph.own_ns[steps] * (largest["size"] / largest["new_size"])))


def _with_waits(graph: Graph, calls: pl.DataFrame, waits_ns: Mapping[str, float], scale: float) -> Graph:
    """Return the graph in which collectives start later by what the latest of more ranks is later."""
    longer_ns = np.zeros(len(graph.own_ns))
    longer_ns[calls["done"].to_numpy()] = [scale * waits_ns.get(op, 0.0) for op in calls["op"]]
    waits = graph.edges
    joins = waits.kind == COLLECTIVE
    lag_ns = waits.lag_ns + np.where(joins, np.round(longer_ns[waits.waiting]), 0).astype(np.int64)
    return replace(graph, edges=replace(waits, lag_ns=lag_ns))


def _assumptions(run: Run, growing: pl.DataFrame, network: Network) -> tuple[str, ...]:
    largest = growing.sort("size").row(-1, named=True)
    links = f"{units.duration(largest['hop_ns'])} a hop, and bandwidth as the recorded collectives show it"
    if largest["new_bytes_per_ns"] is not None:
        rate, hop = units.rate(largest["new_bytes_per_ns"] * _NS), units.duration(largest["new_hop_ns"])
        links = f"rings across nodes at {rate}, {hop} a hop"
    calls = run.table(collective_matching.run_calls).join(
        growing, on=["group", "members"], how="semi", nulls_equal=True
    )
    other_ops = sorted(set(calls["op"].drop_nulls()) - set(_RINGS))
    return (
        "the same work of each rank: a job with more GPUs has a larger batch",
        f"data parallelism of {largest['new_size']} instead of {largest['size']} ranks, {links}",
        "all-reduces by trees" if network.has_trees else "rings, also for all-reduces (--trees: NCCL's across nodes)",
        "ranks as late as the recorded ones at times are; no rarer stragglers, and no failures",
        "links of other axes, saves of checkpoints and the loading of data as recorded",
        *(f"{op} as recorded, although its group grows" for op in other_ops),
    )
