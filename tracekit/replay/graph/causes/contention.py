"""Contention as a cause, and after a change: durations follow the concurrency of the replayed graph.

The recording gives the slowdown of compute by resident collectives, and of preparation and the main compute by each
other (`compute_slowdowns`, `preparation_slowdown`). A replay of the changed graph
shows what then runs concurrently, and durations are updated. Two concurrent streams of kernels share a device: what
preparation gains, the main compute loses, also where the recording never shows them together.
"""

from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import intervals
from tracekit.model.columns import rows_by_key
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.causes.cause import Cause, Contention, Kind
from tracekit.replay.graph.dependency_graph import COLLECTIVE, Graph, InsufficientDataError, Replay

Floats = npt.NDArray[np.float64]
_MOST = 0.95
_GUESSED = 0.1  # of the time of preparation: less changes little
_ALONE, _OVERLAPPED = 0.02, 0.9
"""Work counts as alone up to the first share of overlapped time, as overlapped from the second."""
_SAMPLES = 3
_LEAST = 0.005
_KEY = ["rank", "kernel"]
_CONCURRENT = {
    "communication": "a collective and alone: record a step without communication (no_sync)",
    "memcpy": "a copy and alone: record a step without the copies",
}
"""What the data lacks where no kernel ran both with and without concurrent work of a kind."""


def uncontended_compute(graph: Graph, by: str = "communication") -> Graph:
    """Return the graph with compute at its speed without concurrent work of the kind `by`.

    Raises InsufficientDataError without samples.
    """
    node, slowdown = compute_slowdowns(graph, by)
    compute = _compute_nodes(graph, by)
    lost_ns = np.round(compute["overlap_ns"].to_numpy() * slowdown / (1 + slowdown)).astype(np.int64)
    return graph.with_durations(node, graph.own_ns[node] - lost_ns)


def compute_slowdowns(graph: Graph, by: str = "communication") -> tuple[Ints, npt.NDArray[np.float64]]:
    """Return the compute nodes of devices, and the relative slowdown of each by concurrent collectives, or copies.

    The same kernel has equal name, grid, block and input shapes (`contention.DeviceWork`) on one rank. The slowdown
    compares work that work of the kind `by` overlaps for its whole time with work without, by name, or over all names
    where one has too few samples. Raises InsufficientDataError without samples of both.
    """
    compute = _compute_nodes(graph, by)
    solo = compute.filter(pl.col("overlap_ns") <= _ALONE * pl.col("took_ns"), ~pl.col("crowded"))
    solo_ns = solo.group_by(_KEY).agg(pl.col("took_ns").median().alias("alone_ns"))
    overlapped = compute.filter(pl.col("overlap_ns") >= _OVERLAPPED * pl.col("took_ns"), ~pl.col("crowded"))
    ratios = overlapped.join(solo_ns, on=_KEY, nulls_equal=True).with_columns(
        (pl.col("took_ns") / pl.col("alone_ns") - 1).alias("longer")
    )
    if ratios.height < _SAMPLES:
        raise InsufficientDataError(f"no kernel ran both overlapped by {_CONCURRENT[by]}")
    overall = float(np.average(ratios["longer"].to_numpy(), weights=ratios["alone_ns"].to_numpy()))
    by_name = ratios.group_by("name").agg(pl.col("longer").median(), pl.len().alias("samples"))
    longer = pl.when(pl.col("samples") >= _SAMPLES).then("longer").fill_null(overall)
    slowdown = compute.join(by_name, on="name", how="left", maintain_order="left").select(longer)["longer"].to_numpy()
    return compute["at"].to_numpy(), np.where(slowdown < _LEAST, 0, slowdown)


def preparation_slowdown(graph: Graph) -> float | None:
    """Return the relative slowdown of preparation by the main compute; None where unknown."""
    overlapped = (
        _with_alone(graph).drop_nulls("alone").filter(pl.col("overlapped_ns") >= _OVERLAPPED * pl.col("took_ns"))
    )
    if overlapped.is_empty():
        return None
    return max(0.0, float(overlapped["took_ns"].to_numpy().sum() / max(1, overlapped["alone"].to_numpy().sum()) - 1))


