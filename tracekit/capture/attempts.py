"""The attempts log of a run: when each attempt at a job started, did its steps, and ended; lines are only added.

A resumed training writes into the same folder, and replaces the metrics of the steps that it repeats. This log keeps
what each attempt did. `tracekit goodput` reads it. The leading rank writes it, and the launcher on its node.
"""

import os
import time
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture import atomic_files

_NS_PER_S = 10**9
_STAT_FIELD_OF_START = 22  # in /proc/PID/stat, see proc_pid_stat(5)


class AttemptsLog:
    """The lines of one attempt, which this process leads. All methods raise OSError where they cannot be written.

    Steps reach the file about once a second, as those of a metrics log do.
    """

    def __init__(self, folder: Path, *, first_step: int, world_size: int) -> None:
        self._path = folder / conventions.ATTEMPTS_FILE
        self._clock_ns = time.time_ns() - time.perf_counter_ns()  # a clock that is set meanwhile moves no step
        self._next_step = first_step
        self._steps: list[tuple[int, int]] = []
        self._written_s = time.monotonic()
        self._write(
            conventions.ATTEMPT_START,
            time_ns=time.time_ns(),
            process_start_ns=process_start_ns(),
            launched_ns=launched_ns(),
            first_step=first_step,
            world_size=world_size,
        )

    def add_step(self, begin_ns: int, end_ns: int) -> None:
        """Add a step by the times of `time.perf_counter_ns` at its begin and end."""
        self._steps.append((begin_ns, end_ns))
        if time.monotonic() - self._written_s > conventions.METRICS_WRITE_S:
            self.write_steps()

    def write_steps(self) -> None:
        """Write the steps that are not in the file yet."""
        steps, self._steps = self._steps, []
        self._written_s = time.monotonic()
        if not steps:
            return
        first_begin_ns = steps[0][0]
        line = {
            "event": conventions.ATTEMPT_STEPS,
            "time_ns": self._clock_ns + first_begin_ns,
            "first_step": self._next_step,
            "begin_ns": [begin_ns - first_begin_ns for begin_ns, _ in steps],
            "step_ns": [end_ns - begin_ns for begin_ns, end_ns in steps],
        }
        atomic_files.append_numbers(self._path, [line])
        self._next_step += len(steps)

    def end(self, error: "str | None") -> None:
        """Write that the training's loop has ended, with the type of the exception that ended it, if any."""
        self.write_steps()
        self._write(conventions.ATTEMPT_END, time_ns=time.time_ns(), error=error)

    def _write(self, event: str, **fields: Any) -> None:
        atomic_files.append_lines(self._path, [{"event": event, **fields}])


def append_exit(folder: Path, *, launched_ns: int, failed_ns: "int | None", code: int, reason: "str | None") -> None:
    """Add that the command has exited; `failed_ns` is when its first rank did, where that is known. Raises OSError."""
    times = {"time_ns": time.time_ns(), "launched_ns": launched_ns, "failed_ns": failed_ns}
    line = {"event": conventions.ATTEMPT_EXIT, **times, "code": code, "reason": reason}
    atomic_files.append_lines(folder / conventions.ATTEMPTS_FILE, [line])


def launched_ns() -> "int | None":
    """Unix time in ns at which a launcher of ours started the command of this process; None without one."""
    text = os.environ.get(conventions.LAUNCHED_VARIABLE, "")
    return int(text) if text.isascii() and text.isdigit() else None


def process_start_ns() -> "int | None":
    """Unix time in ns at which this process started, to a hundredth of a second; None outside Linux."""
    try:
        # The name of the program, in parentheses, may have spaces.
        fields = Path("/proc/self/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        ticks = int(fields[_STAT_FIELD_OF_START - 3])
        since_boot_ns = time.clock_gettime_ns(time.CLOCK_BOOTTIME)
        age_ns = since_boot_ns - ticks * _NS_PER_S // os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time_ns() - age_ns if 0 <= age_ns < since_boot_ns else None
