"""Slowdown of work relative to the same work alone: against brute force, and on timelines with a known slowdown."""

import statistics

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import EXAMPLES, overlap_run, queued_run
from tracekit.analysis.communication import queueing
from tracekit.analysis.compute import collective_contention, contention
from tracekit.analysis.compute.contention import COMMUNICATION, COMPUTE, KINDS
from tracekit.rules.contention import ContendedCompute, StarvedCollectives
from tracekit.rules.engine import check
from tracekit.rules.streams import SerializedStreams

samples = st.lists(
    st.tuples(
        st.integers(0, 3), st.integers(0, 2), st.integers(1, 99), st.sampled_from(("alone", "concurrent", "between"))
    ),
    max_size=30,
)


def of_alone(rows):
    return {row[1] for row in rows if row[3] == "alone"}


def quartile(values: list[float], quarter: int) -> float:
    at = (len(values) - 1) * quarter / 4
    return sorted(values)[-int(-at // 1) if quarter == 3 else int(at)]


@settings(max_examples=60, deadline=None)
@given(samples)
def test_comparison_equals_a_reference(rows):
    key, step, dur = (np.array([row[i] for row in rows], np.int64) for i in range(3))
    alone, concurrent = (np.array([row[3] == name for row in rows], bool) for name in ("alone", "concurrent"))
    found = contention.compare_with_alone(key, step, dur, solo=alone, concurrent=concurrent)
    for i, (k, s, ns, how) in enumerate(rows):
        same = [row for row in rows if row[0] == k]
        own = [row[2] for row in same if row[3] == "alone"]
        here = [row[2] for row in same if row[3] == "alone" and row[1] == s]
        steps = {
            of: statistics.median_low([r[2] for r in same if r[3] == "alone" and r[1] == of]) for of in of_alone(same)
        }
        ratios = [row[2] / steps[row[1]] for row in same if row[3] == "alone"]
        alike = own and quartile(ratios, 3) - quartile(ratios, 1) <= contention.MAX_SPREAD
        assert found.is_judged[i] == bool(alike)
        if not alike:
            assert (found.alone_ns[i], found.excess_ns[i]) == (0, 0)
            continue
        assert found.alone_ns[i] == statistics.median_low(here or own)
        others = [row[2] for row in same if row[3] == "concurrent"]
        fence = quartile(others, 3) + 3 * (quartile(others, 3) - quartile(others, 1)) if others else ns
        assert found.excess_ns[i] == (
            0 if how == "alone" else min(ns, max(fence, found.alone_ns[i])) - found.alone_ns[i]
        )


def test_a_concurrent_outlier_is_clipped_to_the_fence():
    dur = np.array([10] * 5 + [20] * 8 + [2000])
    which = np.arange(14) < 5
    found = contention.compare_with_alone(np.zeros(14, int), np.zeros(14, int), dur, solo=which, concurrent=~which)
    assert found.excess_ns.tolist() == [0] * 5 + [10] * 9


def test_the_slowdown_is_overlapped_time_over_solo_time_and_lies_in_its_interval():
    random = np.random.default_rng(1)
    together = random.integers(50, 150, 40)
    excess = together * random.normal(0.5, 0.1, 40)
    found, low, high = contention.pooled_slowdown(together, excess)
    assert found == together.sum() / (together.sum() - excess.sum())
    assert low < found < high
    assert high - low < 0.3
    assert contention.pooled_slowdown(together[:5], excess[:5])[1:] == (None, None)


def test_the_interval_covers_the_true_slowdown_at_its_nominal_rate():
    random = np.random.default_rng(2)
    delayed = 0
    for _ in range(200):
        together = random.integers(50, 150, 20)
        alone = together / 1.5 * random.normal(1, 0.1, 20)
        _, low, high = contention.pooled_slowdown(together, together - alone)
        delayed += low <= 1.5 <= high
    assert 0.85 <= delayed / 200 <= 1.0


# Concurrent work -------------------------------------------------------------------------------------------------

cells = st.lists(st.sampled_from("ab."), min_size=24, max_size=24).map("".join)


@settings(max_examples=25, deadline=None)
@given(cells, cells, cells, cells)
def test_concurrent_time_equals_a_reference(first, second, calls, copies):
    trace = drawn_traces.trace(f"compute1 {first}\ncompute2 {second}\ncomm {calls}\ncopy {copies}")
    lanes = {0: (COMPUTE, first), 1: (COMPUTE, second), 2: (COMMUNICATION, calls), 3: ("copy", copies)}
    for here in contention.device_work(trace):
        for row, (lane, start, dur) in enumerate(here.work.select("lane", "start_ns", "dur_ns").iter_rows()):
            for kind, name in enumerate(KINDS):
                others = [picture for of, (its, picture) in lanes.items() if its == name and of != lane]
                busy = sum(any(picture[at] != "." for picture in others) for at in range(start, start + dur))
                assert here.concurrent_ns[row, kind] == busy


def test_kernels_without_shapes_are_distinguished_by_their_neighbours():
    # g stands for a product: one grid, once short after f, once long after h.
    (here,) = contention.device_work(drawn_traces.trace(f"compute {'f.gg.h.gggg.' * 4}"))
    lengths = {}
    for row, (name, dur) in enumerate(here.work.select("name", "dur_ns").iter_rows()):
        if name == "g":
            lengths.setdefault(int(here.kernel[row]), set()).add(dur)
    assert all(len(of) == 1 for of in lengths.values())


def pair(trace, kind, concurrent_kind):
    run = drawn_traces.run(trace)
    found = run.table(contention.pairs).filter(pl.col("kind") == kind, pl.col("concurrent_kind") == concurrent_kind)
    return found.row(0, named=True) if found.height else None


def test_a_kernel_twice_as_slow_during_a_collective_has_slowdown_two():
    # Overlaps x for 3 of its 4; that work takes 1 alone.
    run = EXAMPLES["STREAM003"].fires()
    found = run.table(contention.pairs).row(0, named=True)
    assert (found["kind"], found["concurrent_kind"]) == (COMPUTE, COMMUNICATION)
    assert found["slowdown"] == 3.0
    assert found["judged_ns"] == 3 * 6  # without the first and last two, which have other neighbours
    assert found["overlapped_ns"] == 3 * 8
    kernel = run.table(contention.by_kernel).row(0, named=True)
    assert (kernel["alone_ns"], kernel["concurrent_ns"], kernel["slowdown"]) == (2, 4, 3.0)


def test_the_cost_of_contended_compute_is_its_extra_time(wording):
    (found,) = check(EXAMPLES["STREAM003"].fires(), [ContendedCompute()]).findings
    wording(found.message)
    assert found.cost_ns == 2 * 8  # two of the eight without a sample of theirs, at the slowdown of the others
    assert found.impact == 16 / 64


def test_work_that_never_ran_alone_is_reported_with_what_to_record():
    run = drawn_traces.run(drawn_traces.trace(f"step {'0' * 48}\ncompute {'aaaaa.' * 8}\ncomm {'xxxxx.' * 8}"))
    report = check(run, [ContendedCompute()])
    assert report.findings == ()
    (note,) = report.notes
    assert "never ran alone" in note
    assert "CUDA_LAUNCH_BLOCKING=1" in note
    assert run.table(contention.pairs)["unknown"].to_list() == [contention.NO_SAMPLE]


def test_work_with_two_concurrent_kinds_is_not_compared_with_one_of_them():
    # a is slow during x only where the copy also runs, which has no solo sample.
    trace = drawn_traces.trace(
        f"step {'0' * 80}\ncompute {'aa...aaaa.' * 8}\ncomm {'.....xxxx.' * 8}\ncopy {'.....mmmm.' * 8}"
    )
    assert pair(trace, COMPUTE, COMMUNICATION)["unknown"] == contention.NO_SAMPLE


def test_a_falling_clock_rate_is_no_contention():
    # In step 1 everything takes twice as long, and most of it overlaps x.
    compute = f"{'aa.' * 12}{'aaaa.' * 12}"
    calls = f"{'...' * 3}{'xx.' * 2}{'...' * 7}{'xxxx.' * 5}{'.....' * 3}{'xxxx.' * 4}"
    picture = f"step {'0' * 36}{'1' * 60}\ncompute {compute}\ncomm {calls}"
    found = pair(drawn_traces.trace(picture), COMPUTE, COMMUNICATION)
    assert found["judged_ns"] > 0
    assert found["slowdown"] == pytest.approx(1.0)


def test_bus_bandwidth_of_collectives_alone_and_during_compute():
    run = overlap_run("aaa.b..", "xxxx.yy")
    found = contention.pool_pairs(run.table(collective_contention.by_step)).row(0, named=True)
    assert found["slowdown"] == 3.0
    (size,) = run.table(collective_contention.bandwidths).to_dicts()
    assert (size["alone_calls"], size["concurrent_calls"]) == (8, 8)
    assert (size["alone_ns"], size["concurrent_ns"]) == (2 * drawn_hosts.UNIT_NS, 4 * drawn_hosts.UNIT_NS)
    (finding,) = check(run, [StarvedCollectives()]).findings
    assert finding.cost_ns == 8 * drawn_hosts.UNIT_NS  # compute waits 1 for each, of the 2 that it takes longer
    assert "all_gather of 1.00 KiB" in finding.message or "bus bandwidth" not in finding.message


def test_slow_collectives_without_waiting_compute_cost_nothing():
    run = overlap_run("aaaaaab..", "xxxx...yy")
    assert contention.pool_pairs(run.table(collective_contention.by_step))["slowdown"].item() > 1.9
    assert check(run, [StarvedCollectives()]).findings == ()


def test_waiting_for_a_peer_is_no_slow_transfer():
    # x takes 2 on rank 1, which arrives last; rank 0 waits 4 longer for it, during compute.
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    traces = [
        drawn_hosts.trace(f"step {'0' * 80}\ncompute {a * 8}\ncomm {x * 8}", {"a": 0, "b": 0}, rank=rank, groups=groups)
        for rank, (a, x) in enumerate((("aaaaaa.b..", "xxxxxx..yy"), ("aaaaaa.b..", "....xx..yy")))
    ]
    found = drawn_traces.run(*traces).table(collective_contention.compared_calls)
    assert found.filter("concurrent")["transfer_ns"].unique().to_list() == [2 * drawn_hosts.UNIT_NS]
    assert found["excess_ns"].sum() == 0


# Queues ---------------------------------------------------------------------------------------------------------------


def test_a_kernel_that_starts_together_with_an_earlier_launch_on_another_stream_is_delayed():
    run = EXAMPLES["STREAM002"].fires()
    delayed = run.table(queueing.delayed_kernels)
    assert delayed["name"].to_list() == ["a"] * 8
    assert delayed["blocker_name"].to_list() == ["x"] * 8
    assert (delayed["delay_ns"] // drawn_hosts.UNIT_NS).to_list()[1:] == [6] * 7  # from the end of the last a
    order = run.table(queueing.launch_order).row(0, named=True)
    assert (order["overtake_chances"], order["overtakes"], order["delayed"]) == (8, 0, 8)
    (found,) = check(run, [SerializedStreams()]).findings
    assert "CUDA_DEVICE_MAX_CONNECTIONS" in found.fix
    assert "0 of 8 kernels overtook" in found.message


def test_an_overtaking_kernel_proves_several_queues():
    # The last a begins before the x launched before it.
    run = queued_run(f"step {'0' * 90}\ncompute {'..aaaa....' * 8}aaaa......\ncomm {'..xx......' * 9}")
    assert run.table(queueing.launch_order)["overtakes"].sum() == 0  # it was launched first
    late_x = f"step {'0' * 80}\ncompute {'..aaaa....' * 7}aaaa......\ncomm {'..xx......' * 8}"
    plain = drawn_traces.trace(late_x, scale_ns=drawn_hosts.UNIT_NS)
    order = plain.activities.sort(pl.col("start_ns") // (10 * drawn_hosts.UNIT_NS), pl.col("kind") == COMPUTE)[
        "id"
    ].to_list()
    calls = [
        {"id": made, "kind": "runtime", "start_ns": i - 999, "dur_ns": 0, "lane": 9} for i, made in enumerate(order)
    ]
    run = drawn_traces.run(drawn_traces.trace(late_x, scale_ns=drawn_hosts.UNIT_NS, ops=pl.DataFrame(calls)))
    assert run.table(queueing.launch_order)["overtakes"].sum() == 1
    assert check(run, [SerializedStreams()]).findings == ()


def test_waiting_for_the_end_of_other_work_is_no_queueing_delay():
    run = queued_run(f"step {'0' * 80}\ncompute {'....aaaa..' * 8}\ncomm {'..xx......' * 8}")
    assert run.table(queueing.delayed_kernels).is_empty()


def test_collectives_of_one_group_are_delayed_by_their_communicator():
    # Each y was launched at 0 and begins when x of the other stream ends.
    picture = f"step {'0' * 80}\ncompute {'aa........' * 8}\ncomm1 {'..xxxx....' * 8}\ncomm2 {'......yyyy' * 8}"
    plain = drawn_traces.trace(picture, scale_ns=drawn_hosts.UNIT_NS)
    calls = [{"id": i, "kind": "runtime", "start_ns": i - 999, "dur_ns": 0, "lane": 9} for i in plain.activities["id"]]
    groups = plain.activities.filter(pl.col("kind") == COMMUNICATION).select(
        pl.col("id").alias("activity_id"), group=pl.lit("0"), op=pl.lit("all_gather")
    )
    apart = groups.with_columns(pl.col("activity_id").cast(pl.String).alias("group"))
    for calls_of_group, count in ((groups, 8), (apart, 0)):
        run = drawn_traces.run(
            drawn_traces.trace(
                picture, scale_ns=drawn_hosts.UNIT_NS, ops=pl.DataFrame(calls), collectives=calls_of_group
            )
        )
        delayed = run.table(queueing.delayed_kernels).filter(reason=queueing.COMMUNICATOR, name="y")
        assert delayed["blocker_name"].to_list() == ["x"] * count


blocks = st.lists(st.tuples(st.integers(1, 1_000_000), st.floats(-1e5, 1e6, allow_nan=False)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(blocks)
def test_pairs_that_are_slowed_too_little_have_an_interval_that_begins_too_low(drawn):
    steps = pl.DataFrame(drawn, ["judged_ns", "lost_ns"], orient="row").with_columns(
        rank=0, device=0, kind=pl.lit(COMPUTE), concurrent_kind=pl.lit(COMMUNICATION), overlapped_ns="judged_ns"
    )
    every = contention.pool_pairs(steps)
    low, found = every["low"][0], every["slowdown"][0]
    assert low is None or low <= found
    assert contention.pool_pairs(steps, min_slowdown=found).is_empty()
    assert contention.pool_pairs(steps, min_slowdown=found - 0.01).equals(every)
