"""Clock drops: all kernels become slower together, not single ones, and not because of concurrent collectives."""

import random
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_faults, perturbation_graph
from tests.support import drawn_traces
from tracekit.analysis.compute.device_counters import clock_drops, slowed_kernels
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
