"""A replay of recorded times with other durations, node by node: what shortening a node saves."""

import numpy as np

from tracekit.replay.graph.critical_path.walk import RecordedTimes


def ends(times: RecordedTimes, own_ns: np.ndarray, later_ns: np.ndarray | None = None) -> np.ndarray:
    """Return when each node ends if the nodes take `own_ns`, each `later_ns` after its waits allow."""
    waits = times.waits
    order = np.argsort(times.graph.position[waits.waiting], kind="stable")
    begin, end = times.begin_ns.copy(), times.begin_ns + own_ns
    rows = order.tolist()
    at = 0
    while at < len(rows):
        node, since = int(waits.waiting[rows[at]]), []
        while at < len(rows) and waits.waiting[rows[at]] == node:
            row = rows[at]
            before = int(waits.awaited[row])
            anchor = 0 if before < 0 else begin[before] if waits.from_begin[row] else end[before]
            since.append(int(anchor + waits.lag_ns[row]))
            at += 1
        begin[node] = max(since) + (0 if later_ns is None else later_ns[node])
        end[node] = begin[node] + own_ns[node]
    return end


def saved_ns(times: RecordedTimes, node: int, shorter_ns: int, last: int) -> int:
    """Return how much earlier the node `last` begins if a node takes less time."""
    own = times.own_ns.copy()
    own[node] -= shorter_ns
    return int(times.begin_ns[last] - (ends(times, own) - own)[last])
