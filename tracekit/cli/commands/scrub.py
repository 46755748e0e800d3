"""``tracekit scrub``: a copy of a run without private data."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli.options import OutputOptions

if TYPE_CHECKING:
    from tracekit.ingest.scrub import ScrubResult
    from tracekit.report.document import Document


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

    OutputOptions().write_in(document(scrub_run(run, out, words=words or [], force=force)))


def document(result: "ScrubResult") -> "Document":
    """Kinds and counts of the text removed (never the text itself), and files not copied, with reasons."""
    from tracekit.ingest.scrub.secrets import KINDS
    from tracekit.report.document import Document, Line

    removed = [
        f"{_count(distinct, KINDS[kind])} in {_count(places, 'place')}"
        for kind, (distinct, places) in result.removed.items()
    ]
    lines = [
        f"{result.out}: {_count(len(result.files), 'file')}; read again: what was recognized is removed everywhere",
        *(f"  removed  {text}" for text in removed or ["nothing: no host, user or path found"]),
        *(f"  left out {name}: {reason}" for name, reason in result.left_out),
        "  cannot be known: secrets without a name or known form (a password that is a plain word, a key that looks",
        "  like a hash) and projects in names of kernels and modules: look for them, and use --remove WORD",
    ]
    return Document(([Line((text,), wraps=False) for text in lines],))


def _count(number: int, noun: str) -> str:
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"
