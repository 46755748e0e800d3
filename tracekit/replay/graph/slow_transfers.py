"""Slow transfers: over slow links, or split into too many collectives."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import WORK

_MARKEDLY = 1.15
_SIZES_APART = 1.15


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
    sizes = calls.filter(pl.col("bytes") > 0).group_by("op", "bytes").agg(pl.col("took_ns").median())
    rows = []
    for (op,), op_sizes in sizes.group_by("op"):
        x, y = op_sizes["bytes"].to_numpy().astype(float), op_sizes["took_ns"].to_numpy().astype(float)
        if len(x) < 2 or x.max() < _SIZES_APART * x.min():
            continue
        slope, fixed = np.polyfit(x, y, 1)
        rows.append((op, max(0.0, float(fixed)), max(0.0, float(slope))))
    return pl.DataFrame(rows, schema={"op": pl.String, "fixed_ns": pl.Float64, "ns_per_byte": pl.Float64}, orient="row")
