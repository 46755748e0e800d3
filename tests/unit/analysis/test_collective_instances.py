"""Collectives across ranks, against drawn timelines and a plain-Python count over runs; their bandwidth."""

import statistics
from collections import defaultdict

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_traces
from tests.support.simulated_runs import MS, US, Job
from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.communication.collective_instances import BUS_FACTORS, by_collective, instances, waits
from tracekit.model.run import Run
from tracekit.report import charts
from tracekit.sync import alignment, collective_matching

GIB = 1 << 30


def test_ranks_wait_for_the_last_arrival_and_the_transfer_starts_there():
    # time (ms)  0 1 2 3 4 5 6 7
    # rank 0     # # # # # # # .      waits 3
    # rank 1     . . # # # # # .      waits 1
    # rank 2     . . . # # # # .      the last: transfer 4
    job = Job({"world": (0, 1, 2)})
    for _ in range(3):
        job.now_ns += 20 * MS
        job.collect("world", "all_reduce", 96, {0: 0, 1: 2 * MS, 2: 3 * MS}, transfer_ns=4 * MS)
    run = drawn_traces.run(job.trace(0), job.trace(1, behind_ns=-5 * MS), job.trace(2, behind_ns=9 * MS))
    table = run.table(instances)
    assert table["last_rank"].to_list() == [2, 2, 2]
    assert table["transfer_ns"].to_list() == [4 * MS] * 3
    assert table["max_wait_ns"].to_list() == [3 * MS] * 3
    assert table["ranks"].to_list() == [[0, 1, 2]] * 3
    assert run.table(waits)["wait_ns"].to_list() == [3 * MS, MS, 0] * 3
    assert table["algorithm_bytes_per_s"].to_list() == pytest.approx([96 / 4e-3] * 3)
    assert table["bus_bytes_per_s"].to_list() == pytest.approx([96 / 4e-3 * 4 / 3] * 3)


@pytest.mark.parametrize(
    ("op", "ranks", "bus_bytes_per_s"),
    [
        # nccl-tests, doc/PERFORMANCE.md: 1 GiB in 10 ms is 107.4 GB/s of algorithm bandwidth
        ("all_reduce", 8, GIB / 0.01 * 14 / 8),
        ("all_gather", 8, GIB / 0.01 * 7 / 8),
        ("reduce_scatter", 4, GIB / 0.01 * 3 / 4),
        ("all_to_all", 4, GIB / 0.01 * 3 / 4),
        ("broadcast", 4, GIB / 0.01),
        ("reduce", 2, GIB / 0.01),
    ],
)
def test_bus_bandwidth_follows_nccl_tests(op, ranks, bus_bytes_per_s):
    job = Job({"world": range(ranks)})
    for _ in range(4):
        job.run("world", "barrier", None)
        job.run("world", op, GIB, transfer_ns=10 * MS)
    run = drawn_traces.run(*(job.trace(rank) for rank in job.ranks))
    found = run.table(instances).filter(pl.col("op") == op)["bus_bytes_per_s"]
    assert found.to_list() == pytest.approx([bus_bytes_per_s] * 4)
    assert op in BUS_FACTORS


def test_message_sizes_are_those_of_the_whole_collective():
    # An all-gather of 4 ranks: each sends 100 bytes and receives 400; its size is 400.
    job = Job({"world": range(4)}).steps(3, (("world", "all_gather", 400),))
    traces = [job.trace(rank) for rank in job.ranks]
    for trace in traces:
        part = trace.collectives.with_columns(pl.lit(100, pl.Int64).alias("sent_bytes"))
        object.__setattr__(trace, "collectives", part)
    assert drawn_traces.run(*traces).table(instances)["bytes"].to_list() == [400] * 3


def test_differences_below_the_residual_are_not_reported():
    job = Job({"world": (0, 1)})
    for _ in range(20):
        job.run("world", "all_reduce", 1 << 20, spread_ns=20 * US, transfer_ns=30 * US)
    run = drawn_traces.run(*(job.trace(rank, jitter_ns=200 * US) for rank in job.ranks))
    table = run.table(instances)
    assert table["residual_ns"].min() > 100 * US
    assert table["last_rank"].null_count() == 20
    assert run.table(waits)["wait_ns"].sum() == 0
    assert table.filter(pl.col("transfer_ns") <= pl.col("residual_ns"))["bus_bytes_per_s"].null_count() >= 18


