"""Clock drops: all kernels become slower together, not single ones, and not because of concurrent collectives."""

import random
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_faults, perturbation_graph
from tests.support import drawn_traces
from tracekit.analysis.compute.device_counters import (
    clock_drops,
    confirmed_drops,
    slowed_kernels,
    work_variation,
)
from tracekit.analysis.time import launched_work
from tracekit.model.trace import Trace
from tracekit.replay.graph import savings
from tracekit.rules import engine
from tracekit.rules.device_slowdowns import ClockDrop

SHARED = Path(__file__).parents[4] / "shared" / "traces"
slowing = drawn_traces.slowing


def test_kernels_that_become_slower_together_show_a_lower_clock():
    # All kernels take 10 in steps 0 and 1, and 12 in steps 2 and 3.
    trace = slowing(dict.fromkeys("abcdefgh", 12))
    (drop,) = clock_drops(trace).iter_rows(named=True)
    assert (drop["step"], drop["low"], drop["slowdown"], drop["high"]) == (2, 1.2, 1.2, 1.2)
    excess = slowed_kernels(trace)
    assert excess["step"].unique().to_list() == [2, 3]
    assert set(excess["excess_ns"]) == {2}


def test_kernels_that_do_not_change_show_nothing():
    assert clock_drops(slowing(dict.fromkeys("abcdefgh", 10))).is_empty()


def test_a_few_slower_kernels_are_no_lower_clock():
    assert clock_drops(slowing({"a": 20, "b": 20, "c": 20})).is_empty()


def test_kernels_that_become_faster_are_no_drop():
    assert clock_drops(slowing(dict.fromkeys("abcdefgh", 8))).is_empty()


def test_kernels_slowed_by_collectives_are_not_compared():
    assert clock_drops(slowing(dict.fromkeys("abcdefgh", 12), concurrent=True)).is_empty()


def test_a_slowdown_within_the_variation_of_the_kernels_is_not_reported():
    trace = slowing(dict.fromkeys("abcdefgh", 11))
    noisy = pl.col("dur_ns") + pl.int_range(pl.len()).shuffle(seed=1) % 5 - 2
    assert clock_drops(trace.replace(activities=trace.activities.with_columns(noisy))).is_empty()


# All kernels of a step take as long as its number says: work that varies, as with sequences of uneven lengths.
UNEVEN = [[length] * 16 for length in (10, 13, 11, 14)]
DROPPED = [[length] * 16 for length in (10, 10, 14, 14)]


def test_work_that_varies_from_step_to_step_is_no_lower_clock():
    trace = drawn_traces.paced(UNEVEN)
    assert clock_drops(trace).is_empty()
    assert work_variation(trace)["ratio"].item() == pytest.approx(1.4, rel=0.01)


def test_a_device_in_every_second_step_slower_has_no_lower_clock():
    assert clock_drops(drawn_traces.paced([[length] * 16 for length in (10, 17, 10, 17)])).is_empty()


def test_a_drop_on_one_rank_counts_where_the_work_of_the_others_does_not_vary():
    dropped, steady = drawn_traces.paced(DROPPED), drawn_traces.paced([[10] * 16] * 4, rank=1)
    assert drawn_traces.run(dropped, steady).table(confirmed_drops)["rank"].to_list() == [0]
    varying = drawn_traces.paced(UNEVEN, rank=1)
    assert drawn_traces.run(dropped, varying).table(confirmed_drops).is_empty()


def test_a_clock_that_falls_steadily_costs_what_kernels_take_beyond_their_first_time():
    # Kernels take from 20 to 40: 20 more in as long as all of them take.
    lengths, now_ns = [], 0
    for _ in range(64):
        lengths.append(20 + round(20 * now_ns / 1846))
        now_ns += lengths[-1]
    trace = drawn_traces.paced([lengths[first : first + 16] for first in range(0, 64, 16)])
    (drop,) = clock_drops(trace).iter_rows(named=True)
    assert (drop["is_gradual"], drop["step"]) == (True, 0)
    assert drop["slowdown"] == pytest.approx(2, rel=0.1)
    assert slowed_kernels(trace)["excess_ns"].sum() == pytest.approx(sum(lengths) - 64 * 20, rel=0.1)


# Kernels take 10 ns, but 14 in some eighths of a step, each of which has every kernel once.
def eighths(*slow):
    return [length for eighth in range(8) for length in 8 * [14 if eighth in slow else 10]]


def test_kernels_that_are_slower_in_half_of_one_step_are_compared_with_all_others():
    trace = drawn_traces.paced([eighths(), eighths(), eighths(0, 1, 2, 3), eighths()])
    (drop,) = clock_drops(trace).iter_rows(named=True)
    assert (drop["step"], drop["spans"], drop["slow_ns"]) == (2, 1, 32 * 14)
    assert drop["slowdown"] == pytest.approx(1.4)
    assert (slowed_kernels(trace).height, slowed_kernels(trace)["excess_ns"].sum()) == (32, 32 * 4)


def test_kernels_that_are_slower_in_the_same_part_of_every_step_are_compared_with_the_rest_of_the_steps():
    trace = drawn_traces.paced([eighths(3, 4)] * 4)
    (drop,) = clock_drops(trace).iter_rows(named=True)
    assert (drop["spans"], drop["slow_ns"]) == (4, 4 * 16 * 14)
    assert (slowed_kernels(trace).height, slowed_kernels(trace)["excess_ns"].sum()) == (64, 64 * 4)


