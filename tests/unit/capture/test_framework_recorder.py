import json
import time
from pathlib import Path
from typing import Any

import pytest

from tracekit import conventions
from tracekit.capture.framework_recorder import FrameworkRecorder, never_raises


def metrics(run: Path) -> list[dict[str, Any]]:
    lines = (run / conventions.rank_file(0, conventions.METRICS_SUFFIX)).read_text().splitlines()
    return [json.loads(line) for line in lines]


def follow(run: Path, **options: Any) -> FrameworkRecorder:
    return FrameworkRecorder(run, {"steps": None, "rank": 0, "device": "cpu", **options})


def test_evaluation_counts_neither_as_step_time_nor_as_data_wait(tmp_path: Path) -> None:
    # step 0   data . evaluation, taken for data . step      step 1   data . step
    evaluation_ns = 5_000_000  # at least
    recorder = follow(tmp_path)
    began_ns, began_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    recorder.begin(0, dict)
    recorder.enter_phase(conventions.DATA)
    recorder.enter_phase(conventions.DATA)
    turned_ns, turned_cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    while time.perf_counter_ns() - turned_ns < evaluation_ns:
        pass
    evaluation_cpu_ns = time.process_time_ns() - turned_cpu_ns
    recorder.enter_phase(None, previous=conventions.EVALUATION)
    recorder.step({}, tokens=10)
    whole_ns, whole_cpu_ns = time.perf_counter_ns() - began_ns, time.process_time_ns() - began_cpu_ns
    recorder.enter_phase(conventions.DATA)
    recorder.step({}, tokens=10)
    recorder.end()
    first, second = metrics(tmp_path)
    assert 0 < first[conventions.DATA_WAIT_METRIC] < first[conventions.STEP_TIME_METRIC] < whole_ns - evaluation_ns
    assert 0 <= first[conventions.CPU_TIME_METRIC] <= whole_cpu_ns - evaluation_cpu_ns
    assert first[conventions.TOKENS_METRIC] == pytest.approx(10e9 / first[conventions.STEP_TIME_METRIC])
    assert first[conventions.TOKENS_PER_GPU_METRIC] == first[conventions.TOKENS_METRIC]  # of one rank
    assert 0 < second[conventions.DATA_WAIT_METRIC] < second[conventions.STEP_TIME_METRIC]


def test_a_run_that_the_framework_cannot_describe_is_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorder = follow(tmp_path, manifest={"strategy": "given"})
    recorder.begin(3, lambda: {"model": 1 / 0})
    recorder.step({}, tokens=None)
    recorder.end()
    assert [row["step"] for row in metrics(tmp_path)] == [3]
    assert json.loads((tmp_path / conventions.MANIFEST_FILE).read_text())["strategy"] == "given"
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_the_users_manifest_overrides_the_frameworks(tmp_path: Path) -> None:
    recorder = follow(tmp_path, manifest={"strategy": "given"})
    recorder.begin(0, lambda: {"strategy": "found", "model": {"name": "found"}})
    recorder.end()
    about = json.loads((tmp_path / conventions.MANIFEST_FILE).read_text())
    assert (about["strategy"], about["model"]) == ("given", {"name": "found"})


def test_a_second_training_begins_a_second_recording(tmp_path: Path) -> None:
    recorder = follow(tmp_path)
    recorder.begin(0, dict)
    recorder.step({}, tokens=None)
    recorder.begin(0, dict)  # the first was left open: it raised
    recorder.step({}, tokens=None)
    recorder.end()
    assert [row["step"] for row in metrics(tmp_path)] == [0]
    assert not list(tmp_path.glob(f"*{conventions.PARTIAL_SUFFIX}"))


def test_phases_are_ignored_before_the_recording_begins(tmp_path: Path) -> None:
    recorder = follow(tmp_path / "run")
    recorder.enter_phase(conventions.DATA)
    recorder.step({}, tokens=None)
    recorder.end()
    assert not (tmp_path / "run").exists()


def test_a_callback_that_raises_ends_the_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Callback:
        def __init__(self) -> None:
            self.recorder = follow(tmp_path)
            self.calls = 0

        @never_raises
        def on_step(self) -> None:
            self.calls += 1
            raise RuntimeError("in the hook")

    callback = Callback()
    callback.recorder.begin(0, dict)
    callback.on_step()
    callback.on_step()
    assert callback.calls == 1
    assert not callback.recorder.recording
    assert capsys.readouterr().err.count("in the hook") == 1
