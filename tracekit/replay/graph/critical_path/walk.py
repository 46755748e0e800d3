"""The walk from the end of a step to its start, from each node to the wait that ended last."""

from typing import NamedTuple

import numpy as np

from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.critical_path.recorded_times import RecordedTimes
from tracekit.replay.graph.dependency_graph import COLLECTIVE

NEVER = np.iinfo(np.int64).max // 4
"""From this time on a latest end means that nothing before the deadline waits for the node."""


class Span(NamedTuple):
    """A time on the path, in ns since the window's origin: a node's own time, or the lag of its binding wait.

    `wait` is -1 for a node's own time. `node` is -1 where nothing before is recorded. `row` is the node among those of
    ranks that owns the time: of a collective, the part that arrived last.
    """

    node: int
    row: int
    wait: int
    start_ns: int
    end_ns: int


def walk(times: RecordedTimes, node: int, *, start_ns: int, end_ns: int) -> list[Span]:
    """Return the path that ends at `node` as spans that cover `start_ns` to `end_ns` exactly, first to last.

    A node that overlaps the next one on the path counts up to the start of that one. Of ranks that arrive last at a
    collective at the same time, the path prefers the one that it comes from. A collective whose waits contradict others
    (and are not in the graph) waits for the rank that arrived last.
    """
    spans: list[Span] = []
    without_waits: set[int] = set()
    graph, last_arrivals = times.graph, _last_arrivals(times)
    rank, row, now, of_rank = graph.column("rank"), node, end_ns, -1
    while now > start_ns:
        wait = last_arrivals.get((node, of_rank), int(times.binding[node]))
        since, awaited = _before(times, node, wait)
        if awaited < 0 and node >= graph.count and node not in without_waits:
            without_waits.add(node)
            parts = np.flatnonzero(graph.join_of == node)
            awaited = int(parts[np.argmax(times.begin_ns[parts])])  # the part that arrived last
        row = node if node < graph.count else awaited
        of_rank = int(rank[row])
        for from_ns, lag_of in ((int(times.begin_ns[node]), -1), (since, wait)):
            if max(from_ns, start_ns) < now:
                spans.append(Span(node, row, lag_of, max(from_ns, start_ns), now))
                now = spans[-1].start_ns
        if awaited < 0:
            break
        node = awaited
    if now > start_ns:
        spans.append(Span(-1, row, -1, start_ns, now))
    return spans[::-1]


def _last_arrivals(times: RecordedTimes) -> dict[tuple[int, int], int]:
    """Return the wait of a collective for each rank that arrived last, by the collective and that rank."""
    waits, graph = times.waits, times.graph
    rows = np.flatnonzero(waits.kind == COLLECTIVE)
    part, joint = waits.awaited[rows], waits.waiting[rows]
    last = times.end_ns[part] + waits.lag_ns[rows] == times.begin_ns[joint]
    rank = graph.column("rank")[part[last]]
    return dict(zip(zip(joint[last].tolist(), rank.tolist(), strict=True), rows[last].tolist(), strict=True))


def _before(times: RecordedTimes, node: int, wait: int) -> tuple[int, int]:
    """Return since when a node's binding wait was all that it waited for, and the node that it awaits (-1: none)."""
    awaited = int(times.waits.awaited[wait]) if wait >= 0 else -1
    if awaited < 0:
        return int(times.begin_ns[node]), -1
    return int((times.begin_ns if times.waits.from_begin[wait] else times.end_ns)[awaited]), awaited


def latest_ends(times: RecordedTimes, deadline_ns: int) -> Ints:
    """Return the latest time at which each node may end without delaying anything past the deadline.

    A node that ended after the deadline may end any time later, unless a node before the deadline waited for it.
    """
    graph, waits, own_ns = times.graph, times.waits, times.own_ns.tolist()
    latest: list[int] = np.where(times.end_ns <= deadline_ns, deadline_ns, 2 * NEVER).tolist()
    wait = np.flatnonzero(waits.awaited >= 0)
    order = wait[np.argsort(-graph.position[waits.waiting[wait]], kind="stable")]
    columns = (waits.waiting, waits.awaited, waits.lag_ns, waits.from_begin)
    # Each node needs the latest ends of those that wait for it, so this loop cannot be vectorized.
    for waiting, awaited, lag_ns, from_begin in zip(*(column[order].tolist() for column in columns), strict=True):
        until = latest[waiting] - own_ns[waiting] - lag_ns + (own_ns[awaited] if from_begin else 0)
        if until < latest[awaited]:
            latest[awaited] = until
    return np.array(latest, np.int64)
