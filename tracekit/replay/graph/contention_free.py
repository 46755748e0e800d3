"""How long work would take if nothing ran beside it, and graphs in which it does."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import intervals
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.dependency_graph import Graph, InsufficientDataError

_ALONE, _BESIDE = 0.02, 0.9
"""Shares of its time in which something runs beside work that counts as alone, and as beside."""
_SAMPLES = 3
_LEAST = 0.005
_KEY = ["rank", "kernel"]


def uncontended_compute(graph: Graph) -> Graph:
    """Let compute take as long beside collectives as alone. Raises InsufficientDataError without samples of both."""
    at, longer = compute_slowdowns(graph)
    told = _compute_nodes(graph)
    own = graph.own_ns.copy()
    own[at] -= np.round(told["beside_ns"].to_numpy() * longer / (1 + longer)).astype(np.int64)
    return replace(graph, own_ns=own)


def compute_slowdowns(graph: Graph) -> tuple[Ints, npt.NDArray[np.float64]]:
    """Return the nodes that compute on devices, and by which share each takes longer beside a collective than alone.

    The same kernel has name, grid, block and input shapes in common (`overlap.Residents`), on one rank. By name, or
    where a name has too few samples over all, work that a collective accompanies for its whole time against work
    without gives the share. Raises InsufficientDataError without samples of both.
    """
    found = _compute_nodes(graph)
    known = found.filter(pl.col("beside_ns") <= _ALONE * pl.col("took_ns"), ~pl.col("crowded"))
    alone = known.group_by(_KEY).agg(pl.col("took_ns").median().alias("alone_ns"))
    beside = found.filter(pl.col("beside_ns") >= _BESIDE * pl.col("took_ns"), ~pl.col("crowded"))
    ratios = beside.join(alone, on=_KEY, nulls_equal=True).with_columns(
        (pl.col("took_ns") / pl.col("alone_ns") - 1).alias("longer")
    )
    if ratios.height < _SAMPLES:
        raise InsufficientDataError(
            "no kernel ran both beside a collective and alone: record a step without communication (no_sync)"
        )
    overall = float(np.average(ratios["longer"].to_numpy(), weights=ratios["alone_ns"].to_numpy()))
    by_name = ratios.group_by("name").agg(pl.col("longer").median(), pl.len().alias("samples"))
    longer = pl.when(pl.col("samples") >= _SAMPLES).then("longer").fill_null(overall)
    told = found.join(by_name, on="name", how="left", maintain_order="left").select(longer)["longer"].to_numpy()
    return found["at"].to_numpy(), np.where(told < _LEAST, 0, told)


def preparation_slowdown(graph: Graph) -> float | None:
    """Return by which share preparation takes longer beside the main compute than alone; None where not known."""
    told = _with_alone(graph).drop_nulls("alone").filter(pl.col("overlapped_ns") >= _BESIDE * pl.col("took_ns"))
    if told.is_empty():
        return None
    return max(0.0, float(told["took_ns"].to_numpy().sum() / max(1, told["alone"].to_numpy().sum()) - 1))


def uncontended_collectives(graph: Graph) -> Graph:
    """Let collectives take as long beside compute as alone, at the same op, group and size.

    Where no size ran both beside and alone, time per byte of the nearest size is compared. Raises InsufficientDataError
    without samples of both.
    """
    found = _collective_nodes(graph)
    share = pl.col("beside_ns") / pl.col("took_ns")
    alone = found.filter(share <= _ALONE)
    beside = found.filter(share >= _BESIDE)
    same = ["op", "group", "bytes"]
    ratios = _slowdowns(beside, alone, same)
    for other in (["op", "group_size"], ["group_size"]):
        ratios = ratios if ratios.height >= _SAMPLES else _slowdowns(beside, alone, other)
    if ratios.height < _SAMPLES:
        raise InsufficientDataError("no collective of one kind ran both beside compute and alone")
    by_op = ratios.group_by("op").agg(pl.col("longer").median(), pl.len().alias("samples"))
    told = found.join(by_op, on="op", how="left", maintain_order="left")
    longer = told["longer"].fill_null(float(ratios["longer"].median() or 0)).to_numpy()  # type: ignore[arg-type]
    longer = np.where(longer < _LEAST, 0, longer)
    own = graph.own_ns.copy()
    own[told["done"].to_numpy()] -= np.round(told["beside_ns"].to_numpy() * longer / (1 + longer)).astype(np.int64)
    return replace(graph, own_ns=own)


def without_preparation(graph: Graph) -> Graph:
    """Let preparation take no time."""
    if graph.prepared.is_empty():
        raise InsufficientDataError("no work of a device prepares collectives")
    own = graph.own_ns.copy()
    own[graph.prepared["node"].to_numpy()] = 0
    return replace(graph, own_ns=own)


def without_give_way(graph: Graph) -> Graph:
    """Let preparation take as long as the same kernel alone: of the same message, else by its time per byte of one."""
    slowed = _with_alone(graph).filter(pl.col("overlapped_ns") > 0)
    if slowed.height and slowed["alone"].null_count() == slowed.height:
        raise InsufficientDataError("no preparation ran alone: record a step without compute beside it")
    own = graph.own_ns.copy()
    known = slowed.drop_nulls("alone")
    own[known["node"].to_numpy()] = np.minimum(known["took_ns"].to_numpy(), known["alone"].to_numpy())
    return replace(graph, own_ns=own)


def _with_alone(graph: Graph) -> pl.DataFrame:
    """Return preparation (columns of `graph.prepared`, took_ns) with what it takes alone (null: not known)."""
    node = graph.prepared["node"].to_numpy()
    names = graph.frame.select("rank", "lane", "name")[node]
    work = pl.concat([graph.prepared.drop("rank"), names], how="horizontal").with_columns(
        pl.Series("took_ns", graph.own_ns[node])
    )
    parts = pl.len().over("collective", "name")
    work = work.with_columns((pl.col("message_bytes") / parts).alias("part_bytes"))
    lone = work.filter(pl.col("overlapped_ns") <= _ALONE * pl.col("took_ns"), pl.col("part_bytes") > 0)
    rates = lone.group_by("name").agg((pl.col("took_ns") / pl.col("part_bytes")).median().alias("ns_per_byte"))
    scaled = (pl.col("ns_per_byte") * pl.col("part_bytes")).round().cast(pl.Int64)
    told = work.join(rates, on="name", how="left", maintain_order="left")
    return told.with_columns(pl.coalesce("alone_ns", scaled).alias("alone"))


def _slowdowns(beside: pl.DataFrame, alone: pl.DataFrame, same: list[str]) -> pl.DataFrame:
    per_byte = (pl.col("took_ns") / pl.col("bytes")).median().alias("alone_per_byte")
    rates = alone.filter(pl.col("bytes") > 0).group_by(same).agg(per_byte)
    joined = beside.filter(pl.col("bytes") > 0).join(rates, on=same, nulls_equal=True)
    return joined.with_columns((pl.col("took_ns") / pl.col("bytes") / pl.col("alone_per_byte") - 1).alias("longer"))


def _compute_nodes(graph: Graph) -> pl.DataFrame:
    """Return the compute of devices: at (node), _KEY, name, took_ns, beside_ns (of it beside collectives), crowded.

    Crowded is what preparation ran beside.
    """
    frame = graph.frame.with_columns(
        pl.int_range(pl.len()).cast(pl.Int64).alias("at"), pl.Series("took_ns", graph.own_ns[: graph.count])
    ).filter(pl.col("device").is_not_null(), pl.col("kind").is_not_null())
    if frame.is_empty():
        raise InsufficientDataError(
            "the run was on the CPU, where nothing tells compute alone from compute beside others"
        )
    prepares = frame["at"].is_in(graph.prepared["node"].implode())
    calls, mine = frame["kind"] == "communication", (frame["kind"] == "compute") & ~prepares & (frame["took_ns"] > 0)
    chosen = frame.filter(mine)
    beside = overlapped_ns(frame, mine.to_numpy(), calls.to_numpy())
    crowd = overlapped_ns(
        frame, mine.to_numpy(), (prepares | (frame["kind"] == "compute") & ~_on_main(frame)).to_numpy()
    )
    return chosen.select(
        "at", *_KEY, "name", "took_ns", pl.Series("beside_ns", beside), pl.Series("crowded", crowd > 0)
    ).filter(pl.col("took_ns") > 0)


def _on_main(frame: pl.DataFrame) -> pl.Series:
    """Return what lies on the lane of each device that computes most."""
    busy = frame.filter(pl.col("kind") == "compute").group_by("rank", "device", "lane").agg(pl.col("took_ns").sum())
    main = busy.sort("took_ns", "lane", descending=[True, False]).unique(["rank", "device"], keep="first")
    told = frame.join(
        main.select("rank", "lane", main=pl.lit(True)), on=["rank", "lane"], how="left", maintain_order="left"
    )
    return told["main"].fill_null(value=False)


def _collective_nodes(graph: Graph) -> pl.DataFrame:
    """Return the collectives: done (node), op, group, group_size, bytes, took_ns, beside_ns (beside compute)."""
    if not graph.frame["device"].is_not_null().any():
        raise InsufficientDataError(
            "the run was on the CPU, where nothing tells collectives alone from those beside compute"
        )
    took = graph.own_ns[graph.parts["done"].to_numpy()]
    ends = graph.frame[graph.parts["at"].to_numpy()].select("end_ns", "device", "rank")
    calls = pl.concat([graph.parts.drop("rank"), ends], how="horizontal").with_columns(pl.Series("took_ns", took))
    calls = calls.with_columns((pl.col("end_ns") - pl.col("took_ns")).alias("start_ns"))
    compute = graph.frame.filter(pl.col("kind") == "compute").select("start_ns", "end_ns", "device", "rank")
    both = pl.concat([calls.select(compute.columns), compute])
    is_call = np.arange(len(both)) < len(calls)
    beside = pl.Series("beside_ns", overlapped_ns(both, is_call, ~is_call))
    each = calls.with_columns(beside).filter(pl.col("took_ns") > 0)
    return each.group_by("done", maintain_order=True).agg(
        pl.col("op", "group", "group_size", "bytes", "took_ns").first(), pl.col("beside_ns").max()
    )


def overlapped_ns(frame: pl.DataFrame, which: Flags, by: Flags) -> Ints:
    """Return how much of each row `which` lies beside rows `by` of the same rank and device, in ns."""
    spans = np.stack((frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()), axis=1)
    place = frame.select(pl.struct("rank", "device").rank("dense")).to_series().to_numpy()
    found = np.zeros(len(frame), np.int64)
    for each in np.unique(place):
        here = place == each
        rows = np.flatnonzero(here & which)
        found[rows] = intervals.coverage(spans[rows], intervals.union(spans[here & by]))
    return found[which]
