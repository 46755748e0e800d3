"""Communication gaps and their causes, on timelines drawn by hand and random ones."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support import drawn_hosts, drawn_traces
from tracekit.analysis.communication.communication_gap_causes import CAUSES, gap_causes
from tracekit.analysis.time import breakdown
from tracekit.analysis.time.launched_work import communication_gaps, compute_gaps


def spans(gaps):
    return [(row["start_ns"], row["dur_ns"]) for row in gaps.iter_rows(named=True)]


def test_a_communication_gap_lies_between_collectives_of_a_phase():
    trace = drawn_traces.trace(
        """
        step     00000000000000000000
        compute  aaaaaa....bbbbbbbb..
        comm     ..xx...x.......yy...
        """,
        columns={name: {"phase": "forward" if name in "ax" else "backward"} for name in "abxy"},
    )
    gaps = communication_gaps(trace)
    # Before x since forward began, between both x, and before y since backward began.
    assert spans(gaps) == [(0, 2), (4, 3), (10, 5)]
    assert gaps["phase"].to_list() == ["forward", "forward", "backward"]
    assert gaps["name"].to_list() == ["x", "x", "y"]


def test_a_communication_gap_needs_all_lanes_to_be_without_collectives():
    trace = drawn_traces.trace("""
        step     0000000000
        compute  a.........
        comm1    .xxx......
        comm2    ..yyyy..zz
    """)
    assert spans(communication_gaps(trace)) == [(0, 1), (6, 2)]


def test_a_compute_gap_lies_in_the_window_of_its_step():
    trace = drawn_traces.trace("""
        step     0000011111
        compute  .aa..b.cc.
        comm     ...xx.....
    """)
    gaps = compute_gaps(trace)
    assert spans(gaps) == [(0, 1), (3, 2), (6, 1), (9, 1)]
    assert gaps["step"].to_list() == [0, 0, 1, 1]
    assert gaps["name"].to_list() == ["a", "b", "c", None]


def test_the_host_causes_the_gap_before_a_collective_launched_late():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaaaaaaaa
        comm     x.......y.
        """,
        {"y": 8},
        doing=(("cudaMalloc", "runtime", 2, 4), ("aten::mm", "cpu_op", 4, 6)),
    )
    assert drawn_hosts.gap_rows(gap_causes(trace)) == [
        ("host", "python", 1, 1),
        ("host", "allocator", 2, 2),
        ("host", "op", 4, 2),
        ("host", "python", 6, 2),
    ]


@pytest.mark.parametrize(
    ("name", "kind", "detail"),
    [
        ("FullyShardedDataParallel.rate_limiter", "annotation", "rate_limiter"),
        ("cudaStreamSynchronize", "runtime", "synchronize"),
        ("aten::item", "cpu_op", "synchronize"),
        ("hipFree", "runtime", "allocator"),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", "annotation", "data"),
        ("cudaEventRecord", "runtime", "launch"),
        ("acquire lock", "annotation", "lock"),
    ],
)
def test_the_detail_of_a_host_gap_is_the_state_of_the_host(name, kind, detail):
    picture = """
        step     0000000000
        compute  aaaaaaaaaa
        comm     x.......y.
    """
    doing = (
        ((name, kind, 1, 8), ("cudaEventSynchronize", "runtime", 2, 3)) if "limiter" in name else ((name, kind, 1, 8),)
    )
    assert drawn_hosts.gap_rows(gap_causes(drawn_hosts.trace(picture, {"y": 8}, doing))) == [("host", detail, 1, 7)]


def test_a_collective_that_waits_for_the_compute_before_it():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaaaabbbb
        comm     x.....y...
        """,
        {"b": 0, "y": 2},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace), "name", "evidence") == [("compute", None, 1, 5, "a", "adjacent")]


def test_a_reduction_launched_late_waits_for_its_data_and_then_for_the_host():
    # While a ran there was nothing to reduce; then the host took 3 more to launch y.
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaa......
        comm     x......y..
        """,
        {"y": 7},
        ops={"y": "reduce_scatter"},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace), "evidence") == [
        ("compute", None, 1, 3, "running"),
        ("host", "python", 4, 3, "launch_time"),
    ]


