"""Contraction of a dependency graph before its replay: nodes whose end follows from that of others in closed form.

Most nodes wait for the previous one of their thread or stream alone, or for that and for their launch. Their ends are
those of one or two other nodes plus a constant, which is a cumulative sum or maximum: NumPy finds them, and the replay
visits only the nodes that remain. The result is exact, since times are integers.
"""

from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.model.sweep_line import NEVER, Flags, Ints

Rows: TypeAlias = npt.NDArray[np.int32]
"""Numbers of nodes or rows: of the graph of thousands of ranks, such arrays need much memory."""
_EVER = np.int64(-(1 << 60))


@dataclass(frozen=True, eq=False)
class Network:
    """All waits of a graph, arrays over its nodes and over its further edges; -1 is no node, or the window's start.

    `chain` is the previous node of a thread or stream, `launch` the launching call; `chain_ns`, `launch_ns` and
    `lag_ns` the least time from the end of the awaited node to the start of the waiting one. A node starts as soon as
    all its waits allow, at time 0 without any. `order` are all nodes in topological order.
    """

    own_ns: Ints
    chain: Ints
    chain_ns: Ints
    launch: Ints
    launch_ns: Ints
    waiting: Ints
    awaited: Ints
    lag_ns: Ints
    order: Ints


@dataclass(frozen=True, eq=False)
class Contracted:
    """The nodes that remain, and all others by them.

    `node` are the remaining nodes, `own_ns` their durations; `waiting` and `awaited` are rows of `node` (-1: the
    window's start). `first` and `second` are the rows by which any node ends (second may be -1: none), `first_ns` and
    `second_ns` how long after their ends at the earliest. `starts_at_0` are the rows without waits.
    """

    network: Network
    node: Ints
    own_ns: Ints
    waiting: Ints
    awaited: Ints
    lag_ns: Ints
    starts_at_0: Flags
    first: Rows
    first_ns: Ints
    second: Rows
    second_ns: Ints

    def rows(self, node: Ints) -> Ints:
        """Return the rows of some nodes; -1 for those that do not remain, and for -1."""
        remains = np.zeros(len(self.first), np.bool_)
        remains[self.node] = True
        return np.where((node >= 0) & remains[node], self.first[node], -1)

    def earliest(self) -> Ints:
        """Earliest start of each row by waits for the window's start alone."""
        start = np.where(self.starts_at_0, 0, _EVER)
        of_window = self.awaited < 0
        np.maximum.at(start, self.waiting[of_window], self.lag_ns[of_window])
        return start

    def all_starts(self, start_ns: Ints) -> Ints:
        """Start of every node of the network, given the starts of the rows."""
        end = start_ns + self.own_ns
        ends = end[self.first] + self.first_ns
        two = np.flatnonzero(self.second >= 0)
        ends[two] = np.maximum(ends[two], end[self.second[two]] + self.second_ns[two])
        return ends - self.network.own_ns


def starts(network: Network) -> Ints:
    """Start of every node if each starts as soon as its waits allow, in one pass in topological order."""
    contracted = contract(network)
    edge = np.flatnonzero(contracted.awaited >= 0)
    place = np.empty(len(network.order), np.int64)
    place[network.order] = np.arange(len(network.order))
    edge = edge[np.argsort(place[contracted.node[contracted.waiting[edge]]], kind="stable")]
    awaited = contracted.awaited[edge]
    start = contracted.earliest().tolist()
    waits = (contracted.waiting[edge], awaited, contracted.lag_ns[edge] + contracted.own_ns[awaited])
    # Each start needs those of the awaited nodes, so this loop cannot be vectorised.
    for row, on, after_ns in zip(*(column.tolist() for column in waits), strict=True):
        time = start[on] + after_ns
        if time > start[row]:
            start[row] = time
    return contracted.all_starts(np.array(start, np.int64))


