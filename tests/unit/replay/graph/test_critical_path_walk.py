"""The walk over binding waits: against all paths of small graphs, and against replays with shorter nodes."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.path_replay import ends, saved_ns
from tracekit.model import schema
from tracekit.replay.graph.critical_path.walk import NEVER, latest_ends, recorded_times, walk
from tracekit.replay.graph.dependency_graph import START_ORDER, Edges, Graph, replay, sort_topologically
from tracekit.replay.graph.nodes import HOST, WORK, NodeTable

NONE = np.empty(0, np.int64)


def graph(own, waits, *, what=None, rank=None, join_of=None, recorded=None):
    """Return a graph of nodes with own times and waits (waiting, awaited, lag, kind).

    Its recorded times are `recorded` (start and end of each), by default those of its replay.
    """
    count = len(own)
    rows = [(a, b, lag, kind) for a, b, lag, kind in waits]
    columns = list(zip(*rows, strict=True)) if rows else [[], [], [], []]
    edges = Edges(
        *(np.array(column, np.int64) for column in columns[:3]), np.array(columns[3], str), np.zeros(len(rows), bool)
    )
    joints = count - (len(join_of) if join_of is not None else count)
    nodes = count - joints
    table = {"rank": rank or [0] * nodes, "what": what or [WORK] * nodes, "lane": [0] * nodes, "device": [0] * nodes}
    nothing = np.full(count, -1)
    whole = Graph(
        window=0,
        frame=NodeTable(pl.DataFrame(table).with_columns(start_ns=pl.lit(0), end_ns=pl.lit(0))),
        join_of=np.array(join_of if join_of is not None else [-1] * nodes),
        chain=nothing,
        launch=nothing,
        launch_ns=np.zeros(count, np.int64),
        own_ns=np.array(own, np.int64),
        chain_ns=np.zeros(count, np.int64),
        edges=edges,
        windows=pl.DataFrame(),
        parts=pl.DataFrame(schema=schema.columns("at done rank op members", members=pl.String)),
        prepared=pl.DataFrame(),
        origin_ns=0,
        order=NONE,
    )
    whole = sort_topologically(whole, np.zeros(count, np.int64))
    played = replay(whole)
    start, end = zip(*recorded, strict=True) if recorded else (played.start_ns[:nodes], played.end_ns[:nodes])
    frame = whole.frame.with_columns(start_ns=pl.Series(start, dtype=pl.Int64), end_ns=pl.Series(end, dtype=pl.Int64))
    return replace(whole, frame=frame)


@st.composite
def graphs(draw):
    """Draw a graph whose nodes wait for up to three earlier ones, the last one for all that nothing else waits for."""
    count = draw(st.integers(2, 9))
    waits, awaited = [], set()
    for node in range(1, count):
        for before in draw(st.sets(st.integers(0, node - 1), max_size=3)):
            kind = draw(st.sampled_from(("event", "event", START_ORDER)))
            waits.append((node, before, 0 if kind == START_ORDER else draw(st.integers(0, 3)), kind))
            awaited.add(before)
    waits += [(count, node, 0, "event") for node in range(count) if node not in awaited]
    starts = {node for node, *_ in waits}
    waits += [(node, -1, 0, "release") for node in range(count) if node not in starts]
    return graph([*draw(st.lists(st.integers(1, 9), min_size=count, max_size=count)), 1], waits)


def paths(times, last):
    """Yield each path to the begin of a node as its length and its nodes with their own time on it."""
    waits = times.waits
    found = []
    for row in np.flatnonzero(waits.waiting == last).tolist():
        before, lag = int(waits.awaited[row]), int(waits.lag_ns[row])
        if before < 0:
            found.append((lag, frozenset()))
            continue
        own = 0 if waits.from_begin[row] else int(times.own_ns[before])
        found += [
            (length + own + lag, nodes | ({before} if own else frozenset())) for length, nodes in paths(times, before)
        ]
    return found


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_the_walk_is_a_longest_path_and_tiles_the_time(drawn):
    times = recorded_times(drawn)
    last = len(drawn.own_ns) - 1
    spans = walk(times, last, start_ns=0, end_ns=int(times.begin_ns[last]))
    every = paths(times, last)
    assert max(length for length, _ in every) == times.begin_ns[last]
    on_path = frozenset(span.node for span in spans if span.wait < 0)
    assert (times.begin_ns[last], on_path) in {(length, nodes) for length, nodes in every}
    edges = [(span.start_ns, span.end_ns) for span in spans]
    assert [start for start, _ in edges] == [0, *(end for _, end in edges[:-1])][: len(edges)]
    assert sum(end - start for start, end in edges) == times.begin_ns[last]


@given(graphs(), st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_shortening_saves_as_much_as_no_other_path_is_as_long(drawn, shorter_ns):
    times = recorded_times(drawn)
    last = len(drawn.own_ns) - 1
    on_path = {s.node for s in walk(times, last, start_ns=0, end_ns=int(times.begin_ns[last])) if s.wait < 0}
    every = paths(times, last)
    for node in range(last):
        x = min(shorter_ns, int(times.own_ns[node]))
        without = max((length for length, nodes in every if node not in nodes), default=0)
        expected = min(x, int(times.begin_ns[last]) - without)
        assert saved_ns(times, node, x, last) == (expected if node in on_path else 0) or expected == 0


@given(graphs())
@settings(max_examples=150, deadline=None)
def test_slack_is_the_most_that_a_node_can_end_later(drawn):
    times = recorded_times(drawn)
    last = len(drawn.own_ns) - 1
    latest = latest_ends(times, int(times.end_ns[last]))
    for node in np.flatnonzero(latest[:last] < NEVER).tolist():
        slack = int(latest[node] - times.end_ns[node])
        for more, delayed in ((slack, 0), (slack + 1, 1)):
            later = np.zeros(last + 1, np.int64)
            later[node] = more
            shifted = ends(times, times.own_ns, later)
            own_end = shifted[node] if times.end_ns[node] <= times.end_ns[last] else 0
            assert max(shifted[last], own_end) - times.end_ns[last] == delayed


def test_a_kernel_that_starts_before_its_launch_returns_waits_for_the_stream_if_that_was_busy():
    # host     0 0 0 0 .      the launch of 2 returns after its start
    # stream   1 1 1 2 2
    whole = graph([4000, 3000, 2000], [(2, 0, 0, "launch"), (2, 1, 0, "stream")], what=[HOST, WORK, WORK])
    frame = whole.frame.with_columns(start_ns=pl.Series([0, 0, 3000]), end_ns=pl.Series([4000, 3000, 5000]))
    times = recorded_times(replace(whole, frame=frame))
    assert [span.node for span in walk(times, 2, start_ns=0, end_ns=5000)] == [1, 2]


def test_a_kernel_that_starts_before_its_launch_returns_waits_for_it_if_the_stream_was_idle():
    # host     . 0 0 0 0 .    from 1000
    # stream   1 . . . 2 2    the launch returns at 5000, the kernel starts at 4000
    whole = graph([4000, 1000, 2000], [(2, 0, 0, "launch"), (2, 1, 0, "stream")], what=[HOST, WORK, WORK])
    frame = whole.frame.with_columns(start_ns=pl.Series([1000, 0, 4000]), end_ns=pl.Series([5000, 1000, 6000]))
    times = recorded_times(replace(whole, frame=frame))
    spans = walk(times, 2, start_ns=1000, end_ns=6000)
    assert [(span.node, span.start_ns, span.end_ns) for span in spans] == [(0, 1000, 4000), (2, 4000, 6000)]


@pytest.mark.parametrize(("first", "on_path"), [(0, {1, 3}), (1, {0, 2})])
def test_a_collective_is_on_the_path_of_the_rank_that_arrives_last(first, on_path):
    # rank 0   0 0 C C C C     0 and 1 compute; 2 and 3 are the parts of the collective 4
    # rank 1   1 1 1 1 C C
    computed = (4, 6) if first == 0 else (6, 4)
    recorded = [(0, computed[0]), (0, computed[1]), (computed[0], 9), (computed[1], 9)]
    waits = [(2, 0, 0, "stream"), (3, 1, 0, "stream"), (4, 2, 0, "collective"), (4, 3, 0, "collective")]
    whole = graph([*computed, 0, 0, 3], waits, rank=[0, 1, 0, 1], join_of=[-1, -1, 4, 4], recorded=recorded)
    times = recorded_times(whole)
    spans = walk(times, 4, start_ns=0, end_ns=9)
    assert {span.row for span in spans} == on_path
    assert [(span.start_ns, span.end_ns) for span in spans] == [(0, 6), (6, 9)]
    latest = latest_ends(times, 9)
    assert latest[first + 2] - times.end_ns[first + 2] == 2
    assert latest[3 - first] == times.end_ns[3 - first]


def test_what_ended_after_the_deadline_and_delays_nothing_has_no_latest_end():
    whole = graph([4, 9], [])
    latest = latest_ends(recorded_times(whole), 5)
    assert latest[0] == 5
    assert latest[1] >= NEVER
