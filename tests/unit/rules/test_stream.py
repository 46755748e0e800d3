"""The give-way chain on drawn timelines: preparation held up beside compute, a late collective, idle compute."""

import dataclasses

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import GIVE_WAY, PREPARED, giving_way
from tracekit.model import schema
from tracekit.rules.engine import check
from tracekit.rules.streams import GiveWay

UNIT_NS = drawn_hosts.UNIT_NS
PREPARES = {"p": {"kind": "compute"}}


def judge(run, **thresholds):
    return check(run, [GiveWay(**thresholds)]).findings


def lost(found):
    """Return what compute waited in the quoted step, in characters."""
    own = found.evidence.filter(pl.col("rank") == found.evidence["rank"][0])
    return own["lost_ns"].sum() // UNIT_NS


def told(row, *names):
    """Return times in characters."""
    return [row[name] // UNIT_NS for name in names]


def test_what_was_lost_is_what_compute_waited_and_no_more():
    (found,) = judge(giving_way(GIVE_WAY))
    assert lost(found) == 4
    assert "3.0 times as long during compute as alone" in found.message
    assert "200 µs longer in total" in found.message
    assert "Compute then waits for them: 200 µs of 1.25 ms" in found.message
    row = found.evidence.row(0, named=True)
    assert (row["name"], row["start_ns"], row["sample"]) == ("p", 0, "alone")
    assert told(row, "dur_ns", "alone_ns", "gap_ns", "contention_ns") == [6, 2, 6, 4]
    assert told(row, "delay_ns", "waited_ns", "lost_ns") == [4, 4, 4]


def test_a_long_communication_gap_costs_only_the_short_compute_gap_behind_it():
    # Compute stands idle only for the last 2 ns of x, though x starts 4 late.
    (found,) = judge(
        giving_way("""
            step     0000000000000000000000000
            compute  aaaaaaaaaa..aaaa......aaa
            comm     ppppppxxxxxx....ppxxxx...
        """)
    )
    assert lost(found) == 2
    assert "200 µs longer in total" in found.message
    assert told(found.evidence.row(0, named=True), "delay_ns", "waited_ns", "lost_ns") == [4, 2, 2]


def test_all_preparation_in_front_of_a_collective_is_one_chain():
    # p and q are held up 2 each, the collective 4, and compute waits 6.
    run = drawn_traces.run(
        drawn_traces.trace(
            """
            step     000000000000000000000000000000
            compute  aaaaaaaa......aaaa........aaaa
            comm     ppppqqqqxxxxxx....ppqqxxxx....
            """,
            columns=PREPARES | {"q": {"kind": "compute"}},
            scale_ns=UNIT_NS,
        )
    )
    (found,) = judge(run)
    assert lost(found) == 4
    assert [ns // UNIT_NS for ns in found.evidence["delay_ns"]] == [2, 2]
    assert found.evidence["lost_ns"].sum() == 4 * UNIT_NS


def test_a_collective_that_ends_the_step_late_costs_though_nothing_computes_after_it():
    (found,) = judge(
        giving_way("""
            step     0000000000000000000000000
            compute  ....aaa......aaaaaaaa....
            comm     ppxxxxx......ppppppxxxxxx
        """)
    )
    assert lost(found) == 4


SILENT = {
    "prepared before the compute": PREPARED,
    "never beside compute": """
        step     0000000000000000000000000
        compute  ........aaaa....aaaa...aa
        comm     ppppppxx....pp....xxxx...
    """,
    "as long beside compute as alone": """
        step     0000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa
        comm     ....ppxxxxxx....ppxxxx...
    """,
    "no collective behind it": """
        step     0000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa
        comm     xxxx....xxxx.pp...pppppp.
    """,
    "compute never idle": """
        step     0000000000000000000000000
        compute  aaaaaaaaaaaaaaaa......aaa
        comm     ppppppxxxxxx....ppxxxx...
    """,
    "compute resumes before the collective ends": """
        step     0000000000000000000000000
        compute  aaaaaaaa..aaaaaa......aaa
        comm     ppppppxxxxxx....ppxxxx...
    """,
    "another collective runs meanwhile": """
        step     0000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa
        comm     ppppppxxxxxx....ppxxxx...
        comm2    yyyyyy...................
    """,
    "never alone to compare with": """
        step     0000000000000
        compute  aaaaaaaa....a
        comm     ppppppxxxxxx.
    """,
}


@pytest.mark.parametrize("picture", SILENT.values(), ids=SILENT)
def test_without_the_whole_chain_nothing_is_claimed(picture):
    run = giving_way(picture)
    assert "p" in run.trace(0).activities["name"]
    assert judge(run, min_cost_ratio=0.0001) == ()


@pytest.mark.parametrize(("inflation", "fires"), [(2.99, True), (3.0, False)])
def test_the_inflation_must_be_exceeded(inflation, fires):
    assert bool(judge(giving_way(GIVE_WAY), min_slowdown=inflation)) == fires


@pytest.mark.parametrize(("ratio", "fires"), [(0.15, True), (0.17, False)])
def test_the_cost_must_be_reached(ratio, fires):
    assert bool(judge(giving_way(GIVE_WAY), min_cost_ratio=ratio)) == fires


def test_the_median_time_alone_is_the_measure():
    # Alone p takes 2, 5 and 5: 6 beside compute is no crawl.
    run = giving_way("""
        step     0000000000000000000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa......a.......a
        comm     ppppppxxxxxx....ppxxxx...pppppx..pppppx.
    """)
    assert judge(run) == ()


def test_ranks_are_measured_by_their_own_kernels_and_the_worst_is_quoted():
    half = GIVE_WAY.replace("aaaaaaaa....aaaa", "aaaaaaaaaa..aaaa")
    traces = [
        drawn_traces.trace(picture, rank=rank, columns=PREPARES, scale_ns=UNIT_NS)
        for rank, picture in enumerate((half, GIVE_WAY, PREPARED))
    ]
    (found,) = judge(drawn_traces.run(*traces))
    assert found.ranks == (0, 1)
    assert (lost(found), found.evidence["rank"][0]) == (4, 1)
    # Alone on another rank is no measure.
    only_beside, only_alone = SILENT["never alone to compare with"], SILENT["never beside compute"]
    traces = [
        drawn_traces.trace(picture, rank=rank, columns=PREPARES, scale_ns=UNIT_NS)
        for rank, picture in enumerate((only_beside, only_alone))
    ]
    assert judge(drawn_traces.run(*traces)) == ()


def two_devices(first: str, second: str):
    """Return one trace with two devices, lanes 0 and 1 on device 0, lanes 2 and 3 on device 1."""
    one, two = (drawn_traces.trace(picture, columns=PREPARES, scale_ns=UNIT_NS) for picture in (first, second))
    shifted = two.lanes.with_columns(pl.col("lane") + 2, device=pl.lit(1, pl.Int64))
    work = two.activities.with_columns(pl.col("lane") + 2, pl.col("id") + 100)
    steps = two.steps.with_columns(device=pl.lit(1, pl.Int64))
    return dataclasses.replace(
        one,
        lanes=schema.LANES.conform(pl.concat([one.lanes, shifted])),
        activities=schema.ACTIVITIES.conform(pl.concat([one.activities, work])),
        steps=schema.STEPS.conform(pl.concat([one.steps, steps])),
    )


def test_compute_of_one_device_does_not_slow_the_streams_of_another():
    # Device 0 prepares alone while device 1 computes.
    alone, computing = (
        SILENT["never beside compute"],
        "step 0000000000000000000000000\ncompute aaaaaaaaaaaaaaaaaaaaaaaaa",
    )
    assert judge(drawn_traces.run(two_devices(alone, computing))) == ()
    (found,) = judge(drawn_traces.run(two_devices(PREPARED, GIVE_WAY)))
    assert (lost(found), found.evidence["device"].to_list()) == (4, [1])


def test_what_happens_in_few_steps_is_not_the_typical_step():
    once = """
        step     0000000000000000000000000111112222233333
        compute  aaaaaaaa....aaaa......aaaaaaaabbbbbccccc
        comm     ppppppxxxxxx....ppxxxx..................
    """
    assert judge(giving_way(once)) == ()


def test_a_cpu_run_is_not_judged_and_says_why():
    report = check(drawn_traces.run(drawn_traces.trace(GIVE_WAY, on_device=False, columns=PREPARES)), [GiveWay()])
    assert report.findings == ()
    assert "device streams" in report.notes[0]
