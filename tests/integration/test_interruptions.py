"""Kills while a training is recorded, two processes on one history and cache, and files that may not grow."""

import functools
import itertools
import json
import os
import resource
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.fuzz import kills, record_kills, together
from tests.support import cli_runner, kineto_files
from tests.support.selection import others_in_accuracy
from tracekit.regression.history import store


@pytest.mark.parametrize("seed", [3000])
def test_what_was_recorded_before_a_kill_stays_readable(seed: int) -> None:
    done = record_kills.kill(seed, ranks=1)
    assert done.problem is None, done


def test_two_commands_that_are_killed_on_one_history_lose_nothing(tmp_path: Path) -> None:
    done = kills.Place(tmp_path, ["history add"]).kill(("history add", "history add"), 4700)
    assert (done.problem, done.killed_count > 0) == (None, True)


@pytest.mark.accuracy
def test_two_commands_that_are_killed_on_one_file_lose_nothing(tmp_path: Path) -> None:
    place = kills.Place(tmp_path)
    rounds = [place.kill(pair, 4701 + number) for number, pair in enumerate(kills.PAIRS)]
    assert [done.problem for done in rounds] == [None] * len(kills.PAIRS)


@pytest.mark.accuracy
def test_two_recordings_into_one_folder_that_are_killed_lose_nothing() -> None:
    done = record_kills.kill_two(4700)
    assert done.problem is None, done


@pytest.mark.accuracy  # unit tests of both have several writers
def test_two_processes_share_a_history_and_a_cache() -> None:
    with together.place() as where:
        assert [once(where, seed) for once in together.ROUNDS.values() for seed in (1,)] == [None] * 2


COMMANDS = {
    "scrub": ("scrub", "run", "out"),
    "query": ("query", "run", "SELECT * FROM ops", "--format", "parquet", "--out", "out"),
    "simulate": ("simulate", "--gpus", "2", "--layers", "1", "--steps", "2", "--model", "125m", "--out", "sim"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_may_not_grow_is_one_line(name: str, tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=6))
    with _small_files():
        done = cli_runner.tracekit(*COMMANDS[name], cwd=tmp_path, TRACEKIT_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 2, done.stderr
    assert "File too large" in cli_runner.only_line(done)
    assert not (tmp_path / "out").exists()


def test_a_read_only_cache_is_used_and_not_said_to_be_cleared(tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=6))
    cache = {"TRACEKIT_CACHE_DIR": str(tmp_path / "cache")}
    cli_runner.tracekit("check", tmp_path / "run", **cache)
    folders = [path for path in (tmp_path / "cache").rglob("*") if path.is_dir()]
    for folder in folders:
        folder.chmod(0o555)
    try:
        checked = _without_rights("check", tmp_path / "run", **cache)
        cleared = _without_rights("cache", "clear", **cache)
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert checked.returncode == 0, checked.stderr
    assert cleared.returncode == 2
    assert "cannot be removed" in cleared.stderr


def _without_rights(*arguments: object, **variables: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a user whose permissions count: those of root do not."""
    drop = "-dac_override,-dac_read_search"
    prefix = ["setpriv", f"--bounding-set={drop}", f"--inh-caps={drop}"] if os.geteuid() == 0 else []
    if prefix and shutil.which(prefix[0]) is None:
        pytest.skip("root needs setpriv (util-linux) for this")
    return subprocess.run(
        [*prefix, *cli_runner.command(*arguments)],
        env=cli_runner.environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.parametrize("streams", [pytest.param(">&-", marks=pytest.mark.accuracy), ">&- 2>&- <&-"])
def test_a_closed_stream_is_the_null_device(streams: str, tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=6))
    line = f"{shlex.join(cli_runner.command('history', 'add', 'run', '--db', 'h.duckdb'))} {streams}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=cli_runner.environment(TRACEKIT_CACHE_DIR=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert store.read(tmp_path / "h.duckdb").runs.height == 1  # no message was written into the database
    closed = subprocess.run(
        ["bash", "-c", f"{shlex.join(cli_runner.command('explain', 'COMM001'))} {streams}"],
        env=cli_runner.environment(),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


@contextmanager
def _small_files() -> Iterator[None]:
    """Let writing beyond 2,000 bytes fail with EFBIG, as on a full disk: Python ignores the signal."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


OUTPUTS = {
    "check": ("check", "run", "--format", "json", "--fail-on", "never", "--out"),
    "query": ("query", "run", "SELECT * FROM ops", "--format", "csv", "--out"),
    "parquet": ("query", "run", "SELECT * FROM ops", "--format", "parquet", "--out"),
    "export": ("export", "run", "--no-findings", "--out"),
    "baseline": ("baseline", "save", "run", "--out"),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=3))
    return tmp_path


@pytest.mark.parametrize("name", OUTPUTS)
def test_a_device_is_written_and_not_replaced(name: str, run: Path) -> None:
    # A terminal is a device that everybody may make: /dev/null would be lost for the whole machine.
    leader, follower = os.openpty()
    device = Path(os.ttyname(follower))
    (run / "out").symlink_to(device)
    before = device.stat()
    with ThreadPoolExecutor(1) as reader:
        written = reader.submit(cli_runner.read_all, leader)
        done = cli_runner.tracekit(*OUTPUTS[name], "out", cwd=run)
        assert (device.stat().st_ino, device.is_char_device()) == (before.st_ino, True)
        os.close(follower)
    assert done.returncode == 0, done.stderr
    assert written.result()
    assert sorted(path.name for path in run.iterdir()) == ["out", "run"]
    os.close(leader)


@pytest.mark.parametrize("name", ["check", "query"])
def test_a_pipe_gets_the_output(name: str, run: Path) -> None:
    os.mkfifo(run / "out")
    with ThreadPoolExecutor(1) as reader:
        written = reader.submit((run / "out").read_bytes)
        done = cli_runner.tracekit(*OUTPUTS[name], "out", cwd=run)
    assert done.returncode == 0, done.stderr
    assert written.result()
    assert (run / "out").is_fifo()


def test_the_device_of_the_standard_output_is_a_pipe_to_the_next_command(run: Path) -> None:
    done = subprocess.run(
        cli_runner.command(*OUTPUTS["check"], "/dev/stdout"), cwd=run, capture_output=True, check=True
    )
    assert done.stdout.startswith(b"{")


def test_a_link_to_a_file_stays_a_link(run: Path) -> None:
    (run / "reports").mkdir()
    (run / "latest.json").symlink_to("reports/1.json")
    done = cli_runner.tracekit(*OUTPUTS["check"], "latest.json", cwd=run)
    assert done.returncode == 0, done.stderr
    assert (run / "latest.json").is_symlink()
    assert (run / "reports" / "1.json").read_text().startswith("{")


def test_scrub_replaces_no_device(run: Path) -> None:
    os.mkfifo(run / "out")
    done = cli_runner.tracekit("scrub", "run", "out", "--force", cwd=run)
    assert (done.returncode, done.stderr) == (2, "tracekit: out: is a device or pipe; name a file or folder\n")
    assert (run / "out").is_fifo()


@contextmanager
def _clock_set_back(reading: int) -> Iterator[None]:
    """Set the clock a day back from a reading of it on."""
    readings, time_s, time_ns = itertools.count(), time.time, time.time_ns

    def offset_s() -> int:
        return -86_400 if next(readings) >= reading else 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "time", lambda: time_s() + offset_s())
        patch.setattr(time, "time_ns", lambda: time_ns() + offset_s() * 10**9)
        yield


