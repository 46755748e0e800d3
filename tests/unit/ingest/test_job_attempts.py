"""Attempts logs: those that the recorder writes, and damaged ones."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tracekit import conventions
from tracekit.capture import Recorder, attempts
from tracekit.errors import InputError
from tracekit.ingest import job_attempts

START = {
    "event": "start",
    "time_ns": 2000,
    "process_start_ns": 1500,
    "launched_ns": 1000,
    "first_step": 4,
    "world_size": 2,
}
STEPS = {"event": "steps", "time_ns": 2100, "first_step": 4, "begin_ns": [0, 30], "step_ns": [20, 10]}
EXIT = {"event": "exit", "time_ns": 3000, "launched_ns": 1000, "failed_ns": 2900, "code": -9, "reason": "killed"}


def text(*events: object) -> str:
    return "".join(json.dumps(event) + "\n" for event in events)


def test_what_the_recorder_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(conventions.LAUNCHED_VARIABLE, "123")
    with Recorder(tmp_path, steps=None, first_step=7, device="cpu") as recorder:
        for _ in range(3):
            recorder.step()
    attempts.append_exit(tmp_path, launched_ns=123, failed_ns=None, code=0, reason=None)
    (attempt,), notes = job_attempts.read([tmp_path])
    assert not notes
    assert (attempt.first_step, attempt.launched_ns, attempt.exit_code, attempt.has_failed) == (7, 123, 0, False)
    assert attempt.step_numbers.tolist() == [7, 8, 9]
    times_ns = [attempt.begin_ns, *attempt.step_spans.ravel(), attempt.loop_end_ns, attempt.exit_ns]
    assert times_ns == sorted(times_ns)
    assert attempt.process_start_ns is None or attempt.process_start_ns < attempt.begin_ns


def test_an_exception_in_the_loop_is_stated(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, steps=None, device="cpu")
    with contextlib.suppress(ZeroDivisionError), recorder:
        recorder.step()
        raise ZeroDivisionError
    (attempt,), _ = job_attempts.read([tmp_path])
    assert attempt.error == "ZeroDivisionError"
    assert attempt.has_failed


def test_attempts_into_one_folder_follow_each_other(tmp_path: Path) -> None:
    for first_step in (0, 2):
        with Recorder(tmp_path, steps=None, first_step=first_step, device="cpu") as recorder:
            recorder.step()
    read, _ = job_attempts.read([tmp_path])
    assert [attempt.first_step for attempt in read] == [0, 2]


def test_steps_are_placed_by_the_times_of_their_line() -> None:
    (attempt,), bad_lines = job_attempts.parse(text(START, STEPS, EXIT), "run")
    assert not bad_lines
    assert attempt.step_spans.tolist() == [[2100, 2120], [2130, 2140]]
    assert attempt.step_numbers.tolist() == [4, 5]
    assert (attempt.launch_ns, attempt.last_evidence_ns, attempt.exit_code) == (1000, 3000, -9)


def test_an_exit_without_a_start_is_an_attempt_that_had_not_begun() -> None:
    read, bad_lines = job_attempts.parse(text(START, STEPS, EXIT, EXIT | {"time_ns": 4000, "launched_ns": 3500}), "run")
    assert not bad_lines
    assert [attempt.has_begun for attempt in read] == [True, False]
    assert read[1].begin_ns == 3500


@pytest.mark.parametrize(
    "line",
    [
        {"event": "other", "time_ns": 1}, {"event": "start"}, STEPS | {"step_ns": [1]}, STEPS | {"step_ns": "x"},
        STEPS | {"begin_ns": [-1, 0]}, STEPS | {"first_step": None}, STEPS | {"time_ns": 1 << 80},
        STEPS | {"begin_ns": [0.5, 1]},
    ],
)  # fmt: skip
def test_a_damaged_line_is_left_out_and_counted(line: object) -> None:
    (attempt,), bad_lines = job_attempts.parse(text(START, line, STEPS, EXIT), "run")
    assert bad_lines == 1
    assert attempt.step_numbers.tolist() == [4, 5]


json_values = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=3)
events = st.sampled_from([START, STEPS, EXIT, {"event": "end", "time_ns": 2500, "error": None}])
changes = st.dictionaries(
    st.sampled_from(["event", "time_ns", "first_step", "begin_ns", "step_ns", "launched_ns", "code", "world_size"]),
    json_values | st.lists(json_values, max_size=3), max_size=2,
)  # fmt: skip


@given(st.lists(st.builds(lambda event, change: event | change, events, changes), max_size=6))
def test_any_log_is_read_to_attempts_whose_steps_are_in_order(lines: list[object]) -> None:
    read, _ = job_attempts.parse(text(*lines), "run")
    for attempt in read:
        times_ns = attempt.step_spans.ravel().tolist()
        assert times_ns == sorted(times_ns)
        assert len(attempt.step_spans) == len(attempt.step_numbers)
        assert attempt.last_evidence_ns >= attempt.begin_ns


def test_a_run_without_an_attempts_log_is_placed_by_its_manifest_and_step_times(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"schema": "tracekit.run/1", "created_ns": 5000, "world_size": 4}))
    rows = [{"step": step, "step_time_ns": 100} for step in (3, 4)]
    (tmp_path / "rank00000.metrics.jsonl").write_text(text(*rows))
    (attempt,), notes = job_attempts.read([tmp_path])
    assert notes
    assert (attempt.first_step, attempt.world_size) == (3, 4)
    assert attempt.step_spans.tolist() == [[5000, 5100], [5100, 5200]]


def test_a_folder_of_runs_has_the_attempts_of_each(tmp_path: Path) -> None:
    for number, start_ns in enumerate((9000, 2000)):
        folder = tmp_path / f"run-{number}"
        folder.mkdir()
        (folder / "attempts.jsonl").write_text(text(START | {"time_ns": start_ns}))
    read, _ = job_attempts.read([tmp_path])
    assert [attempt.begin_ns for attempt in read] == [2000, 9000]
    with pytest.raises(InputError):
        job_attempts.read([tmp_path / "run-0" / "attempts.jsonl"])


def test_a_log_without_the_start_of_an_attempt_is_named(tmp_path):
    log = tmp_path / conventions.ATTEMPTS_FILE
    log.write_text('{"event":"start","time_ns":"x"}\n[[[\n')
    with pytest.raises(InputError) as raised:
        job_attempts.read([tmp_path])
    assert str(log) in str(raised.value)
