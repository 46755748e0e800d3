"""Run `tracekit` commands in this process, which takes a tenth of the time, or in a new one. Not a test.

A command in this process has its own descriptors, streams, environment and folder, like a new process:
tests/integration/test_cli.py compares the two. Tests of signals, pipes and imports need a real process.
"""

import io
import logging
import os
import pty
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tracekit.cli import application
from tracekit.cli.question import Question

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 300
_NOT_INHERITED = ("NO_COLOR", "COLUMNS", "TRACEKIT_DEBUG")
# Categories that Python hides by default.
_UNSHOWN = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)


def environment(**extra: str) -> dict[str, str]:
    plain = {key: value for key, value in os.environ.items() if key not in _NOT_INHERITED}
    return plain | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | extra


def command(*arguments: object) -> list[str]:
    """Return the command that starts tracekit."""
    return [sys.executable, "-m", "tracekit", *map(str, arguments)]


def in_a_process(*arguments: object, cwd: Path | None = None, **extra: str) -> "subprocess.CompletedProcess[str]":
    """Run a command as a shell does."""
    return subprocess.run(
        command(*arguments),
        cwd=cwd or "/",
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def tracekit(
    *arguments: object, cwd: Path | None = None, stdin: str = "", stored_answers: bool = False, **extra: str
) -> "subprocess.CompletedProcess[str]":
    """Run a command in this process, by default in another folder: settings are searched upwards from it.

    Without `stored_answers`, it does its work even if an equal command did it before: tests replace its functions.
    """
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode(errors="surrogateescape"))
        given.seek(0)
        with _as_descriptors(given.fileno(), out.fileno(), err.fileno()):
            words = [str(each) for each in arguments]
            code = _run(words, cwd or Path("/"), environment(**extra), stored_answers=stored_answers)
        outputs = []
        for file in (out, err):
            file.seek(0)
            outputs.append(io.TextIOWrapper(file, encoding="utf-8").read())
    return subprocess.CompletedProcess(command(*arguments), code, *outputs)


def on_a_terminal(*arguments: object, stored_answers: bool = False, **extra: str) -> tuple[int, str]:
    """Return a command's exit code and all that it shows on a terminal, its stdout and stderr."""
    ours, theirs = pty.openpty()
    with ThreadPoolExecutor(1) as reader:
        shown = reader.submit(read_all, ours)
        with _as_descriptors(theirs, theirs, theirs):
            os.close(theirs)
            words, variables = [str(each) for each in arguments], environment(**{"TERM": "xterm"} | extra)
            code = _run(words, Path("/"), variables, stored_answers=stored_answers)
    data = shown.result()
    os.close(ours)
    return code, data.decode()


def read_all(terminal: int) -> bytes:
    """Return the output on a terminal until its last writer has closed it."""
    shown = b""
    try:
        while block := os.read(terminal, 1 << 16):
            shown += block
    except OSError:  # the last writer has closed it
        pass
    return shown


def only_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the one line of stderr of a command that wrote nothing to stdout."""
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("tracekit: ")
    return lines[0]


def _run(arguments: list[str], folder: Path, variables: Mapping[str, str], *, stored_answers: bool) -> int:
    with _environment(folder, variables), _streams(), _fresh_interpreter(["tracekit", *arguments]):
        try:
            application.run(Question(arguments) if stored_answers else None)
        except SystemExit as leaving:
            return int(leaving.code or 0)
    return 0


@contextmanager
def _as_descriptors(*files: int) -> Iterator[None]:
    """Make files the descriptors 0, 1 and 2, so that libraries and child processes have them too."""
    saved = [os.dup(number) for number in range(len(files))]
    for number, file in enumerate(files):
        os.dup2(file, number)
    try:
        yield
    finally:
        for number, file in enumerate(saved):
            os.dup2(file, number)
            os.close(file)


@contextmanager
def _streams() -> Iterator[None]:
    """Give Python new streams on the descriptors 0, 1 and 2, as it makes them when it starts."""
    saved = sys.stdin, sys.stdout, sys.stderr
    utf8 = {"encoding": "utf-8", "closefd": False}
    sys.stdin = open(0, **utf8)  # noqa: SIM115 closed by nobody, as Python's own
    sys.stdout = open(1, "w", **utf8)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", **utf8)  # noqa: SIM115
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdin, sys.stdout, sys.stderr = saved


@contextmanager
def _environment(folder: Path, variables: Mapping[str, str]) -> Iterator[None]:
    before, saved = Path.cwd(), dict(os.environ)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
        os.chdir(before)


@contextmanager
def _fresh_interpreter(words: list[str]) -> Iterator[None]:
    """Set the command's arguments and the state of a new interpreter: no log handler, warnings on stderr."""
    root = logging.getLogger()
    saved, handlers, level = sys.argv, root.handlers[:], root.level
    sys.argv, root.handlers[:] = words, []
    root.setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        for category in _UNSHOWN:
            warnings.simplefilter("ignore", category)
        warnings.showwarning = _show_warning
        try:
            yield
        finally:
            sys.argv, root.handlers[:] = saved, handlers
            root.setLevel(level)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: object) -> None:
    sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
