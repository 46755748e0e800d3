"""Recordings of trials: a configuration started through the recorder, within a time limit, its output in a log."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tracekit.conventions import python_child, regular_files
from tracekit.model import escaping
from tracekit.tune.configuration import Configuration

_GRACE_S = 10.0
"""How long a training has to end after SIGTERM, and again after a second one, before it is killed."""
_LAST_CHARACTERS = 200
_LOG_BYTES = 1 << 16
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopSignal(KeyboardInterrupt):
    """A signal that ends the trials."""

    def __init__(self, number: int) -> None:
        """Remember the signal."""
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def stop_signals() -> Iterator[None]:
    """Raise StopSignal in the block when a signal asks this process to end. Only for the main thread.

    Signals that are ignored, such as SIGHUP under nohup, stay ignored.
    """
    watched = [number for number in STOP_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]

    def stop(number: int, _frame: object) -> None:
        for other in watched:
            signal.signal(other, signal.SIG_IGN)  # until the training has ended, which takes seconds at most
        raise StopSignal(number)

    before = {number: signal.signal(number, stop) for number in watched}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass(frozen=True)
class Recording:
    """A recording of a trial: its folder, how long the command ran in s, and why it cannot be used; "" where it can."""

    folder: Path
    duration_s: float
    problem: str = ""
    is_out_of_time: bool = False


def record(configuration: Configuration, folder: Path, *, steps: str, limit_s: float) -> Recording:
    """Run a configuration once and record it into a new folder; ended where it takes longer than `limit_s`.

    The output of the command is in a log file beside the folder. Our trainers record themselves.
    """
    log = folder.with_name(f"{folder.name}.log")
    began_s = time.monotonic()
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(  # noqa: S603 the command that the user gave with --run
                _command(configuration, folder, steps),
                env={**os.environ, **configuration.variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that all of it can be ended, and a terminal's signals reach us only
            )
        except OSError as error:
            return Recording(folder, 0.0, f"{configuration.command[0]}: {error.strerror}")
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    duration_s = time.monotonic() - began_s
    if code is None:
        return Recording(folder, duration_s, f"did not end within {limit_s:.0f} s", is_out_of_time=True)
    return Recording(folder, duration_s, _problem(code, log) if code else "")


def _command(configuration: Configuration, folder: Path, steps: str) -> Sequence[str]:
    if configuration.is_of_trainers:
        return [*configuration.words, "--out", str(folder)]
    options = ("--quiet", "--steps", steps, "--out", str(folder))
    return python_child.module_command("tracekit", "record", *options, "--", *configuration.words)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a command that still runs: a training may save at a first SIGTERM, and ends at a second one."""
    for _ in range(2):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _problem(code: int, log: Path) -> str:
    """How a command failed: its exit code or signal, and the last line that it printed."""
    how = f"exit code {code}" if code > 0 else f"ended by {signal.Signals(-code).name}"
    last = escaping.inert(_last_line(log), _LAST_CHARACTERS)
    return f"{how}: {last}; see {log}" if last else f"{how}; see {log}"


def _last_line(log: Path) -> str:
    with regular_files.open_to_read(log) as file:
        file.seek(max(0, log.stat().st_size - _LOG_BYTES))
        text = file.read().decode(errors="replace")
    return text.strip().rpartition("\n")[2]
