"""Pages of the dashboard as HTML files: the timeline by this process, others by the dashboard's code in another one."""

import importlib.util
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import parse_qsl, urlsplit

from tracekit.cli import output
from tracekit.conventions import object_storage, python_child
from tracekit.errors import InputError, MissingExtraError

if TYPE_CHECKING:
    from tracekit.cli.options import RunOptions

TIMELINE = "timeline"
_DEFAULT_PAGE = "overview"


def write(source: "RunOptions", link: str, out: Path) -> None:
    """Write the page of a run that a link names. Raises InputError if there is no such page or run."""
    address, query = split_link(link)
    content = _timeline(source, query) if address == TIMELINE else _page(source.run, address, query)
    with output.atomic_file(out) as file:
        file.write(content)
    from tracekit.model import units

    output.notify(f"{out}: {address} of the run, {units.size(len(content))}")


def split_link(link: str) -> tuple[str, str]:
    """Return the page's address and the query of a link, or of its end.

    >>> split_link("http://localhost:8501/kernels?run=a&by=name"), split_link("ranks"), split_link("localhost:8501/")
    (('kernels', 'run=a&by=name'), ('ranks', ''), ('overview', ''))
    """
    parts = urlsplit(link)
    return parts.path.rpartition("/")[2] or _DEFAULT_PAGE, parts.query


def _timeline(source: "RunOptions", query: str) -> bytes:
    from tracekit.report import shared_view
    from tracekit.rules import engine

    run = source.open()
    with output.progress() as bar:
        report = engine.check(run, on_progress=bar.trace_callback(len(run.sources)))
    return shared_view.render(shared_view.timeline_view(report, run, dict(parse_qsl(query)))).encode()


def _page(run: str, address: str, query: str) -> bytes:
    place = run if object_storage.is_url(run) else str(Path(run).resolve())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "page.html"
        spec = importlib.util.find_spec("dashboard") if importlib.util.find_spec("streamlit") else None
        script = Path(spec.origin).parent / "server" / "shared_page.py" if spec and spec.origin else None
        if script is None or not script.is_file():
            raise MissingExtraError(
                "pages other than the timeline need the dashboard: pip install 'torch-tracekit[dashboard]'"
            )
        command = python_child.script_command(script, place, address, query, str(out))
        done = subprocess.run(  # noqa: S603 our own
            command, env=python_child.environment(), capture_output=True, text=True, check=False
        )
        if not out.is_file():
            lines = done.stderr.strip().splitlines() or ["the page cannot be drawn"]
            raise InputError(f"{run}: {lines[-1]}")
        return out.read_bytes()
