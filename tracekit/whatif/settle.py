"""Contention after a change: what no longer runs side by side is no longer slowed, what now does is.

How much compute is slowed by resident collectives, preparation by the main compute, and that by preparation, is
measured on the recording (`beside`); a replay of the changed graph says what then runs beside what, and durations
follow.
"""

from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from tracekit import intervals
from tracekit.analysis.sweep import Flags, Ints
from tracekit.whatif import beside
from tracekit.whatif.cannot import CannotTellError
from tracekit.whatif.graph import Graph, Replayed

Floats = npt.NDArray[np.float64]
_MOST = 0.95


@dataclass(frozen=True, eq=False)
class _Contention:
    """Which nodes are the main compute, preparation and collectives of devices, and what they lose beside each other.

    Of the time beside a collective `compute_loss` of each node is lost; of that beside main compute `preparation_loss`;
    of main compute's beside preparation `main_loss`.
    """

    main: Flags
    prepares: Flags
    carries: Flags
    place: Ints
    compute_loss: Floats
    preparation_loss: float
    main_loss: float


def settled(graph: Graph, changed: Graph, *, crawling: bool = True) -> tuple[Graph, Replayed]:
    """Return a changed graph with its durations as the contention left in it makes them, and its replay.

    Without `crawling`, preparation and compute no longer slow each other.
    """
    first = changed.replayed
    known = _contention(graph)
    if known is not None and not crawling:
        known = replace(known, preparation_loss=0.0, main_loss=0.0)
    if known is None:
        return changed, first
    before, after = _kept(graph, known, graph.replayed), _kept(graph, known, first)
    own = changed.own_ns.copy()
    factor = before / after
    ranks = slice(0, graph.count)
    own[ranks] = np.where(factor == 1, own[ranks], np.round(own[ranks] * factor))
    if (own == changed.own_ns).all():
        return changed, first
    again = replace(changed, own_ns=own)
    return again, again.replayed


_CONTENTION: WeakKeyDictionary[Graph, _Contention | None] = WeakKeyDictionary()


def _contention(graph: Graph) -> _Contention | None:
    if graph not in _CONTENTION:
        _CONTENTION[graph] = _measured(graph) if graph.frame["device"].is_not_null().any() else None
    return _CONTENTION[graph]


def _measured(graph: Graph) -> _Contention | None:
    kind = graph.frame["kind"].fill_null("")
    carries = (kind == "communication").to_numpy()
    prepares = np.zeros(graph.count, bool)
    prepares[graph.prepared["node"].to_numpy()] = True
    computes = (kind == "compute").to_numpy() & ~prepares
    compute_loss = np.zeros(graph.count)
    try:
        at, longer = beside.longer_beside_collectives(graph)
        compute_loss[at] = longer / (1 + longer)
    except CannotTellError:
        pass
    crawl = beside.crawl(graph)
    main_loss = 1 / (1 + crawl) if crawl else 0.0  # what preparation gets is missing from the main compute
    if not compute_loss.any() and not crawl:
        return None
    place = graph.frame["rank"].fill_null(-1).to_numpy() * 4096 + graph.frame["device"].fill_null(-1).to_numpy() + 1
    return _Contention(computes, prepares, carries, place, compute_loss, crawl / (1 + crawl), main_loss)


def _kept(graph: Graph, known: _Contention, played: Replayed) -> Floats:
    """Return the share of each node's time that is not lost to what runs beside it in a replay."""
    start, end = played.start_ns[: graph.count], played.end_ns[graph.done]
    spans = np.stack((start, end), axis=1)
    took = np.maximum(end - start, 1)
    kept = np.ones(graph.count)
    for place in np.unique(known.place[known.main]):
        here = known.place == place
        main, prepares, carries = (
            np.flatnonzero(here & which) for which in (known.main, known.prepares, known.carries)
        )
        beside_calls = intervals.coverage(spans[main], intervals.union(spans[carries])) / took[main]
        kept[main] -= known.compute_loss[main] * beside_calls
        if known.preparation_loss and len(prepares):
            kept[main] -= (
                known.main_loss * intervals.coverage(spans[main], intervals.union(spans[prepares])) / took[main]
            )
            covered = intervals.coverage(spans[prepares], intervals.union(spans[main])) / took[prepares]
            kept[prepares] -= known.preparation_loss * covered
    return np.maximum(kept, 1 - _MOST)
