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


def run(case: str, folder: Path, *, timeout_s: float = 6.0, program: list[str] | None = None) -> Path:
    """Return the folder with the dumps of the ranks of a case, all of which have ended."""
    folder.mkdir(parents=True, exist_ok=True)
    command = program or [sys.executable, str(CASES)]
    processes = [
        subprocess.Popen(
            [*command, case, str(folder), str(timeout_s)], env=_environment(rank), stderr=subprocess.DEVNULL
        )
        for rank in range(RANKS)
    ]
    try:
        _wait_until_hung(folder, processes)
    finally:
        for process in processes:  # a rank that sees another one die would write a dump of that
            process.send_signal(signal.SIGSTOP)
        for process in processes:
            process.kill()
            process.wait()
    return folder


def _environment(rank: int) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, "RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}


def _wait_until_hung(folder: Path, processes: "list[subprocess.Popen[bytes]]") -> None:
    """Wait until each rank has written its dump or is gone."""
    deadline = time.monotonic() + _DEADLINE_S
    while time.monotonic() < deadline:
        written = [(folder / f"rank{rank:05d}.hang.json").exists() for rank in range(RANKS)]
        if all(done or process.poll() is not None for done, process in zip(written, processes, strict=True)):
            return
        time.sleep(0.1)
    raise TimeoutError(f"ranks wrote no dump: {sorted(path.name for path in folder.iterdir())}")
