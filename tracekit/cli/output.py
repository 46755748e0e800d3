"""Output of commands: results to stdout or a file, everything else to stderr."""

import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import typer

from tracekit import conventions
from tracekit.cli import question
from tracekit.cli.question import STDERR, STDOUT, Answer
from tracekit.errors import ConfigError, InputError

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from tracekit.model.run import MeasuredTrace, OnTrace

FALLBACK_WIDTH = 100
BROKEN_PIPE = 141  # as a process that SIGPIPE ends
_DELAY_S = 0.7
DEFAULT_TOP = 20
_MAX_MESSAGE = 4000
_MAX_NAME = 40


def open_closed_streams() -> None:
    """Open the null device as each of stdin, stdout and stderr that the shell has closed (``>&-``).

    Otherwise the next file that is opened, such as a database, would get the stream's number and receive its output.
    """
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115 closed by nobody


def width(output: Path | None = None) -> int:
    """Return the width of text: COLUMNS or the terminal's width, else 100."""
    return FALLBACK_WIDTH if output else shutil.get_terminal_size((FALLBACK_WIDTH, 24)).columns


def color(output: Path | None = None) -> bool:
    """Return whether to color text: on a terminal that can, unless NO_COLOR is set."""
    return (
        output is None and sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )


def emit(text: str, output: Path | None = None, *, has_commands: bool = False) -> None:
    """Write a result, without commands to CI unless it has some. If the reader of stdout has gone, exit quietly."""
    if output is not None:
        with atomic_file(output) as file:
            file.write(text.encode())
        return
    text = text if has_commands else _without_ci_commands(text)
    question.current.get().prints(STDOUT, text)
    _write_stdout(text)


def repeat(answer: Answer) -> None:
    """Write what a command has printed before. Exits quietly if the reader of stdout has gone."""
    for stream, text in answer.texts:
        if stream == STDOUT:
            try:
                _write_stdout(text)
            except typer.Exit as gone:
                sys.exit(gone.exit_code)
        else:
            sys.stderr.write(text)
            sys.stderr.flush()


def _write_stdout(text: str) -> None:
    try:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without '·' shows '?'
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes stdout again at exit, which must not fail.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(BROKEN_PIPE) from None


@contextlib.contextmanager
def atomic_file(output: Path) -> Iterator[BinaryIO]:
    """Yield a file for bytes, which gets its name when it is complete. Raises InputError if it cannot be written.

    A device or pipe, such as /dev/null, is written itself, and of a symbolic link the file that it points to.
    """
    question.current.get().withdraw()
    try:
        if output.exists() and not output.is_file() and not output.is_dir():
            with output.open("wb") as file:
                yield file
            return
        target = output.resolve() if output.is_symlink() else output
        partial = target.with_name(target.name + conventions.PARTIAL_SUFFIX)
        try:
            with partial.open("wb") as file:
                yield file
            partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror if output.parent.exists() else f"there is no folder {output.parent}"
        raise InputError(f"{output}: cannot be written: {reason}; name another file") from None


def split_names(text: str) -> tuple[str, ...]:
    """Return the comma-separated names of an option."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def emit_rows(text: str, output: Path | None) -> None:
    """Write rows for programs unchanged; on a terminal, without control characters except line ends."""
    if output is None and sys.stdout.isatty():
        from tracekit.model import escaping

        text = "".join(escaping.inert(line, len(line) + 1) + "\n" for line in text.split("\n")[:-1])
    emit(text, output)


def notify(message: str) -> None:
    """Write one line to stderr. Names from traces in it cannot control a terminal."""
    from tracekit.model import escaping

    line = _without_ci_commands(f"tracekit: {escaping.inert(message, _MAX_MESSAGE)}\n")
    question.current.get().prints(STDERR, line)
    sys.stderr.write(line)
    sys.stderr.flush()


def require_output_file(output: Path | None, what: str) -> None:
    """Raise ConfigError if the output is for a file but would go to a terminal."""
    if output is None and sys.stdout.isatty():
        raise ConfigError(f"{what} is too large for a terminal; name a file with --out")


class ProgressBar:
    """A progress bar on stderr, shown only on a terminal and only if the work takes long enough."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self.progress: Progress | None = None
        self._task: TaskID | None = None
        self._done = 0

    def trace_callback(self, total: int) -> "OnTrace":
        """Return a function to call after each of `total` traces."""

        def step(measured: "MeasuredTrace") -> None:
            self._done += 1
            from tracekit.model import escaping

            name = escaping.inert(measured.source.path.rsplit("/", 1)[-1], _MAX_NAME)
            self._show(f"reading {name}", self._done, total)

        return step

    def on_file(self, done: int, total: int) -> None:
        """Show how many files of a run were inspected."""
        self._show("inspecting files", done, total)

    def _show(self, what: str, done: int, total: int) -> None:
        if self.progress is None:
            if not sys.stderr.isatty() or time.monotonic() - self._began_s < _DELAY_S:
                return
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            title = TextColumn("{task.description}", markup=False)
            columns = (title, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self.progress = Progress(*columns, console=Console(stderr=True), transient=True)
            self.progress.start()
            self._task = self.progress.add_task("", total=None)
        assert self._task is not None
        self.progress.update(self._task, description=what, completed=done, total=total)


@contextlib.contextmanager
def progress() -> Iterator[ProgressBar]:
    """Yield a progress bar for a with block."""
    bar = ProgressBar()
    try:
        yield bar
    finally:
        if bar.progress is not None:
            bar.progress.stop()


# Runners that obey commands in the log: of GitHub and Gitea, Azure, TeamCity.
_CI_VARIABLES = ("GITHUB_ACTIONS", "TF_BUILD", "TEAMCITY_VERSION")


def _without_ci_commands(text: str) -> str:
    """Return text for the log of CI, in which names from traces are no commands to the runner."""
    if not any(map(os.environ.get, _CI_VARIABLES)):
        return text
    from tracekit.model import escaping

    return escaping.without_commands(text)
