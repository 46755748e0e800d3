"""Contraction of dependency graphs: every node starts when it starts in the whole graph."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.replay.graph import contraction
from tracekit.replay.graph.contraction import Network

LAG = st.integers(-3, 5)


@st.composite
def networks(draw):
    """Draw a network of some threads or streams, whose nodes wait only for nodes earlier in a random order."""
    lanes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=4))
    count = sum(lanes)
    chain, begin = np.full(count, -1, np.int64), 0
    for length in lanes:
        chain[begin + 1 : begin + length] = np.arange(begin, begin + length - 1)
        begin += length
    order = _interleaved(
        lanes, draw(st.permutations([lane for lane, length in enumerate(lanes) for _ in range(length)]))
    )
    place = {node: at for at, node in enumerate(order)}
    launch, edges = np.full(count, -1, np.int64), []
    for node in range(count):
        earlier = order[: place[node]]
        if earlier and draw(st.booleans()):
            launch[node] = draw(st.sampled_from(earlier))
        further = st.tuples(st.just(node), st.sampled_from([-1, *earlier]), LAG)
        edges += draw(st.lists(further, max_size=2)) if draw(st.booleans()) else []
    waiting, awaited, lag_ns = np.array(edges, np.int64).reshape(-1, 3).T
    own_ns, chain_ns, launch_ns = (
        np.array(draw(st.lists(each, min_size=count, max_size=count)), np.int64)
        for each in (st.integers(0, 9), LAG, LAG)
    )
    return Network(own_ns, chain, chain_ns, launch, launch_ns, waiting, awaited, lag_ns, np.array(order, np.int64))


def _interleaved(lanes, turns):
    """Return the nodes lane by lane in the order of turns: a topological order."""
    first = np.cumsum([0, *lanes[:-1]])
    return [int(first[lane]) + turns[:at].count(lane) for at, lane in enumerate(turns)]


def brute_force(network):
    """Return when each node starts, from all its waits, one node after the other."""
    starts, ends = {}, {-1: 0}
    for node in network.order.tolist():
        waits = [
            (int(network.awaited[edge]), int(network.lag_ns[edge])) for edge in np.flatnonzero(network.waiting == node)
        ]
        waits += [(int(network.chain[node]), int(network.chain_ns[node]))] * bool(network.chain[node] >= 0)
        waits += [(int(network.launch[node]), int(network.launch_ns[node]))] * bool(network.launch[node] >= 0)
        starts[node] = max((ends[on] + lag for on, lag in waits), default=0)
        ends[node] = starts[node] + int(network.own_ns[node])
    return [starts[node] for node in range(len(network.order))]


@settings(max_examples=100)
@given(networks())
def test_starts_are_those_of_the_whole_graph(network):
    assert contraction.starts(network).tolist() == brute_force(network)


@settings(max_examples=60)
@given(networks(), st.data())
def test_nodes_that_shall_remain_do_and_change_nothing(network, data):
    count = len(network.order)
    remaining = np.array(data.draw(st.lists(st.booleans(), min_size=count, max_size=count)))
    left = contraction.contract(network, remaining)
    assert set(np.flatnonzero(remaining)) <= set(left.node.tolist())
    truth = np.array(brute_force(network), np.int64)
    assert left.all_starts(truth[left.node]).tolist() == truth.tolist()


def test_a_thread_without_other_waits_becomes_its_first_node():
    #        0  2    5
    # host   a a . b b b c     b starts 1 after a, c right after b
    own = np.array([2, 3, 1], np.int64)
    none = np.full(3, -1, np.int64)
    chain = np.array([-1, 0, 1], np.int64)
    empty = np.empty(0, np.int64)
    zero = np.zeros(3, np.int64)
    network = Network(own, chain, np.array([0, 1, 0]), none, zero, empty, empty, empty, np.arange(3))
    assert contraction.contract(network).node.tolist() == [0]
    assert contraction.starts(network).tolist() == [0, 3, 6]
