"""``tracekit scrub``: a copy of a run that can be given away."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli import output


def scrub(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of traces, or one trace file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where the copy goes.")],
    *,
    words: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="WORD", help="Remove this word too, such as a project's name. Repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run at OUT.")] = False,
) -> None:
    """Copy a run without host names, users, paths, addresses and secrets, and list what was removed.

    No number changes, so the copy analyses as the run does. What cannot be scrubbed is not copied, and said so.
    """
    from tracekit.ingest.scrub import scrub as scrubbing
    from tracekit.report import scrub_text

    output.emit(scrub_text.as_text(scrubbing(run, out, words=words or [], force=force)))
