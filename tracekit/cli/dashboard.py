"""``tracekit dashboard``: the browser's view of runs."""

import importlib.util
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tracekit.errors import InputError, MissingExtraError

DEFAULT_PORT = 8501


def dashboard(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs, or folders of runs.")],
    *,
    history: Annotated[
        Path | None,
        typer.Option("--history", metavar="FILE", help="A history; by default history.duckdb in a folder named."),
    ] = None,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this machine.")] = DEFAULT_PORT,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open the dashboard on one or several runs, or on a folder of them.

    It binds 127.0.0.1 only, sends no statistics and fetches nothing from a network.
    """
    for run in [*runs, *([str(history)] if history else [])]:
        if not Path(run).exists():
            raise InputError(f"{run}: there is no such file or folder")
    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError("the dashboard needs Streamlit: pip install 'torch-tracekit[dashboard]'")
    # Streamlit takes over this very process: Ctrl-C and signals reach it, and its exit code is ours.
    os.execv(sys.executable, command(runs, port=port, browser=browser, history=history))  # noqa: S606 no shell


def command(runs: list[str], *, port: int, browser: bool, history: Path | None = None) -> list[str]:
    """Return the command that serves the dashboard. What follows ``--`` is for the app."""
    options = {
        "server.address": "127.0.0.1",
        "server.port": str(port),
        "server.headless": "false" if browser else "true",
        "browser.gatherUsageStats": "false",
    }
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    paths = [str(Path(run).resolve()) for run in runs]
    paths += [f"--history={history.resolve()}"] if history else []
    return [sys.executable, "-m", "streamlit", "run", str(_app()), *flags, "--", *paths]


def _app() -> Path:
    found = importlib.util.find_spec("dashboard")
    app = Path(found.origin).parent / "app.py" if found and found.origin else None
    if app is None or not app.is_file():
        raise MissingExtraError("the dashboard's pages are not installed: pip install 'torch-tracekit[dashboard]'")
    return app
