"""Contention after a change: durations follow the concurrency of the replayed graph.

The recording gives the slowdown of compute by resident collectives, and of preparation and the main compute by each
other (`contention_free`). A replay of the changed graph shows what then runs concurrently, and durations are updated.
Two concurrent streams of kernels share a device: what preparation gains, the main compute loses, also where the
recording never shows them together.
"""

from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.model import intervals
from tracekit.model.columns import rows_by_key
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph import contention_free
from tracekit.replay.graph.dependency_graph import COLLECTIVE, Graph, InsufficientDataError, Replay

Floats = npt.NDArray[np.float64]
_MOST = 0.95


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
    first = changed.replayed
    contention = _remaining_contention(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    if contention is None:
        return changed, first
    ranks = np.arange(graph.count)
    before = _lost_before(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    own_ns = _update_durations(changed.own_ns[ranks], before, _lost(graph, contention, first))
    if (own_ns == changed.own_ns[ranks]).all():
        return changed, first
    again = changed.with_durations(ranks, own_ns)
    return again, again.replayed


def extrapolates(graph: Graph, played: Replay) -> bool:
    """Return whether preparation overlaps main compute in the replay, although the recording never shows that."""
    contention = _contention(graph)
    if contention is None or contention.is_measured:
        return False
    lost = _lost(graph, contention, played).yielded_ns.sum()
    return bool(lost > _GUESSED * graph.own_ns[: graph.count][contention.prepares].sum())


_GUESSED = 0.1  # of the time of preparation: less changes little


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
def _lost_before(graph: Graph, *, slow_preparation: bool, slow_compute: bool) -> "_Lost":
    """Return the loss of each node in the unchanged replay: each change is compared with it."""
    contention = _remaining_contention(graph, slow_preparation=slow_preparation, slow_compute=slow_compute)
    assert contention is not None
    return _lost(graph, contention, graph.replayed)


@memoize
def _contention(graph: Graph) -> _Contention | None:
    """Return the recorded contention; None on a CPU run, or where nothing is slowed."""
    if not graph.on_device:
        return None
    is_kernel = graph.matches("kind", "compute")
    prepares = is_kernel & graph.frame["at"].is_in(graph.prepared["node"].implode()).to_numpy()
    compute_loss = np.zeros(graph.count)
    with suppress(InsufficientDataError):
        node, longer = contention_free.compute_slowdowns(graph)
        compute_loss[node] = longer / (1 + longer)
    measured = contention_free.preparation_slowdown(graph)
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


@dataclass(frozen=True, eq=False)
class _Lost:
    """The loss of each node in a replay: a share of its time to concurrent work, and ns yielded to preparation."""

    share: Floats
    yielded_ns: Floats


def _update_durations(took_ns: Ints, before: _Lost, after: _Lost) -> Ints:
    """Return the updated durations of nodes with a changed loss, at least a twentieth of their time."""
    same = (before.share == after.share) & (before.yielded_ns == after.yielded_ns)
    work = np.maximum(took_ns * (1 - before.share) - before.yielded_ns, (1 - _MOST) * took_ns)
    return np.where(same, took_ns, np.round((work + after.yielded_ns) / (1 - after.share))).astype(np.int64)


def _lost(graph: Graph, contention: _Contention, played: Replay) -> _Lost:
    """Return the loss of each node to concurrent work in a replay.

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
    return _Lost(np.minimum(share, _MOST), yielded)
