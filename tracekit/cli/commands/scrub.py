"""``tracekit scrub``: a copy of a run without private data."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli import output


def scrub(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A folder of traces, or one trace file.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Where to write the copy.")],
    *,
    words: Annotated[
        list[str] | None,
        typer.Option("--remove", metavar="WORD", help="Also remove this word, such as a project's name. Repeatable."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing run at OUT.")] = False,
) -> None:
    """Copy a run without host names, users, paths, addresses and secrets, and list what was removed.

    No number changes, so tracekit reports the same about the copy. Files that cannot be scrubbed are not copied; the
    list names them.
    """
    from tracekit.ingest.scrub import scrub as scrub_run
    from tracekit.report import scrub_text

    output.emit(scrub_text.as_text(scrub_run(run, out, words=words or [], force=force)))
