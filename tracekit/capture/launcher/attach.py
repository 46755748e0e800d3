"""Request a window from a training that is being recorded, from another process."""

import json
import sys
import time
from pathlib import Path

from tracekit import conventions
from tracekit.capture.launcher import exit_report

MOST_STEPS = 1000
_POLL_EVERY_S = 0.5
_ANSWER_S = 60.0


def attach(run: Path, *, steps: "int | None", quiet: bool) -> int:
    """Request a window of so many steps, wait until it is written, and report it; return the exit code.

    2 where the run is not being recorded, 1 where the training ended before the window was recorded.
    """
    if not _is_live(run):
        sys.stderr.write(f"tracekit: {run}: no training is being recorded there; start one with tracekit record\n")
        return 2
    before = _windows(run)
    now = run / conventions.NOW_FILE
    try:
        now.write_text("" if steps is None else json.dumps({"steps": steps}), encoding="utf-8")
    except OSError as error:
        sys.stderr.write(f"tracekit: {now} cannot be written: {error.strerror}\n")
        return 2
    while _is_live(run):
        if now.exists() and time.time() - now.stat().st_mtime > _ANSWER_S:
            sys.stderr.write(
                f"tracekit: no rank has answered for {_ANSWER_S:.0f} s; the window follows with its next steps\n"
            )
            return 1
        if not now.exists() and len(_windows(run)) > len(before):
            break
        time.sleep(_POLL_EVERY_S)
    new = [window for window in _windows(run) if window not in before]
    if not new:
        sys.stderr.write("tracekit: the training ended before the window was recorded\n")
        return 1
    if not quiet:
        first, count = new[-1]
        sys.stderr.write(f"tracekit: recorded steps {first} to {first + count - 1}; next: tracekit check {run}\n")
        if exit_report.has_analysis():
            exit_report.print_check(run)
    return 0


def _is_live(run: Path) -> bool:
    """Return whether a rank's metrics log is open: it gets its final name when the training ends."""
    suffix = conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX
    return any(run.glob(f"rank*{suffix}"))


def _windows(run: Path) -> "list[tuple[int, int]]":
    try:
        windows = json.loads((run / conventions.MANIFEST_FILE).read_text(encoding="utf-8"))["windows"]
        return [(int(window["first_step"]), int(window["steps"])) for window in windows]
    except (OSError, ValueError, KeyError, TypeError):
        return []
