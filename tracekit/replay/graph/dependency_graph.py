"""The dependency graph of one profiled window over all its ranks, and its replay.

It is not one per step, since changes compare the steps and ranks of a window: which kernels contention slows, which
waits are short, what a collective costs at the least. From the samples of one step alone, the times that they remove
differ by up to several times, and some have no answer. Of many ranks the columns of the nodes are in files instead.
"""

import itertools
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import latency
from tracekit.analysis.compute import device_counters
from tracekit.analysis.host import cpu_contention
from tracekit.analysis.parallelism import expert_load, late_ranks
from tracekit.analysis.time import device_stalls
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import TraceFact
from tracekit.replay.graph import contraction, filled_devices, trace_graph
from tracekit.replay.graph.nodes import SHARED_WAITS_NODES, WORK, HostSpan, NodeTable, shared_waits
from tracekit.sync import alignment, collective_matching

START_ORDER, COLLECTIVE, RELEASE, QUEUE, SYNC = "start_order", "collective", "release", "queue", "sync"
_FAR = -(1 << 60)
_T = TypeVar("_T", "Graph", "Edges")
_ROUNDS = 200
_QUEUE_ROUNDS = 3


class InsufficientDataError(Exception):
    """The graph lacks what a change needs: samples, known waits or traces. The message states what is missing."""


@dataclass(frozen=True, eq=False)
class Graph:
    """The nodes of all ranks of a window, by rank, then one join node for each collective of several ranks.

    `frame` contains the ranks' nodes (columns of `trace_graph.nodes`, rank, and at, the node in this graph; times on
    the run's clock; chain and launch as in the trace). Its rows come first, the join nodes follow. `join_of` is the
    join node of a rank's part in a collective (-1: none): the part then is its arrival, the join node the end on all
    ranks. `own_ns` is a node's duration, `chain_ns` the minimum time after the previous node of its thread or stream.
    `edges` are the other waits. `windows` are the steps (columns of `trace_graph.windows`, and rank), `parts` the
    collectives (at: node, done: the join node, or at; rank, op, group, members, group_size, bytes), `prepared` their
    preparation (columns of `trace_graph.preparation`). `late_ranks` are those that the others wait for most,
    `expert_loads`, `batchable_calls` and `contended_ops` the window's rows of `expert_load.expert_load`,
    `latency.batchable_calls` and `cpu_contention.contended_ops`, `devices` those that kernels fill, if any, `stalls`
    those of the finding whose cause is removed.
    """

    window: int
    frame: NodeTable
    join_of: Ints
    chain: Ints
    launch: Ints
    launch_ns: Ints
    own_ns: Ints
    chain_ns: Ints
    edges: "Edges"
    windows: pl.DataFrame
    parts: pl.DataFrame
    prepared: pl.DataFrame
    origin_ns: int
    order: Ints = field(repr=False)
    late_ranks: tuple[int, ...] = ()
    expert_loads: pl.DataFrame = field(default_factory=lambda: pl.DataFrame(schema=expert_load.COLUMNS))
    batchable_calls: pl.DataFrame = field(default_factory=pl.DataFrame)
    contended_ops: pl.DataFrame = field(default_factory=pl.DataFrame)
    devices: filled_devices.Devices | None = field(default=None, repr=False)
    stalls: tuple[HostSpan, ...] = ()

    @property
    def count(self) -> int:
        """Return the number of the ranks' nodes."""
        return len(self.join_of)

    @cached_property
    def done(self) -> Ints:
        """Return the node whose end is the end of each of the ranks' nodes."""
        return np.where(self.join_of >= 0, self.join_of, np.arange(self.count))

    @cached_property
    def position(self) -> Ints:
        """Return the position of each node in topological order."""
        position = np.empty(len(self.order), np.int64)
        position[self.order] = np.arange(len(self.order))
        return position

    @cached_property
    def is_main_lane(self) -> Flags:
        """Mark the ranks' nodes on the lane of their device with most compute."""
        work = self.frame.select("rank", "device", "lane", "kind", own_ns=self.own_ns[: self.count])
        busy = work.filter(pl.col("kind") == "compute").group_by("rank", "device", "lane").agg(pl.col("own_ns").sum())
        main = busy.sort("own_ns", "lane", descending=[True, False]).unique(["rank", "device"], keep="first")
        marked = work.join(
            main.select("rank", "lane", main=True), on=["rank", "lane"], how="left", maintain_order="left"
        )
        return np.asarray(marked["main"].fill_null(value=False).to_numpy())

    @cached_property
    def is_queued_before(self) -> Flags:
        """Mark the ranks' nodes that are work queued before the window: see `queued_before`."""
        return queued_before(self.frame, self.launch[: self.count])

    @cached_property
    def replay(self) -> "Replay":
        """Replay of the unchanged graph, computed once."""
        return replay(self)

    @property
    def on_device(self) -> bool:
        """Return whether the run was on devices, not on the CPU."""
        devices = self.frame["device"]
        return devices.null_count() < len(devices)

    def column(self, name: str) -> Any:
        """Return a column of the ranks' nodes as an array."""
        return self.frame[name].to_numpy()

    def matches(self, column: str, value: str) -> Flags:
        """Mark the ranks' nodes that have this value in a column."""
        return np.asarray((self.frame[column] == value).fill_null(value=False).to_numpy())

    def with_durations(self, nodes: npt.NDArray[Any], own_ns: npt.ArrayLike) -> "Graph":
        """Return the graph with other durations of some nodes, given by number or flag."""
        changed = self.own_ns.copy()
        changed[nodes] = own_ns
        return replace_unequal(self, own_ns=changed)

    def with_chain(self, chain_ns: Ints) -> "Graph":
        """Return the graph with other least times between a node and the one before it on its thread or stream.

        On a CPU run, a call that follows a wait starts as much earlier after what it waited for.
        """
        if self.on_device:
            return replace_unequal(self, chain_ns=chain_ns)
        edges = self.edges
        after_wait = np.flatnonzero((edges.kind == SYNC) & (edges.waiting < self.count))
        calls, lag_ns = edges.waiting[after_wait], edges.lag_ns.copy()
        earlier_ns = np.maximum(self.chain_ns[calls] - chain_ns[calls], 0)
        lag_ns[after_wait] = np.maximum(lag_ns[after_wait] - earlier_ns, 0)
        return replace_unequal(self, chain_ns=chain_ns, edges=replace_unequal(edges, lag_ns=lag_ns))


