"""Predictions of other sharding strategies, networks and recomputation, from the recorded work."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import polars as pl

from tracekit.analysis.communication import latency
from tracekit.analysis.communication.latency import RingModel
from tracekit.analysis.parallelism import group_axes
from tracekit.conventions import strategies as table
from tracekit.conventions.strategies import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ring_hops
from tracekit.errors import InputError
from tracekit.model import units
from tracekit.model.run import Run
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph import savings
from tracekit.replay.graph.causes import collectives, contention, device_time, host
from tracekit.replay.graph.dependency_graph import SYNC, Edges, Graph, InsufficientDataError, edges, sort_topologically

HSDP = table.HSDP.name
_ASSUMED = (
    "recorded kernels and transfers with their recorded durations and order",
    "preparation of gradients at its solo speed, without contention",
    "no limit on all-gathers that delays the host",
)
_BUFFERS = (
    "two buffers for parameters and two for gradients: no allocator calls, no copies into and out of gathered buffers, "
    "each all-gather before the reduce-scatter that shares its stream"
)
_COPIES = "copies into and out of gathered buffers, which the new strategy may add, not included"
_COPYING = r"copy_in|copy_out"
SLOWEST = 0.01
_EVENT = "event"
_NS = 1e9


@dataclass(frozen=True)
class NodeSpec:
    """Node hardware that a recording of rings across nodes does not show: GPUs per node, and ring bandwidth.

    `bytes_per_s` is bus bandwidth as nccl-tests prints it.
    """

    gpus: int
    bytes_per_s: float


@dataclass(frozen=True)
class Prediction:
    """The predicted step time under another strategy, or with less recomputation, and its assumptions."""

    name: str
    step_ns: int
    predicted_ns: int
    assumptions: tuple[str, ...]
    range_ns: tuple[int, int] | None = None
    """Least and most that the step may take, where the prediction bounds it."""
    throughput_ratio: float | None = None
    """Work of the job per second, as a multiple of the recorded one's, where it has other GPUs."""

    @property
    def gpu_ratio(self) -> float:
        """Work of a GPU per second, as a share of the recorded one's."""
        return self.step_ns / self.predicted_ns if self.predicted_ns else 0.0

    @property
    def saved_ratio(self) -> float:
        """Return the saved share of the step; below 0 where it gets longer."""
        return 1 - self.predicted_ns / self.step_ns if self.step_ns else 0.0


def predict_strategy(run: Run, strategy: str, node: NodeSpec | None = None) -> Prediction:
    """Return the predicted step time under a strategy: yafsdp, fsdp2, or hsdp on nodes of this kind.

    Raises InputError for others, which a trace of another strategy cannot predict.
    """
    if strategy == HSDP:
        return _hsdp(run, node)
    if strategy not in _CHANGES:
        raise InputError(
            f"--strategy {strategy}: cannot be predicted from a recording, only {', '.join(_CHANGES)} and {HSDP}; "
            f"tracekit simulate --strategy {strategy} simulates it on a known machine"
        )
    change, assumed = _CHANGES[strategy]
    return predict_change(run, strategy, change, assumed)


def predict_less_recomputation(run: Run, layers: int) -> Prediction:
    """Return the predicted step time with `layers` fewer recomputed layers: those first in backward.

    Raises InputError where nothing is recomputed.
    """
    if layers < 1:
        raise InputError(f"--recompute-fewer is {layers}; must be 1 or more")

    assumed = ("memory for the activations that are then stored",)
    return predict_change(run, f"{layers} recomputed layers fewer", lambda graph: _fewer(graph, layers), assumed)


