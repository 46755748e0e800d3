"""``tracekit hang``: which rank a hung job waits for, and what that rank does instead."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.options import DocumentOptions, expand_options

HANG_FOUND = 1


@expand_options
def hang(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A folder of flight recorder dumps, one per rank or fewer, or a run.")
    ],
    *,
    min_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            min=0.0,
            help="A job whose ranks waited for a shorter time when the dumps were written still runs.",
        ),
    ] = 10.0,
    table: DocumentOptions,
) -> None:
    """Show why a job hangs: the collective that is not complete, the ranks that have not joined it, and what they do.

    DIR contains dumps by 'tracekit record --hang-timeout', or by torch itself (TORCH_FR_DUMP_TEMP_FILE): pickles or
    JSON. It may also contain stacks by 'py-spy dump' or faulthandler, with the rank in the name, such as rank3.txt.
    Nothing in the files is executed.

    Exit code: 1 if the job hangs, 0 if it does not, 2 if there is no dump that can be used.
    """
    from tracekit.analysis.hangs import diagnosis
    from tracekit.ingest.hang_dumps import folder as dumps
    from tracekit.report import hang as report

    result = diagnosis.diagnose(dumps.read(folder), min_wait_ns=int(min_wait * 1e9))
    table.write_document(report.document(result))
    if result.is_hang:
        raise typer.Exit(HANG_FOUND)
