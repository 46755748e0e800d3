"""The state of a watched run: steps, ranks, saves and losses, from the logs that the recorder writes."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.support import sample_logs
from tests.support.sample_logs import line, steady
from tracekit.cli.watch.run_watch import Watch
from tracekit.cli.watch.steps import GRACE_S
from tracekit.cli.watch.training_state import EventKind, OutlierStep, Symptom, TrainingState

ROOT = Path(__file__).parents[3]
NOW_S = 2e9  # later than any file is


def seen(folder: Path, now_s: float = NOW_S) -> TrainingState:
    watch = Watch(folder)
    watch.poll(now_s)
    watch.judge_pending()
    return watch.state(now_s)


def only(state: TrainingState) -> OutlierStep:
    (found,) = state.outliers
    return found


def slow(lines: list[dict[str, object]], step: int, *, ms: float = 300, **more: object) -> list[dict[str, object]]:
    lines[step] = line(step, ms=ms, **more)
    return lines


def whats(found: OutlierStep) -> list[EventKind]:
    return [coincidence.kind for coincidence in found.events]


# Slow steps ----------------------------------------------------------------------------------------------------------


def test_a_slow_step_is_reported_with_the_median(tmp_path: Path) -> None:
    found = only(seen(sample_logs.write(tmp_path, slow(steady(60), 40))))
    assert (found.symptom, found.step, found.last_step, found.step_time_ns) == (Symptom.SLOW, 40, 40, 300e6)
    assert found.median_ns == pytest.approx(100e6, rel=0.02)
    assert found.events == ()


def test_a_step_that_is_slow_on_all_ranks_is_one_outlier(tmp_path: Path) -> None:
    ranks = [slow(steady(60, seed=rank), 40) for rank in range(8)]
    found = only(seen(sample_logs.write(tmp_path, *ranks)))
    assert (found.ranks, found.rank_count) == (tuple(range(8)), 8)


def test_a_single_straggler_is_named(tmp_path: Path) -> None:
    ranks = [steady(60, seed=rank) for rank in range(8)]
    slow(ranks[5], 40)
    found = only(seen(sample_logs.write(tmp_path, *ranks)))
    assert (found.ranks, found.rank_count) == ((5,), 8)


def test_the_number_of_ranks_does_not_raise_the_number_of_alarms(tmp_path: Path) -> None:
    ranks = [steady(300, seed=rank, jitter=0.1) for rank in range(64)]
    assert seen(sample_logs.write(tmp_path, *ranks)).outlier_count <= 2


def test_warm_up_steps_are_never_outliers(tmp_path: Path) -> None:
    lines = [line(n, ms=5000) for n in range(5)] + steady(60, first=5)
    state = seen(sample_logs.write(tmp_path, lines))
    assert state.outlier_count == 0
    assert state.median_step_ns == pytest.approx(100e6, rel=0.02)


def test_consecutive_slow_steps_are_one_stretch(tmp_path: Path) -> None:
    lines = steady(60)
    for step in range(40, 46):
        slow(lines, step, ms=250 + step)
    found = only(seen(sample_logs.write(tmp_path, lines)))
    assert (found.step, found.last_step, found.step_time_ns) == (40, 45, 295e6)


def test_a_stretch_is_reported_when_it_starts_and_when_it_ends(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(steady(41), 40), live=True)
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    assert [(each.step, each.last_step) for each in watch.take_new_outliers()] == [(40, 40)]
    sample_logs.append(tmp_path, [line(41, ms=320), line(42, ms=310)])
    watch.poll(NOW_S)
    assert watch.take_new_outliers() == []
    sample_logs.append(tmp_path, steady(3, first=43))
    watch.poll(NOW_S)
    assert [(each.step, each.last_step, each.step_time_ns) for each in watch.take_new_outliers()] == [(40, 42, 320e6)]


# Events --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", [39, 40])
def test_a_save_at_the_end_or_the_beginning_of_the_slow_step_is_an_event(tmp_path: Path, step: int) -> None:
    sample_logs.write(tmp_path, slow(steady(60), step))
    sample_logs.save(tmp_path, step=40, ms=200)
    (coincidence,) = only(seen(tmp_path)).events
    assert (coincidence.kind, coincidence.dur_ns, coincidence.name) == (EventKind.SAVE, 200_000_000, "step-40")


def test_a_background_save_is_an_event_as_long_as_it_lasts(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(slow(steady(80), 43), 60))
    sample_logs.save(tmp_path, step=40, ms=450, blocking=False)
    first, second = seen(tmp_path).outliers
    assert whats(first) == [EventKind.BACKGROUND_SAVE]
    assert whats(second) == []


def test_a_save_that_blocks_and_continues_in_the_background_is_both_events(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(slow(slow(steady(80), 40), 43), 60))
    for rank in range(2):
        sample_logs.save(tmp_path, step=40, ms=150 + rank, rank=rank)
        sample_logs.save(tmp_path, step=40, ms=450, rank=rank, blocking=False, stage="complete")
    sample_logs.write(tmp_path, slow(slow(slow(steady(80), 40), 43), 60), steady(80, seed=1))
    state = seen(tmp_path)
    assert [whats(found) for found in state.outliers] == [[EventKind.SAVE], [EventKind.BACKGROUND_SAVE], []]
    assert state.saves == 1
    assert state.last_save is not None
    assert (state.last_save.blocked_ns, state.last_save.background_ns) == (151_000_000, 450_000_000)


@pytest.mark.parametrize(("step", "what"), [(41, EventKind.PROFILED), (44, EventKind.TRACE_WRITTEN)])
def test_a_profiled_window_and_the_writing_of_its_trace_are_events(tmp_path: Path, step: int, what: EventKind) -> None:
    sample_logs.write(tmp_path, slow(steady(60), step))
    sample_logs.manifest(tmp_path, windows=[{"window": 2, "first_step": 40, "steps": 4}])
    (coincidence,) = only(seen(tmp_path)).events
    assert (coincidence.kind, coincidence.count) == (what, 2)


def test_a_wait_for_data_is_an_event_if_it_explains_the_excess(tmp_path: Path) -> None:
    ranks = [[{**each, "data_wait_ns": 1e6} for each in steady(60, seed=rank)] for rank in range(4)]
    for rank, lines in enumerate(ranks):
        slow(lines, 30, data_wait_ns=20e6)
        slow(lines, 40, data_wait_ns=190e6 if rank == 2 else 1e6)
    first, second = seen(sample_logs.write(tmp_path, *ranks)).outliers
    assert whats(first) == []
    (coincidence,) = second.events
    assert (coincidence.kind, coincidence.rank, coincidence.dur_ns) == (EventKind.DATA_WAIT, 2, 190e6)


def test_the_rank_that_the_others_waited_for_is_an_event_if_it_explains_the_excess(tmp_path: Path) -> None:
    ranks = [[{**each, "collective_wait_ns": 5e6 if rank != 1 else 0} for each in steady(60)] for rank in range(4)]
    for rank, lines in enumerate(ranks):
        slow(lines, 30, collective_wait_ns=180e6)  # a slow network: all wait
        slow(lines, 40, collective_wait_ns=2e6 if rank == 2 else 190e6)
    first, second = seen(sample_logs.write(tmp_path, *ranks)).outliers
    assert whats(first) == []
    (coincidence,) = second.events
    assert (coincidence.kind, coincidence.rank, coincidence.dur_ns) == (EventKind.LATE_RANK, 2, 188e6)


def test_allocation_retries_and_skipped_updates_are_events(tmp_path: Path) -> None:
    lines = [{**each, "num_alloc_retries": 3, "num_device_alloc": 10} for each in steady(60)]
    slow(lines, 40, num_alloc_retries=5, num_device_alloc=11, skipped=1)
    for later in lines[41:]:
        later |= {"num_alloc_retries": 5, "num_device_alloc": 11}
    state = seen(sample_logs.write(tmp_path, lines))
    found = only(state)
    assert [(each.kind, each.count) for each in found.events] == [
        (EventKind.RETRIES, 2),
        (EventKind.DEVICE_ALLOCS, 1),
        (EventKind.SKIPPED, None),
    ]
    assert (state.retries, state.device_allocs, state.skipped_updates) == (5, 11, 1)


def test_a_window_is_an_event_even_if_its_trace_is_written_later(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(steady(60), 41), live=True)
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    sample_logs.manifest(tmp_path, windows=[{"window": 0, "first_step": 40, "steps": 4}])
    watch.poll(NOW_S)
    assert whats(only(watch.state(NOW_S))) == [EventKind.PROFILED]


# Losses --------------------------------------------------------------------------------------------------------------


def test_a_loss_that_is_not_finite_is_reported_once_with_its_ranks(tmp_path: Path) -> None:
    ranks = [[{**each, "loss": 2.0} for each in steady(60, seed=rank)] for rank in range(3)]
    for step in range(40, 60):
        ranks[1][step]["loss"] = float("nan")
    state = seen(sample_logs.write(tmp_path, *ranks))
    found = only(state)
    assert (found.symptom, found.step, found.ranks) == (Symptom.LOSS_NOT_FINITE, 40, (1,))
    assert state.loss != state.loss


def test_a_loss_spike_is_reported_and_a_drop_is_not(tmp_path: Path) -> None:
    noise = random.Random(1)
    lines = [{**each, "loss": 5 * 0.99**n + noise.gauss(0, 0.05)} for n, each in enumerate(steady(200))]
    lines[150]["loss"] = 9.0
    lines[170]["loss"] = 0.1
    found = only(seen(sample_logs.write(tmp_path, lines)))
    assert (found.symptom, found.step, found.loss) == (Symptom.LOSS_SPIKE, 150, 9.0)


# Ranks and logs ------------------------------------------------------------------------------------------------------


def test_a_step_waits_for_late_ranks_for_a_limited_time(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(steady(60), 50), slow(steady(60, seed=1), 50)[:50], live=True)
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    assert watch.take_new_outliers() == []
    watch.poll(NOW_S + GRACE_S + 0.1)
    assert [(each.step, each.rank_count) for each in watch.take_new_outliers()] == [(50, 1)]


def test_ranks_that_are_behind_missing_or_stalled_are_named(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, steady(60), steady(60, seed=1), steady(40, seed=2), live=True)
    sample_logs.manifest(tmp_path, world_size=5, strategy="ddp")
    now_s = sample_logs.path(tmp_path, live=True).stat().st_mtime
    watch = Watch(tmp_path)
    watch.poll(now_s + 1)
    state = watch.state(now_s + 1)
    assert (state.slowest_rank, state.lag_steps, state.missing_ranks, state.stalled_ranks) == (2, 20, (3, 4), {})
    state = watch.state(now_s + 60)
    assert set(state.stalled_ranks) == {0, 1, 2}
    assert state.stalled_ranks[0] == pytest.approx(60, abs=1)


@pytest.mark.parametrize(("closed", "behind"), [(False, (None, 0)), (True, (2, 3))])
def test_a_rank_is_not_behind_by_steps_that_it_may_not_have_written_yet(
    tmp_path: Path, closed: bool, behind: tuple[int | None, int]
) -> None:
    # A recorder writes its steps once a second; of steps of 100 ms, 10 may be missing in a log that is open.
    sample_logs.write(tmp_path, steady(60), steady(60, seed=1), steady(57, seed=2), live=True)
    if closed:
        sample_logs.path(tmp_path, 2, live=True).rename(sample_logs.path(tmp_path, 2))
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    state = watch.state(NOW_S)
    assert (state.slowest_rank, state.lag_steps) == behind


def test_a_growing_log_is_not_stalled_if_the_server_has_another_clock(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, steady(30), live=True)
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    assert set(watch.state(NOW_S).stalled_ranks) == {0}
    sample_logs.append(tmp_path, steady(1, first=30))
    watch.poll(NOW_S + 1)
    state = watch.state(NOW_S + 3)
    assert (state.stalled_ranks, state.quiet_s) == ({}, 2)


def test_a_run_is_over_when_every_log_is_closed(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, steady(30), steady(30, seed=1), live=True)
    watch = Watch(tmp_path)
    for rank in range(2):
        watch.poll(NOW_S)
        assert not watch.is_over
        sample_logs.path(tmp_path, rank, live=True).rename(sample_logs.path(tmp_path, rank))
    watch.poll(NOW_S)
    assert watch.is_over
    assert watch.state(NOW_S).steps_done == 30


def test_a_log_that_is_replaced_makes_the_watch_begin_again(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, slow(steady(60), 40), live=True)
    watch = Watch(tmp_path)
    watch.poll(NOW_S)
    assert watch.state(NOW_S).steps_done == 60
    sample_logs.write(tmp_path, steady(30, seed=9), live=True)
    watch.poll(NOW_S)
    state = watch.state(NOW_S)
    assert (state.steps_done, state.outlier_count, watch.starts) == (30, 0, 2)


def _damage(path: Path, rng: random.Random) -> None:
    """Cut, extend, replace, rename or remove a file, as programs, file servers and users may do at any time."""
    other = path.with_name(path.name + ".partial") if path.suffix != ".partial" else path.with_suffix("")
    data = path.read_bytes() if path.is_file() else b""
    draw = rng.randrange(8)
    if path.is_dir():
        path.rmdir()
    elif path.is_symlink():
        path.unlink()
    elif draw == 0:
        path.write_bytes(data[: rng.randrange(len(data) + 1)])
    elif draw == 1:
        path.write_bytes(data + rng.choice(_STRAY))
    elif draw == 2:
        path.with_name("new").write_bytes(data[rng.randrange(len(data) + 1) :])
        path.with_name("new").replace(path)
    elif draw == 3 and path.is_file() and not other.is_dir():
        path.rename(other)
    elif draw == 4:
        path.unlink(missing_ok=True)
    elif draw == 5 and not path.exists():
        path.mkdir()
    elif draw == 6 and not path.exists():
        path.symlink_to(path.name)
    else:
        path.write_bytes(data)


_STRAY = (b"\0" * 900, b'{"step": 1', b"[" * 4000 + b"\n", b"\xff\n\n", b'{"step": 9}\n')


@pytest.mark.parametrize("seed", range(12))
def test_files_that_are_damaged_at_any_time_never_end_the_watch_and_leave_nothing_behind(tmp_path, seed) -> None:
    rng = random.Random(seed)
    manifest = tmp_path / "run.json"
    sample_logs.write(tmp_path, steady(60), steady(60, seed=1), live=True)
    manifest.write_text(json.dumps({"schema": "tracekit.run/1", "world_size": 2}), encoding="utf-8")
    watch = Watch(tmp_path)
    for turn in range(40):
        paths = [sample_logs.path(tmp_path, rank, live=live) for rank in (0, 1) for live in (True, False)]
        _damage(rng.choice([*paths, manifest]), rng)
        watch.poll(NOW_S + turn)
        watch.take_new_outliers()
        watch.state(NOW_S + turn)
    for path in tmp_path.iterdir():
        path.rmdir() if path.is_dir() else path.unlink()
    sample_logs.write(tmp_path, slow(steady(80, seed=2), 70), steady(80, seed=3))
    manifest.write_text(json.dumps({"schema": "tracekit.run/1", "world_size": 2}), encoding="utf-8")
    watch.poll(NOW_S + 100)
    found, fresh = watch.state(NOW_S + 100), seen(tmp_path, NOW_S + 100)
    assert (found.steps_done, found.is_over, found.outliers) == (fresh.steps_done, fresh.is_over, fresh.outliers)
    assert (found.bad_lines, found.missing_ranks) == (0, ())


def test_a_training_resumed_in_the_same_log_goes_on_from_where_it_resumed(tmp_path: Path) -> None:
    lines = steady(60) + slow([line(n, ms=400) for n in range(5)] + steady(60, seed=1), 50)
    for number, each in enumerate(lines[60:]):
        each["step"] = 40 + number
    state = seen(sample_logs.write(tmp_path, lines))
    assert state.steps_done == 105
    assert [(each.step, each.step_time_ns) for each in state.outliers] == [(90, 300e6)]


@pytest.mark.parametrize("stray", [0, 59, 10**15, -5, True, None, "7", 1.5, 10**30])
def test_a_single_damaged_step_number_changes_nothing(tmp_path: Path, stray: object) -> None:
    ranks = [steady(100, seed=rank) for rank in range(3)]
    ranks[1].insert(60, {"step": stray, "step_time_ns": 10**12})
    state = seen(sample_logs.write(tmp_path, *ranks))
    assert (state.steps_done, state.outlier_count, state.lag_steps) == (100, 0, 0)


def test_values_of_wrong_types_count_as_missing(tmp_path: Path) -> None:
    names = [
        "step_time_ns",
        "loss",
        "tokens_per_second",
        "data_wait_ns",
        "num_alloc_retries",
        "allocated_bytes",
        "custom",
    ]
    values = ["12", None, True, [], {}, -1, 10**400, 1e308, float("inf")]
    lines = steady(40)
    for number, each in enumerate(lines[10:]):
        each[names[number % len(names)]] = values[number % len(values)]
    path = sample_logs.path(tmp_path)
    path.write_text(re.sub(r"Infinity", "1e999", sample_logs.text(lines)))
    state = seen(tmp_path)
    assert state.steps_done == 40
    assert state.median_step_ns == pytest.approx(100e6, rel=0.1)


def test_only_metrics_that_the_recorder_does_not_write_are_custom(tmp_path: Path) -> None:
    own = {"cpu_time_ns": 7e6, "sm_clock_mhz": 1980.0, "max_power_w": 690.0, "tokens_per_second_per_gpu": 9.0}
    state = seen(sample_logs.write(tmp_path, [line | own | {"grad_norm": 0.5} for line in steady(40)]))
    assert state.custom_metrics == {"grad_norm": 0.5}


@pytest.mark.parametrize(
    "text", ["[]", "{", '{"world_size": "8", "windows": 3, "strategy": []}', '{"windows": [1, {}]}']
)
def test_an_invalid_manifest_is_skipped(tmp_path: Path, text: str) -> None:
    sample_logs.write(tmp_path, steady(30))
    (tmp_path / "run.json").write_text(text)
    state = seen(tmp_path)
    assert (state.world_size, state.windows, state.steps_done) == (None, (), 30)


def test_memory_does_not_grow_with_the_steps(tmp_path: Path) -> None:
    sample_logs.write(tmp_path, [], live=True)
    watch = Watch(tmp_path)
    sizes = []
    for part in range(4):
        sample_logs.append(tmp_path, [{**each, "loss": 2.0} for each in steady(2000, first=2000 * part, seed=part)])
        watch.poll(NOW_S)
        steps = watch._steps
        sizes.append(len(steps._pending) + len(steps._median_times) + len(steps._losses) + len(steps._data_waits))
        assert len(steps.loss_curve.values) <= 240
    assert sizes[0] == sizes[-1]


# Recorded samples ----------------------------------------------------------------------------------------------------

SAMPLES = sorted(path.parent for path in (ROOT / "sample_traces").glob("**/run.json"))


@pytest.mark.parametrize("run", SAMPLES, ids=lambda run: run.name)
def test_recorded_samples_raise_few_alarms(run: Path) -> None:
    state = seen(run)
    assert state.is_over
    assert state.steps_done == json.loads(list(sample_logs.path(run).open())[-1])["step"] + 1
    # Machines under load are slow in stretches; each is reported once, in fewer than one of fifteen steps.
    assert state.outlier_count <= state.steps_done / 15


def test_in_the_recorded_demo_the_outliers_are_the_steps_that_saved(tmp_path: Path) -> None:
    first, second = seen(ROOT / "sample_traces" / "demo-fsdp2").outliers
    assert (first.last_step, second.step) == (23, 47)
    assert EventKind.SAVE in whats(first)
    assert whats(second) == [EventKind.SAVE]
    assert second.ranks == (0, 1)
