"""``tracekit watch``: a training as it runs, in the terminal."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tracekit import conventions
from tracekit.cli import output
from tracekit.cli.output import Format, TextOrJson
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.cli.watch.run_watch import Watch

_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S, _WAITING_S = 1.0, 10.0, 0.5
_TERMINATED = 128 + signal.SIGTERM
_MAX_PAST_OUTLIERS = 10


def watch(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder that the training records into.")],
    *,
    once: Annotated[bool, typer.Option("--once", help="Show how it stands now, and end.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for RUN where it is not there yet.")] = False,
    interval_s: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            max=86_400,
            help="How often to look.  [default: 1 on a terminal, else 10]",
        ),
    ] = None,
    watch_format: TextOrJson = Format.TEXT,
) -> None:
    """Show a training as it runs: step time, loss, memory, ranks, checkpoints, and which steps are out of line and why.

    It ends with the training. On a terminal the picture stays in place; elsewhere there is a line per interval and one
    for each step out of line. With --format json these lines are JSON.
    """
    from tracekit.cli.watch.run_watch import Watch

    watched = Watch(run)
    _wait_for_logs(watched, once=once, wait=wait)
    if once:
        watched.judge_pending()
        _show_once(watched, watch_format)
    elif watch_format is Format.TEXT and _is_terminal():
        _show_live(watched, interval_s or _TERMINAL_INTERVAL_S)
    else:
        _write_lines(watched, watch_format, interval_s or _LOG_INTERVAL_S)


def _wait_for_logs(watched: "Watch", *, once: bool, wait: bool) -> None:
    """Return once there is something to watch. Raises InputError where there is nothing and nobody wants to wait."""
    is_told = not sys.stderr.isatty()  # nobody reads it
    while True:
        watched.poll(time.time())
        if watched.has_logs or (not wait and not once and _is_starting(watched.folder)):
            return
        if not wait:
            raise InputError(_no_logs_message(watched.folder))
        if not is_told:
            output.notify(f"waiting for a training that records into {watched.folder}")
            is_told = True
        time.sleep(_WAITING_S)


def _is_starting(folder: Path) -> bool:
    """Return whether a recording is about to begin here: its first files are there, or nothing is yet."""
    if not folder.is_dir():
        return False
    present = {path.name for path in folder.iterdir()}
    return not present or bool(present & {conventions.MANIFEST_FILE, conventions.CLAIM_FILE})


def _no_logs_message(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: there is no such folder; --wait waits for the training to make it"
    if not folder.is_dir():
        return f"{folder}: is no folder; name the folder that the training records into"
    runs = sorted({path.parent for path in folder.glob(f"*/rank*{conventions.METRICS_SUFFIX}*")})
    if runs:
        newest = max(runs, key=lambda run: run.stat().st_mtime)
        return f"{folder}: is a folder of runs; name one of them, such as {newest}"
    return f"{folder}: no metrics log in it (rank…{conventions.METRICS_SUFFIX}); --wait waits for the first"


def _show_once(watched: "Watch", watch_format: Format) -> None:
    from tracekit.cli.watch import screen

    picture = watched.state(time.time())
    if watch_format is Format.JSON:
        output.emit(screen.state_json(picture))
    else:
        output.emit(screen.as_text(picture, width=output.width(), color=output.color()))


def _follow(watched: "Watch", interval_s: float, show: Callable[[], None]) -> None:
    """Look and show in turn until the training ends."""
    while True:
        watched.poll(time.time())
        show()
        if watched.is_over:
            return
        time.sleep(interval_s)


# On a terminal -------------------------------------------------------------------------------------------------------


def _is_terminal() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")


def _show_live(watched: "Watch", interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from tracekit.cli.watch import screen

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without '▁' shows '?'
    signal.signal(signal.SIGTERM, _terminated)  # the terminal gets its cursor back
    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False) as live:
        _follow(
            watched,
            interval_s,
            lambda: live.update(screen.screen(watched.state(time.time()), height=console.height), refresh=True),
        )


def _terminated(*_: object) -> NoReturn:
    sys.exit(_TERMINATED)


# In a log ------------------------------------------------------------------------------------------------------------


def _write_lines(watched: "Watch", watch_format: Format, interval_s: float) -> None:
    """Write a line for each step out of line and, where the training went on, one for how it stands."""
    from tracekit.cli.watch import screen

    is_json = watch_format is Format.JSON
    of_event, of_state = (
        (screen.outlier_json, screen.state_json)
        if is_json
        else (lambda found: screen.outlier_line(found) + "\n", lambda picture: screen.state_line(picture) + "\n")
    )
    beginnings, last = 0, ""

    def show() -> None:
        nonlocal beginnings, last
        news = watched.take_new_outliers()
        if watched.starts != beginnings:
            # What lies behind when it begins is told in short, and not again where the logs are read anew.
            news = [] if beginnings else news[-_MAX_PAST_OUTLIERS:]
            beginnings = watched.starts
        for found in news:
            output.emit(of_event(found))
        told = of_state(watched.state(time.time()))
        if told != last:
            output.emit(told)
        last = told

    _follow(watched, interval_s, show)
