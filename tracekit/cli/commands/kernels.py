"""``tracekit kernels``: device work, summed by name or other keys."""

from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import RunOptions, TotalsOptions, expand_options


@expand_options
def kernels(
    *,
    by: Annotated[
        str,
        typer.Option(
            metavar="KEY,…",
            help="Group by name, op, shapes, module, unit, phase, span, step, device, stream or rank; "
            "separate keys by commas.",
        ),
    ] = "name",
    source: RunOptions,
    table: TotalsOptions,
) -> None:
    """Show the kernels, copies and collectives of a run: count, total, mean, median, 95th percentile, maximum.

    "share" is relative to the device time of all ranks, including idle time. "rank spread" is the difference between
    the ranks with most and least time, relative to the mean. op and shapes belong to the launching op; "delay" is from
    the end of the launching call to the start. On a CPU run, rows are the ops that threads computed. Each name has its
    own row; different kinds of work are never merged.
    """
    from tracekit.analysis.compute import kernels as analysis

    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.with_launch_delays(run, output.split_names(by), on_progress=callback)
    table.write(rows)
