"""``tracekit watch``: the live state of a training, in the terminal."""

import os
import signal
import sys
import time
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from tracekit import conventions
from tracekit.cli import output, run_loading
from tracekit.cli.options import RoleName
from tracekit.conventions import object_storage
from tracekit.errors import InputError

if TYPE_CHECKING:
    from tracekit.cli.watch.run_watch import Watch

_TERMINAL_INTERVAL_S, _LOG_INTERVAL_S, _WAITING_S = 1.0, 10.0, 0.5
_TERMINATED = 128 + signal.SIGTERM
_MAX_PAST_OUTLIERS = 10


class WatchFormat(StrEnum):
    """Formats of the state of a training, which is written line by line."""

    TEXT = "text"
    JSON = "json"


def watch(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The folder that the training records into.")],
    *,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once and exit.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until RUN exists.")] = False,
    interval_s: Annotated[
        float | None,
        typer.Option(
            "--interval",
            metavar="SECONDS",
            min=0.1,
            max=86_400,
            help="Update interval.  [default: 1 on a terminal, else 10]",
        ),
    ] = None,
    watch_format: Annotated[
        WatchFormat, typer.Option("--format", help="Text for people, JSON for programs.")
    ] = WatchFormat.TEXT,
    role: RoleName = None,
) -> None:
    """Show a running training: step time, loss, memory, ranks, checkpoints, and outlier steps with concurrent events.

    It exits when the training ends. On a terminal the display updates in place; elsewhere it writes one line per
    interval and one per outlier step, as JSON with --format json.
    """
    from tracekit.cli.watch.run_watch import Watch

    run = object_storage.without_file_scheme(run)
    if object_storage.is_url(run):
        url = object_storage.shown(run)
        raise InputError(
            f"{url}: watch reads logs while they grow, so it needs a file system; at a URL they arrive with each "
            f"profiled window: tracekit check {url} judges what is there"
        )
    watched = Watch(Path(run) if role is None else _wait_for_role(Path(run), role, wait=wait))
    _wait_for_logs(watched, once=once, wait=wait)
    if once:
        watched.judge_pending()
        _show_once(watched, watch_format)
    elif watch_format is WatchFormat.TEXT and (
        sys.stdout.isatty() and os.environ.get("TERM") not in (None, "", "dumb")
    ):
        _show_live(watched, interval_s or _TERMINAL_INTERVAL_S)
    else:
        _write_lines(watched, watch_format, interval_s or _LOG_INTERVAL_S)


def _wait_for_role(folder: Path, role: str, *, wait: bool) -> Path:
    """Folder that a role records into. Raises InputError if there is none and `wait` is not set."""
    is_notified = not sys.stderr.isatty()  # nobody reads it
    while True:
        try:
            return run_loading.role_folder(folder, role)
        except InputError:
            if not wait:
                raise
        if not is_notified:
            output.notify(f"waiting for a training that records the role {role} into {folder}")
            is_notified = True
        time.sleep(_WAITING_S)


def _wait_for_logs(watched: "Watch", *, once: bool, wait: bool) -> None:
    """Wait until there are logs to watch. Raises InputError if there are none and `wait` is not set."""
    is_notified = not sys.stderr.isatty()  # nobody reads it
    while True:
        watched.poll(time.time())
        if watched.has_logs or (not wait and not once and _is_starting(watched.folder)):
            return
        if not wait:
            raise InputError(_no_logs_message(watched.folder))
        if not is_notified:
            output.notify(f"waiting for a training that records into {watched.folder}")
            is_notified = True
        time.sleep(_WAITING_S)


def _is_starting(folder: Path) -> bool:
    """Return whether a recording may be about to start: the folder is empty or has the first files of a run."""
    if not folder.is_dir():
        return False
    present = {path.name for path in folder.iterdir()}
    return not present or bool(present & {conventions.MANIFEST_FILE, conventions.CLAIM_FILE})


def _no_logs_message(folder: Path) -> str:
    if not folder.exists():
        return f"{folder}: there is no such folder; --wait waits until the training creates it"
    if not folder.is_dir():
        return f"{folder}: is not a folder; name the folder that the training records into"
    runs = sorted({path.parent for path in folder.glob(f"*/rank*{conventions.METRICS_SUFFIX}*")})
    roles = sorted(set(run_loading.stated_roles(folder).values()))
    if len(roles) > 1:
        return f"{folder}: has the roles {', '.join(roles)}; choose one with --role"
    if runs:
        newest = max(runs, key=lambda run: run.stat().st_mtime)
        return f"{folder}: is a folder of runs; name one of them, such as {newest}"
    return f"{folder}: no metrics log in it (rank…{conventions.METRICS_SUFFIX}); --wait waits for the first"


def _show_once(watched: "Watch", watch_format: WatchFormat) -> None:
    from tracekit.cli.watch import screen

    state = watched.state(time.time())
    if watch_format is WatchFormat.JSON:
        output.emit(screen.state_json(state))
    else:
        output.emit(screen.as_text(state, width=output.width(), color=output.color()))


def _follow(watched: "Watch", interval_s: float, show: Callable[[], None]) -> None:
    """Read the logs and update the display until the training ends."""
    while True:
        watched.poll(time.time())
        show()
        if watched.is_over:
            return
        time.sleep(interval_s)


# On a terminal -------------------------------------------------------------------------------------------------------


def _show_live(watched: "Watch", interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from tracekit.cli.watch import screen

    sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without '▁' shows '?'
    signal.signal(signal.SIGTERM, _terminate)  # the terminal gets its cursor back
    console = Console(highlight=False, markup=False, emoji=False)
    with Live(console=console, auto_refresh=False) as live:
        _follow(
            watched,
            interval_s,
            lambda: live.update(screen.screen(watched.state(time.time()), height=console.height), refresh=True),
        )


def _terminate(*_: object) -> NoReturn:
    sys.exit(_TERMINATED)


# In a log ------------------------------------------------------------------------------------------------------------


def _write_lines(watched: "Watch", watch_format: WatchFormat, interval_s: float) -> None:
    """Write a line for each outlier step and, whenever the state changed, one for the state."""
    from tracekit.cli.watch import screen

    outlier_line, state_line = (
        (screen.outlier_json, screen.state_json)
        if watch_format is WatchFormat.JSON
        else (lambda outlier: screen.outlier_line(outlier) + "\n", lambda state: screen.state_line(state) + "\n")
    )
    starts, last_line = 0, ""

    def show() -> None:
        nonlocal starts, last_line
        outliers = watched.take_new_outliers()
        if watched.starts != starts:
            # Of earlier outliers show only the last ones, and none again when replaced logs are read from the start.
            outliers = [] if starts else outliers[-_MAX_PAST_OUTLIERS:]
            starts = watched.starts
        for outlier in outliers:
            output.emit(outlier_line(outlier))
        line = state_line(watched.state(time.time()))
        if line != last_line:
            output.emit(line)
        last_line = line

    _follow(watched, interval_s, show)
