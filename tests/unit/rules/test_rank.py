"""Stragglers and slow links on drawn timelines: which rank or group, since which step, and by how much."""

import re
from dataclasses import replace

import polars as pl
import pytest

from tests.support import drawn_hosts, drawn_traces, rule_examples
from tracekit.analysis.communication import group_bandwidth
from tracekit.analysis.parallelism import late_groups, stragglers
from tracekit.model import schema
from tracekit.rules.data_quality import DoubtfulTrace
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity
from tracekit.rules.slow_collectives import SlowLink
from tracekit.rules.stragglers import LateGroup, OccasionalStraggler, Straggler, UnevenRanks

CHARACTER_NS = drawn_hosts.UNIT_NS


def judge(run, rule, **thresholds):
    return check(run, [rule(**thresholds)]).findings


def ranks(*pictures, steps, op="all_reduce"):
    """Return a run of ranks that share one group, each drawn as compute and communication."""
    groups = pl.DataFrame({"group": ["0"], "ranks": [list(range(len(pictures)))]})
    traces = [
        drawn_hosts.trace(
            f"step {steps}\ncompute {compute}\ncomm {communication}", {"a": 0}, rank=rank, groups=groups, ops={"y": op}
        )
        for rank, (compute, communication) in enumerate(pictures)
    ]
    return drawn_traces.run(*traces)


STEPS = "".join(str(step) * 40 for step in range(3))


def test_the_message_names_the_straggler_its_steps_and_collectives(wording):
    # Rank 1 is 3 late at each of 12 collectives: the other ranks are idle for 3 of every 10.
    early, late = ("aa" + "." * 8, "." * 2 + "yyyyyy.."), ("aaaaa.....", "." * 5 + "yyy..")
    run = ranks(*((c * 12, y * 12) for c, y in (early, late, early)), steps=STEPS)
    (found,) = judge(run, Straggler)
    assert found.ranks == (1,)
    assert found.cost_ns == 12 * CHARACTER_NS
    assert found.impact == pytest.approx(0.3, abs=0.02)
    wording(found.message)
    assert set(found.evidence["rank"]) == {0, 2}
    assert set(found.evidence["wait_ns"]) == {3 * CHARACTER_NS}


def test_ranks_that_are_late_together_are_one_finding(wording):
    # Ranks 0 and 3 are 3 late at each collective, rank 3 one more: the others wait for both.
    early, late, later = (("a" * n + "." * (10 - n), "." * n + "y" * (8 - n) + "..") for n in (2, 5, 6))
    run = ranks(*((c * 12, y * 12) for c, y in (late, early, early, later)), steps=STEPS)
    assert judge(run, Straggler) == judge(run, UnevenRanks) == ()
    (found,) = judge(run, LateGroup)
    assert found.ranks == (0, 3)
    wording(found.message)
    assert set(found.evidence["rank"]) == {1, 2}


def test_most_of_the_ranks_are_no_late_group():
    # Three of four ranks arrive late: the fourth is early, and nobody straggles.
    early, late = ("aa" + "." * 8, "." * 2 + "yyyyyy.."), ("aaaaa.....", "." * 5 + "yyy..")
    run = ranks(*((c * 12, y * 12) for c, y in (early, late, late, late)), steps=STEPS)
    assert run.table(late_groups.groups).is_empty()
    assert judge(run, Straggler) == judge(run, LateGroup) == ()


def test_a_rank_that_starts_to_straggle_is_reported_with_its_first_late_step(wording):
    even, slow = ("aa........", "..yyy....."), ("aaaaa.....", ".....yyy..")
    waiting = ("aa........", "..yyyyyy..")
    first = [
        ("".join(even[i] * 4), "".join((slow if rank == 1 else waiting)[i] * 8)) for rank in (0, 1, 2) for i in (0, 1)
    ]
    pictures = [(first[2 * r][0] + first[2 * r][1], first[2 * r + 1][0] + first[2 * r + 1][1]) for r in (0, 1, 2)]
    (found,) = judge(ranks(*pictures, steps=STEPS), Straggler)
    assert found.steps == (1, 2)
    wording(found.message)