@dataclass(frozen=True, eq=False)
class Edges:
    """Waits between nodes other than thread or stream order: launches, events, collectives and others."""

    waiting: Ints
    awaited: Ints
    lag_ns: Ints
    kind: npt.NDArray[np.str_]
    inferred: Flags

    def select(self, which: Flags) -> "Edges":
        """Return some of the edges."""
        if which.all():
            return self
        return Edges(*(column[which] for column in vars(self).values()))

    def concat(self, other: "Edges") -> "Edges":
        """Return these edges and others."""
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Edges(*(np.concatenate(columns) for columns in both))


def replace_unequal(original: _T, **fields: Any) -> _T:
    """Graph or edges with other fields, or as they are if these are equal: then the replay of the graph is known."""
    changed_fields = {
        name: field
        for name, field in fields.items()
        if field is not getattr(original, name)
        and not (isinstance(field, np.ndarray) and np.array_equal(field, getattr(original, name)))
    }
    return replace(original, **changed_fields) if changed_fields else original


@dataclass(frozen=True, eq=False)
class Replay:
    """When each node started and ended in a replay, in ns since the window's origin."""

    start_ns: Ints
    end_ns: Ints


FACTS: tuple[TraceFact, ...] = (
    trace_graph.nodes,
    trace_graph.edges,
    trace_graph.windows,
    trace_graph.preparation,
    *device_stalls.FACTS,
    device_counters.clock_drops,
    device_counters.work_variation,
    collective_matching.calls,
    *late_ranks.FACTS,
    *latency.FACTS,
    *cpu_contention.FACTS,
)
"""The facts of a graph, measured in one pass over the traces at the first replay."""


def graphs(run: Run) -> list[Graph]:
    """Graph of each window of a run."""
    run.measure(FACTS)
    stored = NodeTable(run.scan(trace_graph.nodes) if run.parts(trace_graph.nodes) else run.table(trace_graph.nodes))
    times = stored.select("window", "rank", "start_ns", "end_ns")
    on_clock = alignment.on_run_clock(times, run.offsets, ("start_ns", "end_ns")).select("start_ns", "end_ns")
    on_clock = on_clock.with_columns(
        trace_graph.pauses_on_other_ranks(run, stored) + trace_graph.refuted_slowdowns(run, stored)
    )
    all_nodes = stored.with_columns(on_clock.get_columns())
    own_edges, windows = run.table(trace_graph.edges), run.table(trace_graph.windows)
    shared = shared_waits(all_nodes.select(*SHARED_WAITS_NODES), own_edges)
    edges = pl.concat([own_edges, shared.select(own_edges.columns)])
    counts = stored.select("window").to_series().value_counts(sort=False).sort("window")  # rows are by window and rank
    built, first = [], 0
    for window, count in counts.iter_rows():
        of_window = (all_nodes, edges, windows)  # not copies, if that is all
        if count < stored.height:
            nodes = stored.slice(first, count).with_columns(on_clock.slice(first, count).get_columns())
            of_window = (nodes, edges.filter(window=window), windows.filter(window=window))
        built.append(_graph(run, window, *of_window))
        first += count
    return built


