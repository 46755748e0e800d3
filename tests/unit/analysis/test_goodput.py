"""What the time of a job went to: a recorded job that was killed five times, drawn ones, and random ones."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli_runner import ROOT, tracekit
from tracekit.analysis.checkpoint import goodput as measured
from tracekit.analysis.checkpoint.goodput import (
    BETWEEN,
    CLASSES,
    IDLE,
    LOAD,
    LOST,
    PRODUCTIVE,
    SAVE,
    STALL,
    START,
    STOP,
    WARM_UP,
    Goodput,
)
from tracekit.errors import InputError
from tracekit.ingest import job_attempts
from tracekit.model.attempt import Attempt, CheckpointCall
from tracekit.plan.checkpoint import best_interval_s

RECORDED = ROOT / "tests" / "recordings" / "goodput"
LARGEST_DIFFERENCE = 0.01
"""Of the whole time."""


def recorded_job() -> Goodput:
    return measured.goodput(job_attempts.read([RECORDED])[0])


def test_a_job_that_was_killed_five_times_is_measured_as_its_own_log_has_it() -> None:
    truth = json.loads((RECORDED / "truth.json").read_text(encoding="utf-8"))
    job = recorded_job()
    assert abs(job.whole_ns / 1e9 / truth["whole"] - 1) < LARGEST_DIFFERENCE
    for kind in CLASSES:
        difference_s = job.times[kind] / 1e9 - truth.get(kind.key, 0.0)
        assert abs(difference_s) < LARGEST_DIFFERENCE * truth["whole"], kind.key
    assert [account.attempt.has_failed for account in job.attempts] == [True] * 5 + [False]
    # It was killed in steps 11, 13, 20, 22 and 35, and saved after each eighth.
    assert [account.first_step for account in job.attempts] == [0, 8, 8, 16, 16, 32]
    assert [account.lost_steps for account in job.attempts] == [3, 5, 4, 6, 3, 0]


# A drawn job, times in s; step 0 of an attempt takes twice as long as the others:
#            0   2   3   4   5   6   7   8   9  10  12  13  14  16  17  18  19  20
# launch     |
# steps          0 0 0   1   2       3   4                   3 3   4   5
# save                           S                                        S
# loads                                                  L
# killed                                     x
# exit                                          |                                |
def drawn_job(**second: Any) -> list[Attempt]:
    first = attempt(
        begin_s=2,
        launched_s=0,
        steps_s=[(2, 4), (4, 5), (5, 6), (7, 8), (8, 9)],
        save_s=(6, 7, 3),
        failed_s=10,
        exit_s=12,
    )
    fields = {"begin_s": 14, "launched_s": 13, "steps_s": [(14, 16), (16, 17), (17, 18)], "first_step": 3} | second
    return [first, attempt(**fields, save_s=(18, 19, 6), load_s=(13, 14), loop_end_s=19, exit_s=20, exit_code=0)]


def attempt(
    *,
    begin_s: float,
    launched_s: float,
    steps_s: list[tuple[float, float]],
    first_step: int = 0,
    save_s: tuple[float, float, int] | None = None,
    load_s: tuple[float, float] | None = None,
    failed_s: float | None = None,
    loop_end_s: float | None = None,
    exit_s: float | None = None,
    exit_code: int = 1,
    world_size: int = 2,
) -> Attempt:
    spans = (np.array(steps_s, float).reshape(-1, 2) * 1e9).astype(np.int64)
    saves = () if save_s is None else (CheckpointCall("step", save_s[2], ns(save_s[0]), ns(save_s[1]), ns(save_s[1])),)
    loads = () if load_s is None else (CheckpointCall("step", None, ns(load_s[0]), ns(load_s[1]), ns(load_s[1])),)
    return Attempt(
        "run", ns(begin_s), first_step=first_step, world_size=world_size, launched_ns=ns(launched_s), step_spans=spans,
        step_numbers=first_step + np.arange(len(spans)), failed_ns=None if failed_s is None else ns(failed_s),
        loop_end_ns=None if loop_end_s is None else ns(loop_end_s), exit_ns=None if exit_s is None else ns(exit_s),
        exit_code=None if exit_s is None else exit_code, saves=saves, loads=loads,
    )  # fmt: skip


def ns(time_s: float) -> int:
    return round(time_s * 1e9)


def seconds(job: Goodput) -> dict[str, float]:
    return {kind.key: time_ns / 1e9 for kind, time_ns in job.times.items() if time_ns}


def test_each_moment_of_a_drawn_job_has_its_class() -> None:
    job = measured.goodput(drawn_job())
    assert seconds(job) == {
        PRODUCTIVE.key: 6, WARM_UP.key: 2, SAVE.key: 2, LOST.key: 3, START.key: 2, LOAD.key: 1, STOP.key: 3,
        IDLE.key: 1,
    }  # fmt: skip
    assert job.whole_ns == ns(20)
    assert [account.lost_steps for account in job.attempts] == [2, 0]
    assert job.productive_ratio == 0.3


def test_the_band_over_time_of_a_drawn_job() -> None:
    band = measured.over_time(measured.goodput(drawn_job()), parts=20)
    in_second = {
        (second, row["class"]): row["time_ns"] / 1e9
        for second, part in enumerate(band.partition_by("start_ns"))
        for row in part.rows(named=True)
        if row["time_ns"]
    }
    # The drawing above, second by second; the first steps warm up for 1 s each.
    expected = [START, START, WARM_UP, PRODUCTIVE, PRODUCTIVE, PRODUCTIVE, SAVE, LOST, LOST, LOST, STOP, STOP, IDLE]
    expected += [LOAD, WARM_UP, PRODUCTIVE, PRODUCTIVE, PRODUCTIVE, SAVE, STOP]
    assert in_second == {(second, kind.key): 1 for second, kind in enumerate(expected)}


def test_a_script_that_counts_from_0_again_resumes_where_it_loaded() -> None:
    counted_anew = measured.goodput(drawn_job(first_step=0))
    assert seconds(counted_anew) == seconds(measured.goodput(drawn_job()))
    assert counted_anew.attempts[1].first_step == 3
    assert counted_anew.attempts[1].end_step == 6


def test_without_a_checkpoint_all_training_is_lost() -> None:
    first = drawn_job()[0]
    second = attempt(begin_s=14, launched_s=13, steps_s=[(14, 15)], loop_end_s=15, exit_s=15, exit_code=0)
    anew = measured.goodput([first, second])
    assert seconds(anew)[LOST.key] == 8  # from the first step to the failure, its save too
    assert anew.attempts[0].lost_steps == 5


def test_a_failed_last_attempt_keeps_what_it_saved() -> None:
    job = measured.goodput(drawn_job()[:1])
    assert seconds(job)[LOST.key] == 3
    assert seconds(job)[PRODUCTIVE.key] == 3


def test_a_long_time_without_steps_before_a_failure_is_a_stall() -> None:
    hung = attempt(begin_s=0, launched_s=0, steps_s=[(0, 1), (1, 2)], save_s=(2, 3, 2), failed_s=603, exit_s=604)
    assert seconds(measured.goodput([hung])) == {
        PRODUCTIVE.key: 2,
        SAVE.key: 1,
        LOST.key: 1,
        STALL.key: 599,
        STOP.key: 1,
    }


def test_slow_steps_are_warm_up_at_first_and_stalls_later() -> None:
    steps_s = [(0, 3), (3, 4), (4, 5), (5, 9), (10, 11)]
    job = measured.goodput([attempt(begin_s=0, launched_s=0, steps_s=steps_s, loop_end_s=11, exit_s=11, exit_code=0)])
    assert seconds(job) == {PRODUCTIVE.key: 5, WARM_UP.key: 2, STALL.key: 3, BETWEEN.key: 1}


def test_attempts_on_other_numbers_of_gpus_cost_their_own_gpu_hours() -> None:
    first, second = drawn_job(world_size=8)
    job = measured.goodput([first, second])
    assert job.gpu_ns[IDLE] == 2 * ns(1)
    assert job.gpu_ns[LOAD] == 8 * ns(1)
    assert job.gpu_ns[LOST] == 2 * ns(3)


def test_an_attempt_that_exited_before_its_training_began_was_starting() -> None:
    first, second = drawn_job()
    refused = Attempt("run", ns(12.2), has_begun=False, launched_ns=ns(12.2), exit_ns=ns(12.7), exit_code=2)
    job = measured.goodput([first, refused, second])
    assert seconds(job)[START.key] == 2.5
    assert seconds(job)[IDLE.key] == 0.5
    assert seconds(job)[LOST.key] == 3


def test_a_training_that_begins_anew_after_one_that_had_not_failed_is_another_job() -> None:
    before = attempt(begin_s=1, launched_s=0, steps_s=[(1, 2)], loop_end_s=2, exit_s=3, exit_code=0)
    later = attempt(begin_s=5, launched_s=4, steps_s=[(5, 6)], loop_end_s=6, exit_s=6, exit_code=0)
    job = measured.goodput([before, later])
    assert job.left_out == 1
    assert seconds(job) == {PRODUCTIVE.key: 1, START.key: 1}


def test_attempts_that_overlap_are_refused() -> None:
    first, second = drawn_job()
    with pytest.raises(InputError, match="same time"):
        measured.goodput([first, attempt(begin_s=11, launched_s=11, steps_s=[(11, 12)])])
    assert measured.goodput([first, second])


def test_the_best_interval_is_that_of_the_measured_saves_and_failures() -> None:
    saves = measured.goodput(drawn_job()).save_interval
    assert (saves.saves, saves.failures, saves.blocked_seconds, saves.mtbf_seconds) == (2, 1, 1, 19)
    assert saves.best_interval_seconds == best_interval_s(1, 19)
    # Ending 2 s, idle 1 s, loading 1 s, and warm-up 1 s.
    assert saves.restart_seconds == 5
    assert saves.interval_seconds is None


@st.composite
def jobs(draw: st.DrawFn) -> list[Attempt]:
    """Attempts whose events lie anywhere in the attempt, overlapping or not."""
    attempts, now = [], 0
    for _ in range(draw(st.integers(1, 4))):
        launched = now + draw(st.integers(0, 5))
        times = sorted(draw(st.lists(st.integers(launched, launched + 40), min_size=8, max_size=8)))
        cuts = sorted(draw(st.lists(st.integers(times[0], times[7]), max_size=12)))
        steps = [(float(a), float(b)) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
        first_step = draw(st.integers(0, 6))
        save = draw(st.none() | st.tuples(st.just(times[3]), st.just(times[4]), st.integers(0, 12)))
        load = draw(st.none() | st.just((times[1], times[2])))
        failed, loop_end = draw(st.none() | st.just(times[5])), draw(st.none() | st.just(times[6]))
        attempts.append(
            attempt(
                begin_s=times[0], launched_s=launched, steps_s=steps, first_step=first_step, save_s=save, load_s=load,
                failed_s=failed, loop_end_s=loop_end, exit_s=draw(st.none() | st.just(times[7])),
                exit_code=draw(st.integers(0, 1)), world_size=draw(st.integers(1, 4)),
            )
        )  # fmt: skip
        now = attempts[-1].last_evidence_ns // 10**9
    return attempts


@given(jobs())
def test_the_classes_of_any_job_add_up_to_the_whole(attempts: list[Attempt]) -> None:
    job = measured.goodput(attempts)
    assert sum(job.times.values()) == job.whole_ns
    assert min(job.times.values()) >= 0
    for account in job.attempts:
        assert sum(account.times.values()) == account.end_ns - account.start_ns
    gpus = [account.attempt.world_size for account in job.attempts]
    by_attempt = sum(n * sum(account.times.values()) for n, account in zip(gpus, job.attempts, strict=True))
    idle = sum(n * later.idle_before_ns for n, later in zip(gpus, job.attempts[1:], strict=False))
    assert sum(job.gpu_ns.values()) == by_attempt + idle
    band = measured.over_time(job, parts=7)
    assert dict(band.group_by("class").agg(pl.col("time_ns").sum()).rows()) == {
        kind.key: time_ns for kind, time_ns in job.times.items()
    }
    of_parts = band.group_by("start_ns").agg(
        pl.col("time_ns").sum(), whole_ns=(pl.col("end_ns") - pl.col("start_ns")).first()
    )
    assert of_parts["time_ns"].to_list() == of_parts["whole_ns"].to_list()


def test_the_command_prints_the_account_in_each_format() -> None:
    done = tracekit("goodput", RECORDED, "--gpu-hour-price", "2", "--format", "json")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    job = recorded_job()
    assert printed["whole_ns"] == job.whole_ns == sum(row["time_ns"] for row in printed["classes"])
    assert [row["class"] for row in printed["classes"]] == [kind.key for kind in CLASSES]
    assert [row["cost"] for row in printed["classes"]] == [2 * job.gpu_ns[kind] / 3.6e12 for kind in CLASSES]
    assert [row["lost_steps"] for row in printed["attempts"]] == [account.lost_steps for account in job.attempts]
    assert all("SIGKILL" in row["cause"] for row in printed["attempts"][:5])
    for document_format in ("text", "markdown", "html"):
        shown = tracekit("goodput", RECORDED, "--format", document_format)
        assert shown.returncode == 0, shown.stderr
        assert "productive steps" in shown.stdout


def test_a_path_without_a_job_is_an_error(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing", RECORDED / "truth.json"):
        done = tracekit("goodput", path)
        assert done.returncode == 2, path
        assert str(path) in done.stderr
    assert tracekit("goodput", RECORDED, "--gpu-hour-price", "-1").returncode == 2