def test_overlapped_waiting_counts_as_far_as_it_delays_later_collectives():
    # Compute overlaps the wait of rank 0 from 2 to 5; its next collective starts 3 later and is fully exposed.
    # time    0123456789abcdef
    # rank 0  aaaaaaaa......     y waits 2..5, runs to 8; z 8..13: exposed 5 more than it would be
    early = ("aaaaaaaa........", "..yyyyyyzzzzz...")
    tardy = ("aaaaaaaaaaa.....", ".....yyyzzzzz...")
    run = ranks(*((c * 9, y * 9) for c, y in (early, tardy, early)), steps="".join(str(s) * 48 for s in range(3)))
    accounts = run.table(stragglers.straggler_costs).filter(pl.col("late_rank") == 1)
    assert accounts["idle_ns"].to_list() == [0, 0, 0]
    assert accounts["waited_ns"].to_list() == [9 * CHARACTER_NS] * 3
    assert accounts["lost_ns"].to_list() == [9 * CHARACTER_NS] * 3


def test_delays_that_move_between_ranks_have_no_straggler():
    early, late = ("aa........", "..yyyyyy.."), ("aaaaa.....", ".....yyy..")
    first = [(early[0] * 2 + late[0] * 2) * 3, (early[1] * 2 + late[1] * 2) * 3]
    second = [(late[0] * 2 + early[0] * 2) * 3, (late[1] * 2 + early[1] * 2) * 3]
    assert judge(ranks(tuple(first), tuple(second), steps=STEPS), Straggler) == ()


def test_delays_that_vary_strongly_between_steps_have_no_straggler():
    pictures = []
    for rank in range(3):
        compute = communication = ""
        for late_by in (1, 6, 0):
            tardy = late_by if rank == 1 else 0
            compute += ("a" * (2 + tardy)).ljust(10, ".") * 4
            communication += ("." * (2 + tardy) + "y" * (1 + late_by - tardy)).ljust(10, ".") * 4
        pictures.append((compute, communication))
    run = ranks(*pictures, steps=STEPS)
    assert judge(run, Straggler) == ()
    assert judge(run, Straggler, max_spread_ratio=9.0, min_steps_ratio=0.5)


def turns(*steps):
    """A run of ranks of which each is the last at one of the collectives of a step, by so many characters."""
    pictures = []
    for rank in range(len(steps[0])):
        compute = communication = ""
        for late_by in steps:
            computed = communicated = ""
            for last, late in enumerate(late_by):
                length = 1 + (late if rank == last else 0)
                computed += ("a" * length).ljust(late + 3, ".")
                communicated += ("." * length + "y" * (late + 2 - length)).ljust(late + 3, ".")
            compute += computed.ljust(40, ".")
            communication += communicated.ljust(40, ".")
        pictures.append((compute, communication))
    return ranks(*pictures, steps=STEPS)


def test_a_rank_that_is_last_by_chance_is_not_named():
    """Rank 2 is the last one at a collective of each step, too, by a twelfth of what the others are late by."""
    (finding,) = judge(turns((12, 11, 1, 0), (0, 12, 1, 11), (11, 0, 1, 12)), UnevenRanks)
    late = {int(rank) for rank in re.findall(r"rank (\d) \(\d", finding.message)}
    assert len(late) == 2
    assert 2 not in late
    assert {int(rank) for rank in re.search(r"ranks ([\d, ]+) arrive", finding.fix)[1].split(", ")} == late


def test_a_rank_that_takes_no_longer_has_no_list_of_what_it_takes_longer_for():
    (finding,) = judge(turns((11, 11, 1, 0), (0, 0, 1, 0), (11, 11, 1, 0)), UnevenRanks)
    longer = dict(re.findall(r"rank (\d) is last at \d(?: \(([^)]*))?", finding.message))
    assert set(longer) == {"0", "1", "2"}
    assert longer["2"] == ""
    assert longer["0"] == longer["1"] != ""


def test_a_slow_group_is_compared_with_its_peers(wording):
    (found,) = judge(rule_examples.slow_link_run(3, 6, 3), SlowLink)
    assert found.ranks == (2, 3)
    wording(found.message)
    assert found.cost_ns == 4 * 3 * CHARACTER_NS
    assert set(found.evidence["transfer_ns"]) == {6 * CHARACTER_NS}