def queued_before(frame: NodeTable, launch: Ints) -> Flags:
    """Mark work before the first work of its stream with a recorded launch (`launch` >= 0).

    A stream runs work in launch order, so it was launched before the window began. What it waited for is not recorded:
    its start is given.
    """
    work = frame.select("rank", "lane", "start_ns", is_work=pl.col("what") == WORK, launched=pl.Series(launch >= 0))
    first_ns = pl.col("start_ns").filter("is_work", "launched").min().over("rank", "lane")
    earlier = (pl.col("is_work") & (pl.col("start_ns") < first_ns)).fill_null(value=False)
    return np.asarray(work.select(earlier & ~pl.col("launched")).to_series().to_numpy())


def replay(graph: Graph) -> Replay:
    """Start and end of every node if each starts as soon as its waits allow.

    A collective ends on all ranks its own duration after the last arrival. While a kernel that fills its device runs,
    kernels of other streams wait for room.
    """
    edges = graph.edges
    lag_ns = np.where(edges.kind == START_ORDER, -graph.own_ns[edges.awaited], edges.lag_ns)  # after the awaited end
    # A full launch queue rarely delays its host. A wait that is left out and met anyway changes nothing.
    is_open = (edges.kind == QUEUE) & (graph.chain[edges.waiting] >= 0)
    for rounds_left in reversed(range(_QUEUE_ROUNDS + 1)):
        waits = edges.select(~is_open)
        network = contraction.Network(
            graph.own_ns, graph.chain, graph.chain_ns, graph.launch, graph.launch_ns,
            waits.waiting, waits.awaited, lag_ns[~is_open], graph.order,
        )  # fmt: skip
        start_ns = filled_devices.starts(network, graph.devices)
        end_ns = start_ns + graph.own_ns
        broken = is_open & (start_ns[edges.waiting] < end_ns[edges.awaited] + lag_ns)
        if not broken.any():
            break
        is_open &= ~broken if rounds_left > 1 else False
    return Replay(start_ns, end_ns)


def sort_topologically(graph: Graph, key: Ints) -> Graph:
    """Return the graph in topological order, by `key` where waits leave a choice.

    Of each cycle (from rounded clocks or wrong matches) an edge is dropped: inferred edges first, those that contradict
    the order of `key` before others; then collectives across ranks; then launches.
    """
    for dropped in itertools.count():
        waiting, awaited = _pairs(graph)
        delayed = key.copy()
        for _ in range(_ROUNDS):  # delays nodes past their waits: the order, if that ends
            late = np.flatnonzero(delayed[waiting] <= delayed[awaited])
            if not len(late):
                return replace(graph, order=np.argsort(delayed, kind="stable").astype(np.int64))
            np.maximum.at(delayed, waiting[late], delayed[awaited[late]] + 1)
        free = _kahn_order(awaited, waiting, len(graph.chain))
        if len(free) == len(graph.chain):
            return replace(graph, order=np.array(free, np.int64))
        graph = _without_weakest_cycle_edges(graph, key, 1 << dropped)
    raise AssertionError("not reached")


def _kahn_order(before: Ints, after: Ints, count: int) -> list[int]:
    """Return the nodes that depend on no cycle, in topological order."""
    by = np.argsort(before, kind="stable")
    following, first = after[by].tolist(), np.searchsorted(before[by], np.arange(count + 1)).tolist()
    waits_left = np.bincount(after, minlength=count).tolist()
    free = [node for node, waits in enumerate(waits_left) if not waits]
    for node in free:  # grows during the loop
        for other in following[first[node] : first[node + 1]]:
            waits_left[other] -= 1
            if not waits_left[other]:
                free.append(other)
    return free


