"""``tracekit hang``: which rank a hung job waits for, and why it does not come."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.options import TableOptions, expand_options

HANG_FOUND = 1


@expand_options
def hang(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Flight recorder dumps, one per rank or fewer; a run that has some.")
    ],
    *,
    min_wait: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", min=0.0, help="A shorter wait when the dumps were written is no hang, but a running job."
        ),
    ] = 10.0,
    table: TableOptions,
) -> None:
    """Say why a job hangs: the collective that is not complete, the ranks that have not come, and what they do.

    DIR holds dumps by 'tracekit record --hang-timeout', or by torch itself (TORCH_FR_DUMP_TEMP_FILE): pickles or JSON.
    Stacks by 'py-spy dump' or faulthandler may be among them, with rank3 or so in their names. Nothing in the files is
    executed.

    Exit code: 1 if the job hangs, 0 if it does not, 2 if there is no dump that can be used.
    """
    from tracekit.analysis.hangs import diagnosis
    from tracekit.ingest.hang_dumps import folder as dumps
    from tracekit.report import hang as report

    found = diagnosis.diagnose(dumps.read(folder), min_wait_ns=int(min_wait * 1e9))
    table.write(report, found)
    if found.is_hang:
        raise typer.Exit(HANG_FOUND)
