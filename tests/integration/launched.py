"""Trainings started as a user starts them, in processes of their own. Not a test."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.python_path import PYTHON_PATH

MICRO = ["--device", "cpu", "--model", "micro", "--batch", "2", "--tokens", "32", "--log-every", "1"]


def environment() -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH}


def start(
    *arguments: str, program: tuple[str, ...] = ("-m", "instrumented_trainers"), prefix: tuple[str, ...] = ()
) -> "subprocess.Popen[str]":
    command = [*prefix, sys.executable, *program, *arguments]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def train(
    *arguments: str, program: tuple[str, ...] = ("-m", "instrumented_trainers"), prefix: tuple[str, ...] = ()
) -> tuple[int, str, str]:
    """Return exit code, stdout and stderr of a training."""
    process = start(*arguments, program=program, prefix=prefix)
    out, err = process.communicate(timeout=300)
    return process.returncode, out, err


def read_until(process: "subprocess.Popen[str]", words: str) -> None:
    """Read the training's output up to a line with `words`."""
    assert process.stdout is not None
    for line in process.stdout:
        if words in line:
            return
    raise AssertionError(f"the training ended without {words!r}: {process.communicate()[1]}")


def ranks_of(pid: int) -> list[int]:
    """Return the processes that a training's server of processes started for its ranks, in order of rank."""
    servers = [child for child in _children(pid) if b"forkserver" in Path(f"/proc/{child}/cmdline").read_bytes()]
    return [rank for server in servers for rank in _children(server)]


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    return sorted(int(child) for child in children.read_text().split()) if children.exists() else []
