"""Kills while a training is recorded, two processes on one history and cache, and files that may not grow."""

import os
import resource
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fuzz import record_kills, together
from tests.support import cli_runner, kineto_files
from tracekit.regression.history import store


@pytest.mark.parametrize("seed", [3000])
def test_what_was_recorded_before_a_kill_stays_readable(seed: int) -> None:
    done = record_kills.kill(seed, ranks=1)
    assert done.problem is None, done


def test_two_processes_share_a_history_and_a_cache() -> None:
    with together.place() as where:
        assert [once(where, seed) for once in together.ROUNDS.values() for seed in (1, 2)] == [None] * 4


COMMANDS = {
    "scrub": ("scrub", "run", "out"),
    "query": ("query", "run", "SELECT * FROM ops", "--format", "parquet", "--output", "out"),
    "simulate": ("simulate", "--gpus", "2", "--layers", "1", "--steps", "2", "--model", "125m", "--out", "sim"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_that_may_not_grow_is_one_line(name: str, tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=6))
    done = subprocess.run(
        cli_runner.command(*COMMANDS[name]),
        cwd=tmp_path,
        env=cli_runner.environment(TRACEKIT_CACHE_DIR=str(tmp_path / "cache"), PYTHONDONTWRITEBYTECODE="1"),
        preexec_fn=_limit_files,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
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
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("streams", [">&-", ">&- 2>&- <&-", "2>&-"])
def test_a_closed_stream_is_the_null_device(streams: str, tmp_path: Path) -> None:
    kineto_files.write(tmp_path / "run" / "rank00000.pt.trace.json", kineto_files.trace(0, steps=6))
    line = f"{shlex.join(cli_runner.command('history', 'add', 'run', '--db', 'h.duckdb'))} {streams}"
    done = subprocess.run(
        ["bash", "-c", line],
        cwd=tmp_path,
        env=cli_runner.environment(TRACEKIT_CACHE_DIR=str(tmp_path / "cache")),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert store.read(tmp_path / "h.duckdb").runs.height == 1  # no message was written into the database
    closed = subprocess.run(
        ["bash", "-c", f"{shlex.join(cli_runner.command('explain', 'COMM001'))} {streams}"],
        env=cli_runner.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (closed.returncode, closed.stderr) == (0, "")


def _limit_files() -> None:
    """Let writing beyond 2,000 bytes fail with EFBIG, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))


OUTPUTS = {
    "check": ("check", "run", "--format", "json", "--fail-on", "never", "--output"),
    "query": ("query", "run", "SELECT * FROM ops", "--format", "csv", "--output"),
    "parquet": ("query", "run", "SELECT * FROM ops", "--format", "parquet", "--output"),
    "export": ("export", "run", "--no-findings", "--output"),
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
    os.set_blocking(leader, False)
    (run / "out").symlink_to(device)
    before = device.stat()
    done = subprocess.Popen(cli_runner.command(*OUTPUTS[name], "out"), cwd=run, stderr=subprocess.PIPE)
    written = b""
    while done.poll() is None or (more := _read(leader)):
        written += _read(leader) if done.poll() is None else more
    assert done.returncode == 0, done.stderr.read() if done.stderr else ""
    assert written
    assert (device.stat().st_ino, device.is_char_device()) == (before.st_ino, True)
    assert sorted(path.name for path in run.iterdir()) == ["out", "run"]
    os.close(leader)
    os.close(follower)


def _read(leader: int) -> bytes:
    try:
        return os.read(leader, 1 << 16)
    except OSError:  # nothing there
        time.sleep(0.005)
        return b""


@pytest.mark.parametrize("name", ["check", "query"])
def test_a_pipe_gets_the_output(name: str, run: Path) -> None:
    os.mkfifo(run / "out")
    done = subprocess.Popen(cli_runner.command(*OUTPUTS[name], "out"), cwd=run)
    assert (run / "out").read_bytes()
    assert done.wait() == 0
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
