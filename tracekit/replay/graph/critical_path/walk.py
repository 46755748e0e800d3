"""The walk from the end of a step to its start, from each node to the wait that ended last."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph import dependency_graph
from tracekit.replay.graph.dependency_graph import COLLECTIVE, QUEUE, RELEASE, START_ORDER, SYNC, Edges, Graph
from tracekit.replay.graph.nodes import HOST, WAIT, WORK
from tracekit.sync import collective_matching

NEVER = np.iinfo(np.int64).max // 4
"""From this time on a latest end means that nothing before the deadline waits for the node."""
HOST_ORDER, STREAM, LAUNCH = "host_order", "stream", "launch"
_TIE_ORDER = (
    SYNC, QUEUE, COLLECTIVE, "event", "communicator", "resources", STREAM, HOST_ORDER, START_ORDER, LAUNCH, RELEASE,
)  # fmt: skip
"""Of waits that ended at the same time, the first of these kinds counts as the one that ended last."""
_EARLIER_LAUNCH_NS = 2_000
"""A kernel can start before its launching call returns. Such a call released it at least this long before its start:
about the time from a launch to the start of its kernel on an idle device; not from the trace."""
EVENT = "event"
_LATE_NS = 50_000
"""On a busy device, work that starts less late often does so right after the end of some work by chance."""
_NEAR_NS, _SLACK_NS = 15_000, 3_000
_BACK = 4
_NONE = -1


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


@dataclass(frozen=True, eq=False)
class Waits:
    """All waits between nodes: thread and stream order, launches, and the graph's edges.

    `awaited` is -1 for the start of the recording. A waiting node begins no earlier than `lag_ns` after the end of the
    awaited one, or after its begin where `from_begin` is set. `kind` is one of HOST_ORDER, STREAM, LAUNCH and the kinds
    of edges.
    """

    waiting: Ints
    awaited: Ints
    lag_ns: Ints
    from_begin: Flags
    kind: "np.ndarray[tuple[int], np.dtype[np.str_]]"


@dataclass(frozen=True, eq=False)
class RecordedTimes:
    """When each node of a graph began and ended, in ns since the window's origin, and its waits.

    The lag of each wait contains what the trace does not explain, so that a replay of these waits gives the recorded
    times exactly. `binding` is the wait of each node that ended last (-1: none): without its lag and the time of the
    node that it awaits, the node would have begun earlier. `unexplained_ns` is how much later each node began.
    """

    graph: Graph
    begin_ns: Ints
    end_ns: Ints
    waits: Waits
    binding: Ints
    unexplained_ns: Ints

    @property
    def own_ns(self) -> Ints:
        """Return the duration of each node, without its waits."""
        return self.end_ns - self.begin_ns


def recorded_times(graph: Graph) -> RecordedTimes:
    """Return the recorded times of a graph's nodes.

    A host call begins when what it waited for has ended. A rank's part in a collective is its arrival; the join node
    begins with the last arrival. Waits that the recording contradicts (a kernel that starts before its launch returns,
    clock errors) get a smaller lag; a node that begins later than all its waits allow gets a larger one. Work that
    starts 50 µs late or more, right after other work of its device ended, waits for that.
    """
    times = _compute_times(graph)
    more = waits_of_late_starts(graph, times.unexplained_ns)
    return _compute_times(replace(graph, edges=graph.edges.concat(more))) if len(more.waiting) else times


def waits_of_late_starts(graph: Graph, unexplained_ns: Ints) -> Edges:
    """Return waits of work that began `unexplained_ns` (of each node) after all that it waits for, 50 µs or more.

    It is taken to wait for the work on another stream of its device that ended last, up to 15 µs before. Such a wait
    occurs too rarely to be inferred from its class: the first collective after the last of another group.
    """
    late = (unexplained_ns[: graph.count] >= _LATE_NS) & (graph.column("what") == WORK)
    waiting, awaited = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    place = graph.frame.select("rank", "device", at=pl.int_range(pl.len()), work=pl.col("what") == WORK)
    for _, device_work in place.filter("work").group_by("rank", "device", maintain_order=True):
        rows = device_work["at"].to_numpy()
        if late[rows].any():
            awaited_rows = _ended_before(graph, rows, late)
            waiting.append(rows[late[rows]][awaited_rows >= 0])
            awaited.append(awaited_rows[awaited_rows >= 0])
    after, before = np.concatenate(waiting), graph.done[np.concatenate(awaited)]
    in_order = graph.position[before] < graph.position[after]
    return dependency_graph.edges(after[in_order], before[in_order], EVENT)


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


def _compute_times(graph: Graph) -> RecordedTimes:
    begin_ns, end_ns = _node_times(graph)
    waits = _all_waits(graph, end_ns)
    anchor_ns = np.where(waits.from_begin, begin_ns[waits.awaited], end_ns[waits.awaited])
    anchor_ns = np.where(waits.awaited >= 0, anchor_ns, 0)
    # A wait ends not after its node began.
    began_ns, released_ns = begin_ns[waits.waiting], anchor_ns + waits.lag_ns
    early_ns = np.where(waits.kind == LAUNCH, _EARLIER_LAUNCH_NS, 0)
    released_ns = np.where(released_ns > began_ns, began_ns - early_ns, released_ns)
    latest_ns = np.full(len(begin_ns), np.iinfo(np.int64).min, np.int64)
    np.maximum.at(latest_ns, waits.waiting, released_ns)
    unexplained_ns = begin_ns - latest_ns
    lag_ns = released_ns + unexplained_ns[waits.waiting] - anchor_ns
    adjusted = replace(waits, lag_ns=lag_ns)
    binding = _last_waits(adjusted, released_ns, len(begin_ns))
    return RecordedTimes(graph, begin_ns, end_ns, adjusted, binding, unexplained_ns)


def _node_times(graph: Graph) -> tuple[Ints, Ints]:
    start, end = (graph.column(name) - graph.origin_ns for name in ("start_ns", "end_ns"))
    what, is_part = graph.column("what"), graph.join_of >= 0
    is_host = what == HOST
    # Calls of several threads form one chain: a call inside another one ends its turn with it.
    end = np.where(is_host, _latest_of_rank(graph, np.where(is_host, end, end.min(initial=0))), end)
    begin = np.where(is_host, end - graph.own_ns[: graph.count], np.where(what == WAIT, end, start))
    end = np.where(is_part, begin, end)
    joints = len(graph.own_ns) - graph.count
    arrived, departed = (np.full(joints, np.iinfo(np.int64).min, np.int64) for _ in range(2))
    parts = np.flatnonzero(is_part)
    joint = graph.join_of[parts] - graph.count
    np.maximum.at(arrived, joint, begin[parts])
    np.maximum.at(departed, joint, _part_ends(graph)[parts])
    return np.concatenate((begin, arrived)), np.concatenate((end, np.maximum(arrived, departed)))


def _part_ends(graph: Graph) -> Ints:
    """End of each node. A send ends with its receive: gloo's last until the program waits for them."""
    end = np.asarray(graph.column("end_ns") - graph.origin_ns)
    is_shared = pl.Series(graph.join_of[graph.parts["at"].to_numpy()] >= 0)
    pairs = graph.parts.filter(is_shared, pl.col("op") == collective_matching.PAIRED)
    is_send = pl.col("members").str.starts_with(pl.format("{}>", "rank"))
    timed = pairs.select("at", "done", is_send=is_send, end_ns=pl.Series(end[pairs["at"].to_numpy()], dtype=pl.Int64))
    received_ns = pl.col("end_ns").filter(~pl.col("is_send")).max().over("done")
    sends = timed.with_columns(received_ns.alias("received_ns")).filter("is_send")
    ended = end.copy()
    ended[sends["at"].to_numpy()] = sends.select(pl.min_horizontal("end_ns", "received_ns")).to_series().to_numpy()
    return ended


