import contextlib
import dataclasses
import gzip
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tracekit import conventions
from tracekit.capture import Recorder

CPU_ONLY = pytest.mark.skipif(torch.cuda.is_available(), reason="counts the events of a CPU run")


def train(recorder: Recorder, steps: int) -> None:
    weight = torch.ones(64, 64, requires_grad=True)
    for step in range(steps):
        with recorder.span(conventions.FORWARD):
            loss = (weight @ weight).mean()
        with recorder.span(conventions.BACKWARD):
            loss.backward()
        recorder.step({conventions.LOSS_METRIC: float(step)}, tokens=128)


def read_trace(path: Path) -> dict[str, Any]:
    with gzip.open(path) as packed:
        trace: dict[str, Any] = json.load(packed)
    return trace


def names(trace: dict[str, Any]) -> list[str]:
    spans = [event for event in trace["traceEvents"] if event.get("cat") == "user_annotation"]
    return [event["name"] for event in sorted(spans, key=lambda event: event["ts"])]


def metrics(run: Path, rank: int = 0) -> list[dict[str, Any]]:
    lines = (run / conventions.rank_file(rank, conventions.METRICS_SUFFIX)).read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    given = {"strategy": "ddp", "arguments": {"lr": 0.1, "hf_token": "abc"}, "command": ["train.py", "--key=abc"]}
    with Recorder(folder, first_step=100, steps="2:4", every=4, warmup=1, manifest=given) as recorder:
        train(recorder, 10)
    return folder


def test_a_run_is_complete_and_nothing_else_is_left(run: Path) -> None:
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files == {
        "run.json",
        "attempts.jsonl",
        "rank00000.metrics.jsonl",
        "rank00000.pt.trace.json.gz",
        "window001/rank00000.pt.trace.json.gz",
    }


def test_the_trace_marks_the_optimizer_steps_of_its_window_and_their_phases(run: Path) -> None:
    phases = ["tracekit::forward", "tracekit::backward"]
    first = names(read_trace(run / "rank00000.pt.trace.json.gz"))
    second = names(read_trace(run / "window001" / "rank00000.pt.trace.json.gz"))
    assert first == ["ProfilerStep#102", *phases, "ProfilerStep#103", *phases]
    assert second == ["ProfilerStep#106", *phases, "ProfilerStep#107", *phases]


@CPU_ONLY
def test_allocations_and_shapes_are_recorded(run: Path) -> None:
    events = read_trace(run / "rank00000.pt.trace.json.gz")["traceEvents"]
    allocations = [event for event in events if event["name"] == "[memory]"]
    matmuls = [event for event in events if event["name"] == "aten::mm"]
    assert any(event["args"]["Bytes"] == 64 * 64 * 4 for event in allocations)
    assert matmuls[0]["args"]["Input Dims"][:2] == [[64, 64], [64, 64]]


def test_the_manifest_describes_the_run_without_secrets(run: Path) -> None:
    manifest = json.loads((run / "run.json").read_text())
    assert manifest["schema"] == conventions.RUN_SCHEMA
    assert manifest["strategy"] == "ddp"
    assert manifest["world_size"] == 1
    assert manifest["arguments"] == {"lr": 0.1, "hf_token": "[redacted]"}
    assert manifest["command"] == ["train.py", "--key=[redacted]"]
    assert manifest["versions"]["torch"] == torch.__version__
    assert manifest["simulated"] is False
    assert manifest["windows"] == [
        {"window": 0, "first_step": 102, "steps": 2},
        {"window": 1, "first_step": 106, "steps": 2},
    ]


def test_each_step_has_a_line_of_metrics(run: Path) -> None:
    rows = metrics(run)
    assert [row["step"] for row in rows] == list(range(100, 110))
    assert [row["loss"] for row in rows] == [float(step) for step in range(10)]
    assert all(row["tokens_per_second"] == 128e9 / row["step_time_ns"] for row in rows)


