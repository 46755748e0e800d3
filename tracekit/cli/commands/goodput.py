"""``tracekit goodput``: what the time of a job went to, over all of its attempts."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli.options import DocumentOptions, expand_options


@expand_options
def goodput(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="The folders of all attempts at one job, or a folder of these folders."),
    ],
    *,
    gpu_hour_price: Annotated[
        float | None, typer.Option(metavar="PRICE", help="Price of a GPU-hour; each loss is also stated in money.")
    ] = None,
    table: DocumentOptions,
) -> None:
    """Show the share of time that trained, over all attempts at a job: steps lost at failures, restarts, saves, stalls.

    The times add up to the whole. Attempts are read from the logs of tracekit record, of a Recorder, or of the
    instrumented trainers; a training that resumes may write into the same folder or into a new one.
    """
    from tracekit.analysis.checkpoint import goodput as measured
    from tracekit.report import goodput as report

    job, notes = measured.read_job(runs)
    table.write_document(report.document(job, gpu_hour_price=gpu_hour_price, notes=notes))
