"""`tracekit plan storage`: what is measured, bounded and removed; nothing here depends on how fast a disk is."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cli_runner import ROOT, tracekit
from tracekit.errors import InputError
from tracekit.plan import storage
from tracekit.plan.storage import Load, Measurement
from tracekit.report import storage_probe

MIB = 1 << 20


def test_each_load_is_measured_and_nothing_stays(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    results = storage.measure(tmp_path, storage.loads([1, 3], 6 * MIB), seconds=60)
    assert [(one.threads, one.file_bytes, one.fsync) for one in results] == [
        (1, 6 * MIB, True), (3, 2 * MIB, True), (3, 2 * MIB, False),
    ]  # fmt: skip
    assert all(one.is_complete and one.written_bytes == 6 * MIB for one in results)
    assert all(one.write_bytes_per_second > 0 and (one.read_bytes_per_second or 0) > 0 for one in results)
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_the_time_is_bounded(tmp_path: Path) -> None:
    results = storage.measure(tmp_path, storage.loads([1, 2, 4, 8], 4 * MIB), seconds=0.0)
    assert results == []
    done = tracekit("plan", "storage", tmp_path, "--bytes", "1e6", "--seconds", "0.1", "--threads", "1")
    assert done.returncode in (0, 2)  # a slow disk writes nothing in 0.1 s
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_and_its_files_are_removed(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", "tracekit", "plan", "storage", str(tmp_path), "--threads", "2", "--seconds", "60"]
    variables = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([*command, "--bytes", str(1 << 31)], env=variables, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(f"{storage.FOLDER_PREFIX}*/*.bin")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    assert process.wait(60) == 130
    assert not list(tmp_path.iterdir())


def test_a_failed_write_is_an_error_and_its_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(storage.os, "write", full)
    with pytest.raises(InputError, match="No space left"):
        storage.measure(tmp_path, [Load(2, MIB)], seconds=10)
    assert not list(tmp_path.iterdir())


def measurement(threads: int, rate: float, *, fsync: bool = True, complete: bool = True) -> Measurement:
    return Measurement(threads, MIB, fsync, rate, rate, MIB, complete)


def test_the_fewest_threads_at_the_full_rate_are_advised(tmp_path: Path) -> None:
    measured = [measurement(1, 1e9), measurement(2, 1.95e9), measurement(4, 2e9), measurement(4, 9e9, fsync=False)]
    values = storage_probe.document(tmp_path, measured).values
    assert isinstance(values, dict)
    assert (values["threads"], values["node_write_bytes_per_second"]) == (2, 2e9)
    with pytest.raises(InputError):
        storage_probe.document(tmp_path, [measurement(1, 1e9, complete=False)])


@given(st.lists(st.floats(1e6, 1e12), min_size=1, max_size=6))
def test_the_advised_threads_reach_95_percent(rates: list[float]) -> None:
    measured = [measurement(2**index, rate) for index, rate in enumerate(rates)]
    values = storage_probe.document(Path("path"), measured).values
    assert isinstance(values, dict)
    by_threads = {one.threads: one.write_bytes_per_second for one in measured}
    assert by_threads[values["threads"]] >= 0.95 * max(rates)
    assert all(rate < 0.95 * max(rates) for count, rate in by_threads.items() if count < values["threads"])


def test_a_plan_of_checkpoints_takes_the_limit_of_a_node(tmp_path: Path) -> None:
    done = tracekit("plan", "storage", tmp_path, "--bytes", "1e6", "--threads", "1,2", "--format", "json")
    assert done.returncode == 0, done.stderr
    probe = tmp_path / "probe.json"
    probe.write_text(done.stdout)
    limit = json.loads(done.stdout)["node_write_bytes_per_second"]
    size = (
        "plan",
        "checkpoint",
        "--params",
        "1e9",
        "--write-bandwidth",
        "1e15",
        "--interval",
        "1h",
        "--format",
        "json",
    )
    by_file = json.loads(tracekit(*size, "--storage", probe).stdout)
    assert by_file == json.loads(tracekit(*size, "--node-write-limit", limit).stdout)
    assert by_file["write_bytes_per_second"] == pytest.approx(limit)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"node_write_bytes_per_second": -1}', "[" * 100_000])
def test_what_is_no_measurement_is_an_error_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "probe.json"
    path.write_text(text)
    done = tracekit("plan", "checkpoint", "--params", "1e9", "--interval", "1h", "--storage", path)
    assert done.returncode == 2
    assert str(path) in done.stderr


@pytest.mark.parametrize(
    "words", ["--threads 0", "--threads x", "--threads 99999", "--bytes 0", "--bytes 1e14", "--bytes nan"]
)
def test_what_cannot_be_measured_is_an_error(tmp_path: Path, words: str) -> None:
    done = tracekit("plan", "storage", tmp_path, *words.split())
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_path_that_is_no_folder_is_an_error(tmp_path: Path) -> None:
    done = tracekit("plan", "storage", tmp_path / "none")
    assert done.returncode == 2
    assert str(tmp_path / "none") in done.stderr