def test_cpu_time_does_not_include_waiting(tmp_path: Path) -> None:
    def spin(cpu_ns: int) -> None:
        end_ns = time.process_time_ns() + cpu_ns
        while time.process_time_ns() < end_ns:
            pass

    with Recorder(tmp_path, steps=None) as recorder:
        spin(30_000_000)
        recorder.step()
        threading.Event().wait(0.03)
        recorder.step()
    busy, waiting = (row["cpu_time_ns"] for row in metrics(tmp_path))
    assert busy >= 30_000_000
    assert waiting < busy / 2


@pytest.mark.skipif(
    not Path("/proc/thread-self/schedstat").exists(), reason="needs the scheduler's statistics of Linux"
)
def test_the_wait_for_a_processor_is_that_of_threads_that_share_it(tmp_path: Path) -> None:
    cores = os.sched_getaffinity(0)
    spin = f"import os; os.sched_setaffinity(0, {{{min(cores)}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        os.sched_setaffinity(0, {min(cores)})
        with Recorder(tmp_path, steps=None) as recorder:
            end_ns = time.process_time_ns() + 200_000_000
            while time.process_time_ns() < end_ns:
                pass
            recorder.step()
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.wait()
    (row,) = metrics(tmp_path)
    assert row["processor_wait_ns"] >= 20_000_000  # half of the processor is the other's
    assert row["processor_wait_ns"] + row["cpu_time_ns"] <= 1.1 * row["step_time_ns"]


def test_a_metric_given_as_a_function_is_read_a_step_later(tmp_path: Path) -> None:
    calls: list[int] = []

    def loss(step: int) -> float:
        calls.append(step)
        return float(step)

    with Recorder(tmp_path, steps=None) as recorder:
        recorder.step({"loss": lambda: loss(0)})
        assert calls == []
        recorder.step({"loss": lambda: loss(1)})
        assert calls == [0]
    assert [row["loss"] for row in metrics(tmp_path)] == [0.0, 1.0]


def test_waiting_for_the_number_of_an_earlier_step_counts_in_a_steps_time(tmp_path: Path) -> None:
    waits: list[int] = []

    def loss() -> float:
        waits.append(recorder.steps_done)
        threading.Event().wait(0.03)  # as for a device that is steps behind
        return 1.0

    with Recorder(tmp_path, steps=None) as recorder:
        recorder.step({"loss": loss})
        assert waits == []
        for _ in range(3):
            recorder.step({"loss": loss})
    _, *others = (row["step_time_ns"] for row in metrics(tmp_path))
    assert min(others) >= 30_000_000


def test_a_window_begins_once_the_device_has_done_what_is_queued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(recorder.steps_done))
    with Recorder(tmp_path, steps="2:4", every=5, warmup=1) as recorder:
        recorder._profiler._options = dataclasses.replace(recorder._profiler._options, device="cuda")
        train(recorder, 10)
    assert waited == [2, 7]