def test_a_part_of_every_step_that_is_slower_on_one_of_three_ranks_is_left_to_the_comparison_of_ranks():
    slow = [drawn_traces.paced([eighths(3, 4)] * 4, rank=rank) for rank in range(3)]
    fast = [drawn_traces.paced([eighths()] * 4, rank=rank) for rank in range(3)]
    assert drawn_traces.run(*slow).table(confirmed_drops)["rank"].to_list() == [0, 1, 2]
    assert drawn_traces.run(slow[0], *fast[1:]).table(confirmed_drops).is_empty()


@pytest.mark.parametrize("slow_steps", [{2}, {1, 2}])
def test_whole_steps_that_take_longer_are_other_work(slow_steps):
    trace = drawn_traces.paced([eighths(*range(8)) if step in slow_steps else eighths() for step in range(6)])
    assert clock_drops(trace).is_empty()


def test_a_few_slower_kernels_in_a_part_of_every_step_are_no_slower_device():
    step = [14 if 20 <= number < 36 and number % 8 < 3 else 10 for number in range(64)]
    assert clock_drops(drawn_traces.paced([step] * 4)).is_empty()


def forward_and_backward(lost_in_step: Mapping[int, Collection[int]]) -> Trace:
    """Five steps of 8 passes through kernels a and b in forward, and in backward, where these take twice as long.

    Kernels in `lost_in_step`, by step and place in it, have no launch, step and grid, as without their arguments.
    """
    rows, launch, grid = {"step": "", "compute": ""}, [], []
    for step in range(5):
        for number in range(32):
            length, letter = 10 * (1 + number // 16), "ab"[number % 2]
            is_lost = number in lost_in_step.get(step, ())
            rows["step"] += ("." if is_lost else str(step)) * length
            rows["compute"] += letter * length
            launch.append(None if is_lost else len(launch))
            grid.append(None if is_lost else "8x1x1")
    trace = drawn_traces.trace("\n".join(f"{name} {cells}" for name, cells in rows.items()))
    columns = pl.Series("launch_id", launch, pl.Int64), pl.Series("grid", grid, pl.String)
    return replace(trace, activities=trace.activities.with_columns(columns))


def test_lost_launches_do_not_make_the_kernels_of_backward_slower_ones_of_forward():
    lost = {step: (2 + step, 9, 18 + step, 27) for step in range(5)}
    assert clock_drops(forward_and_backward({})).is_empty()
    assert clock_drops(forward_and_backward(lost)).is_empty()


def test_work_of_which_the_launch_was_lost_is_the_same_as_none_and_so_are_its_neighbours():
    whole, damaged = (
        launched_work.kernel_ids(forward_and_backward(lost), 0).tolist() for lost in ({}, {2: (5,), 0: (0, 1)})
    )
    place = 2 * 32 + 5
    near = range(place - 2, place + 3)
    assert all(damaged.count(damaged[number]) == 1 for number in near)
    # What was queued before the recording has neighbours that are known by their names.
    assert damaged[8 : place - 2] == whole[8 : place - 2]
    assert damaged[place + 3 :] == whole[place + 3 :]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
class TestOnARealRecording:
    def test_a_clock_drop_of_one_rank_is_found_and_priced(self, tmp_path):
        job = perturbation_graph.load((SHARED / "torchrec_v100_4ranks").glob("*.json.gz"))
        rank = injected_faults.clock_drop(job, 0.12, random.Random("clock"))
        job.replay()
        for of_rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, tmp_path / f"rank{of_rank.number}.json.gz")
        run = tracekit.load(str(tmp_path), cache=False)
        (drop,) = run.table(clock_drops).iter_rows(named=True)
        assert (drop["rank"], drop["step"]) == (rank, 5)
        assert drop["slowdown"] == pytest.approx(1.36, rel=0.02)
        (finding,) = engine.check(run, [ClockDrop()]).findings
        assert finding.ranks == (rank,)
        assert finding.cost_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.25)
        assert savings.saving(run, "clock-drop").saved_ns > 0

    @pytest.mark.parametrize(
        "folder", ["torchrec_v100_4ranks", "megatron_tp8_a100_8ranks", "kineto_resnet_v100_memory"]
    )
    def test_public_recordings_have_no_drop(self, folder):
        assert tracekit.load(str(SHARED / folder)).table(clock_drops).is_empty()

    def test_a_save_in_the_background_that_slows_half_a_step_is_found_and_priced(self, tmp_path):
        job = perturbation_graph.load((SHARED / "torchrec_v100_4ranks").glob("*.json.gz"))
        injected_faults.background_save(job, 0.25, random.Random("save"))
        job.replay()
        for of_rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, tmp_path / f"rank{of_rank.number}.json.gz")
        run = tracekit.load(str(tmp_path), cache=False)
        (finding,) = engine.check(run, [ClockDrop()]).findings
        assert finding.ranks == (0, 1, 2, 3)
        assert finding.cost_ns == pytest.approx(1000 * job.lost_in_steps_us() / 3, rel=0.15)
