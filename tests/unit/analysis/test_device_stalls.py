"""Stalled devices: queued work that does not run, kernels that are paused, and what the program explains itself."""

import random
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_faults, perturbation_graph
from tests.support import drawn_hosts, drawn_traces
from tracekit.analysis.communication.communication_gap_causes import gap_causes
from tracekit.analysis.compute.compute_gap_causes import compute_gap_causes
from tracekit.analysis.time.device_stalls import device_stalls, paused_kernels
from tracekit.replay.graph import savings
from tracekit.rules import engine
from tracekit.rules.device_slowdowns import DeviceStall
from tracekit.rules.host import BlockingSync, LateLaunch

SHARED = Path(__file__).parents[4] / "shared" / "traces"
sliced = drawn_hosts.time_sliced


def test_queued_work_that_does_not_run_at_varying_places_is_a_stall():
    trace = sliced((5, 10, 15, 24, 31))
    stalls = device_stalls(trace)
    assert stalls["dur_ns"].to_list() == [20 * drawn_hosts.UNIT_NS] * 5
    assert stalls["is_recurring"].all()
    causes = compute_gap_causes(trace)
    assert causes.filter(pl.col("cause") == "device_stall")["dur_ns"].sum() == 100 * drawn_hosts.UNIT_NS
    assert set(causes["cause"]) == {"device_stall"}


@pytest.mark.parametrize("kind", ["memcpy", "memset"])
def test_a_device_that_computes_nothing_is_judged(kind: str) -> None:
    trace = drawn_traces.trace("step 0000000000\ncompute a....b....")
    copies = replace(trace, activities=trace.activities.with_columns(kind=pl.lit(kind, trace.activities["kind"].dtype)))
    assert device_stalls(copies)["dur_ns"].to_list() == []
    engine.check(drawn_traces.run(copies))  # a rule that fails raises


