"""``tracekit dashboard``: the browser's view of runs."""

import contextlib
import errno
import importlib.util
import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.errors import InputError, MissingExtraError

DEFAULT_PORT = 8501
LOCALHOST = "127.0.0.1"
_LOOPBACK = (LOCALHOST, "localhost", "::1")
_PORTS_TRIED = 50


def dashboard(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Runs, or folders of runs.")],
    *,
    history: Annotated[
        Path | None,
        typer.Option("--history", metavar="FILE", help="A history; by default history.duckdb in a folder named."),
    ] = None,
    host: Annotated[
        str,
        typer.Option("--host", metavar="ADDRESS", help="Address to listen at; others than this machine's are open."),
    ] = LOCALHOST,
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on this machine.")] = DEFAULT_PORT,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open the dashboard on one or several runs, or on a folder of them.

    It binds 127.0.0.1 unless --host names another address, sends no statistics and fetches nothing from a network.
    There is no password: whoever reaches the address sees the runs. Only the runs and folders named are read.
    """
    for run in [*runs, *([str(history)] if history else [])]:
        if not Path(run).exists():
            raise InputError(f"{run}: there is no such file or folder; check the path")
    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError("the dashboard needs Streamlit: pip install 'torch-tracekit[dashboard]'")
    _require_free_port(host, port)
    if host not in _LOOPBACK:
        output.notify(
            f"warning: listening at {host}, port {port}, without a password or encryption: whoever reaches it can "
            f"read {', '.join(runs)}; leave --host out where only you look, and forward the port: "
            f"ssh -L {port}:127.0.0.1:{port}"
        )
    # Streamlit takes over this very process: Ctrl-C and signals reach it, and its exit code is ours.
    words = server_command(runs, host=host, port=port, browser=browser, history=history)
    os.execv(sys.executable, words)  # noqa: S606 no shell


def server_command(
    runs: list[str], *, port: int, browser: bool, history: Path | None = None, host: str = LOCALHOST
) -> list[str]:
    """Return the command that serves the dashboard. What follows ``--`` is for the app."""
    options = {
        "server.address": host,
        "server.port": str(port),
        "server.headless": "false" if browser else "true",
        "browser.gatherUsageStats": "false",
    }
    if host not in _LOOPBACK:  # whatever name leads to it from elsewhere
        options |= {"server.allowedHosts": "*"}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    paths = [str(Path(run).resolve()) for run in runs]
    paths += [f"--history={history.resolve()}"] if history else []
    return [sys.executable, "-P", str(_server()), *flags, "--", *paths]


def _require_free_port(host: str, port: int) -> None:
    """Raise InputError where nobody can listen at that address and port, rather than let Streamlit fail."""
    try:
        _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = _free_port_after(host, port)
            other = f", such as --port {free}" if free else ""
            raise InputError(
                f"port {port} of {host} is taken, perhaps by a dashboard that runs already; choose another{other}"
            ) from None
        if error.errno == errno.EACCES:
            raise InputError(f"--port {port}: is not for you to use; choose one from 1024 on") from None
        raise InputError(
            f"--host {host}: is no address of this machine ({error.strerror}); name one of its own, or 0.0.0.0 for all"
        ) from None


def _free_port_after(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + _PORTS_TRIED, 65535)):
        with contextlib.suppress(OSError):
            _listen(host, other)
            return other
    return None


def _listen(host: str, port: int) -> None:
    """Listen at an address for a moment, as a server does. Raises OSError where it cannot."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # as Streamlit chooses
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen()


def _server() -> Path:
    found = importlib.util.find_spec("dashboard")
    server = Path(found.origin).parent / "server" / "serve.py" if found and found.origin else None
    if server is None or not server.is_file():
        raise MissingExtraError("the dashboard's pages are not installed: pip install 'torch-tracekit[dashboard]'")
    return server