class Device:
    """A device that is behind the host: its clock moves when a test says so, and events wait for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached: list[float] = []  # when each event was reached, in ms
        self.events: list[DeviceEvent] = []
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "Event", lambda **_: DeviceEvent(self))
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
        monkeypatch.setattr("tracekit.capture.recorder.allocator_counters", dict)


class DeviceEvent:
    def __init__(self, device: Device) -> None:
        self._device, self.number = device, len(device.events)
        device.events.append(self)

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.number < len(self._device.reached)

    def synchronize(self) -> None:
        assert self.query(), "the host would wait for ever"

    def elapsed_time(self, later: "DeviceEvent") -> float:
        return self._device.reached[later.number] - self._device.reached[self.number]


def test_on_a_gpu_a_steps_time_is_that_between_its_ends_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    with Recorder(tmp_path, steps=None, device="cuda", world_size=8) as recorder:
        times = []
        for _ in range(3):
            recorder.step({"loss": 1.0}, tokens=128)
            times.append(recorder.step_time)
        assert [time.ready for time in times] == [False, False, False]  # the host waited for none
        device.reached = [0.0, 80.0, 81.0, 161.0, 170.0, 250.0, 251.0]  # each step's begin and end
    assert [row["step_time_ns"] for row in metrics(tmp_path)] == [80_000_000] * 3
    assert [row["tokens_per_second"] for row in metrics(tmp_path)] == [1600.0] * 3
    assert [row["tokens_per_second_per_gpu"] for row in metrics(tmp_path)] == [200.0] * 3


def test_a_gpu_that_has_failed_does_not_raise_in_the_recorder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Device(monkeypatch)

    def fail(_: DeviceEvent) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with Recorder(tmp_path, steps=None, device="cuda") as recorder:
        monkeypatch.setattr(DeviceEvent, "record", fail)
        recorder.step()
        recorder.step()
    assert all(row["step_time_ns"] > 0 for row in metrics(tmp_path))


def test_before_the_training_uses_the_gpu_a_steps_time_is_the_hosts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    with Recorder(tmp_path, steps=None, device="cuda") as recorder:
        threading.Event().wait(0.01)
        recorder.step()
    assert metrics(tmp_path)[0]["step_time_ns"] >= 10_000_000
    assert not device.events


def test_a_resumed_run_keeps_the_metrics_of_earlier_steps(tmp_path: Path) -> None:
    for first_step, steps in ((0, 4), (2, 3)):
        with Recorder(tmp_path, first_step=first_step, steps=None) as recorder:
            for step in range(first_step, first_step + steps):
                recorder.step({"loss": 10.0 * first_step + step})
    assert [(row["step"], row["loss"]) for row in metrics(tmp_path)] == [(0, 0), (1, 1), (2, 22), (3, 23), (4, 24)]


def test_a_training_that_ends_inside_the_window_leaves_a_trace_of_the_steps_done(tmp_path: Path) -> None:
    with contextlib.suppress(KeyboardInterrupt), Recorder(tmp_path, steps=(1, 6), warmup=1) as recorder:
        train(recorder, 3)
        raise KeyboardInterrupt
    assert "ProfilerStep#2" in names(read_trace(tmp_path / "rank00000.pt.trace.json.gz"))
    assert not list(tmp_path.glob("*" + conventions.PARTIAL_SUFFIX))


@pytest.mark.parametrize("wait", [0, 2])
def test_the_trainings_own_profiler_has_priority(tmp_path: Path, wait: int, capfd: pytest.CaptureFixture[str]) -> None:
    own = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with own, Recorder(tmp_path, steps=(wait + 1, wait + 2), warmup=1) as recorder:
        train(recorder, 6)
    assert sum(event.name == "aten::mm" for event in own.events()) >= 6
    complaints = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit:")]
    assert len(complaints) == 1
    assert "another profiler is running" in complaints[0]
    assert len(metrics(tmp_path)) == 6


@pytest.fixture
def full_disk(tmp_path: Path) -> Path:
    """A run folder in which no trace can be written: a folder stands where the file should."""
    for name in ("rank00000.pt.trace.json.gz", "rank00000.metrics.jsonl.partial"):
        (tmp_path / name / "occupied").mkdir(parents=True)
    return tmp_path


def test_a_recording_failure_is_reported_in_one_line_and_training_continues(
    full_disk: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with Recorder(full_disk, steps="1:2", warmup=1) as recorder:
        train(recorder, 4)
    complaints = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit:")]
    assert len(complaints) == 2
    assert "metrics are not recorded" in complaints[0]
    assert "rank00000.pt.trace.json.gz was not written" in complaints[1]
    assert all(line.endswith("training continues") for line in complaints)


def test_the_oldest_windows_except_the_first_are_removed_over_the_disk_budget(tmp_path: Path) -> None:
    with Recorder(tmp_path, steps="1:2", every=2, warmup=1, disk_budget_bytes=1) as recorder:
        for _ in range(10):
            train(recorder, 1)
            recorder._profiler._writer.finish()
    remaining = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.gz"))
    assert remaining == ["rank00000.pt.trace.json.gz", "window004/rank00000.pt.trace.json.gz"]
    manifest = json.loads((tmp_path / "run.json").read_text())
    assert [window["first_step"] for window in manifest["windows"]] == [1, 9]


def test_an_uncompressed_trace_is_written_to_scratch_and_removed_from_there(tmp_path: Path) -> None:
    with Recorder(tmp_path / "run", steps="1:2", warmup=1, scratch=tmp_path / "scratch") as recorder:
        train(recorder, 4)
    assert (tmp_path / "run" / "rank00000.pt.trace.json.gz").exists()
    assert not list((tmp_path / "scratch").iterdir())


def test_without_a_scratch_folder_the_uncompressed_trace_is_written_to_the_run(tmp_path: Path) -> None:
    (tmp_path / "scratch").write_text("a file stands where the folder should")
    with Recorder(tmp_path / "run", steps="1:2", warmup=1, scratch=tmp_path / "scratch") as recorder:
        train(recorder, 4)
    assert "ProfilerStep#1" in names(read_trace(tmp_path / "run" / "rank00000.pt.trace.json.gz"))


def test_a_hanging_disk_delays_no_step_and_queues_no_more_windows(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A pipe that nobody reads stands for a file system that hangs: opening it to write waits."""
    stuck = tmp_path / "rank00000.pt.trace.json.gz.partial"
    os.mkfifo(stuck)
    with Recorder(tmp_path, steps="1:2", every=2, warmup=1) as recorder:
        train(recorder, 9)
        steps = recorder.steps_done
        reader, ended = os.open(stuck, os.O_RDONLY | os.O_NONBLOCK), threading.Event()
        drains = threading.Thread(target=drain, args=(reader, ended))
        drains.start()
    ended.set()
    drains.join()
    assert steps == 9
    complaints = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit:")]
    assert len(complaints) == 3  # two windows wait, each of the others is reported once
    assert all("earlier windows are still being written" in line for line in complaints)
    assert [row["step"] for row in metrics(tmp_path)] == list(range(9))