def _without_weakest_cycle_edges(graph: Graph, key: Ints, limit: int) -> Graph:
    """Graph without the least certain edges of each part whose nodes all depend on each other.

    Inferred edges that contradict the recorded order are dropped. Without any, `limit` that are next to it are: their
    ends are the closest in time. The others stay, since one wrong edge is enough for a cycle.
    """
    from scipy import sparse  # imported here: few graphs have cycles

    waits = sparse.csr_matrix((np.ones(len(_pairs(graph)[0]), bool), _pairs(graph)), shape=(len(graph.chain),) * 2)
    part = np.asarray(sparse.csgraph.connected_components(waits, connection="strong")[1], np.int64)
    edges, of_edge = graph.edges, part[graph.edges.waiting]
    within = (edges.awaited >= 0) & (of_edge == part[edges.awaited])
    slack_ns = key[edges.waiting] - key[edges.awaited]
    inferred = within & edges.inferred
    wrong = inferred & (slack_ns < 0)
    nearest = _nearest(np.where(inferred & ~np.isin(of_edge, of_edge[wrong]), slack_ns, -_FAR), of_edge, limit)
    across = within & (edges.kind == COLLECTIVE) & ~np.isin(of_edge, of_edge[inferred])
    for which in (wrong | nearest, across):
        if which.any():
            return replace(graph, edges=edges.select(~which))
    tied = (np.bincount(part) > 1)[part]
    launch = np.where(tied & (graph.launch >= 0) & (part[graph.launch] == part), -1, graph.launch)
    return replace(graph, launch=launch, edges=edges.select(~within))


def _nearest(slack_ns: Ints, part: Ints, limit: int) -> Flags:
    """Mark the edges with the least slack in each part, at most `limit` each; not those with the largest number."""
    order = np.lexsort((slack_ns, part))
    first = np.searchsorted(part[order], part[order], side="left")
    is_nearest = np.zeros(len(part), bool)
    is_nearest[order] = np.arange(len(part)) - first < limit
    return is_nearest & (slack_ns < -_FAR)


def _pairs(graph: Graph) -> tuple[Ints, Ints]:
    nodes = np.arange(len(graph.chain))
    waiting = np.concatenate((nodes, nodes, graph.edges.waiting))
    awaited = np.concatenate((graph.chain, graph.launch, graph.edges.awaited))
    is_wait = awaited >= 0
    return waiting[is_wait], awaited[is_wait]


# Building ------------------------------------------------------------------------------------------------------------


def _graph(run: Run, window: int, nodes: NodeTable, edges: pl.DataFrame, windows: pl.DataFrame) -> Graph:
    table = nodes.with_columns(at=pl.int_range(pl.len(), dtype=pl.Int64))
    frame = filled_devices.with_rooms(table)
    rank = table["rank"]
    firsts = pl.DataFrame([rank.unique(maintain_order=True), rank.rle_id().arg_unique().cast(pl.Int64).alias("base")])
    base = firsts["base"].to_numpy()[rank.rle_id().to_numpy()]
    joint_of, joints = _join_nodes(run, window, table)
    done = np.where(joint_of >= 0, joint_of, np.arange(len(joint_of)))
    chain, launch = (  # nodes numbered by trace, as those of the graph at which they are done
        np.append(np.where(node >= 0, done[np.maximum(node + base, 0)], -1), np.full(len(joints), -1, np.int64))
        for node in (table["chain"].to_numpy(), table["launch"].to_numpy())
    )
    zeros = np.zeros(len(joints), np.int64)
    start_ns, own_ns = table["start_ns"].to_numpy(), np.where(joint_of >= 0, 0, table["own_ns"].to_numpy())
    origin = int(table["start_ns"].min() or 0)  # type: ignore[arg-type]
    moved = edges.join(firsts, on="rank", how="left", maintain_order="left")
    prepared = run.table(trace_graph.preparation).filter(window=window).join(firsts, on="rank")
    graph = Graph(
        window,
        frame,
        joint_of,
        chain,
        launch,
        np.append(table["launch_ns"].to_numpy(), zeros),
        np.append(own_ns, joints["transfer_ns"].to_numpy()),
        np.append(table["chain_ns"].to_numpy(), zeros),
        _edges(moved, done).concat(_release_edges(table, chain, launch, origin)),
        windows.join(firsts, on="rank").with_columns(pl.col("first") + pl.col("base")).drop("base"),
        _parts(run, window, frame, done),
        prepared.with_columns(pl.col("node", "collective") + pl.col("base")).drop("base", "window"),
        origin,
        np.empty(0, np.int64),
        late_ranks.latest(run),
        run.table(expert_load.expert_load).filter(window=window),
        run.table(latency.batchable_calls).filter(window=window),
        run.table(cpu_contention.contended_ops).filter(window=window),
        filled_devices.devices(frame, len(own_ns) + len(joints)),
    )
    # When each node was done, or arrived: the recorded order, which is nearly topological.
    parts = np.flatnonzero(joint_of >= 0)
    together = np.full(len(joints), np.iinfo(np.int64).min, np.int64)
    np.maximum.at(together, joint_of[parts] - len(joint_of), start_ns[parts] + 1)
    return sort_topologically(graph, np.append(np.where(joint_of >= 0, start_ns, table["end_ns"].to_numpy()), together))


