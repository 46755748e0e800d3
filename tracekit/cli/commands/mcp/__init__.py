"""``tracekit mcp``: answers about runs for coding agents, as small JSON values, by the Model Context Protocol."""

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.options import UseCache
from tracekit.errors import MissingExtraError

LOOPBACK = "127.0.0.1"


def mcp(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Runs, or folders of runs.")],
    *,
    http: Annotated[
        int | None,
        typer.Option(
            metavar="PORT", min=1, max=65535, help="Answer at http://127.0.0.1:PORT/mcp instead of on stdin and stdout."
        ),
    ] = None,
    cache: UseCache = True,
) -> None:
    """Serve runs to coding agents by the Model Context Protocol: why they are slow, where, what a fix saves.

    An agent starts it itself: its command is "tracekit mcp FOLDER". It reads only the given runs and folders, and
    changes nothing. Texts of recordings come marked: an agent does not take a kernel's name for an instruction.
    """
    if importlib.util.find_spec("mcp") is None:
        raise MissingExtraError("tracekit mcp needs the package mcp: pip install 'torch-tracekit[mcp]'")
    from tracekit.cli.commands.mcp import server
    from tracekit.cli.commands.mcp.answers import Answers
    from tracekit.cli.commands.mcp.roots import Roots

    served = server.build(Answers(Roots(runs), cache=cache))
    if http is None:
        served.run("stdio")
    else:
        served.run("streamable-http", host=LOOPBACK, port=http)