def uncontended_collectives(graph: Graph) -> Graph:
    """Return the graph with collectives at their speed without compute, at the same op, group and size.

    Where no size ran both overlapped and alone, the time per byte of the nearest size is compared. Raises
    InsufficientDataError without samples of both.
    """
    collectives = _collective_nodes(graph)
    share = pl.col("overlap_ns") / pl.col("took_ns")
    solo = collectives.filter(share <= _ALONE)
    overlapped = collectives.filter(share >= _OVERLAPPED)
    same = ["op", "group", "bytes"]
    ratios = _slowdowns(overlapped, solo, same)
    for other in (["op", "group_size"], ["group_size"]):
        ratios = ratios if ratios.height >= _SAMPLES else _slowdowns(overlapped, solo, other)
    if ratios.height < _SAMPLES:
        raise InsufficientDataError("no collective of one kind ran both overlapped by compute and alone")
    by_op = ratios.group_by("op").agg(pl.col("longer").median(), pl.len().alias("samples"))
    calls = collectives.join(by_op, on="op", how="left", maintain_order="left")
    slowdown = calls["longer"].fill_null(float(ratios["longer"].median() or 0)).to_numpy()  # type: ignore[arg-type]
    slowdown = np.where(slowdown < _LEAST, 0, slowdown)
    lost_ns = np.round(calls["overlap_ns"].to_numpy() * slowdown / (1 + slowdown)).astype(np.int64)
    done = calls["done"].to_numpy()
    return graph.with_durations(done, graph.own_ns[done] - lost_ns)


def without_preparation(graph: Graph) -> Graph:
    """Return the graph with zero time for preparation. Raises InsufficientDataError if there is none."""
    if graph.prepared.is_empty():
        raise InsufficientDataError("no device work prepares collectives")
    return graph.with_durations(graph.prepared["node"].to_numpy(), 0)


def without_give_way(graph: Graph) -> Graph:
    """Return the graph with preparation at the solo speed of the same kernel: same message, else by time per byte.

    Raises InsufficientDataError if no preparation ran alone.
    """
    slowed = _with_alone(graph).filter(pl.col("overlapped_ns") > 0)
    if slowed.height and slowed["alone"].null_count() == slowed.height:
        raise InsufficientDataError("no preparation ran alone: record a step without concurrent compute")
    comparable = slowed.drop_nulls("alone")
    shorter_ns = np.minimum(comparable["took_ns"].to_numpy(), comparable["alone"].to_numpy())
    return graph.with_durations(comparable["node"].to_numpy(), shorter_ns)