def test_a_slow_group_with_few_collectives_is_a_suspicion(wording):
    (found,) = judge(rule_examples.slow_link_run(3, 6, 3), SlowLink, min_calls=13)
    assert found.severity is Severity.INFO
    wording(found.message)


def test_a_slow_group_with_small_messages_is_a_suspicion(wording):
    (found,) = judge(rule_examples.slow_link_run(3, 6, 3), SlowLink, min_bandwidth_bytes_per_s=1 << 60)
    assert found.severity is Severity.INFO
    wording(found.message)


@pytest.mark.parametrize(("durations", "fires"), [((4, 6), True), ((5, 6), False)])
def test_the_slowdown_of_a_group_must_reach_its_threshold(durations, fires):
    assert bool(judge(rule_examples.slow_link_run(*durations), SlowLink)) == fires


def test_a_slow_link_whose_cost_is_overlapped_is_information():
    run = rule_examples.slow_link_run(3, 6)
    hidden = [replace(trace, activities=_all_compute(trace.activities)) for trace in run.traces()]
    (found,) = judge(drawn_traces.run(*hidden), SlowLink)
    assert found.severity is Severity.INFO
    assert found.cost_ns == 0


def _all_compute(activities):
    """Return the activities with compute that overlaps every collective."""
    overlapping = activities.filter(pl.col("kind") == "communication").with_columns(
        id=pl.col("id") + 100_000, launch_id=None, lane=0, name=pl.lit("a"), kind=pl.lit("compute")
    )
    return schema.ACTIVITIES.conform(pl.concat([activities, overlapping], how="diagonal_relaxed"))


def test_a_single_group_is_reported_only_if_it_becomes_slower(wording):
    # From step 1 on its collectives take twice as long; a link that was always slow cannot be recognized.
    quick, slow = "..xxx.....", "..xxxxxx.."
    for pattern, since in ((quick * 4 + slow * 8, 1), (slow * 12, None), (quick * 4 + slow * 4 + quick * 4, None)):
        traces = []
        for rank in (0, 1):
            groups = pl.DataFrame({"group": ["0"], "description": ["dp"], "ranks": [[0, 1]]})
            picture = f"step {STEPS}\ncompute {'aa........' * 12}\ncomm {pattern}"
            plain = drawn_hosts.trace(picture, {"a": 0}, rank=rank, groups=groups)
            collectives = plain.collectives.with_columns(group=pl.lit("0"), group_size=pl.lit(2), dtype=pl.lit("Float"))
            traces.append(replace(plain, collectives=schema.COLLECTIVES.conform(collectives)))
        found = judge(drawn_traces.run(*traces), SlowLink, min_bandwidth_bytes_per_s=0)
        assert len(found) == (since is not None)
        if found:
            wording(found[0].message)
            assert found[0].steps == (1, 2)
            assert found[0].severity is Severity.WARNING
            # Without the trace of rank 1, the collectives may take longer because it arrives later.
            (alone,) = judge(drawn_traces.run(traces[0]), SlowLink, min_bandwidth_bytes_per_s=0)
            assert alone.severity is Severity.INFO
            wording(alone.message)


@pytest.mark.parametrize(
    ("levels", "first"),
    [
        ([1, 1, 2, 2], 2),
        ([1, 2, 2, 2], 1),
        ([2, 2, 2, 2], None),
        ([1, 1, 1, 2], None),  # a single slow step is not enough
        ([1, 2, 1, 2], None),
        ([2, 2, 1, 1], None),
        ([1, 1, 2, 1.2, 2, 2, 2], 2),
        ([], None),
    ],
)
def test_first_slow_step(levels, first):
    assert group_bandwidth.first_slow_step([float(level) for level in levels], min_ratio=1.5, share=0.75) == first


