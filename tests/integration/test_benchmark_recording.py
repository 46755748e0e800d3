"""The benchmark of recording: that it runs, and works its tables out right. No times are judged."""

import json
from pathlib import Path

import pytest

from benchmarks import recording, recording_training


def turns(*, alone: list[list[int]], recorded: list[list[int]]) -> recording.Turns:
    times = {recording.ALONE: alone, recording.AGAIN: alone, recording.RECORD: recorded, recording.RECORDER: recorded}
    doubled = {name: [[2 * time for time in turn] for turn in each] for name, each in times.items()}
    return {name: {"cpu_ns": times[name], "wall_ns": doubled[name]} for name in times}


def test_recorded_steps_are_compared_with_plain_steps_of_the_same_round() -> None:
    start = turns(alone=[[100], [1000]], recorded=[[110], [1010]])  # a busy machine slows both
    assert recording.ratios([start], recording.RECORD, "cpu_ns") == [1.1, 1.01]
    assert recording.ratios([start], recording.AGAIN, "wall_ns") == [1.0, 1.0]
    assert recording.added_us([start], recording.RECORD) == [0.01, 0.01]


def test_the_table_has_intervals_given_enough_rounds() -> None:
    start = turns(alone=[[100_000_000]] * 10, recorded=[[101_000_000 + n * 10_000] for n in range(10)])
    rows = recording.outside_tables({"model": [start]})
    assert "| tracekit record | 101 ms | +1.04% (+1.01% to +1.08%) | +1.04% (+1.01% to +1.08%) | — |" in rows
    assert "| alone | 100 ms | — | — | — |" in rows
    few = recording.outside_tables({"model": [turns(alone=[[100_000_000]], recorded=[[101_000_000]])]})
    assert "| tracekit record | 101 ms | +1.00% | +1.00% | — |" in few


def test_the_cost_of_a_window_is_relative_to_the_steps_before_it() -> None:
    window = {
        "before_ns": 10.0,
        "inside_ns": 15.0,
        "blocked_ns": 2e6,
        "background_ns": 3e6,
        "trace_bytes": 5 * 2048,
        "call_ns": 9e4,
    }
    rows = recording.inside_table({"plain": [[window, window | {"inside_ns": 16.0}, window]]})
    assert "| plain | 1.50x | 2 KiB | 2 ms | 3 ms of CPU |" in rows
    assert "`Recorder.step` itself takes 90 µs of CPU" in rows[-1]


@pytest.mark.accuracy  # which measures with it
def test_training_alternates_between_plain_and_recorded(tmp_path: Path) -> None:
    subjects = (recording.ALONE, recording.RECORD)
    found = recording.take_turns("empty", tmp_path, turns=3, steps=2, subjects=subjects)
    for name in subjects:
        for times in found[name].values():
            assert [len(turn) for turn in times] == [2, 2, 2]
            assert min(map(min, times)) > 0
    lines = (tmp_path / "record" / "rank00000.metrics.jsonl").read_text().splitlines()
    assert len(lines) >= 6


def test_windows_are_recorded_and_reported_with_their_cost(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recording_training.windows(recording_training.empty_step(), "all", str(tmp_path), 2)
    windows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert len(windows) == 2
    for number, window in enumerate(windows):
        folder = tmp_path / "window001" if number else tmp_path
        assert window["trace_bytes"] == (folder / "rank00000.pt.trace.json.gz").stat().st_size
        assert window["inside_ns"] > 0
        assert window["before_ns"] > 0
