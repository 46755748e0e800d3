"""Commands recorded as a user records them: `tracekit record -- …`, in processes of their own. Not a test."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tracekit
from tests.support import ports
from tests.support.python_path import PYTHON_PATH
from tracekit.model.run import Run

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
LEFT_OUT = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "TRACEKIT_RECORD"}


@dataclass(frozen=True)
class Done:
    """The result of a command."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines that tracekit printed, without the verdict."""
        return [line for line in self.err.splitlines() if line.startswith("tracekit: ")]


def environment(**more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if name not in LEFT_OUT}
    return {**inherited, "OMP_NUM_THREADS": "1", "PYTHONPATH": PYTHON_PATH, **more}


def of_rank(rank: int, world_size: int, **more: str) -> dict[str, str]:
    """Return what a launcher tells a rank on this machine, without the seconds that a launcher takes to start."""
    port = {} if "MASTER_PORT" in more else {"MASTER_PORT": str(ports.free_port())}
    numbers = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    return {"MASTER_ADDR": "127.0.0.1", **port, **numbers, **more}


def command(*options: str, program: tuple[str, ...] = ("-m", "tracekit", "record")) -> list[str]:
    return [sys.executable, *program, *options]


def start(words: list[str], folder: Path, **more: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        words, cwd=folder, env=environment(**more), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def finish(process: "subprocess.Popen[str]") -> Done:
    out, err = process.communicate(timeout=500)
    return Done(process.returncode, out, err)


def do(words: list[str], folder: Path, **more: str) -> Done:
    return finish(start(words, folder, **more))


def script(name: str, *arguments: str) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *arguments]


def launched(ranks: int, name: str, *arguments: str) -> list[str]:
    """Return the command of a script on several ranks, by a launcher that needs no torch."""
    return script("launch.py", str(ranks), str(SCRIPTS / name), *arguments)


def under_torchrun(ranks: int, name: str, *arguments: str) -> list[str]:
    return [*TORCHRUN, str(ranks), str(SCRIPTS / name), *arguments]


def steps_by_rank(run: Run) -> dict[int, list[int]]:
    """Return the profiled steps of each rank."""
    return {trace.rank: trace.steps["step"].to_list() for trace in run.traces()}


def load(folder: Path) -> Run:
    return tracekit.load(str(folder), cache=False)


def metrics(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    lines = (folder / f"rank{rank:05d}.metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def wait_until(holds: Callable[[], bool], *, seconds: float = 300.0, every_s: float = 0.05) -> None:
    """Wait until a condition holds, which is tried again after `every_s`: to list a bucket takes as much CPU time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(every_s)
