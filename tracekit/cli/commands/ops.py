"""``tracekit ops``: work of the host's threads, summed by name or other keys."""

from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import RunOptions, TotalsOptions, expand_options


@expand_options
def ops(
    *,
    by: Annotated[
        str,
        typer.Option(
            metavar="KEY,…",
            help="Group by name, shapes, module, unit, phase, span, step, thread or rank; separate keys by commas.",
        ),
    ] = "name",
    kinds: Annotated[
        str,
        typer.Option(
            "--kind",
            metavar="KIND,…",
            help="Include cpu_op, annotation, runtime, python, overhead or os_call; separate kinds by commas.",
        ),
    ] = "cpu_op",
    source: RunOptions,
    table: TotalsOptions,
) -> None:
    """Show the ops of a run: count, total, self time, device time, mean, median, 95th percentile, maximum.

    "self time" is the time without nested slices. "share" is the share of the self time of all recorded slices.
    "on device" is the time of the kernels that the op itself launched. "of roofline" is the time that the device needs
    at least for the operations and bytes of the calls, over the time that they took.
    """
    from tracekit.analysis.host import ops as analysis
    from tracekit.report import kernels as report

    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.ops(run, output.split_names(by), output.split_names(kinds), on_progress=callback)
    table.write(rows, report.document)
