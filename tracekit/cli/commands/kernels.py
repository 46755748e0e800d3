"""``tracekit kernels``: device work, summed by name or other keys."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import OutputOptions, RunOptions, expand_options
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl

    from tracekit.analysis.compute import kernels as kernels_analysis
    from tracekit.model.run import Run
    from tracekit.report.document import Document


class TotalsFormat(StrEnum):
    """Formats of a table of kernels or ops."""

    TEXT = "text"
    CSV = "csv"
    JSON = "json"


@dataclass(frozen=True, kw_only=True)
class TotalsOptions(OutputOptions):
    """The length, format and destination of a table of kernels or ops."""

    top: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Show the N rows with most time.  [default: text 20, else all]"),
    ] = None
    totals_format: Annotated[TotalsFormat, typer.Option("--format", help="Output format.")] = TotalsFormat.TEXT

    def write(self, rows: "pl.DataFrame", document: "Callable[[pl.DataFrame, int], Document]") -> None:
        """Write the first `top` rows; by default 20 in a document for people, and all rows as CSV or JSON."""
        from tracekit.report import query_rows

        if self.totals_format is TotalsFormat.TEXT:
            self.write_text(document(rows, self.top or output.DEFAULT_TOP))
            return
        top_rows = rows if self.top is None else rows.head(self.top)
        is_csv = self.totals_format is TotalsFormat.CSV
        output.emit_rows(query_rows.as_csv(top_rows) if is_csv else query_rows.as_json(top_rows), self.out)


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
    eager_twin: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="The same program recorded without CUDA graphs: names the ops of kernels in graphs."
        ),
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
    from tracekit.report import summary_tables

    if sequences is not None and launched_by is not None:
        raise ConfigError("--sequences and --launched-by are two tables; give one of them")
    run = source.open()
    if sequences is not None:
        table.write(kernel_sequences.by_sequence(run, sequences), summary_tables.sequences)
        return
    if launched_by is not None:
        table.write(kernel_sequences.by_call(run, launched_by), summary_tables.sequences)
        return
    ops = analysis.recorded_ops if eager_twin is None else _graph_ops(run, eager_twin, cache=source.cache)
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.with_launch_delays(run, output.split_names(by), ops=ops, on_progress=callback)
    table.write(rows, summary_tables.totals)


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
    from tracekit.report import summary_tables

    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.ops(run, output.split_names(by), output.split_names(kinds), on_progress=callback)
    table.write(rows, summary_tables.totals)


def _graph_ops(run: "Run", twin: str, *, cache: bool) -> "kernels_analysis.OpColumns":
    """Return the op columns of kernels in CUDA graphs by their twin; report the number of kernels that have one."""
    from tracekit.analysis.compute import kernels as analysis

    eager = analysis.EagerTwin(run_loading.open_run(twin, cache=cache))
    replayed, matched = analysis.replay_attribution(run, eager)
    output.notify(f"{matched:,} of {replayed:,} kernels in CUDA graphs have the op of the same kernels in {twin}")
    return eager.op_columns
