"""Causes of compute gaps, on timelines drawn by hand and random ones; chains from preparation to compute gap."""

import polars as pl
from hypothesis import given, settings

from tests.support import drawn_hosts, drawn_traces
from tests.unit.analysis.test_gaps import random_traces, tiles
from tracekit.analysis.compute.compute_gap_causes import chains, compute_gap_causes, sums_across
from tracekit.analysis.host.host_stalls import host_stalls
from tracekit.analysis.time.launched_work import compute_gaps


def test_compute_that_waits_for_a_collective():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aa.....bbb
        comm     .xxxxxx...
        """,
        {"b": 0, "x": 0},
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace), "evidence") == [("collective", None, 2, 5, "adjacent")]


def test_the_host_causes_gaps_before_late_launches():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aa.....bbb
        """,
        {"b": 6},
        doing=(("cudaFree", "runtime", 1, 5),),
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace)) == [
        ("host", "allocator", 2, 3),
        ("host", "python", 5, 1),
        ("unknown", None, 6, 1),
    ]


def test_a_host_that_waits_for_a_collective_does_not_cause_the_gap():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aa.....bbb
        comm     .xxx......
        """,
        {"b": 7},
        doing=(("cudaStreamSynchronize", "runtime", 1, 4),),
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace)) == [
        ("collective", "synchronize", 2, 2),
        ("host", "python", 4, 3),
    ]


LOST = ("cudaLaunchKernel", "runtime")


def test_a_gap_is_not_known_to_be_idle_from_the_launch_of_a_lost_kernel_on():
    # The kernel that is launched at 4 was lost; the one at 12 is launched after b, and runs after it.
    trace = drawn_hosts.trace(
        """
        step     0000000000000000
        compute  aa.......bbbb..c
        """,
        {"b": 8, "c": 14},
        doing=((*LOST, 4, 4), ("cudaDeviceSynchronize", "runtime", 4, 7), (*LOST, 12, 12)),
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace)) == [
        ("host", "python", 2, 2),
        ("unknown", None, 4, 5),
        ("unknown", None, 13, 2),
    ]


def test_a_lost_kernel_that_was_launched_ahead_may_have_run_in_the_whole_gap():
    trace = drawn_hosts.trace(
        """
        step     0000000000000
        compute  aaaa.......bb
        """,
        {"a": 0, "b": 10},
        doing=((*LOST, 1, 1), ("cudaDeviceSynchronize", "runtime", 2, 9)),
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace)) == [("unknown", None, 4, 7)]


def test_kernels_that_were_lost_after_the_last_work_leave_no_stall_of_the_host():
    picture = "step 000000000011111111112222222222\ncompute aaaaaaaa..bbbbbbbb..c........."
    waits = ("cudaDeviceSynchronize", "runtime", 22, 60)
    steps = pl.DataFrame(
        {"step": [0, 1, 2], "device": [0, 0, 0], "host_start_ns": [0, 10, 20], "host_end_ns": [10, 20, 60],
         "start_ns": [0, 10, 20], "end_ns": [10, 20, 21]}
    ).with_columns(pl.col("^.*_ns$") * drawn_hosts.UNIT_NS)  # fmt: skip
    whole, cut = (
        drawn_hosts.trace(picture, {"c": 20}, doing, steps=steps) for doing in ((waits,), (waits, (*LOST, 21, 21)))
    )
    assert host_stalls(whole)["cause"].to_list() == ["synchronize"]
    assert host_stalls(cut).is_empty()


def test_compute_that_waits_for_a_copy():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aa.....bbb
        copy     ..mmmmm...
        """,
        {"b": 0},
    )
    assert drawn_hosts.gap_rows(compute_gap_causes(trace)) == [("copy", None, 2, 5)]


def test_a_compute_gap_inherits_the_cause_of_its_communication_gap():
    # The host launches y late; nothing runs until then, and b waits for y.
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aa......bb
        comm     x.....yy..
        """,
        {"y": 6, "b": 6},
    )
    causes = compute_gap_causes(trace)
    assert drawn_hosts.gap_rows(causes) == [("host", "python", 2, 4), ("collective", None, 6, 2)]
    assert causes["communication_gap"].to_list() == [0, None]
    assert causes["collective_id"].n_unique() == 1


def test_slow_preparation_causes_a_communication_gap_and_the_same_compute_gap():
    # p takes 2 alone and 6 during a: y starts 4 late, and b waits all of y.
    trace = drawn_hosts.trace(
        """
        step     00000000000000000000000000
        compute  aaaaaaaa....bbbb......cccc
        comm     xxppppppyyyy....ppzzzz....
        """,
        dict.fromkeys("abcpyz", 0),
    )
    first, second = chains(trace).rows(named=True)
    names = ("dur_ns", "preparation_ns", "contention_ns", "waited_ns")
    assert [first[name] // drawn_hosts.UNIT_NS for name in names] == [6, 2, 4, 4]
    assert second["contention_ns"] == 0
    assert second["preparation_ns"] == 2 * drawn_hosts.UNIT_NS


@settings(max_examples=20, deadline=None)
@given(random_traces)
def test_causes_sum_to_the_compute_gaps_and_chains_to_the_communication_gaps(trace):
    tiles(compute_gaps(trace), compute_gap_causes(trace))
    found = chains(trace)
    parts = [name for name in found.columns if name.endswith("_ns") and name not in ("start_ns", "dur_ns", "waited_ns")]
    assert found.select(pl.sum_horizontal(parts)).to_series().to_list() == found["dur_ns"].to_list()


def test_waiting_for_a_peer_is_separated_from_the_transfer():
    # Rank 1 arrives at each y 3 later than rank 0.
    groups = pl.DataFrame({"group": ["0"], "ranks": [[0, 1]]})
    picture = "step 000000000000000000000000000000\n"
    early = picture + "compute aa....bbaa....bbaa....bbaa....\ncomm ..yyyy....yyyy....yyyy....yyyy"
    tardy = picture + "compute aaaaa.bbaaaaa.bbaaaaa.bbaaaaa.\ncomm .....y.......y.......y.......y"
    run = drawn_traces.run(
        *(
            drawn_hosts.trace(text, {"b": 0}, rank=rank, groups=groups, ops={"y": "all_reduce"})
            for rank, text in enumerate((early, tardy))
        )
    )
    causes = sums_across(run, ["rank", "cause", "peer_rank"])
    rank_causes = causes.filter(pl.col("rank") == 0).select("cause", "peer_rank", "dur_ns")
    assert rank_causes.rows() == [("collective", None, 4 * drawn_hosts.UNIT_NS), ("peer", 1, 12 * drawn_hosts.UNIT_NS)]
    assert causes["dur_ns"].sum() == run.table(compute_gap_causes)["dur_ns"].sum()
    assert set(causes.filter(pl.col("rank") == 1)["cause"]) == {"collective"}
