"""Order of work as a cause: late all-gathers, and streams that share a launch queue or a communicator."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.causes.cause import REORDERS, Cause, Kind
from tracekit.replay.graph.causes.device_time import MICRO_BATCH
from tracekit.replay.graph.dependency_graph import (
    COLLECTIVE,
    START_ORDER,
    Graph,
    InsufficientDataError,
    edges,
    sort_topologically,
)
from tracekit.replay.graph.nodes import WAIT

COMMUNICATOR, EVENT = "communicator", "event"
_GATHER, _REDUCE = "all_gather", "reduce_scatter"


def independent_streams(graph: Graph) -> Graph:
    """Remove the start order between streams that share a launch queue."""
    return replace(graph, edges=graph.edges.select(graph.edges.kind != START_ORDER))


def independent_collectives(graph: Graph) -> Graph:
    """Return the graph without the order between collectives of one group on different streams."""
    return replace(graph, edges=graph.edges.select(graph.edges.kind != COMMUNICATOR))


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


SHARED_QUEUE = Cause(
    name="shared-queue", codes=("STREAM002",), kind=Kind.CONTENTION, transform=independent_streams, place=REORDERS,
    summary="work on a stream does not wait until earlier-launched work on other streams has started",
    basis="the start order, where it never differs from the launch order",
)  # fmt: skip
SHARED_COMMUNICATOR = Cause(
    name="shared-communicator", codes=("STREAM002",), kind=Kind.CONTENTION, transform=independent_collectives,
    place=REORDERS, confidence=0.4,
    summary="collectives of one group on different streams overlap",
    basis="the order of collectives in a group, where they never overlap",
)  # fmt: skip
LATE_GATHERS = Cause(
    name="late-gathers", codes=("COMM001",), kind=Kind.COMMUNICATION, transform=prefetch_all_gathers, place=REORDERS,
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
