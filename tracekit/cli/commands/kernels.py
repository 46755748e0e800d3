"""``tracekit kernels``: what ran on the devices, added up by name or more."""

from typing import Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Output, Top, TotalsFormat
from tracekit.cli.run_loading import RunArgument, UseCache


def kernels(
    run: RunArgument,
    *,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="KEY,…",
            help="One row per: name, op, shapes, unit, phase, span, step, device, stream, rank; several by commas.",
        ),
    ] = "name",
    top: Top = None,
    totals_format: Annotated[TotalsFormat, typer.Option("--format", help="How to write it.")] = TotalsFormat.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Show the kernels, copies and collectives of a run: count, total, mean, median, 95th percentile, longest.

    "share" is of the device time of all ranks, idle time included; "rank spread" is the most time on a rank less the
    least, over the mean. op and shapes are of the op that launched. On a CPU run these are the ops that threads
    computed. Every name has its own row; names of two kinds of work are never joined.
    """
    from tracekit.analysis.compute import kernels as measured

    opened = run_loading.open_run(run, cache=cache)
    with output.progress() as bar:
        rows = measured.kernels(opened, output.split_names(by), on_progress=bar.trace_callback(len(opened.sources)))
    output.emit_totals(rows, totals_format, top, out)
