"""The host's lead over the device: by how much launches precede the work before them, which hides later host time."""

import numpy as np

from tracekit.model.columns import rows_by_key
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph.dependency_graph import Graph
from tracekit.replay.graph.nodes import WORK


def idle_due_to_waits(graph: Graph, waited_ns: Ints, end_ns: Ints) -> Ints:
    """Time that compute later waits for launches because the host waited, at most the wait, per host call, in ns.

    Only waits until the end of all compute that was launched count: after others, the host still leads.
    """
    rank, launch = graph.column("rank"), graph.launch[: graph.count]
    computing = np.flatnonzero(graph.matches("kind", "compute") & (graph.column("what") == WORK) & (launch >= 0))
    waits = np.flatnonzero(waited_ns > 0)
    totals_ns = np.zeros(graph.count, np.int64)
    calls_of = {number: waits[rows] for number, rows in rows_by_key(rank[waits]).items()}
    for number, rows in rows_by_key(rank[computing]).items():
        work = computing[rows]
        work = work[np.argsort(launch[work], kind="stable")]
        reach_ns = np.maximum.accumulate(end_ns[work])
        idle_ns = np.maximum(end_ns[launch[work[1:]]] - reach_ns[:-1], 0)
        calls = calls_of.get(number, work[:0])
        launched = np.searchsorted(launch[work], calls)
        calls = calls[(launched > 0) & (reach_ns[launched - 1] <= end_ns[calls])]
        idle_between_ns = np.zeros(len(calls) + 1, np.int64)
        np.add.at(idle_between_ns, np.searchsorted(calls, launch[work[1:]]), idle_ns)
        totals_ns[calls] = _idle_due_to(waited_ns[calls], idle_between_ns[1:])
    return totals_ns


def _idle_due_to(waited_ns: Ints, idle_after_ns: Ints) -> Ints:
    """Idle time due to each wait, in ns: first to the last wait before it, then to earlier ones, at most as they took.

    Without a wait, the host leads the device by as much more, until the device has idled for as long.
    """
    due_ns = np.zeros(len(waited_ns), np.int64)
    leads: list[tuple[int, int]] = []
    for wait, (lead_ns, idle_ns) in enumerate(zip(waited_ns.tolist(), idle_after_ns.tolist(), strict=True)):
        leads.append((wait, lead_ns))
        while idle_ns and leads:
            earlier, left_ns = leads.pop()
            used_ns = min(left_ns, idle_ns)
            due_ns[earlier] += used_ns
            idle_ns -= used_ns
            if used_ns < left_ns:
                leads.append((earlier, left_ns - used_ns))
    return due_ns
