"""Messages: bandwidth of each, and totals by kind."""

import pytest

from tests.support import drawn_traces
from tests.support.simulated_runs import MS, Job
from tracekit.analysis.communication import group_bandwidth
from tracekit.report import charts

KIB = 1 << 10


def job() -> Job:
    # rank 0  # # # # # # # .      comes first, waits 3 ms
    # rank 1  . . # # # # # .
    # rank 2  . . . # # # # .      the last: the data moves for 4 ms
    made = Job({"world": (0, 1, 2)})
    for _ in range(3):
        made.now_ns += 20 * MS
        made.collect("world", "all_reduce", 96 * KIB, {0: 0, 1: 2 * MS, 2: 3 * MS}, transfer_ns=4 * MS)
    return made


def test_bandwidth_is_size_over_time_from_the_last_arrival():
    made = job()
    table = drawn_traces.run(*(made.trace(rank) for rank in made.ranks)).table(group_bandwidth.speeds)
    assert table["is_whole"].to_list() == [True] * 3
    assert table["transfer_ns"].to_list() == [4 * MS] * 3
    assert table["algorithm_bytes_per_s"].to_list() == pytest.approx([96 * KIB / 4e-3] * 3)
    assert table["bus_bytes_per_s"].to_list() == pytest.approx([96 * KIB / 4e-3 * 4 / 3] * 3)


@pytest.mark.parametrize(("ranks", "took_ms"), [((0,), 7), ((0, 1), 5)])
def test_bandwidth_is_a_lower_bound_where_ranks_have_no_trace(ranks, took_ms):
    made = job()
    table = drawn_traces.run(*(made.trace(rank) for rank in ranks)).table(group_bandwidth.speeds)
    assert table["is_whole"].to_list() == [False] * 3
    assert table["transfer_ns"].to_list() == [took_ms * MS] * 3
    assert table["bus_bytes_per_s"].to_list() == pytest.approx([96 * KIB / (took_ms * 1e-3) * 4 / 3] * 3)


def test_messages_of_one_kind_are_summed_over_ranks():
    made = job()
    row = drawn_traces.run(*(made.trace(rank) for rank in made.ranks)).table(group_bandwidth.by_kind).row(0, named=True)
    assert (row["op"], row["axis"], row["bytes"], row["ranks"], row["calls"]) == ("all_reduce", "world", 96 * KIB, 3, 9)
    assert (row["total_ns"], row["p50_ns"], row["waited_ns"]) == (3 * 16 * MS, 5 * MS, 3 * 4 * MS)
    assert row["bus_bytes_per_s"] == pytest.approx(96 * KIB / 4e-3 * 4 / 3)


def test_the_chart_has_a_mark_per_message_at_its_size_and_bandwidth():
    made = job()
    speeds = drawn_traces.run(*(made.trace(rank) for rank in made.ranks)).table(group_bandwidth.speeds)
    figure = charts.bandwidth(speeds, charts.ALGORITHM)
    assert [trace.name for trace in figure.data] == ["all-reduce · world · 3 ranks"]
    assert list(figure.data[0].x) == [96 * KIB] * 3
    assert list(figure.data[0].y) == pytest.approx([96 * KIB / 4e-3] * 3)
    assert (figure.layout.xaxis.type, figure.layout.yaxis.type) == ("log", "log")
    assert "64 KiB" in figure.layout.xaxis.ticktext
    lone = charts.bandwidth(drawn_traces.run(made.trace(0)).table(group_bandwidth.speeds))
    assert lone.data[0].marker.symbol == "circle-open"
    assert "at least" in lone.data[0].hovertemplate


def test_very_many_messages_are_sampled_by_kind():
    made = Job({"world": (0, 1)})
    made.steps(3, [("world", "all_reduce", KIB), ("world", "all_gather", KIB)])
    speeds = drawn_traces.run(*(made.trace(rank) for rank in (0, 1))).table(group_bandwidth.speeds)
    many = speeds.select(speeds.columns)[[i % speeds.height for i in range(9000)]]
    drawn_points = [len(trace.x) for trace in charts.bandwidth(many).data]
    assert len(drawn_points) == 2
    assert sum(drawn_points) <= 3000