def contract(network: Network, remaining: Flags | None = None) -> Contracted:
    """Network without the nodes that follow from others, except for those that shall remain."""
    count = len(network.own_ns)
    waits = np.bincount(network.waiting, minlength=count) + (network.chain >= 0) + (network.launch >= 0)
    follows = network.chain == np.arange(count) - 1
    follows[:1] = False
    if remaining is not None:
        follows &= ~remaining
    # Nodes that wait for the one before alone, and those that also wait for their launch.
    chained, launched = follows & (waits == 1), follows & (waits == 2) & (network.launch >= 0)
    head, after_ns = _runs(chained, network.chain_ns + network.own_ns)
    rows = np.flatnonzero(launched)
    launched[rows] = ~launched[head[network.launch[rows]]]
    before = np.flatnonzero(~chained)  # the remaining nodes so far, in order: each follows the one before
    joins, launch = launched[before], np.maximum(network.launch[before], 0)
    del waits, follows, chained, launched
    caller = head[launch]
    joins[1:] &= ~joins[:-1] | (caller[1:] == caller[:-1])
    own_ns, chain_ns = network.own_ns[before], network.chain_ns[before]
    chain_ns = chain_ns + after_ns[np.maximum(before - 1, 0)]
    first, first_ns = _runs(joins, chain_ns + own_ns)
    called_ns = network.launch_ns[before] + after_ns[launch] + own_ns - first_ns
    second_ns = np.where(joins, first_ns + _running_maximum(np.where(joins, called_ns, _EVER), first), NEVER)
    of_node = np.full(len(head), -1, np.int32)
    of_node[before] = np.arange(len(before), dtype=np.int32)
    run = of_node[head]  # the row in `before` by which each node ends
    row = np.cumsum(~joins, dtype=np.int32) - np.int32(1)
    second = np.where(joins, row[of_node[caller]], np.int32(-1))
    first_after_ns, second_after_ns = first_ns[run], second_ns[run]
    first_after_ns += after_ns
    second_after_ns += after_ns
    return _contract_edges(network, before[~joins], row[first][run], first_after_ns, second[run], second_after_ns)


def _contract_edges(
    network: Network, node: Ints, first: Rows, first_ns: Ints, second: Rows, second_ns: Ints
) -> Contracted:
    """Network of the nodes that remain, given by which of their rows any node ends: see `Contracted`."""
    chain, launch = node[network.chain[node] >= 0], node[network.launch[node] >= 0]
    waiting = np.concatenate((network.waiting, chain, launch))  # nodes with further edges all remain
    awaited = np.concatenate((network.awaited, network.chain[chain], network.launch[launch]))
    lag = np.concatenate((network.lag_ns, network.chain_ns[chain], network.launch_ns[launch]))
    on = np.maximum(awaited, 0)
    has_awaited = awaited >= 0
    two = has_awaited & (second[on] >= 0)
    row = first[waiting].astype(np.int64)
    return Contracted(
        network,
        node,
        network.own_ns[node],
        np.concatenate((row, row[two])),
        np.concatenate((np.where(has_awaited, first[on], -1), second[on][two])),
        np.concatenate((np.where(has_awaited, lag + first_ns[on], lag), (lag + second_ns[on])[two])),
        np.bincount(row, minlength=len(node)) == 0,
        first,
        first_ns,
        second,
        second_ns,
    )


def _runs(continues: Flags, took_ns: Ints) -> tuple[Rows, Ints]:
    """Return the first row of each row's run, and the time from that one's end to the end of the row.

    Changes `took_ns`: there may be millions of rows.
    """
    first = np.arange(len(continues), dtype=np.int32)
    first[continues] = 0
    np.maximum.accumulate(first, out=first)
    took_ns[~continues] = 0
    np.cumsum(took_ns, out=took_ns)
    return first, took_ns - took_ns[first]


def _running_maximum(values: Ints, first: Rows) -> Ints:
    """Return the maximum of the values so far in each run, found by doubling: `first` is the run's first row."""
    maxima = values.copy()
    length = np.arange(len(values)) - first
    reach = 1
    while reach <= int(length.max(initial=0)):
        rows = np.flatnonzero(length >= reach)
        maxima[rows] = np.maximum(maxima[rows], maxima[rows - reach])
        reach *= 2
    return maxima
