"""``tracekit dashboard``: runs in the browser."""

import contextlib
import errno
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from tracekit import conventions
from tracekit.cli import output
from tracekit.conventions import object_storage, python_child
from tracekit.errors import InputError, MissingExtraError

DEFAULT_PORT = conventions.DASHBOARD_PORT
LOCALHOST = conventions.DASHBOARD_HOST
_LOOPBACK = (LOCALHOST, "localhost", "::1")
_WILDCARDS = ("0.0.0.0", "::")  # noqa: S104 compared, not bound
_PORTS_TRIED = 50


def dashboard(
    runs: Annotated[list[str], typer.Argument(metavar="RUN…", help="Runs, or folders of runs.")],
    *,
    history: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="History to show.  [default: history.duckdb in one of the folders]"),
    ] = None,
    host: Annotated[
        str,
        typer.Option(metavar="ADDRESS", help="Address to listen on; any other than localhost is open to the network."),
    ] = LOCALHOST,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Also answer under this name, such as an alias of this machine or a proxy's name. Repeatable.",
        ),
    ] = None,
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Port to listen on.")] = DEFAULT_PORT,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser.")] = True,
) -> None:
    """Open runs, or folders of runs, in the dashboard.

    It listens on 127.0.0.1 unless --host sets another address, sends no statistics and loads nothing from the network.
    There is no password: anyone who can reach the address can see the runs. It reads only the runs and folders given,
    which may be URLs.
    """
    from tracekit.cli import settings_file

    runs = [object_storage.without_file_scheme(run) for run in runs]
    for run in runs:
        if object_storage.is_url(run):
            _require_listable(run)
        elif not Path(run).exists():
            raise InputError(f"{run}: there is no such file or folder; check the path")
    if history is not None and not history.exists():
        raise InputError(f"{history}: there is no such file; check the path")
    if importlib.util.find_spec("streamlit") is None:
        raise MissingExtraError("the dashboard needs Streamlit: pip install 'torch-tracekit[dashboard]'")
    settings_file.nearest_read_settings()  # an error in a settings file is said here, not on a page
    _require_free_port(host, port)
    if host not in _LOOPBACK:
        output.notify(
            f"warning: listening on {host}, port {port}, without a password or encryption: anyone who can "
            f"reach it can read {', '.join(map(object_storage.shown, runs))}; for yourself alone, omit --host and "
            f"forward the port: ssh -L {port}:127.0.0.1:{port}"
        )
    if port:  # Streamlit prints no address without its welcome
        output.notify(f"The dashboard is at {_address(host, port)} (Ctrl-C ends it).")
    # Streamlit replaces this process, so that it gets Ctrl-C and signals, and its exit code is the command's.
    arguments = server_command(
        runs, host=host, port=port, browser=browser, history=history, allowed_hosts=allow_host or []
    )
    os.execve(arguments[0], arguments, python_child.environment())  # noqa: S606 no shell


def server_command(
    runs: list[str],
    *,
    port: int,
    browser: bool,
    history: Path | None = None,
    host: str = LOCALHOST,
    allowed_hosts: Sequence[str] = (),
) -> list[str]:
    """Return the command that serves the dashboard. Arguments after ``--`` are the app's."""
    options = {
        "server.address": host,
        "server.port": str(port),
        "browser.serverAddress": LOCALHOST if host in _WILDCARDS else _url_host(host),
        # Otherwise Streamlit asks a new user for an address, and offers to install files for coding assistants.
        "server.headless": "true",
        "logger.hideWelcomeMessage": "true",  # this command prints the address
        "browser.gatherUsageStats": "false",
    }
    if host not in _LOOPBACK or allowed_hosts:  # dashboard.server.own_origin checks the names
        options |= {"server.allowedHosts": "*"}
    flags = [part for name, value in options.items() for part in (f"--{name}", value)]
    paths = [run if object_storage.is_url(run) else str(Path(run).resolve()) for run in runs]
    paths += [f"--history={history.resolve()}"] if history else []
    paths += [f"--allow-host={name}" for name in allowed_hosts]
    paths += ["--open-browser"] if browser else []
    return python_child.script_command(_server(), *flags, "--", *paths)


def _address(host: str, port: int) -> str:
    """Return the address to open in a browser.

    >>> _address("::1", 8501), _address("0.0.0.0", 8501)
    ('http://[::1]:8501', 'http://localhost:8501')
    """
    return f"http://{'localhost' if host in _WILDCARDS else _url_host(host)}:{port}"


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _require_listable(url: str) -> None:
    """Raise InputError if a URL cannot be accessed or has no file of a run, before the browser opens."""
    from tracekit.ingest import files

    if not any(files.is_read_by_tracekit(file.name) for file in files.list_remote(url).files):
        raise InputError(f"{object_storage.shown(url)}: no file of a run there; check the address")


def _require_free_port(host: str, port: int) -> None:
    """Raise InputError if the address or port cannot be used, before Streamlit fails on it."""
    try:
        _listen(host, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = _free_port_after(host, port)
            other = f", such as --port {free}" if free else ""
            raise InputError(
                f"port {port} of {host} is in use, perhaps by another dashboard; choose another port{other}"
            ) from None
        if error.errno == errno.EACCES:
            raise InputError(f"--port {port}: you have no permission to use it; choose a port from 1024 on") from None
        raise InputError(
            f"--host {host}: is no address of this machine ({error.strerror}); use one that is, or 0.0.0.0 for all"
        ) from None


def _free_port_after(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + _PORTS_TRIED, 65535)):
        with contextlib.suppress(OSError):
            _listen(host, other)
            return other
    return None


def _listen(host: str, port: int) -> None:
    """Listen on an address for a moment, as a server does. Raises OSError if that fails."""
    import socket

    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:  # as Streamlit chooses
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((host, port))
        probe.listen()


def _server() -> Path:
    spec = importlib.util.find_spec("dashboard")
    server = Path(spec.origin).parent / "server" / "serve.py" if spec and spec.origin else None
    if server is None or not server.is_file():
        raise MissingExtraError("the dashboard's pages are not installed: pip install 'torch-tracekit[dashboard]'")
    return server
