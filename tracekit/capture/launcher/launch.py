"""A command run so that each Python of it records itself; all else about it stays its own.

Needs the standard library only.
"""

import contextlib
import ctypes
import dataclasses
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tracekit import conventions
from tracekit.capture.launch_settings import Settings
from tracekit.capture.launcher import exit_report

NOT_FOUND, NOT_EXECUTABLE = 127, 126
_INJECTED = Path(__file__).parent / "inject"
_WATCHED = {
    signal.SIGCHLD,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGWINCH,
}
_POLL_EVERY_S = 1.0
_PR_SET_PDEATHSIG = 1


def run(command: list[str], settings: Settings, *, on_signal: "int | None" = None, quiet: bool = False) -> int:
    """Run `command`, its trainings recorded as `settings` say, and return its exit code.

    The folders for notes and for traces that wait are made here, and gone in the end. A command that a signal ended
    ends this process by the same one. `on_signal` is a signal that asks for a window instead of reaching the command.
    """
    with _folders(settings) as placed:
        try:
            code = _run(_resolved(command), environment(placed), lambda: exit_report.request_window(placed), on_signal)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            sys.stderr.write(f"tracekit: {command[0]}: {'command not found' if missing else error.strerror}\n")
            return NOT_FOUND if missing else NOT_EXECUTABLE
        try:
            exit_report.report(placed, code=code, quiet=quiet)
        except KeyboardInterrupt:
            pass
        except Exception as error:  # noqa: BLE001 what the command did is not to be hidden by what we say of it
            sys.stderr.write(f"tracekit: cannot say what was recorded: {type(error).__name__}: {error}\n")
    if code < 0:
        _die_of(-code)
    return code


def new_name() -> str:
    """Return a name for one start of a command."""
    return uuid.uuid4().hex[:12]


@contextlib.contextmanager
def _folders(settings: Settings) -> Iterator[Settings]:
    """Give the settings with a folder for notes and one for traces to wait in, both gone in the end if empty."""
    parent = Path(settings.scratch) if settings.scratch else Path(tempfile.gettempdir())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="tracekit-", dir=parent))
    except OSError as error:
        sys.stderr.write(
            f"tracekit: --scratch {parent} cannot be written ({error.strerror}); the run's folder serves\n"
        )
        folder = Path(settings.out + ".scratch")
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    notes = folder / "notes"
    with contextlib.suppress(OSError):
        notes.mkdir()
    try:
        yield dataclasses.replace(settings, notes=str(notes), scratch=str(folder))
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # what could not be brought to its place stays


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment in which each Python records itself as `settings` say."""
    path = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_INJECTED), *([path] if path else [])]),
        conventions.RECORD_VARIABLE: settings.as_variable(),
    }


def _resolved(command: list[str]) -> list[str]:
    """Return the command with its program found: beside our own Python too, as torchrun often is on no path."""
    program = command[0]
    if program.endswith(".py") and Path(program).is_file() and not os.access(program, os.X_OK):
        return [sys.executable, *command]
    if os.sep in program or shutil.which(program):
        return command
    sibling = shutil.which(program, path=str(Path(sys.executable).parent))
    return [sibling or program, *command[1:]]


def _run(
    command: list[str], environment: Mapping[str, str], request_window: Callable[[], None], on_signal: "int | None"
) -> int:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    try:
        child = subprocess.Popen(command, env=environment, preexec_fn=lambda: _as_if_alone(before))  # noqa: S603
        while child.poll() is None:
            signal_info = signal.sigtimedwait(_WATCHED, _POLL_EVERY_S)
            if signal_info is None or signal_info.si_signo == signal.SIGCHLD:
                continue
            if signal_info.si_signo == on_signal:
                request_window()
            elif signal_info.si_code <= 0:  # from a process; what comes from the terminal reached the command as well
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(signal_info.si_signo)
        return int(child.returncode)
    finally:
        while signal.sigtimedwait(_WATCHED, 0):
            pass  # what came too late for the command is not for us
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_if_alone(mask: "set[int | signal.Signals]") -> None:
    """Give the new process the signal mask that we were started with, and have it die with us."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _die_of(number: int) -> None:
    """End this process by a signal, as the command ended, without a core of ours."""
    sys.stdout.flush()
    sys.stderr.flush()
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if number not in (signal.SIGKILL, signal.SIGSTOP):
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    sys.exit(128 + number)
