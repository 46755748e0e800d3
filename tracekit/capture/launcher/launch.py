"""Run a command so that each of its Python processes records itself; nothing else about it changes."""

import contextlib
import dataclasses
import json
import os
import platform
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from tracekit import conventions
from tracekit.capture import attempts, notices
from tracekit.capture.launch_settings import Settings
from tracekit.capture.launcher import exit_report
from tracekit.capture.launcher.group_signals import GroupSignals, end_with_parent
from tracekit.conventions import object_storage, regular_files

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
_NCCL_PREFIX = "nccl_trace_rank_"
_EXIT = "exit"


def run(command: list[str], settings: Settings, *, on_signal: "int | None" = None, quiet: bool = False) -> int:
    """Run `command`, recorded as `settings` say, and return its exit code.

    The folders for notes and uncompressed traces are created here, and removed at the end. A signal that ends the
    command ends this process too. The signal `on_signal` requests a window instead of reaching the command.
    """
    launched_ns = attempts.process_start_ns() or time.time_ns()
    with _folders(settings) as config:
        try:
            variables = environment(config) | {conventions.LAUNCHED_VARIABLE: str(launched_ns)}
            code = _run(_resolve(command), variables, lambda: exit_report.request_window(config), on_signal)
        except OSError as error:
            missing = isinstance(error, FileNotFoundError)
            notices.notify(f"{command[0]}: {'command not found' if missing else error.strerror}")
            return NOT_FOUND if missing else NOT_EXECUTABLE
        try:
            exit_report.record_exit(config, code=code, launched_ns=launched_ns)
            report_hang(config, quiet=quiet)
            exit_report.report(config, code=code, quiet=quiet)
        except KeyboardInterrupt:
            pass
        except Exception as error:  # noqa: BLE001 what the command did is not to be hidden by what we say of it
            notices.notify(f"cannot report what was recorded: {type(error).__name__}: {error}")
    if code < 0:
        # End this process by the signal that ended the command, without a core dump.
        number = -code
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
        sys.exit(128 + number)
    return code


def new_name() -> str:
    """Unique name for one start of a command."""
    return uuid.uuid4().hex[:12]


def environment(settings: Settings) -> dict[str, str]:
    """Environment in which each Python records itself as `settings` say."""
    path = os.environ.get("PYTHONPATH")
    return {
        **(recorder_variables(settings) if settings.hang_timeout_s is not None else {}),
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(_INJECTED), *([path] if path else [])]),
        conventions.RECORD_VARIABLE: settings.as_variable(),
    }


def recorder_variables(settings: Settings) -> dict[str, str]:
    """Variables of torch's flight recorder; those that the user has set come first.

    The recorder of NCCL also writes a dump itself, when its own timeout ends a collective.
    """
    prefix = str(Path(settings.scratch, _NCCL_PREFIX))
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",  # its name before torch 2.8
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": prefix,
    }


def report_hang(settings: Settings, *, quiet: bool) -> None:
    """Remove what ranks left that did not hang; report the hang of others."""
    if settings.hang_timeout_s is None:
        return
    notes = Path(settings.notes).glob(f"*{conventions.HANG_NOTE_SUFFIX}")
    for folder in sorted({Path(regular_files.read_text(note)) for note in notes}):
        for dump in sorted(Path(settings.scratch).glob(f"{_NCCL_PREFIX}*")):
            shutil.move(dump, folder / dump.name)
        if not _has_hung(folder):
            _remove(folder)
        elif not quiet:
            notices.notify(f"the training hung or failed; next: tracekit hang {folder}")
            exit_report.print_hang(folder)


@contextlib.contextmanager
def _folders(settings: Settings) -> Iterator[Settings]:
    """Yield the settings with a notes and a scratch folder; both are removed at the end if empty."""
    parent = Path(settings.scratch) if settings.scratch else Path(tempfile.gettempdir())
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix="tracekit-", dir=parent))
    except OSError as error:
        notices.notify(f"--scratch {parent} cannot be written ({error.strerror}); using a folder next to the run")
        folder = Path(
            "tracekit.scratch" if object_storage.is_url(settings.out) else settings.out + ".scratch"
        ).absolute()
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
    notes = folder / "notes"
    with contextlib.suppress(OSError):
        notes.mkdir()
    try:
        yield dataclasses.replace(settings, notes=str(notes), scratch=str(folder))
    finally:
        shutil.rmtree(notes, ignore_errors=True)
        for stated in folder.glob("upload-*.url"):
            stated.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            folder.rmdir()  # traces that could not be moved stay


def _resolve(command: list[str]) -> list[str]:
    """Command with its program resolved: also next to our own Python, as torchrun is often not on PATH."""
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
        with contextlib.closing(GroupSignals()) as group_signals:
            while child.poll() is None:
                signal_info = signal.sigtimedwait(_WATCHED, _POLL_EVERY_S)
                if signal_info is None or signal_info.si_signo == signal.SIGCHLD:
                    continue
                is_from_process = signal_info.si_code <= 0
                # Signals to the process group, such as those of a terminal, reach the command directly.
                is_for_group = not is_from_process or group_signals.take(signal_info.si_signo)
                if signal_info.si_signo == on_signal:
                    request_window()
                elif not is_for_group:
                    with contextlib.suppress(ProcessLookupError):
                        child.send_signal(signal_info.si_signo)
        return int(child.returncode)
    finally:
        while signal.sigtimedwait(_WATCHED, 0):
            pass  # signals that came too late for the command are not for us
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _as_if_alone(mask: "set[int | signal.Signals]") -> None:
    """Give the new process our original signal mask, and make it die with us."""
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    end_with_parent()


def _has_hung(folder: Path) -> bool:
    """Return whether a rank left a dump of something else than the end of its program."""
    dumps = list(folder.glob(f"rank*{conventions.HANG_SUFFIX}"))
    return any(_reason(dump) != _EXIT for dump in dumps) or any(folder.glob(f"{_NCCL_PREFIX}*"))


def _reason(dump: Path) -> str:
    try:
        return str(json.loads(regular_files.read_text(dump))["tracekit"]["reason"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _remove(folder: Path) -> None:
    """Remove the files of ranks on this node, and folders that are empty then."""
    with contextlib.suppress(OSError):
        for stacks in folder.glob(f"rank*{conventions.STACKS_SUFFIX}"):
            process = json.loads(regular_files.read_text(stacks).partition("\n")[0].removeprefix("# "))
            if process.get("host") == platform.node():
                name = stacks.name.removesuffix(conventions.STACKS_SUFFIX)
                (folder / (name + conventions.HANG_SUFFIX)).unlink(missing_ok=True)
                stacks.unlink()
        folder.rmdir()
        run = folder.parent
        if [path.name for path in run.iterdir()] == [conventions.CLAIM_FILE]:
            (run / conventions.CLAIM_FILE).unlink()
            run.rmdir()