def test_a_group_with_a_large_spread_between_steps_is_not_judged():
    traces = []
    for rank in range(4):
        spans = [(2, 6, 2, 4), (6, 2, 5, 2), (2, 5, 6, 6)] if rank < 2 else [(6, 7, 6, 7)] * 3
        communication = "".join(("..." + "x" * durations).ljust(10, ".") for step in spans for durations in step)
        groups = pl.DataFrame(
            {"group": [str(rank // 2)], "description": ["dp"], "ranks": [[rank // 2 * 2, rank // 2 * 2 + 1]]}
        )
        plain = drawn_hosts.trace(
            f"step {STEPS}\ncompute {'aa........' * 12}\ncomm {communication}", {"a": 0}, rank=rank, groups=groups
        )
        collectives = plain.collectives.with_columns(
            group=pl.lit(str(rank // 2)), group_size=pl.lit(2), dtype=pl.lit("F")
        )
        traces.append(replace(plain, collectives=schema.COLLECTIVES.conform(collectives)))
    run = drawn_traces.run(*traces)
    spreads = dict(run.table(group_bandwidth.step_variation).select("group", "spread_ratio").iter_rows())
    assert spreads["0"] > 0.3
    assert spreads["1"] == 0


def test_a_step_in_which_one_rank_evaluates_is_priced_by_the_wait_of_the_others(wording):
    (found,) = judge(rule_examples.occasional_straggler_run(0, 0, 0, 10, 0, 0), OccasionalStraggler)
    assert (found.severity, found.ranks, found.steps) == (Severity.WARNING, (0,), (3,))
    assert found.cost_ns == 10 * 9 * drawn_hosts.UNIT_NS // 6
    wording(found.message)


def test_an_evaluation_in_the_first_step_is_no_warm_up():
    run = rule_examples.occasional_straggler_run(10, 0, 0, 0, 0, 0)
    assert [each.steps for each in judge(run, OccasionalStraggler)] == [(0,)]
    assert not [each for each in judge(run, DoubtfulTrace) if "warm-up" in each.message]


def test_a_straggler_of_most_steps_is_not_occasional():
    assert judge(rule_examples.occasional_straggler_run(10, 10, 10, 10, 10, 0), OccasionalStraggler) == ()


def test_a_rank_that_is_late_in_half_of_the_steps_recurs():
    (found,) = judge(rule_examples.occasional_straggler_run(10, 0, 10, 0, 10, 0), OccasionalStraggler)
    assert (found.ranks, found.steps, found.severity) == ((0,), (0, 2, 4), Severity.WARNING)


def test_a_single_marked_step_is_judged_by_its_parts():
    # Rank 1 is 3 late at each of 12 collectives of the only step.
    early, late = ("aa" + "." * 8, "." * 2 + "yyyyyy.."), ("aaaaa.....", "." * 5 + "yyy..")
    run = ranks(*((c * 12, y * 12) for c, y in (early, late, early)), steps="0" * 120)
    (finding,) = judge(run, Straggler)
    assert (finding.ranks, finding.steps, finding.is_of_window) == ((1,), (0,), False)
    # It is 36 late at the first collective only: that is no straggler.
    once = ("aa" + "." * 38 + ("aa" + "." * 8) * 8, "." * 2 + "y" * 38 + (".." + "yyyyyy..") * 8)
    late_once = ("a" * 38 + ".." + ("aa" + "." * 8) * 8, "." * 38 + "yy" + (".." + "yyyyyy..") * 8)
    assert judge(ranks(once, late_once, once, steps="0" * 120), Straggler) == ()


def test_work_that_is_uneven_in_turn_names_the_rank_that_computes_longest_in_each_step():
    # Ranks 0, 1, 2 compute 4 instead of 3 in steps 0, 1, 2; compute fills half of what the others wait meanwhile.
    short, long = ("aaa.......", "...yyyyyy."), ("aaaa......", "....yyyyy.")
    pictures = [
        tuple("".join(4 * (long if step == rank else short)[part] for step in range(3)) for part in (0, 1))
        for rank in (0, 1, 2)
    ]
    (finding,) = judge(ranks(*pictures, steps=STEPS), UnevenRanks)
    assert finding.subject == "work"
    assert finding.evidence.select("step", "rank").rows() == [(0, 0), (1, 1), (2, 2)]
    # Four kernels a step take 1 longer on one of three ranks: 4 - 4 / 3 beyond the mean.
    assert finding.evidence["uneven_ns"].to_list() == pytest.approx([8 / 3 * CHARACTER_NS] * 3, abs=1)
    assert judge(ranks(*[("".join(3 * 4 * [short[0]]), 12 * short[1])] * 3, steps=STEPS), UnevenRanks) == ()
