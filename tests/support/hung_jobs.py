"""Start the ranks of a case of tests/recordings/hangs/cases.py, wait until they have hung, and end them."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

CASES = Path(__file__).parents[1] / "recordings" / "hangs" / "cases.py"
ROOT = Path(__file__).parents[2]
RANKS = 4
_DEADLINE_S = 400.0
# Ranks are forked from a process that has imported torch and has done nothing with it: to import it takes seconds.
_FORK_RANKS = """
import os, runpy, sys
import torch.utils.data
import instrumented_trainers.launch, tracekit.capture.hangs
cases, *_ = sys.argv = sys.argv[1:]
for rank in range(int(os.environ["WORLD_SIZE"])):
    os.environ["RANK"] = str(rank)
    if not (pid := os.fork()):
        runpy.run_path(cases, run_name="__main__")
        sys.exit()
    print(pid, flush=True)
sys.stdin.read()  # a rank that has ended remains a zombie until then
"""


def run(case: str, folder: Path, *, timeout_s: float = 6.0) -> Path:
    """Return the folder with the dumps of the ranks of a case, all of which have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-c", _FORK_RANKS, str(CASES), case, str(folder), str(timeout_s)]
    with subprocess.Popen(
        command,
        env=_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as forking:
        assert forking.stdout is not None
        pids = [int(forking.stdout.readline()) for _ in range(RANKS)]
        try:
            _wait_until_hung(folder, pids)
        finally:
            for pid in pids:  # a rank that sees another one die would write a dump of that
                os.kill(pid, signal.SIGSTOP)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
    return folder


def _environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}


def _wait_until_hung(folder: Path, pids: list[int]) -> None:
    """Wait until each rank has written its dump or has ended."""
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        written = [(folder / f"rank{rank:05d}.hang.json").exists() for rank in range(RANKS)]
        if all(done or _has_ended(pid) for done, pid in zip(written, pids, strict=True)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"ranks wrote no dump: {sorted(path.name for path in folder.iterdir())}")


def _has_ended(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