def test_the_host_causes_the_gap_before_a_late_gather_even_during_compute():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaa......
        comm     x......y..
        """,
        {"y": 7},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace)) == [("host", "python", 1, 6)]


def test_a_collective_that_waits_for_a_copy():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaa.......
        copy     ...mmm....
        comm     x.....y...
        """,
        {"m": 0, "y": 1},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace)) == [("compute", None, 1, 2), ("copy", None, 3, 3)]


def test_unexplained_gaps_are_unknown():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaaaaaaaa
        comm     x......y..
        """,
        {"y": 1},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace), "confidence") == [("unknown", None, 1, 6, 0.0)]


def test_preparation_is_split_into_solo_time_and_contention():
    # p takes 2 alone (before z), 6 during a.
    trace = drawn_hosts.trace(
        """
        step     0000000000000000000
        compute  aaaaaaaaa......bbbb
        comm     x.ppppppyyy.pp.z...
        """,
        {"p": 0, "y": 0, "z": 0},
    )
    found = [row for row in drawn_hosts.gap_rows(gap_causes(trace), "name", "evidence") if row[2] < 12]
    assert found == [
        ("unknown", None, 1, 1, None, "none"),
        ("preparation", None, 2, 2, "p", "lane_order"),
        ("contention", None, 4, 4, "p", "lane_order"),
        ("unknown", None, 11, 1, None, "none"),
    ]


def test_preparation_without_a_solo_sample_is_not_split():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaaaaaaaa
        comm     xppppyy...
        """,
        {"p": 0, "y": 0},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace)) == [("preparation", "no_sample_alone", 1, 4)]


