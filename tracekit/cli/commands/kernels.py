"""``tracekit kernels``: device work, summed by name or other keys."""

from typing import Annotated

import typer

from tracekit.cli import output
from tracekit.cli.options import RunOptions, TotalsOptions, expand_options
from tracekit.errors import ConfigError


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
    sequences: Annotated[
        int | None,
        typer.Option(metavar="N", help="Instead show sequences of up to N kernels that recur on a stream: 2 to 256."),
    ] = None,
    launched_by: Annotated[
        str | None,
        typer.Option(metavar="OP", help="Instead show the sequences that calls of operators named …OP… launch."),
    ] = None,
    source: RunOptions,
    table: TotalsOptions,
) -> None:
    """Show the kernels, copies and collectives of a run: count, total, mean, median, 95th percentile, maximum.

    "share" is relative to the device time of all ranks, including idle time. "rank spread" is the difference between
    the ranks with most and least time, relative to the mean. op and shapes belong to the launching op; "delay" is from
    the end of the launching call to the start. On a CPU run, rows are the ops that threads computed. Each name has its
    own row; different kinds of work are never merged.

    --sequences finds what could be fused or captured in a CUDA graph: each kernel counts in one sequence only, "gaps"
    is the time between its kernels, "launches" the calls that launched them.
    """
    from tracekit.analysis.compute import kernel_sequences
    from tracekit.analysis.compute import kernels as analysis
    from tracekit.report import kernel_sequences as sequence_table

    if sequences is not None and launched_by is not None:
        raise ConfigError("--sequences and --launched-by are two tables; give one of them")
    run = source.open()
    if sequences is not None:
        table.write(kernel_sequences.by_sequence(run, sequences), sequence_table.as_text)
        return
    if launched_by is not None:
        table.write(kernel_sequences.by_call(run, launched_by), sequence_table.as_text)
        return
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.with_launch_delays(run, output.split_names(by), on_progress=callback)
    table.write(rows)
