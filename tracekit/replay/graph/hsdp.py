"""HSDP: sharding within a node and replication across nodes; shorter rings, and an extra all-reduce of shards."""

from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.analysis.communication.latency import RingModel
from tracekit.conventions.strategies import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ring_hops
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.dependency_graph import Edges, Graph, InsufficientDataError, edges, sort_topologically

_EVENT, _SYNC = "event", "sync"
_NS = 1e9


@dataclass(frozen=True)
class NodeSpec:
    """Node hardware that a recording of rings across nodes does not show: GPUs per node, and ring bandwidth.

    `bytes_per_s` is bus bandwidth as nccl-tests prints it.
    """

    gpus: int
    bytes_per_s: float


def to_hsdp(graph: Graph, node: NodeSpec, lines: pl.DataFrame) -> Graph:
    """Return the graph with parameters sharded within a node, and gradient shards all-reduced across nodes.

    A ring of m GPUs takes (m-1) hops and moves (m-1)/m of the bytes at the node's bandwidth. The all-reduce of a shard
    among k nodes, one of m that share the node's network, takes 2(k-1) hops and moves 2(k-1)/k of the bytes at the
    bandwidth of the recorded ring. It follows its reduce-scatter on its own stream; what waits for the last
    reduce-scatter of a step also waits for the last all-reduce. The optimizer updates k times as much. `lines` are
    latency and bandwidth by group (`latency.by_group`). Raises InsufficientDataError where nothing is sharded across
    nodes.
    """
    calls = _sharding(graph).join(lines, on=["group", "group_size"], how="left", maintain_order="left")
    size = int(calls["group_size"][0])
    if size <= node.gpus:
        raise InsufficientDataError(
            f"parameters are sharded over {size} ranks, which fit in one node of {node.gpus} GPUs already"
        )
    if size % node.gpus:
        raise InsufficientDataError(f"the {size} ranks of the sharding group do not fill nodes of {node.gpus} GPUs")
    if calls["bytes_per_ns"].null_count():
        raise InsufficientDataError("collectives have one size only, which does not separate latency from bandwidth")
    line = RingModel(calls["hop_ns"][0], calls["bytes_per_ns"][0])
    count, m = size // node.gpus, node.gpus
    own_ns = graph.own_ns.copy()
    hops = ring_hops(ALL_GATHER, m)
    moved = hops * line.hop_ns + calls["bytes"].to_numpy() * hops / m / node.bytes_per_s * _NS
    own_ns[calls["done"].to_numpy()] = np.round(moved)
    own_ns[np.flatnonzero(graph.matches("phase", "optimizer") & graph.matches("kind", "compute"))] *= count
    reduced = calls.filter(pl.col("op") == REDUCE_SCATTER)
    hops = ring_hops(ALL_REDUCE, count)
    reduction_ns = hops * line.hop_ns + reduced["bytes"].to_numpy() * hops / count / line.bytes_per_ns
    return _with_reductions(replace(graph, own_ns=own_ns), reduced, np.round(reduction_ns).astype(np.int64))


def _sharding(graph: Graph) -> pl.DataFrame:
    """Return the all-gathers and reduce-scatters of the largest group with both, in topological order."""
    nodes = graph.parts["at"].to_numpy()
    calls = graph.parts.with_columns(
        pl.Series("turn", graph.position[nodes]), pl.Series("lane", graph.frame["lane"].to_numpy()[nodes])
    ).filter(pl.col("op").is_in([ALL_GATHER, REDUCE_SCATTER]), pl.col("bytes") > 0)
    both = calls.filter(pl.col("op").n_unique().over("group", "group_size") == 2).drop_nulls("group_size")
    if both.is_empty():
        raise InsufficientDataError("no group both all-gathers parameters and reduce-scatters gradients")
    return both.filter(pl.col("group_size") == pl.col("group_size").max()).sort("rank", "turn")


def _with_reductions(graph: Graph, reduced: pl.DataFrame, duration_ns: Ints) -> Graph:
    """Return the graph with an all-reduce after each reduce-scatter, in order, on a stream of their own."""
    timed = reduced.with_columns(pl.Series("duration_ns", duration_ns))
    instances = timed.unique("done", keep="first", maintain_order=True).sort("turn")
    done, first = instances["done"].to_numpy(), len(graph.chain)
    new = np.arange(first, first + len(instances), dtype=np.int64)
    zeros = np.zeros(len(new), np.int64)
    follows = edges(new, done, _EVENT)
    reductions = dict(zip(done, new, strict=True))
    key = np.empty(first + len(new), np.int64)
    key[graph.order] = 2 * np.arange(first)
    key[new] = key[done] + 1
    wider = replace(
        graph,
        chain=np.concatenate((graph.chain, np.concatenate(([-1], new[:-1])))),
        launch=np.concatenate((graph.launch, np.full(len(new), -1, np.int64))),
        launch_ns=np.concatenate((graph.launch_ns, zeros)),
        own_ns=np.concatenate((graph.own_ns, instances["duration_ns"].to_numpy())),
        chain_ns=np.concatenate((graph.chain_ns, zeros)),
        edges=graph.edges.concat(follows).concat(_waits_for_reductions(graph, reduced, reductions)),
    )
    return sort_topologically(wider, key)


def _waits_for_reductions(graph: Graph, reduced: pl.DataFrame, reductions: dict[int, int]) -> Edges:
    """Return the waits for each step's last all-reduce, of work that waits for its reduce-scatter or later ones.

    Waits for earlier reduce-scatters only free buffers.
    """
    waits, lane, rank = graph.edges, graph.column("lane"), graph.column("rank")
    waiting: list[int] = []
    awaited: list[int] = []
    candidates = np.flatnonzero(
        np.isin(waits.kind, (_EVENT, _SYNC)) & (waits.awaited >= 0) & (waits.waiting < graph.count)
    )
    for (of_rank, of_lane), lane_calls in reduced.group_by("rank", "lane", maintain_order=True):
        turns, done = lane_calls["turn"].to_numpy(), lane_calls["done"].to_numpy()
        lasts = lane_calls["step"].is_last_distinct().to_numpy()
        ends = set(done[lasts].tolist())
        for row in candidates.tolist():
            node, on = int(waits.waiting[row]), int(waits.awaited[row])
            if rank[node] != of_rank or lane[node] == of_lane:
                continue
            if on in ends:
                waiting.append(node)
                awaited.append(reductions[on])
            elif on < graph.count and rank[on] == of_rank and lane[on] == of_lane:
                last = int(np.searchsorted(turns, graph.position[on], side="right")) - 1
                if last >= 0 and lasts[last]:
                    waiting.append(node)
                    awaited.append(reductions[int(done[last])])
    return edges(np.array(waiting, np.int64), np.array(awaited, np.int64), _EVENT)
