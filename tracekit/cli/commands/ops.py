"""``tracekit ops``: what ran on the host's threads, added up by name or more."""

from typing import Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Output, Top, TotalsFormat
from tracekit.cli.run_loading import RunArgument, UseCache


def ops(
    run: RunArgument,
    *,
    by: Annotated[
        str,
        typer.Option(
            "--by",
            metavar="KEY,…",
            help="One row per: name, shapes, unit, phase, span, step, thread, rank; several by commas.",
        ),
    ] = "name",
    kinds: Annotated[
        str,
        typer.Option(
            "--kind", metavar="KIND,…", help="cpu_op, annotation, runtime, python, overhead; several by commas."
        ),
    ] = "cpu_op",
    top: Top = None,
    totals_format: Annotated[TotalsFormat, typer.Option("--format", help="How to write it.")] = TotalsFormat.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Show the ops of a run: count, total, time by themselves, on the device, mean, median, 95th percentile, longest.

    "by itself" leaves out all slices inside; "share" is of that time, over all recorded slices. "on device" is the
    time of the kernels that the op itself launched.
    """
    from tracekit.analysis.host import ops as measured

    opened = run_loading.open_run(run, cache=cache)
    with output.progress() as bar:
        step = bar.trace_callback(len(opened.sources))
        rows = measured.ops(opened, output.split_names(by), output.split_names(kinds), on_progress=step)
    output.emit_totals(rows, totals_format, top, out)
