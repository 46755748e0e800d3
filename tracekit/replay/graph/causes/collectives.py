"""Transfers as causes: their time, slow links, unbalanced experts, and collectives that are too small."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.causes.cause import REORDERS, Cause, Kind
from tracekit.replay.graph.causes.device_time import MICRO_BATCH
from tracekit.replay.graph.dependency_graph import (
    COLLECTIVE,
    START_ORDER,
    Graph,
    InsufficientDataError,
    edges,
    replace_unequal,
    sort_topologically,
)
from tracekit.replay.graph.nodes import WAIT

_MARKEDLY = 1.15
_SIZES_APART = 1.15
_MIN_LOAD_RATIO = 0.1
"""With fewer tokens, the time of a rank's experts says nothing about their time with the mean."""

COMMUNICATOR, EVENT = "communicator", "event"
_GATHER, _REDUCE = "all_gather", "reduce_scatter"


def without_transfers(graph: Graph) -> Graph:
    """Set the time of transfers to zero."""
    return graph.with_durations(is_transfer(graph), 0)


def is_transfer(graph: Graph) -> Flags:
    """Mark nodes that transfer data: collectives of the ranks, and join nodes."""
    return np.concatenate((graph.matches("kind", "communication"), np.ones(len(graph.own_ns) - graph.count, bool)))


def equalize_transfers(graph: Graph) -> Graph:
    """Return the graph with each transfer at the speed of its op, size and place in the fastest group and step.

    Raises InsufficientDataError on a CPU run, where transfers vary with CPU load, or where nothing repeats.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded; on the CPU, transfers vary with its load")
    calls = transfers(graph)
    place = ["op", "bytes", "group_size", "phase", "unit"]
    medians = calls.group_by([*place, "members", "group", "step"]).agg(pl.col("took_ns").median().alias("median_ns"))
    if medians.group_by(place).len().filter(pl.col("len") > 1).is_empty():
        raise InsufficientDataError("no collective repeats in another group or step")
    best = medians.group_by(place).agg(pl.col("median_ns").min().alias("best_ns"))
    with_medians = calls.join(medians, on=[*place, "members", "group", "step"], nulls_equal=True).join(
        best, on=place, nulls_equal=True
    )
    slow = with_medians.filter(pl.col("median_ns") > _MARKEDLY * pl.col("best_ns"))
    factor = slow["best_ns"].to_numpy() / np.maximum(slow["median_ns"].to_numpy(), 1)
    return graph.with_durations(slow["done"].to_numpy(), np.round(slow["took_ns"].to_numpy() * factor))


def bucket_collectives(graph: Graph) -> Graph:
    """Return the graph with collectives that could be batched merged: they take the time of their bytes, launches none.

    Ranks meet at those that stay only. Raises InsufficientDataError where the latency of none is known.
    """
    batched = graph.batchable_calls
    if batched.is_empty():
        raise InsufficientDataError("no collectives of known latency follow each other closely enough to be batched")
    key = ["rank", "ref"]
    merged = batched.filter("is_merged").select("rank", "moving_ns", ref="activity_id").unique(key, keep="first")
    calls = graph.parts.join(merged, on=key, maintain_order="left").with_columns(
        pl.col("moving_ns").max().over("done").round().cast(pl.Int64)
    )
    done, nodes = calls["done"].to_numpy(), calls["at"].to_numpy()
    own_ns, chain_ns, launch_ns = graph.own_ns.copy(), graph.chain_ns.copy(), graph.launch_ns.copy()
    own_ns[done] = np.minimum(own_ns[done], calls["moving_ns"].to_numpy())
    launches = graph.launch[nodes]
    launches = launches[launches >= 0]
    own_ns[launches] = 0
    chain_ns[nodes] = 0
    chain_ns[launches] = 0
    if not graph.on_device:
        launch_ns[nodes] = 0  # the backend's thread is woken for none of them
    changed = replace(graph, own_ns=own_ns, launch_ns=launch_ns).with_chain(chain_ns)
    return _without_meeting(changed, calls)


def _without_meeting(graph: Graph, calls: pl.DataFrame) -> Graph:
    """Return the graph in which each rank goes on after its own part of collectives (rows of `graph.parts`)."""
    of_several = calls.filter(pl.col("done") >= graph.count)
    if of_several.is_empty():
        return graph
    own_ns = graph.own_ns.copy()
    own_ns[of_several["at"].to_numpy()] = own_ns[of_several["done"].to_numpy()]
    own_ns[of_several["done"].to_numpy()] = 0
    rank_of = graph.frame["rank"]

    def own_part(waiting: Ints, awaited: Ints) -> Ints:
        """Return the part of the waiting node's rank where a node waits for one of the collectives."""
        waits = np.flatnonzero((waiting < graph.count) & (awaited >= graph.count))
        pairs = pl.DataFrame({"rank": rank_of[waiting[waits]], "done": awaited[waits]})
        parts = pairs.join(of_several, on=["rank", "done"], how="left", maintain_order="left")["at"]
        moved = awaited.copy()
        moved[waits] = parts.fill_null(pairs["done"]).to_numpy()
        return moved

    nodes = np.arange(len(graph.chain))
    awaited = own_part(graph.edges.waiting, graph.edges.awaited)
    return replace(
        graph,
        own_ns=own_ns,
        chain=own_part(nodes, graph.chain),
        launch=own_part(nodes, graph.launch),
        edges=replace(graph.edges, awaited=awaited),
    )


