"""Which part of a gap in compute is due to a wait of the host, and which not; and exposed copies."""

import numpy as np
import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tests.support import drawn_hosts
from tests.support.drawn_hosts import UNIT_NS
from tracekit.analysis.host import launch_delay
from tracekit.model import schema


def rows(trace):
    gaps = launch_delay.host_gaps(trace).sort("synced", "start_ns", descending=[True, False])
    return [(row["detail"], row["synced"], row["dur_ns"] // UNIT_NS) for row in gaps.iter_rows(named=True)]


def test_a_gap_is_synced_for_as_long_as_the_host_had_waited():
    # time     0         10        20
    # compute  aaaaaaaa............bbbb     b is launched at 20
    # host     ......ss............l        waits 2 for a; without that, b were launched at 18
    trace = drawn_hosts.trace(
        "step 000000000000000000000000\ncompute  aaaaaaaa............bbbb",
        {"a": 0, "b": 20},
        (("cudaStreamSynchronize", "runtime", 6, 8),),
    )
    assert rows(trace) == [("python", True, 2), ("python", False, 10)]


def test_a_gap_after_a_long_wait_is_synced_in_full():
    trace = drawn_hosts.trace(
        "step 0000000000000000\ncompute  aaaaaaaa....bbbb", {"a": 0, "b": 12}, (("aten::item", "cpu_op", 1, 8),)
    )
    assert rows(trace) == [("python", True, 4)]


def test_a_wait_inside_a_gap_counts_first():
    # compute  aaaa................bbbb     idle from 4 to 20
    # host     ........ssss........l        4 of Python, 4 of waiting, 8 of Python
    trace = drawn_hosts.trace(
        "step 000000000000000000000000\ncompute  aaaa................bbbb",
        {"a": 0, "b": 20},
        (("cudaDeviceSynchronize", "runtime", 8, 12),),
    )
    assert rows(trace) == [("synchronize", True, 4), ("python", False, 12)]


def test_a_host_that_waits_for_a_copy_does_not_cause_the_gap():
    # compute  aaaa............bbbb
    # copy     ....hhhhhhhh........
    # host     ....ssssssss...l         the copy blocks the host for 8; then 4 until b is launched
    trace = drawn_hosts.trace(
        """
        step     00000000000000000000
        compute  aaaa............bbbb
        copy     ....hhhhhhhh........
        """,
        {"a": 0, "h": 4, "b": 16},
        (("cudaStreamSynchronize", "runtime", 4, 12),),
        columns={"h": {"name": "Memcpy HtoD (Pageable -> Device)"}},
    )
    assert rows(trace) == [("python", False, 4)]


def test_what_the_host_waited_and_a_gap_did_not_use_explains_the_next_one():
    # compute  aaaaaaaaaa..bbbb......cccc
    # host     .ssssssssssl.....ss...l      waits 9 for a, of which the first gap uses 2; the second gap lasts 6
    trace = drawn_hosts.trace(
        "step 00000000000000000000000000\ncompute  aaaaaaaaaa..bbbb......cccc",
        {"a": 0, "b": 12, "c": 22},
        (("aten::item", "cpu_op", 1, 10), ("aten::item", "cpu_op", 15, 16)),
    )
    assert rows(trace) == [("python", True, 2), ("python", True, 6)]


GAPS = st.lists(
    st.tuples(
        st.integers(0, 1), st.integers(0, 2), st.booleans(), st.integers(0, 9), st.integers(1, 9), st.integers(0, 9)
    ),
    min_size=1,
    max_size=8,
)  # device, step, synced, waited before, time of Python, time of waiting
_PARTS = schema.columns("gap device step")


@given(GAPS)
def test_waits_explain_gaps_as_a_balance_that_is_kept_gap_by_gap(
    gaps: list[tuple[int, int, bool, int, int, int]],
) -> None:
    place, parts, expected, balance = [], [], [], {}
    for number, (device, step, synced, before_ns, python_ns, waiting_ns) in enumerate(gaps):
        start_ns = 100 * number
        own = [(start_ns, python_ns, False)] + [(start_ns + python_ns, waiting_ns, True)] * (waiting_ns > 0)
        place += [{"gap": number, "device": device, "step": step}] * len(own)
        parts += [(number, *part, before_ns, synced) for part in own]
        ahead_ns = balance.get((device, step), 0) + before_ns + waiting_ns
        explained_ns = min(ahead_ns, python_ns + waiting_ns) if synced else 0
        if synced:
            balance[device, step] = ahead_ns - explained_ns
        for begin_ns, dur_ns, _ in sorted(own, key=lambda part: not part[2]):  # waits count first
            used_ns = min(dur_ns, explained_ns)
            explained_ns -= used_ns
            expected += [(begin_ns, used_ns, True)] * (used_ns > 0)
            expected += [(begin_ns + used_ns, dur_ns - used_ns, False)] * (dur_ns > used_ns)
    gap, start, dur, waits, before, synced_ = (np.array(column) for column in zip(*parts, strict=True))
    host_time = launch_delay._HostTime(pl.DataFrame(place, schema=_PARTS), gap, start, dur, before, waits, synced_)
    start, dur, _, is_synced = launch_delay._split_by_wait(host_time)
    assert list(zip(start.tolist(), dur.tolist(), is_synced.tolist(), strict=True)) == sorted(expected)