def test_preparation_on_another_lane_is_recognized_by_its_span():
    under = {"span": "all_gather", "unit": "layers.1"}
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaaaaaaaa
        set      .ppp......
        comm     x...y.....
        """,
        {"p": 0, "y": 1},
        columns={"p": under, "y": under},
    )
    assert drawn_hosts.gap_rows(gap_causes(trace), "evidence")[0] == ("preparation", "no_sample_alone", 1, 3, "span")


def test_collectives_of_a_cpu_run_wait_for_compute():
    trace = drawn_hosts.trace(
        """
        step     0000000000
        compute  aaaa..bb..
        comm     .......yy.
        """,
        {"y": 7},
        on_device=False,
    )
    assert drawn_hosts.gap_rows(gap_causes(trace)) == [
        ("compute", None, 0, 4),
        ("host", "python", 4, 2),
        ("compute", None, 6, 1),
    ]


@pytest.mark.parametrize("scale_ns", [1 << 20, 1 << 55])
def test_gaps_may_last_for_years(scale_ns):
    """GIVEN short gaps and one that is so long that their number times its length exceeds an int64, THEN all count."""
    comm = "x." * 20 + "." * 30 + "x"
    trace = drawn_traces.trace(f"step {'0' * len(comm)}\ncomm {comm}", scale_ns=scale_ns)
    found = gap_causes(trace)
    assert (found["dur_ns"] // scale_ns).to_list() == [1] * 19 + [31]
    assert set(found["cause"]) == {"unknown"}


def test_a_trace_without_collectives_has_no_communication_gaps():
    trace = drawn_traces.trace("step 0000\ncompute aa.b")
    assert communication_gaps(trace).is_empty()
    assert gap_causes(trace).is_empty()


def test_a_trace_without_launches_leaves_causes_unknown():
    trace = drawn_traces.trace("step 00000000\ncompute aaaaaaaa\ncomm x....y..", scale_ns=drawn_hosts.UNIT_NS)
    assert set(gap_causes(trace)["cause"]) == {"unknown"}


cells = st.lists(st.sampled_from("aab.x"), min_size=24, max_size=24).map("".join)
random_traces = st.builds(
    lambda compute, first, second, launches, host, on_device: drawn_hosts.trace(
        f"step 000000001111111122222222\ncompute {compute}\ncomm1 {first}\ncomm2 {second}",
        launches,
        tuple((name, kind, start, start + length) for name, kind, start, length in host),
        phases={"a": "forward", "x": "backward"},
        prepares="ab",
        on_device=on_device,
    ),
    cells,
    cells,
    cells,
    st.dictionaries(st.sampled_from("abx"), st.integers(0, 23)),
    st.lists(
        st.tuples(
            st.sampled_from(["cudaMalloc", "aten::mm", "cudaStreamSynchronize"]),
            st.sampled_from(["runtime", "cpu_op"]),
            st.integers(0, 20),
            st.integers(1, 5),
        ),
        max_size=3,
    ),
    st.booleans(),
)


def by_hand(trace):
    """Return, character by character, the collective that ends the gap it lies in; None outside gaps."""
    work = trace.activities.with_columns(
        (pl.col("start_ns") // drawn_hosts.UNIT_NS).alias("start"),
        ((pl.col("start_ns") + pl.col("dur_ns")) // drawn_hosts.UNIT_NS).alias("end"),
    ).rows(named=True)
    calls = sorted((w for w in work if w["kind"] == "communication"), key=lambda w: (w["start"], w["id"]))
    found = []
    for t in range(24):
        following = next((c for c in calls if c["start"] > t), None)
        if following is None or any(c["start"] <= t < c["end"] for c in calls):
            found.append(None)
            continue
        begun = min(w["start"] for w in work if all(w[k] == following[k] for k in ("step", "phase")))
        found.append(following["id"] if t >= begun else None)
    return found


@settings(max_examples=25, deadline=None)
@given(random_traces)
def test_communication_gaps_equal_a_mask_and_causes_sum_to_them(trace):
    gaps, causes = communication_gaps(trace), gap_causes(trace)
    mask: list[int | None] = [None] * 24
    for row in gaps.iter_rows(named=True):
        for t in range(
            row["start_ns"] // drawn_hosts.UNIT_NS, (row["start_ns"] + row["dur_ns"]) // drawn_hosts.UNIT_NS
        ):
            assert mask[t] is None
            mask[t] = row["collective_id"]
    assert mask == by_hand(trace)
    tiles(gaps, causes)


def tiles(gaps, causes):
    assert set(causes["cause"]) <= set(CAUSES)
    assert causes["gap"].unique().sort().to_list() == gaps["gap"].to_list()
    for gap, start_ns, dur_ns in gaps.select("gap", "start_ns", "dur_ns").iter_rows():
        parts = causes.filter(pl.col("gap") == gap)
        edges = np.cumsum([start_ns, *parts["dur_ns"].to_list()])
        assert parts["start_ns"].to_list() == edges[:-1].tolist()
        assert edges[-1] == start_ns + dur_ns
        assert (parts["dur_ns"] > 0).all()


@settings(max_examples=25, deadline=None)
@given(random_traces)
def test_compute_gaps_equal_a_mask(trace):
    compute = trace.activities.filter(pl.col("kind") == "compute")
    busy = {
        t
        for start, dur in compute.select("start_ns", "dur_ns").iter_rows()
        for t in range(start // drawn_hosts.UNIT_NS, (start + dur) // drawn_hosts.UNIT_NS)
    }
    idle = [
        t
        for start, dur in compute_gaps(trace).select("start_ns", "dur_ns").iter_rows()
        for t in range(start // drawn_hosts.UNIT_NS, (start + dur) // drawn_hosts.UNIT_NS)
    ]
    assert idle == [t for t in range(24) if t not in busy]


def test_the_parts_of_a_step_sum_to_its_duration():
    # compute 4 (aa, bb), communication 5 of which 1 hidden under b, copies 3 of which 2 exposed, idle 2
    trace = drawn_traces.trace("""
        step     000000000000
        compute  aabb........
        comm     ...xxxxx....
        copy     .......mmm..
    """)
    row = breakdown.by_step(trace).row(0, named=True)
    assert row["duration_ns"] == 12
    assert (row["compute_ns"], row["communication_ns"], row["overlapped_ns"]) == (4, 5, 1)
    assert (row["exposed_communication_ns"], row["exposed_copy_ns"], row["idle_ns"]) == (4, 2, 2)


def test_the_rank_row_spans_first_to_last_activity():
    trace = drawn_traces.trace("""
        step     0000111111
        compute  ..aa..bb..
        comm     ........x.
    """)
    row = breakdown.by_rank(trace).row(0, named=True)
    assert (row["step"], row["start_ns"], row["duration_ns"], row["idle_ns"]) == (None, 2, 7, 2)


def test_a_trace_without_work_has_no_rows():
    trace = drawn_traces.trace("step 000")
    assert breakdown.by_rank(trace).is_empty()