def with_balanced_experts(graph: Graph) -> Graph:
    """Return the graph in which each rank's experts get the mean number of tokens of their group, in each layer.

    Between the two all-to-alls of a layer, compute takes time in proportion to the tokens. An all-to-all takes as long
    as the rank with most tokens needs; its fixed cost stays, where sizes of all-to-alls separate it. Raises
    InsufficientDataError on a CPU run, and without pairs of all-to-alls of known size.
    """
    if not graph.on_device:
        raise InsufficientDataError("no device activity was recorded; on the CPU, ranks share cores")
    pairs = _pairs(graph)
    if pairs.is_empty():
        raise InsufficientDataError("no pairs of all-to-alls of expert parallelism with known sizes")
    own_ns = graph.own_ns.astype(np.float64)
    nodes, load_ratio = _expert_compute(graph, pairs)
    own_ns[nodes] /= load_ratio
    done, balanced_ns = _balanced_transfers(graph, pairs)
    own_ns[done] = balanced_ns
    return graph.with_durations(np.arange(len(own_ns)), np.round(own_ns).astype(np.int64))


COMMUNICATION = Cause(
    name="communication",
    loss="exposed communication",
    codes=("COMM001",), kind=Kind.COMMUNICATION, transform=without_transfers, confidence=0.8,
    is_transfer_time=True,
    summary="transfers take no time",
    basis="recorded transfers, without waiting for peers",
)  # fmt: skip
SLOW_LINK = Cause(
    name="slow-link",
    loss="slow links",
    codes=("RANK002",), kind=Kind.STRAGGLERS, transform=equalize_transfers, place=30, confidence=0.8,
    is_transfer_time=True,
    summary="collectives of one kind and size are as fast in every group and step as in the fastest",
    basis="transfer times by op, size and place, across groups and steps",
)  # fmt: skip
SMALL_COLLECTIVES = Cause(
    name="small-collectives",
    loss="small collectives",
    codes=("COMM002",), kind=Kind.COMMUNICATION, transform=bucket_collectives, place=30,
    confidence=0.7, is_transfer_time=True,
    is_attainable=True,
    summary="collectives that follow each other, or that one call or larger units could replace, are merged",
    basis="latency of the group's collectives, from this run's time against size",
)  # fmt: skip
UNBALANCED_EXPERTS = Cause(
    name="unbalanced-experts",
    loss="overloaded experts",
    codes=("EP001",), kind=Kind.COMMUNICATION, transform=with_balanced_experts, place=30,
    confidence=0.8,
    summary="the experts of each rank get the mean number of tokens of their group",
    basis="sizes of the all-to-alls around the experts, and the compute between them",
)  # fmt: skip


def transfers(graph: Graph) -> pl.DataFrame:
    """Return the collectives of a graph, each once: columns of `graph.parts` of its first rank, first, took_ns.

    first is its position in topological order.
    """
    once = graph.parts.unique("done", keep="first", maintain_order=True)
    done = once["done"].to_numpy()
    return once.with_columns(pl.Series("took_ns", graph.own_ns[done]), pl.Series("first", graph.position[done]))