def test_without_a_ranks_trace_the_last_rank_is_unknown_and_waits_are_lower_bounds():
    job = Job({"world": (0, 1, 2)})
    for _ in range(4):
        job.now_ns += 20 * MS
        job.collect("world", "all_reduce", 96, {0: 0, 1: 2 * MS, 2: 3 * MS}, transfer_ns=4 * MS)
    run = drawn_traces.run(job.trace(0), job.trace(1))
    table = run.table(instances)
    assert table["group_size"].to_list() == [3] * 4
    assert table.select(pl.col("last_rank", "transfer_ns", "bus_bytes_per_s").null_count()).row(0) == (4, 4, 4)
    assert run.table(waits)["wait_ns"].to_list() == [2 * MS, 0] * 4


def test_ranks_that_are_not_on_one_clock_are_not_compared():
    job = Job({"world": (0, 1)}).steps(1, (("world", "all_reduce", 8),))
    run = drawn_traces.run(job.trace(0, with_seq=True), job.trace(1, with_seq=True))
    assert run.table(collective_matching.matched_calls)["instance"].n_unique() == 1
    assert run.table(instances).is_empty()
    assert run.table(waits).is_empty()
    assert by_collective(run).is_empty()


def test_a_run_without_collectives_has_empty_tables():
    run = drawn_traces.run(drawn_traces.trace("compute aa"), drawn_traces.trace("compute aa", rank=1))
    assert run.table(instances).is_empty()
    assert run.table(waits).is_empty()
    assert by_collective(run).is_empty()


def test_by_collective_sums_the_waits_of_each_rank():
    job = Job({"world": (0, 1, 2)}, seed=3).steps(
        5, (("world", "all_reduce", 1 << 20), ("world", "all_gather", 1 << 20))
    )
    run = drawn_traces.run(*(job.trace(rank) for rank in job.ranks))
    rows = by_collective(run)
    assert rows.select("op", "rank", "calls").rows() == [
        (op, rank, 5) for op in ("all_gather", "all_reduce") for rank in (0, 1, 2)
    ]
    assert rows["wait_ns"].sum() == run.table(waits)["wait_ns"].sum() > 0
    assert rows.group_by("op").agg(pl.col("arrived_last").sum())["arrived_last"].to_list() == [5, 5]
    one = run.table(instances).filter(pl.col("op") == "all_reduce")
    bus = (one["bus_bytes_per_s"] * one["transfer_ns"]).sum() / one["transfer_ns"].sum()
    assert rows.filter(pl.col("op") == "all_reduce")["bus_bytes_per_s"].to_list() == pytest.approx([bus] * 3)


def test_the_mean_bandwidth_covers_all_collectives_and_is_null_unless_the_mean_transfer_exceeds_the_residual():
    # Nine transfers of 10 µs and one of 3 ms: where clocks agree to 100 µs, the slow one alone would mislead.
    job = Job({"world": (0, 1)}, seed=1)
    for i in range(10):
        job.now_ns += 50 * MS
        job.collect("world", "all_reduce", 1 << 20, {0: 0, 1: 0}, transfer_ns=3 * MS if i == 5 else 10_000)
    run = drawn_traces.run(job.trace(0), job.trace(1))
    (rate,) = by_collective(run)["bus_bytes_per_s"].unique()
    assert rate == pytest.approx(10 * (1 << 20) / (3 * MS + 9 * 10_000) * 1e9)
    for residual_us, is_known in ((200, True), (400, False)):
        rough = drawn_traces.run(job.trace(0), job.trace(1))
        agreed = rough.offsets.with_columns(pl.lit(residual_us * 1000, pl.Int64).alias("residual_ns"))
        rough = Run("rough", rough.sources, align=lambda run, agreed=agreed: agreed)
        assert rough.table(instances)["bus_bytes_per_s"].is_not_null().sum() == 1
        assert by_collective(rough)["bus_bytes_per_s"].is_not_null().all() == is_known


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    jitter_ns=st.sampled_from([0, 5_000, 100_000]),
    drops=st.lists(st.lists(st.integers(0, 19), max_size=6), min_size=3, max_size=3),
)
def test_instances_equal_a_plain_python_count(seed, jitter_ns, drops):
    job = Job({"world": (0, 1, 2), "pair": (0, 2)}, seed=seed)
    job.steps(
        5,
        (
            ("world", "all_reduce", 4096),
            ("pair", "all_gather", 512),
            ("world", "reduce_scatter", 64),
            ("pair", "all_reduce", 8),
        ),
    )
    run = drawn_traces.run(
        *(job.trace(r, behind_ns=r * 17 * MS, jitter_ns=jitter_ns, drop=drops[r], with_seq=True) for r in job.ranks)
    )
    calls = alignment.on_run_clock(run.table(collective_matching.matched_calls), run.offsets, ("start_ns", "end_ns"))
    residuals = dict(run.offsets.select("rank", "residual_ns").iter_rows())
    members = defaultdict(list)
    for row in calls.drop_nulls("instance").iter_rows(named=True):
        if residuals[row["rank"]] is not None:
            members[row["instance"]].append(row)
    expected = {}
    for instance, rows in members.items():
        if len(rows) < 2:
            continue
        residual = max(residuals[row["rank"]] for row in rows)
        arrivals = sorted((row["start_ns"], row["rank"]) for row in rows)
        last = arrivals[-1][0]
        waited = [min(last, row["end_ns"]) - row["start_ns"] for row in sorted(rows, key=lambda r: r["rank"])]
        whole = len(rows) == rows[0]["group_size"]
        clear = whole and last - arrivals[-2][0] >= residual
        low = min(row["end_ns"] for row in rows)
        end = low + round(statistics.median(row["end_ns"] - low for row in rows))
        expected[instance] = (
            arrivals[-1][1] if clear else None,
            max(end - last, 0) if whole else None,
            [max(w, 0) if w >= residual else 0 for w in waited],
        )
    found = {
        i: (last, transfer)
        for i, last, transfer in run.table(instances).select("instance", "last_rank", "transfer_ns").iter_rows()
    }
    per_rank = dict(run.table(waits).group_by("instance", maintain_order=True).agg("wait_ns").iter_rows())
    assert {i: (*found[i], per_rank[i]) for i in found} == expected


