"""The give-way effect on drawn timelines: preparation slowed by compute, a late collective, idle compute."""

import dataclasses

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces
from tests.support.rule_examples import GIVE_WAY, PREPARED, give_way_run
from tracekit.model import schema
from tracekit.rules.engine import check
from tracekit.rules.streams import GiveWay

UNIT_NS = drawn_hosts.UNIT_NS
PREPARES = {"p": {"kind": "compute"}}


def judge(run, **thresholds):
    return check(run, [GiveWay(**thresholds)]).findings


def lost(found):
    """Return how long compute waits in the quoted step, in characters."""
    own = found.evidence.filter(pl.col("rank") == found.evidence["rank"][0])
    return own["lost_ns"].sum() // UNIT_NS


def characters(row, *names):
    """Return times in characters."""
    return [row[name] // UNIT_NS for name in names]


def test_the_loss_is_how_long_compute_waits(wording):
    (found,) = judge(give_way_run(GIVE_WAY))
    assert lost(found) == 4
    wording(found.message)
    row = found.evidence.row(0, named=True)
    assert (row["name"], row["start_ns"], row["sample"]) == ("p", 0, "alone")
    assert characters(row, "dur_ns", "alone_ns", "gap_ns", "contention_ns") == [6, 2, 6, 4]
    assert characters(row, "delay_ns", "waited_ns", "lost_ns") == [4, 4, 4]


def test_a_long_communication_gap_costs_only_the_short_compute_gap_behind_it(wording):
    # Compute is idle only during the last 2 of x, although x starts 4 late.
    (found,) = judge(
        give_way_run("""
            step     0000000000000000000000000
            compute  aaaaaaaaaa..aaaa......aaa
            comm     ppppppxxxxxx....ppxxxx...
        """)
    )
    assert lost(found) == 2
    wording(found.message)
    assert characters(found.evidence.row(0, named=True), "delay_ns", "waited_ns", "lost_ns") == [4, 2, 2]


def test_all_preparation_of_a_collective_is_one_chain():
    # p and q are delayed by 2 each, the collective by 4, and compute waits 6.
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


def test_a_late_last_collective_of_a_step_counts_although_no_compute_follows():
    (found,) = judge(
        give_way_run("""
            step     0000000000000000000000000
            compute  ....aaa......aaaaaaaa....
            comm     ppxxxxx......ppppppxxxxxx
        """)
    )
    assert lost(found) == 4


SILENT = {
    "prepared before the compute": PREPARED,
    "never during compute": """
        step     0000000000000000000000000
        compute  ........aaaa....aaaa...aa
        comm     ppppppxx....pp....xxxx...
    """,
    "as long during compute as alone": """
        step     0000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa
        comm     ....ppxxxxxx....ppxxxx...
    """,
    "no collective follows": """
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
    "never alone": """
        step     0000000000000
        compute  aaaaaaaa....a
        comm     ppppppxxxxxx.
    """,
}


@pytest.mark.parametrize("picture", SILENT.values(), ids=SILENT)
def test_an_incomplete_chain_is_not_reported(picture):
    run = give_way_run(picture)
    assert "p" in run.trace(0).activities["name"]
    assert judge(run, min_cost_ratio=0.0001) == ()


@pytest.mark.parametrize(("slowdown", "fires"), [(2.99, True), (3.0, False)])
def test_the_slowdown_must_exceed_its_threshold(slowdown, fires):
    assert bool(judge(give_way_run(GIVE_WAY), min_slowdown=slowdown)) == fires


@pytest.mark.parametrize(("ratio", "fires"), [(0.15, True), (0.17, False)])
def test_the_cost_must_reach_its_threshold(ratio, fires):
    assert bool(judge(give_way_run(GIVE_WAY), min_cost_ratio=ratio)) == fires


def test_the_time_alone_is_a_median():
    # Alone p takes 2, 5 and 5, so 6 during compute is not slow.
    run = give_way_run("""
        step     0000000000000000000000000000000000000000
        compute  aaaaaaaa....aaaa......aaa......a.......a
        comm     ppppppxxxxxx....ppxxxx...pppppx..pppppx.
    """)
    assert judge(run) == ()


def test_each_rank_is_compared_with_its_own_kernels_and_the_worst_is_quoted():
    half = GIVE_WAY.replace("aaaaaaaa....aaaa", "aaaaaaaaaa..aaaa")
    traces = [
        drawn_traces.trace(picture, rank=rank, columns=PREPARES, scale_ns=UNIT_NS)
        for rank, picture in enumerate((half, GIVE_WAY, PREPARED))
    ]
    (found,) = judge(drawn_traces.run(*traces))
    assert found.ranks == (0, 1)
    assert (lost(found), found.evidence["rank"][0]) == (4, 1)
    # The time alone on another rank does not count.
    only_during, only_alone = SILENT["never alone"], SILENT["never during compute"]
    traces = [
        drawn_traces.trace(picture, rank=rank, columns=PREPARES, scale_ns=UNIT_NS)
        for rank, picture in enumerate((only_during, only_alone))
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
        SILENT["never during compute"],
        "step 0000000000000000000000000\ncompute aaaaaaaaaaaaaaaaaaaaaaaaa",
    )
    assert judge(drawn_traces.run(two_devices(alone, computing))) == ()
    (found,) = judge(drawn_traces.run(two_devices(PREPARED, GIVE_WAY)))
    assert (lost(found), found.evidence["device"].to_list()) == (4, [1])


def test_an_effect_in_few_steps_is_not_in_the_representative_step():
    first_step_only = """
        step     0000000000000000000000000111112222233333
        compute  aaaaaaaa....aaaa......aaaaaaaabbbbbccccc
        comm     ppppppxxxxxx....ppxxxx..................
    """
    assert judge(give_way_run(first_step_only)) == ()


def test_a_cpu_run_is_a_blind_spot():
    report = check(drawn_traces.run(drawn_traces.trace(GIVE_WAY, on_device=False, columns=PREPARES)), [GiveWay()])
    assert report.findings == ()
    assert "no device activity" in report.notes[0]