def drain(reader: int, ended: threading.Event) -> None:
    while not ended.wait(0.01):
        with contextlib.suppress(BlockingIOError):
            while os.read(reader, 1 << 16):
                pass


def test_time_in_the_data_span_is_logged_as_data_wait(tmp_path: Path) -> None:
    took_ns = []
    with Recorder(tmp_path, steps=None) as recorder:
        for wait_s in (0.0, 0.05):
            began_ns = time.perf_counter_ns()
            with recorder.span(conventions.DATA):
                time.sleep(wait_s)
            took_ns.append(time.perf_counter_ns() - began_ns)
            recorder.step()
    first, second = [row[conventions.DATA_WAIT_METRIC] for row in metrics(tmp_path)]
    assert first <= took_ns[0]
    assert 50_000_000 <= second <= took_ns[1]


def test_a_first_step_that_has_begun_already_has_no_step_time(tmp_path: Path) -> None:
    with Recorder(tmp_path, steps=None, mid_step=True) as recorder:
        recorder.step(tokens=5)
        recorder.step(tokens=5)
    first, second = metrics(tmp_path)
    assert first == {"step": 0}
    assert {conventions.STEP_TIME_METRIC, conventions.TOKENS_METRIC} <= set(second)


def test_evaluation_lies_between_two_steps_and_counts_in_neither(tmp_path: Path) -> None:
    # step 0 . evaluation, at least 5 ms . step 1
    evaluation_ns = 5_000_000
    with Recorder(tmp_path, steps="0:2", warmup=0) as recorder:
        began_ns = time.perf_counter_ns()
        with recorder.evaluation():
            turned_ns = time.perf_counter_ns()
            while time.perf_counter_ns() - turned_ns < evaluation_ns:
                torch.ones(2) + 1
        recorder.step()
        recorder.step(last=True)
        whole_ns = time.perf_counter_ns() - began_ns
    spans = {
        event["name"]: (event["ts"], event["ts"] + event["dur"])
        for event in read_trace(tmp_path / conventions.rank_file(0, conventions.TRACE_SUFFIX))["traceEvents"]
        if event.get("cat") == "user_annotation"
    }
    first, evaluation, second = (spans[name] for name in ("ProfilerStep#0", "tracekit::evaluation", "ProfilerStep#1"))
    assert first[1] <= evaluation[0] < evaluation[1] <= second[0]
    times = [row[conventions.STEP_TIME_METRIC] for row in metrics(tmp_path)]
    assert sum(times) <= whole_ns - evaluation_ns