def _join_nodes(run: Run, window: int, nodes: NodeTable) -> tuple[Ints, pl.DataFrame]:
    """Return each node's join node, and the transfer time of each join node: the shortest duration of its ranks.

    The last-arriving rank only transfers; the others wait before. On the CPU, a send ends where its host waits for it,
    so a send and its receive transfer at most from the last start to the first end.
    """
    aligned = run.offsets.filter(pl.col("window") == window, pl.col("residual_ns").is_not_null())
    calls = run.table(collective_matching.matched_calls).filter(pl.col("window") == window).drop_nulls("instance")
    calls = calls.join(aligned.select("rank"), on="rank", how="semi")
    is_message = (pl.col("op") == collective_matching.PAIRED).alias("is_message")
    several = calls.filter(pl.len().over("instance") > 1).select(
        "rank", pl.col("activity_id").alias("ref"), "instance", is_message
    )
    work = nodes.select("at", "rank", "ref", "own_ns", "what", "device", "start_ns", "end_ns")
    work = work.filter(pl.col("what") == WORK)
    parts = several.unique(["rank", "ref"], keep="first", maintain_order=True).join(work, on=["rank", "ref"])
    shortest_ns, together_ns = pl.col("own_ns").min(), (pl.col("end_ns").min() - pl.col("start_ns").max()).clip(0)
    ends_when_awaited = (pl.col("is_message") & pl.col("device").is_null()).all()
    transfer_ns = pl.when(ends_when_awaited).then(pl.min_horizontal(shortest_ns, together_ns)).otherwise(shortest_ns)
    joints = (
        parts.group_by("instance", maintain_order=True)
        .agg(transfer_ns.alias("transfer_ns"), "at")
        .with_columns((pl.int_range(pl.len()) + nodes.height).cast(pl.Int64).alias("joint"))
    )
    joint_of = np.full(nodes.height, -1, np.int64)
    members = joints.select("joint", "at").explode("at")
    joint_of[members["at"].to_numpy()] = members["joint"].to_numpy()
    return joint_of, joints


def _parts(run: Run, window: int, frame: NodeTable, done: Ints) -> pl.DataFrame:
    calls = run.table(collective_matching.calls).filter(pl.col("window") == window)
    messages = calls.select(
        "rank", pl.col("activity_id").alias("ref"), "op", "group", "members", "group_size", "bytes"
    ).unique(["rank", "ref"])
    call_nodes = np.flatnonzero((frame["kind"] == "communication").fill_null(value=False).to_numpy())
    numbers = [pl.Series("at", call_nodes), pl.Series("done", done[call_nodes])]
    call_columns = [frame[name].gather(call_nodes) for name in ("rank", "ref", "step", "phase", "unit")]
    return pl.DataFrame([*numbers, *call_columns]).join(messages, on=["rank", "ref"], how="left", maintain_order="left")


def _edges(moved: pl.DataFrame, done: Ints) -> Edges:
    """Edges of the traces, and those of join nodes, which wait for all parts of their collective."""
    base = moved["base"].to_numpy()
    how = moved["kind"].to_numpy().astype(np.str_)
    awaited = moved["awaited"].to_numpy() + base
    recorded = Edges(
        moved["waiting"].to_numpy() + base,
        np.where(how == START_ORDER, awaited, done[awaited] if len(awaited) else awaited),
        moved["lag_ns"].to_numpy(),
        how,
        moved["inferred"].to_numpy(),
    )
    parts = np.flatnonzero(done >= len(done))
    return recorded.concat(edges(done[parts], parts, COLLECTIVE))


def _release_edges(nodes: NodeTable, chain: Ints, launch: Ints, origin_ns: int) -> Edges:
    """Return the waits for the window's start: of each rank's host, and of work queued before."""
    unbound = (chain[: nodes.height] < 0) & (launch[: nodes.height] < 0)
    free = np.flatnonzero(unbound | queued_before(nodes, nodes["launch"].to_numpy()))
    return edges(free, np.full(len(free), -1, np.int64), RELEASE, nodes["start_ns"].to_numpy()[free] - origin_ns)


def edges(waiting: Ints, awaited: Ints, how: str, lag_ns: Ints | int = 0) -> Edges:
    """Return known waits of one kind."""
    lag = np.broadcast_to(np.asarray(lag_ns, np.int64), waiting.shape)
    return Edges(waiting, awaited, lag, np.full(len(waiting), how), np.zeros(len(waiting), bool))