def pipeline(rank, pictures, peers):
    """Return a rank of a pipeline: x is an all-reduce of both, s sends to the peer, r receives from it."""
    ops = {"x": "all_reduce", "s": "send", "r": "recv"}
    plain = drawn_traces.trace(pictures, rank=rank, scale_ns=MS)
    calls = plain.activities.filter(pl.col("kind") == "communication").select(
        pl.col("id").alias("activity_id"),
        pl.col("name").replace_strict(ops).alias("op"),
        pl.lit("0").alias("group"),
        pl.lit(1 << 20).alias("sent_bytes"),
        pl.lit(4).alias("group_size"),
        pl.when(pl.col("name") != "x").then(peers).alias("peer"),
    )
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    return drawn_traces.trace(pictures, rank=rank, scale_ns=MS, collectives=calls, groups=groups)


def test_a_send_and_its_receive_are_split_into_waiting_and_transfer_at_the_last_arrival():
    # time (ms)  0123456789abcdefgh
    # rank 0     xx.ssss..sss..rr..     its first send waits 2 for the receive; its second comes last, and its receive
    # rank 1     xx...rr.rrrr.sss..     the second receive waits 1 for the send, and so does the send
    first, second = "xx.ssss..sss..rr..", "xx...rr.rrrr.sss.."
    steps = f"step {'0' * 18 * 3}"
    run = drawn_traces.run(pipeline(0, f"{steps}\ncomm {first * 3}", 1), pipeline(1, f"{steps}\ncomm {second * 3}", 0))
    pairs = run.table(instances).filter(pl.col("op") == "send_recv").sort("first_arrival_ns")
    assert pairs.select("last_rank", "max_wait_ns", "transfer_ns").rows() == 3 * [
        (1, 2 * MS, 2 * MS),
        (0, MS, 3 * MS),
        (0, MS, 2 * MS),
    ]
    waited = run.table(waits).filter(pl.col("op") == "send_recv").sort("arrival_ns")
    assert waited.select("rank", "wait_ns").rows() == 3 * [(0, 2 * MS), (1, 0), (1, MS), (0, 0), (1, MS), (0, 0)]
    assert pairs["bus_bytes_per_s"].to_list() == pytest.approx([(1 << 20) / ms * 1000 for ms in (2, 3, 2)] * 3)


def test_sends_without_a_known_peer_are_not_matched():
    picture = f"step {'0' * 20}\ncomm xx.ss.xx.ss.xx.ss.xx"
    run = drawn_traces.run(*(pipeline(rank, picture, None) for rank in (0, 1)))
    assert set(run.table(instances)["op"]) == {"all_reduce"}


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
