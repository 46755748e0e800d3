"""Waits between streams that one rank shows hold at the same place of the others."""

import polars as pl
import pytest

from tracekit.replay.graph.nodes import EDGE_COLUMNS, HOST, NODE_COLUMNS, WORK, shared_waits


def nodes(rank, *work):
    """Return the calls and kernels of a rank: a lane, a name, a start and an end each, launched in this order."""
    calls = [{"node": at, "what": HOST, "start_ns": 0, "end_ns": 0, "launch": -1} for at in range(len(work))]
    kernels = [
        {"node": len(work) + at, "what": WORK, "lane": lane, "name": name, "step": 0}
        | {"start_ns": start, "end_ns": end, "launch": at}
        for at, (lane, name, start, end) in enumerate(work)
    ]
    columns = {name: NODE_COLUMNS[name] for name in ("node", "what", "lane", "name", "step", "start_ns", "end_ns")}
    frame = pl.DataFrame(calls + kernels, schema={**columns, "launch": pl.Int64})
    return frame.with_columns(window=pl.lit(0, pl.Int64), rank=pl.lit(rank, pl.Int64))


def wait(rank, waiting, awaited, kind="event"):
    row = {"waiting": waiting, "awaited": awaited, "lag_ns": 0, "kind": kind, "inferred": True}
    return pl.DataFrame([row], schema=EDGE_COLUMNS).with_columns(
        window=pl.lit(0, pl.Int64), rank=pl.lit(rank, pl.Int64)
    )


# Rank 0 is late: its collective x starts when a has ended.
# compute  aaaa....
# comm     ....xxxx
LATE = nodes(0, (0, "a", 0, 40_000), (1, "x", 40_000, 80_000))
SEEN = wait(0, waiting=3, awaited=2)


def test_a_wait_of_the_late_rank_holds_on_the_rank_whose_collective_waits_for_its_peers():
    # compute  aa......
    # comm     ...xxxxx     an earlier collective ends late
    early = nodes(1, (0, "a", 0, 20_000), (1, "x", 30_000, 80_000))
    found = shared_waits(pl.concat([LATE, early]), SEEN)
    assert found.select("rank", "waiting", "awaited", "kind", "inferred").rows() == [(1, 3, 2, "event", True)]


def test_a_wait_holds_on_a_rank_that_numbers_its_streams_differently():
    early = nodes(1, (7, "a", 0, 20_000), (3, "x", 30_000, 80_000))
    found = shared_waits(pl.concat([LATE, early]), SEEN)
    assert found.select("rank", "waiting", "awaited").rows() == [(1, 3, 2)]


def test_the_order_within_one_stream_is_no_wait_between_streams():
    early = nodes(1, (0, "a", 0, 20_000), (0, "x", 30_000, 80_000))
    assert shared_waits(pl.concat([LATE, early]), SEEN).is_empty()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(((0, "a", 0, 20_000), (1, "x", 10_000, 80_000)), id="it starts before the other has ended"),
        pytest.param(((1, "x", 30_000, 80_000), (0, "a", 0, 20_000)), id="it is launched first"),
        pytest.param(((0, "b", 0, 20_000), (1, "x", 30_000, 80_000)), id="another kernel runs there"),
        pytest.param(
            ((0, "a", 0, 9_000), (0, "a", 9_000, 20_000), (1, "x", 30_000, 80_000)), id="the kernel runs more often"
        ),
    ],
)
def test_nothing_is_shared_with_a_rank_that_does_something_else(other):
    assert shared_waits(pl.concat([LATE, nodes(1, *other)]), SEEN).is_empty()


def test_a_wait_that_one_rank_contradicts_was_there_by_chance():
    early = nodes(1, (0, "a", 0, 20_000), (1, "x", 30_000, 80_000))
    ahead = nodes(2, (0, "a", 0, 20_000), (1, "x", 10_000, 80_000))
    assert shared_waits(pl.concat([LATE, early, ahead]), SEEN).is_empty()


def test_waits_of_the_host_are_not_shared():
    early = nodes(1, (0, "a", 0, 20_000), (1, "x", 30_000, 80_000))
    assert shared_waits(pl.concat([LATE, early]), wait(0, waiting=3, awaited=2, kind="sync")).is_empty()