def _latest_of_rank(graph: Graph, end: Ints) -> Ints:
    """Return the latest end so far among the nodes of each rank, which are consecutive."""
    first = np.flatnonzero(np.diff(graph.column("rank"), prepend=-1))
    parts = [np.maximum.accumulate(part) for part in np.split(end, first[1:])] if len(end) else [end]
    return np.concatenate(parts)


def _all_waits(graph: Graph, end_ns: Ints) -> Waits:
    """Return the waits of the graph. Those for a collective are for its end on the rank that waits."""
    nodes, edges = np.arange(len(graph.chain)), graph.edges
    is_host = np.append(graph.column("what"), np.full(len(nodes) - graph.count, WAIT)) == HOST
    order = np.where(is_host, HOST_ORDER, STREAM)
    waiting = np.concatenate((nodes, nodes, edges.waiting))
    awaited = np.concatenate((graph.chain, graph.launch, edges.awaited))
    lag_ns = np.concatenate((graph.chain_ns, graph.launch_ns, edges.lag_ns))
    kind = np.concatenate((order, np.full(len(nodes), LAUNCH), edges.kind))
    is_wait = (awaited >= 0) | (kind == RELEASE)
    waiting, awaited, lag_ns, kind = (column[is_wait] for column in (waiting, awaited, lag_ns, kind))
    from_begin = kind == START_ORDER
    lag_ns = np.where(from_begin, 0, lag_ns) + _left_earlier_ns(graph, waiting, awaited, end_ns)
    return Waits(waiting, awaited, lag_ns, from_begin, kind)


