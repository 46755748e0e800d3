"""One fault, one price: public recordings into which an independent program put a fault of known cost."""

import functools
import random
import tempfile
from pathlib import Path

import polars as pl
import pytest

import tracekit
from benchmarks import injected_faults, perturbed
from tests.support import recorded_jobs
from tracekit.replay.graph import savings
from tracekit.rules import cost_attribution
from tracekit.rules.rule import Severity

FOLDER = Path(__file__).parents[3] / "shared" / "traces" / "torchrec_v100_4ranks"
SIZE = 0.3

pytestmark = [
    pytest.mark.accuracy,  # many runs with known faults: `make accuracy`
    pytest.mark.skipif(not FOLDER.is_dir(), reason="the downloaded traces are not in ../shared"),
]


@pytest.fixture(scope="module")
def control():
    return costs(as_recorded(FOLDER).findings)


@functools.cache
def as_recorded(folder):
    """Return the report on a recording as it is."""
    return tracekit.check(tracekit.load(folder))


def costs(findings):
    """Return the sum of the costs of the warnings of each code."""
    warned = [each for each in findings if each.severity >= Severity.WARNING]
    return {code: sum(each.cost_ns for each in warned if each.code == code) for code in {each.code for each in warned}}


@functools.cache
def priced(name, folder=FOLDER):
    """Return the costs of the warnings about a changed recording, and the truth per step."""
    job = recorded_jobs.job(folder)
    kind = next(each for each in injected_faults.KINDS if each.name == name)
    kind.apply(job, SIZE, random.Random(name))
    with tempfile.TemporaryDirectory() as scratch:
        found = perturbed.check_job(job, Path(scratch))
    return costs(found.findings), 1000 * job.lost_us / max(1, len(job.ranks[0].steps))


@pytest.mark.parametrize(
    ("name", "code", "error"),
    [
        ("data stall", "HOST003", 0.15),
        ("data stall of one rank", "HOST003", 0.15),
        ("allocation retries", "MEM001", 0.15),
        ("reading scalars", "HOST002", 0.15),
        ("late launches of two ranks", "RANK004", 0.15),
        ("save without a name", "STEP001", 0.15),
    ],
)
def test_the_cause_that_a_person_can_remove_has_the_price(name, code, error, control):
    found, truth_ns = priced(name)
    assert found[code] - control.get(code, 0) == pytest.approx(truth_ns, rel=error)


@pytest.mark.parametrize("name", ["data stall", "data stall of one rank", "allocation retries"])
def test_late_launches_and_late_ranks_are_consequences_that_cost_no_more_than_in_the_control(name, control):
    found, truth_ns = priced(name)
    # Without a warning about the allocator, its time is part of what makes launches late.
    before_ns = late_ns(control) + (0 if "MEM001" in found else control.get("MEM001", 0))
    assert late_ns(found) - before_ns < 0.25 * truth_ns


def late_ns(found):
    return sum(found.get(code, 0) for code in ("HOST001", "RANK001", "RANK004"))


def test_reading_scalars_is_priced_as_a_blocking_call_and_only_once(control):
    # Rank 2 pauses in Python where it did before; a read in the middle of that pause does not explain it.
    found, truth_ns = priced("reading scalars")
    assert found["HOST002"] > 0.5 * truth_ns
    assert found["HOST002"] + late_ns(found) < 1.15 * (truth_ns + late_ns(control))


def test_no_data_stall_is_reported_where_the_host_loads_no_data(control):
    assert "HOST003" not in control


def test_a_stall_in_a_window_of_one_step_has_one_warning():
    # There a steady cause and a single stall look alike.
    found, truth_ns = priced("allocation retries", FOLDER.parent / "megatron_tp8_a100_8ranks")
    assert found["MEM001"] == pytest.approx(truth_ns, rel=0.15)
    assert "STEP001" not in found


def test_a_load_that_some_ranks_hide_behind_queued_work_makes_no_stragglers_of_the_others():
    # Ranks 0 to 2 launch late anyway, so that they have nothing queued when all ranks load their data.
    found, truth_ns = priced("data stall", FOLDER.parent / "nanogpt_h100_8ranks")
    assert found["HOST003"] == pytest.approx(truth_ns, rel=0.05)  # with the load before the first step
    assert "RANK001" not in found


def test_a_blocking_call_names_the_rank_whose_host_pauses_after_it_though_others_synchronize_more(tmp_path):
    # On an MI300: all ranks read values in each step; rank 2 synchronizes once more, when its device is almost idle.
    merged = FOLDER.parent / "merged_ddp_mi300_4ranks"
    job = recorded_jobs.job(merged)
    seed = "merged_ddp_mi300_4ranks blocking pause of one rank 0.3 310"
    assert injected_faults.blocking_pause(job, SIZE, random.Random(seed)) == 2
    (found,) = (each for each in perturbed.check_job(job, tmp_path).findings if each.code == "HOST002")
    (before,) = (each for each in as_recorded(merged).findings if each.code == "HOST002")
    assert (2 in found.ranks, 2 in before.ranks) == (True, False)
    assert found.cost_ns - before.cost_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.15)


def test_a_blocking_call_in_a_stall_of_the_allocator_is_no_part_of_the_stall(tmp_path):
    # In step 4 all hosts allocate anew for 166 ms, once; rank 1 synchronizes and pauses in that time, as in each step.
    job = recorded_jobs.job(FOLDER)
    injected_faults.blocking_pause(job, 0.05, random.Random("torchrec_v100_4ranks blocking pause of one rank 0.05 310"))
    (found,) = (each for each in perturbed.check_job(job, tmp_path).findings if each.code == "HOST002")
    assert found.cost_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.15)