def test_work_launched_while_another_process_has_the_device_waits_for_the_rest_of_its_slice():
    # launch             v         half of the slice is over: kernel z, which runs once
    # compute  abc....................zabcd
    trace = sliced((5, 10, 15, 24, 31, 35))
    start_ns = int(trace.activities["start_ns"][35])
    calls = pl.when(pl.col("id") == trace.activities["launch_id"][35]).then(start_ns - 10 * drawn_hosts.UNIT_NS)
    named = pl.when(pl.col("id") == 35).then(pl.lit("z")).otherwise("name").alias("name")
    late = trace.replace(
        ops=trace.ops.with_columns(calls.otherwise("start_ns").alias("start_ns")),
        activities=trace.activities.with_columns(named),
    )
    rest = device_stalls(late).sort("start_ns").row(-1, named=True)
    assert (rest["dur_ns"] // drawn_hosts.UNIT_NS, rest["is_recurring"]) == (10, True)


def test_fewer_stalls_have_no_known_cause():
    trace = sliced((5, 10, 15, 24))
    assert not device_stalls(trace)["is_recurring"].any()
    assert set(compute_gap_causes(trace).select("cause", "detail").unique().rows()) == {("unknown", "queued")}


def test_stalls_at_one_place_are_a_wait_that_is_not_recorded():
    # Each kernel b waits: it may wait for the host or another process.
    trace = sliced(range(5, 40, 4))
    assert device_stalls(trace).height == 9
    assert not device_stalls(trace)["is_recurring"].any()


def test_work_that_is_launched_late_is_not_stalled():
    trace = sliced((5, 10, 15, 24, 31), launched_late=(5, 10, 15, 24, 31))
    assert device_stalls(trace).is_empty()
    assert set(compute_gap_causes(trace)["cause"]) == {"host"}


def test_a_device_that_waits_for_another_one_of_its_process_is_not_stalled():
    trace = sliced((5, 10, 15, 24, 31))
    end_ns = int(trace.activities.select((pl.col("start_ns") + pl.col("dur_ns")).max()).item())
    other = trace.activities.head(1).with_columns(
        id=pl.lit(999, pl.Int64),
        lane=pl.lit(9, pl.Int64),
        launch_id=pl.lit(None, pl.Int64),
        dur_ns=pl.lit(end_ns, pl.Int64),
    )
    lane = trace.lanes.head(1).with_columns(lane=pl.lit(9, pl.Int64), device=pl.lit(1, pl.Int64))
    both = trace.replace(activities=pl.concat([trace.activities, other]), lanes=pl.concat([trace.lanes, lane]))
    assert device_stalls(both).filter(pl.col("device") == 0).is_empty()


def test_kernels_launched_before_that_were_not_recorded_may_have_run():
    trace = sliced((5, 10, 15, 24, 31))
    kept = trace.activities.filter(pl.col("id") != 4)
    assert device_stalls(trace.replace(activities=kept)).height == 4


def test_an_idle_device_within_a_cuda_graph_is_not_called_stalled():
    trace = sliced((5, 10, 15, 24, 31))
    graph = trace.ops.with_columns(pl.lit("cudaGraphLaunch").alias("name"))
    stalls = device_stalls(trace.replace(ops=graph))
    assert stalls.height == 5
    assert not stalls["is_recurring"].any()


def paused(lengths):
    """Return a trace of kernels a of 2 characters, but those in `lengths`, each followed by b."""
    cells = "".join("a" * lengths.get(number, 2) + "b" for number in range(30))
    return drawn_hosts.trace(f"step {'0' * len(cells)}\ncompute {cells}")


def test_kernels_that_take_longer_by_one_length_are_paused():
    trace = paused({3: 22, 8: 22, 14: 22, 21: 42, 26: 22})
    stalls = device_stalls(trace)
    assert set(stalls["kind"]) == {"paused"}
    assert (stalls["dur_ns"] // drawn_hosts.UNIT_NS).to_list() == [20, 20, 20, 40, 20]
    assert set(stalls["usual_ns"]) == {2 * drawn_hosts.UNIT_NS}


def test_kernels_that_take_longer_by_different_lengths_are_not_paused():
    trace = paused({3: 14, 8: 30, 14: 55, 21: 90, 26: 140})
    assert device_stalls(trace).is_empty()


def test_kernels_that_all_take_longer_for_a_while_are_slower_not_paused():
    # From the 16th to the 27th pair of kernels all take twice as long: a 40 instead of 20, b 4 instead of 2.
    cells = "".join("a" * 40 + "b" * 4 if 16 <= pair < 28 else "a" * 20 + "b" * 2 for pair in range(60))
    assert device_stalls(drawn_hosts.trace(f"step {'0' * len(cells)}\ncompute {cells}")).is_empty()


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
class TestOnARealRecording:
    """A device that another process takes for time slices, on a public recording of 4 ranks."""

    def test_time_slices_are_found_and_no_one_else_is_blamed(self, tmp_path):
        job = perturbation_graph.load((SHARED / "torchrec_v100_4ranks").glob("*.json.gz"))
        rank = injected_faults.time_sliced_device(job, 0.3, random.Random("slices"))
        job.replay()
        for of_rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, tmp_path / f"rank{of_rank.number}.json.gz")
        run = tracekit.load(str(tmp_path), cache=False)
        stalls = run.table(device_stalls).filter("is_recurring")
        assert set(stalls["rank"]) == {rank}
        taken = job.ranks[rank].taken
        assert stalls["dur_ns"].median() == pytest.approx(1000 * (taken[0][1] - taken[0][0]), rel=0.1)
        (finding,) = [each for each in engine.check(run, [DeviceStall()]).findings if each.subject == ""]
        assert finding.ranks == (rank,)
        assert finding.severity.label == "warning"
        assert savings.saving(run, "device-stall").saved_ns > 0

    def test_kernels_that_one_device_starts_late_are_found_and_cost_what_they_cost(self, tmp_path):
        job = perturbation_graph.load((SHARED / "nanogpt_h100_8ranks").glob("*.json.gz"))
        injected_faults.delayed_stream(job, 0.3, random.Random("late starts"))
        late = {rank.number for rank in job.ranks if sum(kernel.delay > 0 for kernel in rank.kernels) > 100}
        job.replay()
        steps = len(injected_faults.steps_of(job.ranks[0]))
        for of_rank, document in zip(job.ranks, job.documents(), strict=True):
            perturbation_graph.write(document, tmp_path / f"rank{of_rank.number}.json.gz")
        run = tracekit.load(str(tmp_path), cache=False)
        (finding,) = [finding for finding in engine.check(run).findings if finding.code == "STREAM005"]
        assert (finding.severity.label, finding.subject) == ("warning", "late starts")
        assert set(finding.ranks) == late
        # The recording has gaps of 1.7 µs of its own, and other ranks are late: part of them hides these.
        assert finding.cost_ns == pytest.approx(1000 * job.lost_in_steps_us() / steps, rel=0.4)

    @pytest.mark.parametrize("folder", ["torchrec_v100_4ranks", "megatron_tp8_a100_8ranks", "hta_ddp_v100_memory"])
    def test_public_recordings_have_no_stall(self, folder):
        assert tracekit.load(str(SHARED / folder)).table(device_stalls).is_empty()

    def test_lost_kernels_of_graphs_are_an_open_question(self):
        run = tracekit.load(str(SHARED / "hta_dlrm_a100"))
        assert not run.table(device_stalls)["is_recurring"].any()
        (finding,) = engine.check(run, [DeviceStall()]).findings
        assert finding.severity.label == "info"


def test_a_copy_that_the_host_waits_for_is_queued_from_its_call():
    # time     0 1 … the copy of .item() is queued at once, but runs 1 ms later; the host waits in its call
    cells = "".join(("abcd"[n % 4] + ("." * 21 if n in (5, 10, 15, 24, 31) else "..")) for n in range(40))
    copies = "".join("." + (("." * 20 + "m") if n in (5, 10, 15, 24, 31) else ".m") for n in range(40))
    trace = drawn_hosts.trace(f"step {'0' * len(cells)}\ncompute {cells}\ncopy {copies}")
    renamed = trace.activities.with_columns(
        pl.when(pl.col("kind") == "memcpy")
        .then(pl.lit("Memcpy DtoH (Device -> Pageable)"))
        .otherwise("name")
        .alias("name")
    )
    calls = trace.ops.join(renamed.select("id", "kind", "start_ns", "dur_ns"), on="id", suffix="_work").sort("id")
    is_copy = pl.col("kind_work") == "memcpy"
    called = pl.when(is_copy).then((pl.col("start_ns_work") - 22 * drawn_hosts.UNIT_NS).clip(0)).otherwise("start_ns")
    ops = calls.with_columns(called.alias("start_ns")).with_columns(
        pl.when(is_copy)
        .then(pl.col("start_ns_work") + pl.col("dur_ns_work") - pl.col("start_ns"))
        .otherwise(0)
        .alias("dur_ns")
    )
    held = trace.replace(activities=renamed, ops=ops.select(trace.ops.columns))
    assert device_stalls(held)["is_recurring"].sum() == 5
    causes = compute_gap_causes(held)
    assert causes.filter(pl.col("cause") == "device_stall")["dur_ns"].sum() == 100 * drawn_hosts.UNIT_NS
    assert gap_causes(held).is_empty()


def late_starts(gaps_ns, *, launched_late=()):
    """Return a trace of kernels of 50 µs that all were launched at first, with a gap before each."""
    drawn = drawn_hosts.trace(f"step {'0' * len(gaps_ns)}\ncompute {('abcd' * len(gaps_ns))[: len(gaps_ns)]}")
    starts = [sum(gaps_ns[: number + 1]) + number * drawn_hosts.UNIT_NS for number in range(len(gaps_ns))]
    called = [start if number in launched_late else 0 for number, start in enumerate(starts)]
    return drawn.replace(
        ops=drawn.ops.with_columns(pl.Series("start_ns", called, pl.Int64)),
        activities=drawn.activities.with_columns(pl.Series("start_ns", starts, pl.Int64)),
        steps=drawn.steps.with_columns(end_ns=pl.lit(starts[-1] + drawn_hosts.UNIT_NS, pl.Int64)),
    )


def test_a_device_that_starts_each_queued_kernel_late_is_stalled_by_the_rest_of_each_gap():
    stalls = device_stalls(late_starts([0] + [15_000] * 59))
    assert set(stalls.select("kind", "is_recurring", "dur_ns").rows()) == {("gap", True, 12_000)}
    assert stalls.height == 59


def test_late_starts_are_priced_by_a_replay():
    run = drawn_traces.run(late_starts([0] + [15_000] * 59))
    (finding,) = engine.check(run, [DeviceStall()]).findings
    assert (finding.severity.label, finding.subject) == ("warning", "late starts")
    assert finding.cost_ns == pytest.approx(59 * 12_000, rel=0.01)


@pytest.mark.parametrize(
    "gaps_ns",
    [
        [0] + [3_000] * 59,  # what a GPU takes
        [0] + [15_000] * 25,  # too few to say that this device takes as long
        [0, *([2_000] * 3 + [40_000]) * 15],  # before a few kernels only: waits of the program
        [0] + [600_000] * 59,  # as long as a time slice: before each kernel it is a wait of the program
    ],
)
def test_other_gaps_are_none(gaps_ns):
    assert "gap" not in set(device_stalls(late_starts(gaps_ns))["kind"])


def test_kernels_that_are_launched_late_have_no_gap():
    trace = late_starts([0] + [15_000] * 59, launched_late=range(60))
    assert device_stalls(trace).is_empty()


def test_rules_on_the_host_do_not_report_a_stalled_device():
    run = drawn_traces.run(sliced((5, 10, 15, 24, 31)))
    findings = engine.check(run, [LateLaunch(), BlockingSync(), DeviceStall()]).findings
    assert [finding.code for finding in findings] == ["STREAM005"]


# Kernels that are paused by the durations on other ranks --------------------------------------------------------------


def ranks_of(*cells):
    """Return a run whose ranks run these kernels, a letter for each 50 µs; every step is a line."""
    traces = [
        replace(drawn_hosts.trace(f"step {'0' * len(own)}\ncompute {own}"), rank=rank) for rank, own in enumerate(cells)
    ]
    return drawn_traces.run(*traces)


def kernels(lengths, *, usual=12):
    return "".join("abcd"[n % 4] * lengths.get(n, usual) for n in range(24))


SLICES = dict.fromkeys(range(1, 24, 3), 32)
"""Every third kernel is longer by 20 characters: in its own trace, two of three of each letter are not."""


def test_a_kernel_that_every_step_pauses_is_compared_with_other_ranks():
    # The kernel x occurs once: nothing in its own trace shows how long it takes.
    run = ranks_of(kernels(SLICES) + "x" * 40, kernels({}) + "x" * 20, kernels({}) + "x" * 20)
    assert "x" not in set(run.table(device_stalls).filter(pl.col("rank") == 0)["name"])
    stalls = run.table(paused_kernels)
    (found,) = stalls.filter(pl.col("name") == "x").iter_rows(named=True)
    assert (found["rank"], found["kind"], found["is_recurring"]) == (0, "paused", True)
    assert found["dur_ns"] == 20 * drawn_hosts.UNIT_NS
    assert found["usual_ns"] == 20 * drawn_hosts.UNIT_NS


@pytest.mark.parametrize(
    ("own", "others"),
    [
        (31, (20, 20)),  # longer by half of the slices' length: it has more to do
        (40, (20, 34)),  # the other ranks differ, too
        (40, (20,)),  # one other rank may be the one that differs
    ],
)
def test_a_kernel_that_differs_for_another_reason_is_not_paused(own, others):
    run = ranks_of(kernels(SLICES) + "x" * own, *(kernels({}) + "x" * each for each in others))
    assert run.table(device_stalls).height
    assert "x" not in set(run.table(paused_kernels)["name"])


def test_without_slices_of_one_length_other_ranks_show_no_pause():
    run = ranks_of(kernels({}) + "x" * 40, kernels({}) + "x" * 20, kernels({}) + "x" * 20)
    assert run.table(paused_kernels).is_empty()


def test_work_without_durations_has_no_gap():
    trace = late_starts([0] + [15_000] * 59)
    assert device_stalls(trace.replace(activities=trace.activities.with_columns(dur_ns=pl.lit(0)))).is_empty()