def _left_earlier_ns(graph: Graph, waiting: Ints, awaited: Ints, end_ns: Ints) -> Ints:
    """Return by how much (as a negative time) a collective ended earlier on the rank that waits than on the last."""
    earlier_ns = np.zeros(len(waiting), np.int64)
    rows = np.flatnonzero((awaited >= graph.count) & (waiting < graph.count))
    if not len(rows):
        return earlier_ns
    rank, parts = graph.column("rank"), np.flatnonzero(graph.join_of >= 0)
    width = int(rank.max()) + 1
    key = graph.join_of[parts] * width + rank[parts]
    order = np.argsort(key)
    place = np.searchsorted(key[order], awaited[rows] * width + rank[waiting[rows]])
    place = np.minimum(place, len(order) - 1)
    part = parts[order[place]]
    is_own = key[order[place]] == awaited[rows] * width + rank[waiting[rows]]
    ended_ns = _part_ends(graph)[part]
    earlier_ns[rows] = np.where(is_own, ended_ns - end_ns[awaited[rows]], 0)
    return earlier_ns


def _last_waits(waits: Waits, released_ns: Ints, count: int) -> Ints:
    """Return the wait of each node that ended last; -1 for none."""
    preference = np.full(len(waits.kind), len(_TIE_ORDER))
    for number, kind in enumerate(_TIE_ORDER):
        preference[waits.kind == kind] = number
    order = np.lexsort((preference, -released_ns, waits.waiting))
    waiting = waits.waiting[order]
    first = order[np.append(True, waiting[1:] != waiting[:-1])] if len(order) else order
    binding = np.full(count, -1, np.int64)
    binding[waits.waiting[first]] = first
    return binding


def _ended_before(graph: Graph, rows: Ints, late: Flags) -> Ints:
    """Return, for each late one of the rows, the row of the work that ended right before it; -1 for none."""
    lane, launch = graph.column("lane"), graph.launch
    order = rows[np.argsort(graph.column("end_ns")[rows], kind="stable")]
    ended_ns, waiting = graph.column("end_ns")[order], rows[late[rows]]
    began_ns = graph.column("start_ns")[waiting]
    row_before = np.full(len(waiting), _NONE, np.int64)
    for back in range(_BACK):
        place = np.searchsorted(ended_ns, began_ns + _SLACK_NS, side="right") - 1 - back
        on = order[np.maximum(place, 0)]
        near = (place >= 0) & (began_ns - ended_ns[np.maximum(place, 0)] <= _NEAR_NS) & (lane[on] != lane[waiting])
        near &= launch[on] <= np.where(launch[waiting] < 0, np.iinfo(np.int64).max, launch[waiting])
        row_before = np.where((row_before < 0) & near, on, row_before)
    return row_before
