"""Transfers as causes: their time, slow links, unbalanced experts, and collectives that are too small."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags
from tracekit.replay.graph.causes.cause import Cause, Kind
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import WORK

_MARKEDLY = 1.15
_SIZES_APART = 1.15
_MIN_LOAD_RATIO = 0.1
"""With fewer tokens, the time of a rank's experts says nothing about their time with the mean."""


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
    """Return the graph with collectives of one op that are launched back to back merged into one.

    The fixed cost of a collective is a least-squares fit of time against size over the medians of sizes. Raises
    InsufficientDataError where sizes differ too little.
    """
    runs = _runs(graph)
    several = runs.filter(pl.len().over("run") > 1)
    if several.is_empty():
        return graph
    with_costs = several.join(costs(transfers(graph)), on="op", maintain_order="left")
    if with_costs.is_empty():
        raise InsufficientDataError("collectives have one size only, so their fixed cost is unknown")
    first = with_costs.group_by("run", maintain_order=True).agg(
        pl.col("done", "fixed_ns", "ns_per_byte").first(), pl.col("bytes").sum()
    )
    own_ns, chain_ns = graph.own_ns.copy(), graph.chain_ns.copy()
    merged = np.setdiff1d(with_costs["done"].to_numpy(), first["done"].to_numpy())
    own_ns[merged] = 0
    whole_ns = first["fixed_ns"].to_numpy() + first["ns_per_byte"].to_numpy() * first["bytes"].to_numpy()
    own_ns[first["done"].to_numpy()] = np.round(whole_ns)
    nodes = graph.parts.filter(pl.col("done").is_in(pl.Series(merged).implode()))["at"].to_numpy()
    calls = graph.launch[nodes]
    calls = calls[calls >= 0]
    own_ns[calls] = 0
    chain_ns[nodes] = 0
    chain_ns[calls] = 0
    return replace(graph, own_ns=own_ns, chain_ns=chain_ns)


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
    name="communication", codes=("COMM001",), kind=Kind.COMMUNICATION, transform=without_transfers, confidence=0.8,
    is_transfer_time=True,
    summary="transfers take no time",
    basis="recorded transfers, without waiting for peers",
)  # fmt: skip
SLOW_LINK = Cause(
    name="slow-link", codes=("RANK002",), kind=Kind.STRAGGLERS, transform=equalize_transfers, place=30, confidence=0.8,
    is_transfer_time=True,
    summary="collectives of one kind and size are as fast in every group and step as in the fastest",
    basis="transfer times by op, size and place, across groups and steps",
)  # fmt: skip
SMALL_COLLECTIVES = Cause(
    name="small-collectives", codes=("COMM002",), kind=Kind.COMMUNICATION, transform=bucket_collectives, place=30,
    confidence=0.7, is_transfer_time=True,
    summary="collectives of one unit are merged into one",
    basis="fixed cost per collective, from time against size of all collectives of the op",
)  # fmt: skip
UNBALANCED_EXPERTS = Cause(
    name="unbalanced-experts", codes=("EP001",), kind=Kind.COMMUNICATION, transform=with_balanced_experts, place=30,
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


def _runs(graph: Graph) -> pl.DataFrame:
    """Return the collectives of the first rank of each: columns of `transfers`, and run.

    A run: collectives of one op, group, step, phase and unit, with no other launch in between.
    """
    calls = transfers(graph)
    launch = graph.launch[calls["at"].to_numpy()]
    other_launches = np.zeros(len(graph.own_ns), np.int64)
    is_other = (graph.launch[: graph.count] >= 0) & (graph.column("what") == WORK)
    is_other[graph.parts["at"].to_numpy()] = False
    work = np.flatnonzero(is_other)
    np.add.at(other_launches, graph.launch[work], 1)
    before = np.cumsum(other_launches)[launch]
    keyed = calls.with_columns(pl.Series("call", launch), pl.Series("others", before)).filter(pl.col("call") >= 0)
    key = ["rank", "group", "op", "step", "phase", "unit", "others"]
    return keyed.sort("call").with_columns(pl.struct(key).rank("dense").alias("run"))


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
