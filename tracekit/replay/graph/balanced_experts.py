"""Experts of a mixture that all get equally many tokens: shorter waits for the rank that gets most."""

import numpy as np
import polars as pl

from tracekit.replay.graph import slow_transfers
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError

_MIN_LOAD_RATIO = 0.1
"""With fewer tokens, the time of a rank's experts says nothing about their time with the mean."""


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
    fixed = slow_transfers.costs(took).select("op", "fixed_ns")
    sides = [pairs.select("most_ratio", done=f"{side}_done") for side in ("from", "to")]
    of_pairs = pl.concat(sides).group_by("done").agg(pl.col("most_ratio").max())
    transfers = of_pairs.join(took, on="done").join(fixed, on="op", how="left")
    fixed_ns = pl.min_horizontal(pl.col("fixed_ns").fill_null(0), "took_ns")
    balanced = transfers.select("done", ns=fixed_ns + (pl.col("took_ns") - fixed_ns) / pl.col("most_ratio"))
    return balanced["done"].to_numpy(), balanced["ns"].to_numpy()
