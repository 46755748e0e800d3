"""Work that starts late for no recorded or inferred wait, right after other work of its device ended."""

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph import dependency_graph
from tracekit.replay.graph.dependency_graph import Edges, Graph
from tracekit.replay.graph.nodes import WORK

EVENT = "event"
_LATE_NS = 50_000
"""On a busy device, work that starts less late often does so right after the end of some work by chance."""
_NEAR_NS, _SLACK_NS = 15_000, 3_000
_BACK = 4
_NONE = -1


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