def predict_network(run: Run, times: float) -> Prediction:
    """Return the predicted step time with every link at `times` its bandwidth.

    Raises InputError where nothing is transferred.
    """
    checked_times(times, "--network-times")
    lines = run.table(latency.by_group).select("group", "group_size", "hop_ns")
    has_latency = lines["hop_ns"].is_not_null().any()
    assumed = (
        f"every link, inside nodes and between them, at {times:g} times its bandwidth",
        "unchanged latency per hop, as fitted to the run's collectives"
        if has_latency
        else "latency scales too: sizes differ too little to separate it from bandwidth",
    )
    name = f"a network {times:g} times as fast"
    return predict_change(run, name, lambda graph: _scale_links(graph, times, lines), assumed, slow_preparation=True)


def axes_text(axes: pl.DataFrame) -> str:
    """Return the axes of a run's groups (`group_axes`) as text."""
    return ", ".join(sorted(axes["axis"].drop_nulls().unique())) or "no known axis"


def checked_times(times: float, option: str) -> float:
    """Link speed-up `times` itself. Raises InputError for what is out of range."""
    if not SLOWEST <= times <= 1 / SLOWEST:
        raise InputError(f"{option} is {times}; it must be from {SLOWEST:g} to {1 / SLOWEST:g}")
    return times


def predict_axes(run: Run, times_of_axis: Mapping[str, float]) -> Prediction:
    """Return the predicted step time with the links of mesh axes at so many times their bandwidth.

    Axis "dp" means data parallelism of any kind. Raises InputError where the run has no collective of an axis.
    """
    axes = run.table(group_axes.group_axes)
    lines = run.table(latency.by_group).select("group", "group_size", "hop_ns")
    changes = {axis: (_groups_of(axes, axis), times) for axis, times in times_of_axis.items()}

    def scale_axes(graph: Graph) -> Graph:
        for groups, times in changes.values():
            graph = _scale_links(graph, times, lines, groups)
        return graph

    name = ", ".join(axis_text(axis, times) for axis, times in times_of_axis.items())
    return predict_change(run, name, scale_axes, ("links of other axes as recorded",), slow_preparation=True)


def axis_text(axis: str, times: float) -> str:
    """Change of the links of an axis, as text."""
    return f"axis {axis} {times:g} times as fast"


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


def _hsdp(run: Run, node: NodeSpec | None) -> Prediction:
    if node is None:
        raise InputError(
            "--strategy hsdp: the recording does not show the bandwidth of a ring inside a node; give it by "
            "--node-bandwidth, such as 230e9: the bus bandwidth that all_gather_perf of nccl-tests prints on one node"
        )
    lines = run.table(latency.by_group).select("group", "group_size", "hop_ns", "bytes_per_ns").fill_nan(None)
    with_hops = lines.with_columns(pl.col("hop_ns").fill_null(0.0))
    assumed = (
        f"{node.gpus} GPUs per node, with a ring bandwidth of {units.rate(node.bytes_per_s)}",
        "ring collectives; network bandwidth as recorded, shared by the all-reduces of a node's GPUs",
        "all-reduces of gradient shards on their own stream; their copies and contention not included",
        "optimizer time proportional to shard size",
        f"memory for {HSDP}: weights, gradients and optimizer states sharded over {node.gpus} ranks only",
    )
    return predict_change(run, HSDP, lambda graph: to_hsdp(graph, node, with_hops), assumed, slow_preparation=True)


def _groups_of(axes: pl.DataFrame, axis: str) -> pl.DataFrame:
    is_axis = (pl.col("axis") == axis) | pl.col("axis").str.starts_with(f"{axis}_")
    groups = axes.filter(is_axis).select("group", "members")
    if groups.is_empty():
        raise InputError(f"--axis-times {axis}: no collective of this axis; the run has {axes_text(axes)}")
    return groups