def costs(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the costs of a collective of each op, fitted to sizes. Columns op, fixed_ns, ns_per_byte.

    `calls` has columns op, bytes, took_ns. Ops whose sizes differ too little are left out.
    """
    sizes = (
        calls.filter(pl.col("bytes") > 0).group_by("op", "bytes").agg(pl.col("took_ns").median()).sort("op", "bytes")
    )
    rows = []
    for (op,), op_sizes in sizes.group_by("op"):
        x, y = op_sizes["bytes"].to_numpy().astype(float), op_sizes["took_ns"].to_numpy().astype(float)
        if len(x) < 2 or x.max() < _SIZES_APART * x.min():
            continue
        slope, fixed = np.polyfit(x, y, 1)
        rows.append((op, max(0.0, float(fixed)), max(0.0, float(slope))))
    return pl.DataFrame(rows, schema={"op": pl.String, "fixed_ns": pl.Float64, "ns_per_byte": pl.Float64}, orient="row")


def independent_streams(graph: Graph) -> Graph:
    """Remove the start order between streams that share a launch queue."""
    return replace_unequal(graph, edges=graph.edges.select(graph.edges.kind != START_ORDER))


def independent_collectives(graph: Graph) -> Graph:
    """Return the graph without the order between collectives of one group on different streams."""
    return replace_unequal(graph, edges=graph.edges.select(graph.edges.kind != COMMUNICATOR))


def prefetch_all_gathers(graph: Graph) -> Graph:
    """Return the graph with each all-gather waiting for the compute that the previous all-gather waited for.

    In backward, an all-gather right after a reduce-scatter precedes it on communicator and stream if the reduce-scatter
    waits for later compute than the all-gather now does. Raises InsufficientDataError where no all-gather waits for
    compute.
    """
    calls = _in_order(graph)
    delayed = _delayed_all_gathers(graph, calls)
    if delayed.is_empty():
        raise InsufficientDataError("no all-gather waits for compute, as far as is known")
    awaited = graph.edges.awaited.copy()
    awaited[delayed["edge"].to_numpy()] = delayed["instead"].to_numpy()
    moved = replace(graph, edges=replace(graph.edges, awaited=awaited))
    after = pl.concat([
        delayed.select("at", pl.Series("after", _last_work(graph, delayed["instead"].to_numpy()), pl.Int64)),
        _reductions_after(graph, calls),
    ]).with_columns(delayed=pl.lit(True))  # fmt: skip
    return _in_turn(moved, _swap_calls(calls.join(after, on="at", how="left", maintain_order="left")))


def all_gathers_first(graph: Graph) -> Graph:
    """Return the graph with each all-gather moved before the reduce-scatter that directly precedes it."""
    calls = _in_order(graph)
    return _in_turn(graph, _swap_calls(calls.with_columns(delayed=pl.lit(True), after=pl.lit(None, pl.Int64))))


def _pairs(graph: Graph) -> pl.DataFrame:
    """Return the pairs of all-to-alls: columns rank, load_ratio, most_ratio, and from_ and to_ with at and done.

    most_ratio is the highest load_ratio of the ranks in the same layer.
    """
    loads = graph.expert_loads
    most_ratio = pl.col("load_ratio").max().over("step", "group", "members", "layer").alias("most_ratio")
    calls = graph.parts.select("rank", "ref", "at", "done")
    rows = loads.select("rank", "load_ratio", most_ratio, "first_id", "second_id")
    for side, id_column in (("from", "first_id"), ("to", "second_id")):
        side_calls = calls.rename({"ref": id_column, "at": f"{side}_at", "done": f"{side}_done"})
        rows = rows.join(side_calls, on=["rank", id_column])
    return rows


def _expert_compute(graph: Graph, pairs: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the nodes that compute between the all-to-alls of a pair, and the load of their rank."""
    frame = graph.frame
    start_ns, end_ns = graph.column("start_ns"), graph.column("end_ns")
    spans = pairs.filter(pl.col("load_ratio") >= _MIN_LOAD_RATIO).select(
        "rank",
        "load_ratio",
        pl.Series("start_ns", end_ns[pairs["from_at"].to_numpy()]),
        pl.Series("to_ns", start_ns[pairs["to_at"].to_numpy()]),
    )
    compute = frame.select("at", "rank", "start_ns", "end_ns", "kind").filter(pl.col("kind") == "compute")
    inside = compute.sort("start_ns").join_asof(
        spans.sort("start_ns"), on="start_ns", by="rank", check_sortedness=False
    )
    inside = inside.filter(pl.col("end_ns") <= pl.col("to_ns"))
    return inside["at"].to_numpy(), inside["load_ratio"].to_numpy()


def _balanced_transfers(graph: Graph, pairs: pl.DataFrame) -> tuple[np.ndarray, np.ndarray]:
    """Return the all-to-alls of pairs, and how long they take if all ranks get equally much."""
    sizes = graph.parts.group_by("done").agg(pl.col("op").first(), pl.col("bytes").max())
    took = sizes.with_columns(took_ns=pl.Series(graph.own_ns[sizes["done"].to_numpy()]))
    fixed = costs(took).select("op", "fixed_ns")
    sides = [pairs.select("most_ratio", done=f"{side}_done") for side in ("from", "to")]
    of_pairs = pl.concat(sides).group_by("done").agg(pl.col("most_ratio").max())
    transfers = of_pairs.join(took, on="done").join(fixed, on="op", how="left")
    fixed_ns = pl.min_horizontal(pl.col("fixed_ns").fill_null(0), "took_ns")
    balanced = transfers.select("done", ns=fixed_ns + (pl.col("took_ns") - fixed_ns) / pl.col("most_ratio"))
    return balanced["done"].to_numpy(), balanced["ns"].to_numpy()


SHARED_QUEUE = Cause(
    name="shared-queue",
    loss="streams that wait for each other",
    codes=("STREAM002",), kind=Kind.CONTENTION, transform=independent_streams, place=REORDERS,
    summary="work on a stream does not wait until earlier-launched work on other streams has started",
    basis="the start order, where it never differs from the launch order",
)  # fmt: skip
SHARED_COMMUNICATOR = Cause(
    name="shared-communicator",
    loss="collectives of one group that wait for each other",
    codes=("STREAM002",), kind=Kind.CONTENTION, transform=independent_collectives,
    place=REORDERS, confidence=0.4,
    summary="collectives of one group on different streams overlap",
    basis="the order of collectives in a group, where they never overlap",
)  # fmt: skip
LATE_GATHERS = Cause(
    name="late-gathers",
    loss="all-gathers that start late",
    codes=("COMM001",), kind=Kind.COMMUNICATION, transform=prefetch_all_gathers, place=REORDERS,
    confidence=0.7,
    summary="each all-gather may start one unit earlier (prefetch)",
    basis="an all-gather waits for the compute that the previous one waited for",
)  # fmt: skip


def _in_order(graph: Graph) -> pl.DataFrame:
    """Return all-gathers and reduce-scatters in topological order, by rank and group."""
    calls = graph.parts.filter(pl.col("op").is_in([_GATHER, _REDUCE]))
    nodes = calls["at"].to_numpy()
    with_turns = calls.with_columns(graph.frame["lane"].gather(nodes), pl.Series("turn", graph.position[nodes]))
    return with_turns.sort("rank", "group", "turn")


def _delayed_all_gathers(graph: Graph, calls: pl.DataFrame) -> pl.DataFrame:
    """Return for each all-gather the event edge (row) to the awaited compute, and the earlier compute to await instead.

    Columns at, rank, step, edge, awaited, instead; of several edges the last awaited counts. The first all-gather of a
    micro-batch has none: nothing is prefetched before the forward pass that needs it.
    """
    on = graph.edges.awaited
    real = (graph.edges.kind == EVENT) & (on >= 0) & (on < graph.count)
    rows = np.flatnonzero(real)
    rows = rows[graph.is_main_lane[on[rows]]]
    by_waiting = pl.DataFrame({"item": graph.edges.waiting[rows], "edge": rows, "awaited": on[rows]})
    gathers = calls.filter(pl.col("op") == _GATHER)
    before = _leading(graph, gathers["at"].to_numpy())
    waits = before.join(by_waiting, on="item").sort("at", "awaited").unique("at", keep="last", maintain_order=True)
    with_batches = calls.with_columns(MICRO_BATCH)
    ordered = waits.join(with_batches.select("at", "rank", "step", "turn", "micro_batch"), on="at").sort("rank", "turn")
    earlier = pl.col("awaited").shift(1).over("rank", "step", "micro_batch")
    return ordered.with_columns(earlier.alias("instead")).drop_nulls("instead")


def _leading(graph: Graph, gathers: Ints) -> pl.DataFrame:
    """Return each all-gather (at) with itself and the waits directly before it on its lane (item)."""
    is_wait = graph.column("what") == WAIT
    gather_nodes, item = [gathers], [gathers]
    current, gather = graph.chain[gathers], gathers
    while True:
        going = (current >= 0) & (current < graph.count)
        going[going] &= is_wait[current[going]]
        if not going.any():
            return pl.DataFrame({"at": np.concatenate(gather_nodes), "item": np.concatenate(item)})
        current, gather = current[going], gather[going]
        gather_nodes.append(gather)
        item.append(current)
        current = graph.chain[current]


def _last_work(graph: Graph, nodes: Ints) -> Ints:
    """Return the last work up to each item of a main lane: equal for items that wait for the same compute."""
    work = nodes.copy()
    is_wait = graph.column("what") == WAIT
    while (waits := is_wait[work] & (graph.chain[work] >= 0)).any():
        work[waits] = graph.chain[work[waits]]
    return work


def _reductions_after(graph: Graph, calls: pl.DataFrame) -> pl.DataFrame:
    """Return the reduce-scatters (at) with known awaited compute (after), their own or their preparation's."""
    waits, done = graph.edges, graph.done
    rows = np.flatnonzero((waits.kind == EVENT) & (waits.awaited >= 0) & (waits.awaited < graph.count))
    rows = rows[graph.is_main_lane[waits.awaited[rows]]]
    awaited = dict(zip(waits.waiting[rows].tolist(), _last_work(graph, waits.awaited[rows]).tolist(), strict=True))
    ends = set(done[calls["at"].to_numpy()].tolist())
    after = {}
    for call in calls.filter(pl.col("op") == _REDUCE)["at"].to_list():
        item = call
        while item not in awaited and 0 <= (before := int(graph.chain[item])) < graph.count and before not in ends:
            item = before
        if item in awaited:
            after[call] = awaited[item]
    return pl.DataFrame({"at": list(after), "after": list(after.values())}, schema={"at": pl.Int64, "after": pl.Int64})


def _swap_calls(calls: pl.DataFrame) -> pl.DataFrame:
    """Return the calls in their new order: a delayed all-gather moves before a directly preceding reduce-scatter.

    Not where the reduce-scatter is known to wait for no later compute (`after`) than the all-gather.
    """
    key = ["rank", "group"]
    before = pl.col("op").shift(1).over(key) == _REDUCE
    later = (pl.col("after").shift(1).over(key) > pl.col("after")).fill_null(value=True)
    jumps = (pl.col("op") == _GATHER) & before & later & pl.col("delayed").fill_null(value=False)
    places = calls.with_columns(pl.int_range(pl.len()).over(key).cast(pl.Int64).alias("place"), jumps.alias("jumps"))
    jumped = places.with_columns(pl.col("jumps").shift(-1).over(key).fill_null(value=False).alias("yields"))
    place = pl.col("place") - pl.col("jumps").cast(pl.Int64) + pl.col("yields").cast(pl.Int64)
    return jumped.with_columns(place.alias("place")).sort(*key, "place")


def _in_turn(graph: Graph, swapped: pl.DataFrame) -> Graph:
    """Return the graph with the calls in a new order on the communicator and on lanes with several ops."""
    done = graph.done
    turns = swapped.with_columns(before=pl.col("at").shift(1).over("rank", "group")).drop_nulls("before")
    across = edges(turns["at"].to_numpy(), done[turns["before"].to_numpy()], COMMUNICATOR)
    had = (graph.edges.kind == COMMUNICATOR).any() or (graph.edges.kind == COLLECTIVE).any()
    kept_edges = graph.edges.select(graph.edges.kind != COMMUNICATOR)
    chain = _reorder_chain(graph, swapped.filter(pl.col("op").n_unique().over("rank", "lane") > 1))
    both = kept_edges.concat(replace(across, inferred=np.ones_like(across.inferred))) if had else kept_edges
    return sort_topologically(replace(graph, edges=both, chain=chain), graph.position)


def _reorder_chain(graph: Graph, calls: pl.DataFrame) -> Ints:
    """Return the lane order with each call moved together with the items that lead to it."""
    chain = graph.chain.copy()
    if calls.is_empty():
        return chain
    done = graph.done
    heads = _heads(graph, calls["at"].to_numpy(), set(done[calls["at"].to_numpy()].tolist()))
    with_heads = calls.with_columns(pl.Series("head", heads))
    first = with_heads.sort("turn").group_by("rank", "lane").agg(pl.col("head").first())
    last = {(rank, lane): int(graph.chain[head]) for rank, lane, head in first.rows()}
    for rank, lane, call, head in with_heads.sort("rank", "lane", "place").select("rank", "lane", "at", "head").rows():
        chain[head] = last[rank, lane]
        last[rank, lane] = int(done[call])
    return chain


def _heads(graph: Graph, calls: Ints, ends: set[int]) -> list[int]:
    """Return for each call the first item after the previous call on its lane."""
    heads = []
    for call in calls.tolist():
        head = call
        while (before := int(graph.chain[head])) >= 0 and before not in ends and before < graph.count:
            head = before
        heads.append(head)
    return heads