@pytest.mark.parametrize("reading", others_in_accuracy([0, 3, 20], [3]))
def test_a_clock_that_is_set_back_changes_no_report_and_loses_no_run(run: Path, reading: int) -> None:
    tracekit = functools.partial(cli_runner.tracekit, cwd=run, TRACEKIT_CACHE_DIR=str(run / "cache"))
    report = tracekit("check", "run", "--format", "json")
    with _clock_set_back(reading):
        again = tracekit("check", "run", "--format", "json")
    assert (again.returncode, again.stdout) == (report.returncode, report.stdout), again.stderr
    kineto_files.write(run / "later" / "rank00000.pt.trace.json", kineto_files.trace(0, start_us=900, steps=4))
    for name, commit in (("run", "a" * 40), ("later", "b" * 40)):
        with _clock_set_back(reading):
            added = tracekit("history", "add", name, "--db", "h.duckdb", "--commit", commit)
        assert added.returncode == 0, added.stderr
    runs = store.read(run / "h.duckdb").runs
    assert sorted(runs["commit"]) == ["a" * 40, "b" * 40]
    if reading == 0:
        assert max(runs["added_ns"]) < time.time_ns() - 80_000 * 10**9  # the clock was set back


# Imported by each Python process that has its folder in PYTHONPATH.
SET_BACK = """
import itertools, os, time
_readings, _at = itertools.count(), int(os.environ["SET_BACK_AT"])
_time, _time_ns = time.time, time.time_ns

def _offset_s():
    return -86_400 if next(_readings) >= _at else 0

time.time = lambda: _time() + _offset_s()
time.time_ns = lambda: _time_ns() + _offset_s() * 10**9
"""


def test_a_training_is_recorded_while_the_clock_is_set_back(tmp_path: Path) -> None:
    script = cli_runner.ROOT / "tests" / "integration" / "scripts" / "plain_single.py"
    words = ("record", "--out", tmp_path / "recorded", "--", sys.executable, script)
    (tmp_path / "clock").mkdir()
    (tmp_path / "clock" / "sitecustomize.py").write_text(SET_BACK)
    path = f"{cli_runner.ROOT}{os.pathsep}{tmp_path / 'clock'}"
    done = cli_runner.in_a_process(*words, cwd=tmp_path, PYTHONPATH=path, SET_BACK_AT="10")
    assert done.returncode == 0, done.stderr
    checked = cli_runner.tracekit(
        "check", tmp_path / "recorded", "--format", "json", "--fail-on", "never", "--no-cache"
    )
    assert checked.returncode == 0, checked.stderr
    for log in (tmp_path / "recorded").rglob("*.metrics.jsonl"):
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        assert lines
        assert all(line["step_time_ns"] > 0 for line in lines if "step_time_ns" in line)
