"""Kills while a training is recorded, two processes on one history and cache, and files that may not grow."""

import resource
import signal
import subprocess
from pathlib import Path

import pytest

from tests.fuzz import record_kills, together
from tests.support import cli_runner, kineto_files


@pytest.mark.parametrize("seed", [3000])
def test_what_was_recorded_before_a_kill_stays_readable(seed: int) -> None:
    done = record_kills.kill(seed, ranks=1)
    assert done.problem is None, done


def test_two_processes_share_a_history_and_a_cache() -> None:
    with together.place() as where:
        assert [once(where, seed) for once in together.ROUNDS.values() for seed in (1, 2)] == [None] * 4


COMMANDS = {
    "scrub": ("scrub", "run", "out"),
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


def _limit_files() -> None:
    """Let writing beyond 2,000 bytes fail with EFBIG, as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