def predict_change(
    run: Run, name: str, change: Callable[[Graph], Graph], assumed: tuple[str, ...], *, slow_preparation: bool = False
) -> Prediction:
    """Return the predicted step time with a change of the graph. Raises InputError where it is not possible."""
    before = savings.replayed_steps(run)
    if before.is_empty():
        raise InputError(f"{run.path}: no step can be replayed")
    try:
        changed = [
            contention.apply_contention(graph, change(graph), slow_preparation=slow_preparation)
            for graph in savings.graphs_of(run)
        ]
    except InsufficientDataError as error:
        raise InputError(f"{run.path}: {name} cannot be predicted: {error}") from error
    per = before.select("window", "step").n_unique()
    after = pl.concat(savings.step_durations(*replayed) for replayed in changed)
    saved_ns = savings.total_ns(before, "replayed_ns") - savings.total_ns(after, "replayed_ns")
    step_ns = savings.total_ns(before, "duration_ns") // per
    return Prediction(name, step_ns, step_ns - saved_ns // per, assumed)


def _fsdp2(graph: Graph) -> Graph:
    unlimited = host.rate_limiter(graph)
    with suppress(InsufficientDataError):
        return contention.without_give_way(unlimited)
    return unlimited


def _yafsdp(graph: Graph) -> Graph:
    copies = (graph.frame["span"].fill_null("").str.contains(_COPYING)).to_numpy()
    without_copies = graph.with_durations(np.flatnonzero(copies & graph.matches("kind", "compute")), 0)
    return collectives.all_gathers_first(host.allocator(_fsdp2(without_copies)))


def _scale_links(graph: Graph, times: float, lines: pl.DataFrame, groups: pl.DataFrame | None = None) -> Graph:
    """Return the graph with every link at `times` its bandwidth; the latency of hops stays.

    `lines` are latency and bandwidth by group (`latency.by_group`); where latency is unknown, the whole transfer
    scales. `groups` (group, members) limits the change to some groups. Raises InsufficientDataError where nothing is
    transferred.
    """
    if not graph.matches("kind", "communication").any():
        raise InsufficientDataError("the traces contain no collective")
    calls = collectives.transfers(graph).join(lines, on=["group", "group_size"], how="left", maintain_order="left")
    fixed_ns = np.zeros(len(graph.own_ns))
    latencies = calls.select((latency.hops() * pl.col("hop_ns")).fill_nan(None).fill_null(0.0)).to_series()
    fixed_ns[calls["done"].to_numpy()] = np.minimum(latencies.to_numpy(), calls["took_ns"].to_numpy())
    moves = collectives.is_transfer(graph)
    if groups is not None:
        affected = collectives.transfers(graph).join(groups, on=["group", "members"], how="semi", nulls_equal=True)
        is_chosen = np.zeros(len(graph.own_ns), bool)
        is_chosen[affected["done"].to_numpy()] = True
        moves = moves & is_chosen
    return graph.with_durations(moves, np.round(fixed_ns + (graph.own_ns - fixed_ns) / times)[moves])


def _fewer(graph: Graph, layers: int) -> Graph:
    """Return the graph without the first `layers` recomputed regions of each backward pass."""
    again = device_time.recomputed_nodes(graph)
    rows = graph.frame.select("at", "rank", "step", "lane", "kind", again=pl.Series(again))
    work = rows.filter(pl.col("kind") == "compute")
    place = ["rank", "lane", "step"]
    begins = pl.col("again") & ~pl.col("again").shift(1, fill_value=False).over(place)
    region = work.with_columns(begins.cast(pl.Int64).cum_sum().over(place).alias("region"))
    fewer = np.zeros(graph.count, bool)
    fewer[region.filter("again", pl.col("region") <= layers)["at"].to_numpy()] = True
    return device_time.without_recomputed(graph, fewer)


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
        np.isin(waits.kind, (_EVENT, SYNC)) & (waits.awaited >= 0) & (waits.waiting < graph.count)
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


_CHANGES: Mapping[str, tuple[Callable[[Graph], Graph], tuple[str, ...]]] = {
    table.FSDP2.name: (_fsdp2, (*_ASSUMED, _COPIES)),
    table.YAFSDP.name: (_yafsdp, (*_ASSUMED, _BUFFERS)),
}


NAMES = (*_CHANGES, HSDP)
"""The strategies that can be predicted."""
