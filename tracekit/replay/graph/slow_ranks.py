"""Ranks with slower work than their peers, and a graph without the difference."""

from dataclasses import replace

import numpy as np
import polars as pl

from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError
from tracekit.replay.graph.nodes import HOST

_MARKEDLY = 1.04
_STEP = ["rank", "step"]
_PLACE = [*_STEP, "part", "phase"]


def equalize_ranks(graph: Graph) -> Graph:
    """Return the graph with each slow rank of a step at the speed of its peers, phase by phase.

    Compute and host time of a rank are scaled to the median of the other ranks, in steps in which its sum exceeds
    theirs by 4%. Raises InsufficientDataError for a single rank.
    """
    ranks = graph.frame["rank"].n_unique()
    if ranks < 2:
        raise InsufficientDataError("comparing ranks needs the traces of at least two")
    work = _work(graph)
    slow = work.join(_factors(work), on=_PLACE, how="inner", nulls_equal=True)
    host = slow.filter(pl.col("part") == "host")
    chain_ns, at = graph.chain_ns.copy(), host["at"].to_numpy()
    chain_ns[at] = np.round(chain_ns[at] * host["factor"].to_numpy())
    busy = slow.filter((pl.col("part") == "compute") | pl.col("kind").is_null())
    at = busy["at"].to_numpy()
    scaled_ns = np.round(graph.own_ns[at] * busy["factor"].to_numpy())
    return replace(graph.with_durations(at, scaled_ns), chain_ns=chain_ns)


def _work(graph: Graph) -> pl.DataFrame:
    """Return each rank's own work: at (node), rank, step, phase, kind, part (compute, host), took_ns."""
    columns = ("at", "rank", "step", "phase", "kind")
    own_ns, chain_ns = graph.own_ns[: graph.count], graph.chain_ns[: graph.count]
    frame = graph.frame.select(*columns, "what", own_ns=pl.Series(own_ns), chain_ns=pl.Series(chain_ns))
    compute = frame.filter(pl.col("kind").is_not_null() & (pl.col("kind") != "communication"))
    # On a CPU run a host node is also an op: its own time is compute, the time before it host time.
    host_ns = pl.col("chain_ns") + pl.when(pl.col("kind").is_null()).then("own_ns").otherwise(0)
    host = frame.filter(pl.col("what") == HOST)
    return pl.concat([
        compute.select(*columns, part=pl.lit("compute"), took_ns="own_ns"),
        host.select(*columns, part=pl.lit("host"), took_ns=host_ns),
    ])  # fmt: skip


def _factors(work: pl.DataFrame) -> pl.DataFrame:
    """Return the factor to the peers' speed for each rank, step, part and phase in which the rank is slow."""
    by_place = work.group_by(_PLACE).agg(pl.col("took_ns").sum())
    by_step = by_place.group_by([*_STEP, "part"]).agg(pl.col("took_ns").sum())
    slow = _with_peers(by_step, ["step", "part"]).filter(
        pl.col("took_ns") > _MARKEDLY * pl.col("peers_ns"), pl.col("peers_ns") > 0
    )
    each = _with_peers(by_place, ["step", "part", "phase"])
    chosen = each.join(slow.select(*_STEP, "part"), on=[*_STEP, "part"], how="semi", nulls_equal=True)
    factor = (pl.col("peers_ns") / pl.col("took_ns")).clip(0, 1)
    return chosen.filter(pl.col("took_ns") > 0).select(*_PLACE, factor.alias("factor"))


def _with_peers(table: pl.DataFrame, place: list[str]) -> pl.DataFrame:
    """Return the table with the median of the other ranks at each place."""
    others = table.select(*place, pl.col("rank").alias("other"), pl.col("took_ns").alias("other_ns"))
    paired = table.join(others, on=place, how="left", nulls_equal=True).filter(pl.col("rank") != pl.col("other"))
    medians = paired.group_by(["rank", *place]).agg(pl.col("other_ns").median().alias("peers_ns"))
    return table.join(medians, on=["rank", *place], how="inner", nulls_equal=True)
