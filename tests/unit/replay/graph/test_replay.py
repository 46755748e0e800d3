"""The replay's arithmetic: against graphs drawn by hand, and against a simulation of events on random graphs."""

import heapq
from dataclasses import replace

import numpy as np
import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from tracekit.replay.graph import filled_devices
from tracekit.replay.graph.dependency_graph import (
    START_ORDER,
    Edges,
    Graph,
    edges,
    queued_before,
    replay,
    sort_topologically,
)
from tracekit.replay.graph.nodes import EDGE_COLUMNS, WORK, NodeTable

NONE = np.empty(0, np.int64)


def graph(chain, launch, own, *, chain_ns=None, launch_ns=None, waits=()):
    """Return a graph of nodes by the number of what comes before and launches each; waits: (waiting, awaited, lag)."""
    count = len(own)
    rows = np.array(waits, np.int64).reshape(-1, 3)
    whole = Graph(
        window=0,
        frame=NodeTable(pl.DataFrame({"node": np.arange(count)})),
        join_of=np.full(count, -1),
        chain=np.array(chain),
        launch=np.array(launch),
        launch_ns=np.array(launch_ns or [0] * count),
        own_ns=np.array(own),
        chain_ns=np.array(chain_ns or [0] * count),
        edges=edges(rows[:, 0], rows[:, 1], "event", rows[:, 2]),
        windows=pl.DataFrame(),
        parts=pl.DataFrame(),
        prepared=pl.DataFrame(),
        origin_ns=0,
        order=NONE,
    )
    return sort_topologically(whole, np.zeros(count, np.int64))


def test_a_node_starts_after_its_predecessor_and_its_launch():
    # host     0 0 . 1 . . .      two launches, two ns of Python between
    # device   . . 2 2 2 3 3      the second kernel was launched in time
    played = replay(graph([-1, 0, -1, 2], [-1, -1, 0, 1], [2, 1, 3, 2], chain_ns=[0, 1, 0, 0]))
    assert played.end_ns.tolist() == [2, 4, 5, 7]
    assert played.start_ns.tolist() == [0, 3, 2, 5]


def test_a_stream_waits_for_an_event_and_for_a_release():
    # lane a   0 0 0 . .
    # lane b   . . . 1 1      waits for the end of 0, though free since 1
    whole = graph([-1, -1], [-1, -1], [3, 2], waits=[(1, 0, 0), (1, -1, 1)])
    assert replay(whole).start_ns.tolist() == [0, 3]
    alone = replace(whole, edges=whole.edges.select(whole.edges.awaited < 0))
    assert replay(alone).start_ns.tolist() == [0, 1]


def test_a_call_released_before_the_window_lets_its_work_start_before_it():
    # host     0 0 . .      released three ns before the window begins
    # device   . . 1 1
    whole = graph([-1, -1], [-1, 0], [2, 2], waits=[(0, -1, -3)])
    assert replay(whole).start_ns.tolist() == [-3, -1]


def test_a_node_starts_after_all_of_its_waits():
    whole = graph([-1, -1, -1, -1], [-1] * 4, [5, 9, 7, 1], waits=[(3, 0, 0), (3, 1, 0), (3, 2, 4)])
    assert replay(whole).start_ns[3] == 11


def test_a_start_order_edge_waits_for_the_start_only():
    whole = graph([-1, -1], [-1, -1], [5, 2], waits=[(0, -1, 3)])
    turn = Edges(np.array([1]), np.array([0]), np.array([0]), np.array([START_ORDER]), np.array([True]))
    played = replay(sort_topologically(replace(whole, edges=whole.edges.concat(turn)), np.zeros(2, np.int64)))
    assert played.start_ns.tolist() == [3, 3]


def test_inferred_edges_on_cycles_are_dropped():
    whole = graph([-1, 0], [-1, -1], [2, 3])
    back = Edges(np.array([0]), np.array([1]), np.array([0]), np.array(["event"]), np.array([True]))
    played = replay(sort_topologically(replace(whole, edges=back), np.zeros(2, np.int64)))
    assert played.end_ns.tolist() == [2, 5]


def inferred(*waits):
    """Return inferred edges from (waiting, awaited)."""
    rows = np.array(waits)
    return replace(edges(rows[:, 0], rows[:, 1], "event"), inferred=np.ones(len(rows), bool))


def test_of_the_inferred_edges_on_a_cycle_only_those_against_the_recorded_order_are_dropped():
    # lane a   0 0 1 1 .
    # lane b   . . 2 2 3    2 waits for 0; that 0 waits for 3 cannot be: 3 started after it
    whole = graph([-1, 0, -1, 2], [-1] * 4, [2, 2, 2, 1])
    sorted_ = sort_topologically(replace(whole, edges=inferred((2, 0), (0, 3))), np.array([2, 4, 4, 5]))
    assert list(zip(sorted_.edges.waiting, sorted_.edges.awaited, strict=True)) == [(2, 0)]
    assert replay(sorted_).start_ns.tolist() == [0, 2, 2, 4]