def apply_contention(
    graph: Graph, changed: Graph, *, slow_preparation: bool = True, slow_compute: bool = True
) -> tuple[Graph, Replay]:
    """Return a changed graph with durations updated for its remaining contention, and its replay.

    Without `slow_preparation`, preparation and compute no longer slow each other; without `slow_compute`, collectives
    no longer slow compute. Raises InsufficientDataError where the change creates a cycle of waits between ranks.
    """
    if (changed.edges.kind == COLLECTIVE).sum() < (graph.edges.kind == COLLECTIVE).sum():
        raise InsufficientDataError(
            "the change creates a cycle of waits between ranks: some inferred waits must be wrong"
        )
    first = changed.replay
    contention = _remaining_contention(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    if contention is None:
        return changed, first
    ranks = np.arange(graph.count)
    share, yielded_ns = _lost_before(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    new_share, new_yielded_ns = _lost(graph, contention, first)
    took_ns = changed.own_ns[ranks]
    same = (share == new_share) & (yielded_ns == new_yielded_ns)
    work_ns = np.maximum(took_ns * (1 - share) - yielded_ns, (1 - _MOST) * took_ns)
    longer_ns = np.round((work_ns + new_yielded_ns) / (1 - new_share))
    own_ns = np.where(same, took_ns, longer_ns).astype(np.int64)
    if (own_ns == took_ns).all():
        return changed, first
    again = changed.with_durations(ranks, own_ns)
    return again, again.replay


def extrapolates(graph: Graph, played: Replay) -> bool:
    """Return whether preparation overlaps main compute in the replay, although the recording never shows that."""
    contention = _contention(graph)
    if contention is None or contention.is_measured:
        return False
    lost = _lost(graph, contention, played)[1].sum()
    return bool(lost > _GUESSED * graph.own_ns[: graph.count][contention.prepares].sum())


SLOWED_COMPUTE = Cause(
    name="slowed-compute",
    loss="compute that concurrent collectives slow",
    codes=("STREAM003",), kind=Kind.CONTENTION, transform=uncontended_compute, place=20,
    confidence=0.7, removed_contention=Contention.COMPUTE,
    summary="compute is as fast with concurrent collectives as alone",
    basis="the same kernel (name, grid, shapes) alone and overlapped by collectives",
)  # fmt: skip
SLOWED_BY_COPIES = Cause(
    name="slowed-by-copies",
    loss="compute that concurrent copies slow",
    codes=("STREAM006",), kind=Kind.CONTENTION, transform=partial(uncontended_compute, by="memcpy"), place=20,
    confidence=0.7,
    summary="compute is as fast with concurrent copies as alone",
    basis="the same kernel (name, grid, shapes) alone and overlapped by copies of other streams",
)  # fmt: skip
SLOWED_COLLECTIVES = Cause(
    name="slowed-collectives",
    loss="collectives that concurrent compute slows",
    codes=("STREAM004",), kind=Kind.CONTENTION, transform=uncontended_collectives, place=21,
    confidence=0.7, is_transfer_time=True,
    summary="collectives are as fast with concurrent compute as alone",
    basis="collectives of the same op, group and size, alone and overlapped by compute",
)  # fmt: skip
PREPARATION = Cause(
    name="preparation",
    loss="preparation of collectives",
    codes=("COMM004",), kind=Kind.COMMUNICATION, transform=without_preparation, confidence=0.6,
    removed_contention=Contention.PREPARATION,
    summary="no copy, cast or division is needed before a collective",
    basis="work under a collective's span, or directly before it on its stream",
)  # fmt: skip
GIVE_WAY = Cause(
    name="give-way",
    loss="preparation that concurrent compute slows",
    codes=("STREAM001",), kind=Kind.CONTENTION, transform=without_give_way, place=21, confidence=0.8,
    removed_contention=Contention.PREPARATION,
    summary="preparation of a collective is as fast with concurrent compute as alone",
    basis="the same kernel alone, by time per byte where message sizes differ",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class _Contention:
    """The main compute, preparation and collectives of devices, and the relative loss of each by overlap.

    With a collective, `compute_loss` of each node's time is lost; preparation loses `preparation_loss` to main compute,
    and main compute `main_loss` to preparation.
    """

    main: Flags
    prepares: Flags
    communicates: Flags
    place: Ints
    compute_loss: Floats
    preparation_loss: float
    main_loss: float
    is_measured: bool
    """Whether preparation overlaps main compute in the recording; if not, it is assumed as fast there as alone."""


def _remaining_contention(graph: Graph, *, slow_preparation: bool, slow_compute: bool) -> _Contention | None:
    """Return the recorded contention without what `apply_contention` leaves out."""
    contention = _contention(graph)
    if contention is None:
        return None
    if not slow_preparation:
        contention = replace(contention, preparation_loss=0.0, main_loss=0.0)
    if not slow_compute:
        contention = replace(contention, compute_loss=np.zeros_like(contention.compute_loss))
    return contention


@memoize
def _lost_before(graph: Graph, *, slow_preparation: bool, slow_compute: bool) -> tuple[Floats, Floats]:
    """Return the loss of each node in the unchanged replay: each change is compared with it."""
    contention = _remaining_contention(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    assert contention is not None
    return _lost(graph, contention, graph.replay)


@memoize
def _contention(graph: Graph) -> _Contention | None:
    """Return the recorded contention; None on a CPU run, or where nothing is slowed."""
    if not graph.on_device:
        return None
    is_kernel = graph.matches("kind", "compute")
    prepares = is_kernel & graph.frame["at"].is_in(graph.prepared["node"].implode()).to_numpy()
    compute_loss = np.zeros(graph.count)
    with suppress(InsufficientDataError):
        node, longer = compute_slowdowns(graph)
        compute_loss[node] = longer / (1 + longer)
    measured = preparation_slowdown(graph)
    slowdown = measured or 0.0
    if not compute_loss.any() and not prepares.any():
        return None
    place = graph.frame["rank"].fill_null(-1).to_numpy() * 4096 + graph.frame["device"].fill_null(-1).to_numpy() + 1
    return _Contention(
        is_kernel & ~prepares,
        prepares,
        graph.matches("kind", "communication"),
        place,
        compute_loss,
        slowdown / (1 + slowdown),
        1 / (1 + slowdown),
        measured is not None,
    )


def _lost(graph: Graph, contention: _Contention, played: Replay) -> tuple[Floats, Floats]:
    """Loss of each node in a replay: a share of its time to concurrent work, and ns yielded to preparation.

    Collectives and main compute slow concurrent work for as long as they overlap it. Main compute yields to
    preparation, which then ends: main compute ends later by that time, in this kernel or the next.
    """
    start, end = played.start_ns[: graph.count], played.end_ns[graph.done]
    spans = np.stack((start, end), axis=1)
    took = np.maximum(end - start, 1)
    share, yielded = np.zeros(graph.count), np.zeros(graph.count)
    kinds = (contention.main, contention.prepares, contention.communicates)
    of_place = [
        {key: rows[index] for key, index in rows_by_key(contention.place[rows]).items()}
        for rows in map(np.flatnonzero, kinds)
    ]
    none = np.empty(0, np.int64)
    for place in of_place[0]:
        main, prepares, carries = (rows.get(place, none) for rows in of_place)
        in_calls = intervals.coverage(spans[main], intervals.union(spans[carries])) / took[main]
        share[main] = contention.compute_loss[main] * in_calls
        if len(prepares):
            in_main = intervals.coverage(spans[prepares], intervals.union(spans[main])) / took[prepares]
            share[prepares] = contention.preparation_loss * in_main
            yielded[main] = contention.main_loss * intervals.coverage(spans[main], intervals.union(spans[prepares]))
    return np.minimum(share, _MOST), yielded


def _with_alone(graph: Graph) -> pl.DataFrame:
    """Return preparation (columns of `graph.prepared`, took_ns) with its solo duration (null: unknown)."""
    node = graph.prepared["node"].to_numpy()
    names = pl.DataFrame([graph.frame[name].gather(node) for name in ("rank", "lane", "name")])
    work = pl.concat([graph.prepared.drop("rank"), names], how="horizontal").with_columns(
        pl.Series("took_ns", graph.own_ns[node])
    )
    parts = pl.len().over("collective", "name")
    work = work.with_columns((pl.col("message_bytes") / parts).alias("part_bytes"))
    lone = work.filter(pl.col("overlapped_ns") <= _ALONE * pl.col("took_ns"), pl.col("part_bytes") > 0)
    rates = lone.group_by("name").agg((pl.col("took_ns") / pl.col("part_bytes")).median().alias("ns_per_byte"))
    scaled = (pl.col("ns_per_byte") * pl.col("part_bytes")).round().cast(pl.Int64)
    with_rates = work.join(rates, on="name", how="left", maintain_order="left")
    return with_rates.with_columns(pl.coalesce("alone_ns", scaled).alias("alone"))


def _slowdowns(overlapped: pl.DataFrame, solo: pl.DataFrame, same: list[str]) -> pl.DataFrame:
    per_byte = (pl.col("took_ns") / pl.col("bytes")).median().alias("alone_per_byte")
    rates = solo.filter(pl.col("bytes") > 0).group_by(same).agg(per_byte)
    joined = overlapped.filter(pl.col("bytes") > 0).join(rates, on=same, nulls_equal=True)
    return joined.with_columns((pl.col("took_ns") / pl.col("bytes") / pl.col("alone_per_byte") - 1).alias("longer"))


def _compute_nodes(graph: Graph, by: str) -> pl.DataFrame:
    """Return the compute of devices: at (node), _KEY, name, took_ns, overlap_ns (with work of the kind `by`), crowded.

    crowded: preparation, or where copies are compared a collective, overlapped it.
    """
    took = pl.Series("took_ns", graph.own_ns[: graph.count])
    frame = graph.frame.select("at", *_KEY, "name", "device", "kind", "start_ns", "end_ns", took).filter(
        pl.col("device").is_not_null(), pl.col("kind").is_not_null()
    )
    if frame.is_empty():
        raise InsufficientDataError(
            "no device activity was recorded; on the CPU, concurrent compute cannot be identified"
        )
    prepares = frame["at"].is_in(graph.prepared["node"].implode())
    concurrent, calls, computes = (frame["kind"] == kind for kind in (by, "communication", "compute"))
    off_main = ~pl.Series(graph.is_main_lane[frame["at"].to_numpy()])
    is_compute = computes & ~prepares & (frame["took_ns"] > 0)
    overlap = overlapped_ns(frame, is_compute.to_numpy(), concurrent.to_numpy())
    others = prepares | computes & off_main | calls & ~concurrent
    crowded = overlapped_ns(frame, is_compute.to_numpy(), others.to_numpy()) > 0
    return frame.filter(is_compute).select(
        "at", *_KEY, "name", "took_ns", pl.Series("overlap_ns", overlap), pl.Series("crowded", crowded)
    )


def _collective_nodes(graph: Graph) -> pl.DataFrame:
    """Return the collectives: done (node), op, group, group_size, bytes, took_ns, overlap_ns (with compute)."""
    if not graph.on_device:
        raise InsufficientDataError(
            "no device activity was recorded; on the CPU, concurrent compute cannot be identified"
        )
    took = graph.own_ns[graph.parts["done"].to_numpy()]
    part_nodes = graph.parts["at"].to_numpy()
    ends = pl.DataFrame([graph.frame[name].gather(part_nodes) for name in ("end_ns", "device", "rank")])
    calls = pl.concat([graph.parts.drop("rank"), ends], how="horizontal").with_columns(pl.Series("took_ns", took))
    calls = calls.with_columns((pl.col("end_ns") - pl.col("took_ns")).alias("start_ns"))
    work = graph.frame.select("start_ns", "end_ns", "device", "rank", "kind")
    compute = work.filter(pl.col("kind") == "compute").drop("kind")
    both = pl.concat([calls.select(compute.columns), compute])
    is_call = np.arange(len(both)) < len(calls)
    overlap = pl.Series("overlap_ns", overlapped_ns(both, is_call, ~is_call))
    overlapped = calls.with_columns(overlap).filter(pl.col("took_ns") > 0)
    return overlapped.group_by("done", maintain_order=True).agg(
        pl.col("op", "group", "group_size", "bytes", "took_ns").first(), pl.col("overlap_ns").max()
    )


def overlapped_ns(frame: pl.DataFrame, which: Flags, by: Flags) -> Ints:
    """Overlap of each row of `which` with the rows `by` of the same rank and device, in ns."""
    spans = np.stack((frame["start_ns"].to_numpy(), frame["end_ns"].to_numpy()), axis=1)
    place = frame.select(pl.struct("rank", "device").rank("dense")).to_series().to_numpy().astype(np.int64)
    overlap_ns = np.zeros(len(frame), np.int64)
    for device_rows in rows_by_key(place).values():
        rows = device_rows[which[device_rows]]
        overlap_ns[rows] = intervals.coverage(spans[rows], intervals.union(spans[device_rows[by[device_rows]]]))
    return overlap_ns[which]
