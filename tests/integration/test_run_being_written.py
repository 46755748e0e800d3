"""`check` and `watch` on a run that three ranks write to a URL, of which one is slow and one is killed."""

import contextlib
import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.integration.recorded import command, finish, launched, start, wait_until
from tests.support import object_stores
from tests.support.cli_runner import tracekit
from tests.support.object_stores import BUCKET, keys

URL = f"s3://{BUCKET}/runs/live"
STEPS = ("--steps", "3:8", "--every", "10", "--warmup", "1")
"""Windows 0, 1 and 2: steps 3 to 7, 13 to 17 and 23 to 27."""
RANKS = 3
SLOW, KILLED = 1, 2
STOPS = (f"{SLOW}:16", f"{KILLED}:28")
"""Before which optimizer step, from 1, a rank stops: in the middle of window 1, and at the end of window 2."""


@pytest.mark.accuracy  # browser/test_live_run follows a run, test_record_to_url has a killed rank
def test_what_is_there_is_judged_and_what_is_missing_is_said(tmp_path: Path) -> None:
    training = launched(RANKS, "plain_ddp.py", "--steps", "40", "--save-at", "0", "--stop", *STOPS)
    record = command(*STEPS, "--out", URL, "--scratch", str(tmp_path / "local"), "--", *training)
    with object_stores.s3_server():
        process = start(record, tmp_path)
        try:
            slow = _wait_until_stopped(tmp_path, SLOW)
            wait_until(lambda: _uploaded(0) == {0, 1, 2}, seconds=240, every_s=0.5)
            report = _check()
            assert (_checked(report, window=0), _missing(report)) == ({0, 1, 2}, [])
            state = _watch(tmp_path / "local")
            assert (state["ranks_logging"], state["world_size"], state["is_over"]) == (RANKS, RANKS, False)
            assert state["slowest_rank"] is None  # by their logs, ranks that wait stopped where the slow one did
            os.kill(slow, signal.SIGCONT)

            killed = _wait_until_stopped(tmp_path, KILLED)
            wait_until(lambda: _uploaded(2) == {0, 1}, seconds=240, every_s=0.5)
            lacking = [f"Window 2 has no trace of rank {KILLED}, other windows do. Affected: 33.3%."]
            assert _missing(_check()) == lacking
            os.kill(killed, signal.SIGKILL)
            done = finish(process)
        finally:
            _end(process, tmp_path)
        report = _check()
    assert done.code == 1
    assert f"tracekit: rank {KILLED} was killed while recording; complete files remain" in done.said
    assert (_checked(report, window=1), _checked(report, window=2), _missing(report)) == (
        {0, 1, 2},
        {0, 1},
        lacking,
    )


def _end(process: "subprocess.Popen[str]", folder: Path) -> None:
    """End the ranks if a test ended early: the launcher ends all of them when one is killed."""
    if process.poll() is None:
        process.terminate()
        for file in folder.glob("stopped-*"):
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(file.read_text()), signal.SIGKILL)
        process.communicate(timeout=60)


def _wait_until_stopped(folder: Path, rank: int) -> int:
    """Return the process of a rank once it has stopped."""
    file = folder / f"stopped-{rank}"
    wait_until(lambda: file.exists() and bool(file.read_text()), seconds=240)
    return int(file.read_text())


def _uploaded(window: int) -> set[int]:
    """Return the ranks whose trace of a window is uploaded."""
    folder = f"window{window:03}/" if window else ""
    return {rank for rank in range(RANKS) if f"runs/live/{folder}rank{rank:05}.pt.trace.json.gz" in keys("runs/live/")}


def _check() -> dict[str, Any]:
    done = tracekit("check", URL, "--format", "json", "--fail-on", "never")
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _checked(report: dict[str, Any], *, window: int) -> set[int]:
    """Return the ranks whose trace of a window was read."""
    folder = f"window{window:03}/" if window else "live/"
    paths = [each["path"] for each in report["inputs"]]
    return {
        rank for rank in range(RANKS) if any(path.endswith(f"{folder}rank{rank:05}.pt.trace.json.gz") for path in paths)
    }


def _missing(report: dict[str, Any]) -> list[str]:
    """Return what DATA001 says of missing traces."""
    return [
        each["message"] for each in report["findings"] if each["code"] == "DATA001" and "no trace" in each["message"]
    ]


def _watch(scratch: Path) -> dict[str, Any]:
    """Return what `watch` says of the files that are still on this machine."""
    (manifest,) = scratch.rglob("run.json")
    state: dict[str, Any] = json.loads(tracekit("watch", manifest.parent, "--once", "--format", "json").stdout)
    return state