def test_of_inferred_edges_in_recorded_order_those_of_the_shortest_time_are_dropped_first():
    # 1 waits for 0 and 3 for 1, both inferred; a recorded wait of 0 for 3 contradicts them: one must be wrong.
    whole = graph([-1] * 4, [-1] * 4, [1] * 4, waits=[(0, 3, 0)])
    both = whole.edges.concat(inferred((1, 0), (3, 1), (2, 1)))
    sorted_ = sort_topologically(replace(whole, edges=both), np.array([1, 9, 10, 12]))
    remaining = sorted_.edges.inferred
    assert list(zip(sorted_.edges.waiting[remaining], sorted_.edges.awaited[remaining], strict=True)) == [
        (1, 0),
        (2, 1),
    ]


def test_work_before_the_first_launched_one_of_its_stream_was_queued_before_the_window():
    # lane 0   a a . B . c      only B has a recorded launch: a was queued before, c's launch is missing
    # lane 1   d                no launch at all: not known
    frame = pl.DataFrame({"rank": [0] * 4, "lane": [0, 0, 0, 1], "start_ns": [0, 3, 5, 0], "what": [WORK] * 4})
    assert queued_before(frame, np.array([-1, 7, -1, -1])).tolist() == [True, False, False, False]


def test_a_kernel_waits_for_the_last_wave_of_another_that_fills_the_device():
    # lane 0   . 0 0 0 0 0 0 0 0 0 .
    # lane 1   . . . . . . . . . 1 1    launched long before, starts in the last tenth of 0
    # lane 2   . . . . 2 2 . . . . .    starts in the middle of it: no wait
    kernels = pl.DataFrame({
        "item": [0, 1, 2], "is_wait": [False] * 3, "launch_id": [5, 6, 7], "device": [0] * 3, "lane": [0, 1, 2],
        "kind": ["compute"] * 3, "start_ns": [100_000, 980_000, 500_000],
        "end_ns": [1_000_000, 1_100_000, 600_000], "launched_ns": [10_000, 20_000, 30_000], "previous": [-1] * 3,
    })  # fmt: skip
    assert waits_for_room(kernels, [20_000, 30_000, 40_000]) == [(11, 10, -20_000)]
    # Its launching call returned while 0 ran: it met 0 by chance, and is as late after its launch at any time.
    assert waits_for_room(kernels, [20_000, 400_000, 40_000]) == [(11, 6, 580_000)]
    # Its launching call had hardly returned when it started: it was not late.
    assert waits_for_room(kernels, [20_000, 970_000, 40_000]) == []


def waits_for_room(kernels, launched_ns):
    known = pl.DataFrame(schema=EDGE_COLUMNS)
    launch, launched_ns = np.array([5, 6, 7]), np.array(launched_ns)
    late = filled_devices.late_kernels(kernels, known, 10, launched_ns)
    found = filled_devices.resource_waits(late, 10, launch=launch, launched_ns=launched_ns)
    return found.select("waiting", "awaited", "lag_ns").rows()


@st.composite
def graphs(draw):
    count = draw(st.integers(1, 30))
    earlier = [draw(st.integers(-1, at - 1)) for at in range(count)]
    launch = [draw(st.integers(-1, at - 1)) for at in range(count)]
    numbers = st.lists(st.integers(0, 9), min_size=count, max_size=count)
    waits = [
        (at, draw(st.integers(-1, at - 1)), draw(st.integers(0, 5)))
        for at in draw(st.lists(st.integers(0, count - 1), max_size=40))
    ]
    return graph(earlier, launch, draw(numbers), chain_ns=draw(numbers), launch_ns=draw(numbers), waits=waits)


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_the_replay_equals_an_event_by_event_simulation(whole):
    assert replay(whole).end_ns.tolist() == by_events(whole)


def by_events(whole):
    """Simulate events one by one: a node starts when all that it waits for has ended and the lags have passed."""
    waits = {at: [] for at in range(len(whole.own_ns))}
    for at, (chain, lag) in enumerate(zip(whole.chain, whole.chain_ns, strict=True)):
        waits[at] += [(chain, lag)] if chain >= 0 else []
    for at, (launch, lag) in enumerate(zip(whole.launch, whole.launch_ns, strict=True)):
        waits[at] += [(launch, lag)] if launch >= 0 else []
    for at, on, lag in zip(whole.edges.waiting, whole.edges.awaited, whole.edges.lag_ns, strict=True):
        waits[at].append((on, lag))
    open_waits = {at: sum(on >= 0 for on, _ in found) for at, found in waits.items()}
    ready = {at: max((lag for on, lag in found if on < 0), default=0) for at, found in waits.items()}
    ends = {}
    events = [(ready[at], at, "start") for at, count in open_waits.items() if not count]
    heapq.heapify(events)
    while events:
        now, at, what = heapq.heappop(events)
        if what == "start":
            heapq.heappush(events, (now + int(whole.own_ns[at]), at, "end"))
            continue
        ends[at] = now
        for other, found in waits.items():
            for on, lag in found:
                if on == at:
                    ready[other] = max(ready[other], now + int(lag))
                    open_waits[other] -= 1
                    if not open_waits[other]:
                        heapq.heappush(events, (ready[other], other, "start"))
    return [int(ends[at]) for at in range(len(ends))]