@pytest.mark.parametrize(
    ("name", "size", "error"),
    [("save without a name", 0.3, 0.01), ("save without a name", 0.12, 0.05), ("one pause of one rank", 0.12, 0.1)],
)
def test_a_single_stall_costs_what_a_replay_saves_also_in_a_step_of_usual_length(name, size, error, tmp_path):
    # The other ranks hide a part of one rank's pause; the stall before a step's first launch is in the step before.
    folder = FOLDER.parent / "merged_ddp_mi300_4ranks"
    job = recorded_jobs.job(folder)
    kind = next(each for each in injected_faults.KINDS if each.name == name)
    kind.apply(job, size, random.Random(f"{folder.name} {name} {size} 310"))
    found = costs(perturbed.check_job(job, tmp_path).findings)
    assert found["STEP001"] == pytest.approx(1000 * job.lost_us / 3, rel=error)


def test_retries_in_each_step_are_no_part_of_a_single_one_beside_them(control, tmp_path):
    # The recording has a retry of its own in its first step. Those put in are hidden behind queued work in one step.
    job = recorded_jobs.job(FOLDER)
    injected_faults.allocation_retries(job, 0.12, random.Random(f"{FOLDER.name} allocation retries 0.12 310"))
    found = costs(perturbed.check_job(job, tmp_path).findings)
    assert found["MEM001"] - control["MEM001"] == pytest.approx(1000 * job.lost_us / 3, rel=0.1)


@pytest.mark.parametrize(
    ("name", "code", "seed"),
    [("late host of one rank", "RANK001", 312), ("late launches of two ranks", "RANK004", 310)],
)
def test_kernels_that_fill_the_device_meet_in_a_replay_without_late_ranks_as_in_the_control(name, code, seed, tmp_path):
    # In steps 5 and 6 a copy and matrix products on another stream wait for each other: 2.6 ms each. Where a rank is
    # late they do not meet; without it they would, as in the control. A delay that stays as it was recorded is not it.
    job = recorded_jobs.job(FOLDER)
    kind = next(each for each in injected_faults.KINDS if each.name == name)
    kind.apply(job, 0.12, random.Random(f"{FOLDER.name} {name} 0.12 {seed}"))
    (found,) = (each for each in perturbed.check_job(job, tmp_path).findings if each.code == code)
    before = as_recorded(FOLDER)
    saved_ns = found.cost_ns - cost_attribution.saved_by(before, found.removals)
    assert saved_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.05)


def test_pauses_after_one_call_count_whole_where_it_waits_in_another_step(tmp_path):
    # Rank 1 pauses 5.5 ms after each of its cudaDeviceSynchronize, which find the device idle in two of three steps.
    # After the calls that read values it pauses for 0.6 ms: what is typical of those says nothing about these.
    folder = FOLDER.parent / "merged_ddp_mi300_4ranks"
    job = recorded_jobs.job(folder)
    injected_faults.blocking_pause(job, 0.12, random.Random(f"{folder.name} blocking pause of one rank 0.12 311"))
    (found,) = (each for each in perturbed.check_job(job, tmp_path).findings if each.code == "HOST002")
    before = as_recorded(folder)
    saved_ns = found.cost_ns - cost_attribution.saved_by(before, found.removals)
    assert saved_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.1)


def test_kernels_that_wait_for_room_start_in_a_replay_as_recorded():
    run = as_recorded(FOLDER).run
    (graph,) = savings.graphs_of(run)
    nodes = graph.frame.select("name", "room_ns", dur_ns=pl.col("end_ns") - pl.col("start_ns"))
    fills = nodes.filter(pl.col("room_ns") >= 0, pl.col("dur_ns") > 1_000_000)
    assert set(fills["name"].str.extract(r"(CatArrayBatchedCopy|volta_sgemm)")) == {
        "CatArrayBatchedCopy",
        "volta_sgemm",
    }
    assert savings.worst_error_ratio(savings.replayed_steps(run)) < 0.002


def test_a_retry_that_is_no_outlier_among_others_is_in_the_price_of_both_recordings(tmp_path):
    # The recording has one retry of 166 ms, in step 4: STEP001. With retries of 47 to 87 ms in all steps, it is a part
    # of MEM001. What MEM001 costs more than in the control is the cost of the others only if it is a part of both.
    job = recorded_jobs.job(FOLDER)
    injected_faults.allocation_retries(job, SIZE, random.Random(f"{FOLDER.name} allocation retries 0.3 312"))
    report = perturbed.check_job(job, tmp_path)
    (found,) = (each for each in report.findings if each.code == "MEM001")
    before = as_recorded(FOLDER)
    assert ("STEP001" in costs(before.findings), "STEP001" in costs(report.findings)) == (True, False)
    saved_ns = found.cost_ns - cost_attribution.saved_by(before, found.removals)
    assert saved_ns == pytest.approx(1000 * job.lost_us / 3, rel=0.15)


def test_waits_for_events_are_found_on_a_device_that_needs_18_us_for_them():
    run = as_recorded(FOLDER.parent / "merged_ddp_mi300_4ranks").run
    assert savings.worst_error_ratio(savings.replayed_steps(run)) < 0.01


def test_a_stall_that_recurs_in_steps_that_save_is_no_outlier(tmp_path):
    # The hosts stall for 7 ms in each of three steps, two of which save; other work there is not part of the save.
    job = recorded_jobs.job(FOLDER.parent / "merged_ddp_mi300_4ranks")
    injected_faults.checkpoint(job, 0.12, random.Random("merged_ddp_mi300_4ranks checkpoint 0.12 312"))
    found = costs(perturbed.check_job(job, tmp_path).findings)
    assert found["CKPT001"] == pytest.approx(1000 * job.lost_us / 3, rel=0.05)
    assert "STEP001" not in found
