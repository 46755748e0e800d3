"""Kernels that fill a device: which they are, and when a replay lets others start beside them."""

import numpy as np
import polars as pl
import pytest

from tracekit.replay.graph import filled_devices
from tracekit.replay.graph.contraction import Network
from tracekit.replay.graph.nodes import HOST, WORK


def started(launched_ns, own_ns, room_ns, *, shares_with=(-1, -1, -1), recorded_ns=None):
    """Return when three kernels start, each on a stream of its own, all launched by one host at some times.

    They started in the recording at `recorded_ns`, by default when they were launched.
    """
    count = len(own_ns)
    nodes = {
        "what": [WORK] * count, "kind": ["compute"] * count, "rank": [0] * count, "device": [0] * count,
        "lane": list(range(count)), "room_ns": room_ns, "shares_with": shares_with,
        "launch": [-1] * count, "start_ns": recorded_ns or launched_ns,
    }  # fmt: skip
    devices = filled_devices.devices(pl.DataFrame(nodes), count)
    return filled_devices.starts(released_at(launched_ns, own_ns), devices).tolist()


def released_at(start_ns, own_ns):
    """Return a network of nodes that wait for the window's start alone."""
    nothing, nodes = np.full(len(own_ns), -1), np.arange(len(own_ns))
    waits = (nodes, nothing, np.array(start_ns))
    return Network(np.array(own_ns), nothing, 0 * nothing, nothing, 0 * nothing, *waits, order=nodes)


def test_a_kernel_waits_for_the_last_wave_of_one_that_fills_the_device():
    # lane 0   0 0 0 0 0 .      fills the device; its last wave takes one ns
    # lane 1   . . - - 1 1      ready at 2
    # lane 2   . . . . . . 2    ready at 6: nothing runs that fills the device
    assert started([0, 2, 6], [5, 2, 1], [1, -1, -1]) == [0, 4, 6]


def test_a_kernel_that_is_ready_before_the_other_starts_does_not_wait_for_it():
    # lane 0   . . 0 0 0 0 0    made later by a change: what met it in the recording no longer does
    # lane 1   . 1 1 . . . .
    assert started([2, 1, 0], [5, 2, 1], [1, -1, -1]) == [2, 1, 0]


def test_kernels_that_fill_the_device_run_one_after_the_other_in_the_order_in_which_they_became_ready():
    # lane 0   0 0 0 0 . . . . .
    # lane 1   . . - - - - 1 1 1    ready at 2, after 2
    # lane 2   . - - - 2 2 . . .    ready at 1
    assert started([0, 2, 1], [4, 3, 2], [0, 0, 0]) == [0, 6, 4]


def test_a_kernel_that_ran_beside_it_in_the_recording_finds_room_again():
    assert started([0, 2, 3], [5, 2, 1], [1, -1, -1], shares_with=[-1, 0, -1]) == [0, 2, 4]


@pytest.mark.parametrize(("recorded_ns", "expected_ns"), [([0, 5, 9], [0, 3, 7]), ([0, 9, 5], [0, 7, 3])])
def test_of_kernels_that_are_ready_at_once_the_one_that_started_first_in_the_recording_finds_room(
    recorded_ns, expected_ns
):
    # lane 0   0 0 0 . . .      all fill the device and leave no room
    # lane 1   . . . 1 1 1 1    or the other way round, whatever numbers their lanes have
    # lane 2   . . . . . . . 2
    assert started([0, 1, 1], [3, 4, 4], [0, 0, 0], recorded_ns=recorded_ns) == expected_ns


def frame(start_ns, end_ns, *, room_ns, grid_id, is_late):
    count = len(start_ns)
    return pl.DataFrame(
        {
            "at": range(count), "what": [WORK] * count, "kind": ["compute"] * count, "rank": [0] * count,
            "device": [0] * count, "lane": [each % 2 for each in range(count)], "start_ns": start_ns, "end_ns": end_ns,
            "room_ns": room_ns, "grid_id": grid_id, "is_late": is_late,
        },
        schema_overrides={"what": pl.Int8},
    )  # fmt: skip


def test_a_kernel_of_the_same_grid_fills_the_device_also_where_no_other_one_met_it():
    # lane 0   0 0 0 0 0 0 0 0 0 0 . . 2 2 2 2 2 2 2 2 2 2    3 starts at once beside 2
    # lane 1   . . . . . . . . . 1 . . . . . . 3 3 . . . .    1 started in the last wave of 0
    found = filled_devices.with_rooms(
        frame([0, 90, 120, 160], [100, 110, 220, 180], room_ns=[10, -1, -1, -1], grid_id=[7, 8, 7, 8],
              is_late=[False, True, False, False])
    )  # fmt: skip
    assert found["room_ns"].to_list() == [10, -1, 10, -1]
    assert found["shares_with"].to_list() == [-1, -1, -1, 2]


def late_items(start_ns, end_ns, ready_ns):
    count = len(start_ns)
    late = [start - ready > 50_000 for start, ready in zip(start_ns, ready_ns, strict=True)]
    return pl.DataFrame({
        "item": range(count), "is_wait": [False] * count, "device": [0] * count, "kind": ["compute"] * count,
        "lane": [each % 2 for each in range(count)], "start_ns": start_ns, "end_ns": end_ns, "ready_ns": ready_ns,
        "late": late,
    })  # fmt: skip


def test_kernels_beside_which_most_others_start_at_once_do_not_fill_the_device():
    ms = 1_000_000
    grid_id = pl.Series([7, 8, 7, 8, 7, 8], dtype=pl.UInt64)
    start, end = [0, 9 * ms, 20 * ms, 29 * ms, 40 * ms, 49 * ms], [10 * ms, 11 * ms, 30 * ms, 31 * ms, 50 * ms, 51 * ms]
    waits = filled_devices.waits_for_room(late_items(start, end, [0, ms, 20 * ms, 22 * ms, 40 * ms, 49 * ms]), grid_id)
    assert waits.rows() == [(1, 0, ms, True), (3, 2, ms, True)]
    at_once = [0, 9 * ms, 20 * ms, 23 * ms, 40 * ms, 44 * ms]
    assert filled_devices.waits_for_room(late_items(at_once, end, [0, ms, *at_once[2:]]), grid_id).is_empty()


def test_a_graph_without_device_work_is_replayed_as_it_is():
    nodes = pl.DataFrame({"what": [HOST], "kind": [None], "room_ns": [-1]})
    assert filled_devices.starts(released_at([3], [1]), filled_devices.devices(nodes, 1)).tolist() == [3]
