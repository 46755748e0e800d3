"""``tracekit kernels``: kernels or host ops, summed by name, stack or other keys."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import Format, OutputOptions, RunOptions, SelectedWork, expand_options
from tracekit.errors import ConfigError

if TYPE_CHECKING:
    import polars as pl

    from tracekit.analysis.compute import kernels as kernels_analysis
    from tracekit.model.run import Run
    from tracekit.report.document import Document


class TotalsFormat(StrEnum):
    """Formats of a table of kernels or ops."""

    TEXT = "text"
    MARKDOWN = "markdown"
    HTML = "html"
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

    def write_rows(self, rows: "pl.DataFrame", document: "Callable[[pl.DataFrame, int], Document]") -> None:
        """Write the first `top` rows; by default 20 in a document for people, and all rows as CSV or JSON."""
        from tracekit.report import query_rows

        top_rows = rows if self.top is None else rows.head(self.top)
        if self.totals_format is TotalsFormat.CSV:
            output.emit_rows(query_rows.as_csv(top_rows), self.out)
        elif self.totals_format is TotalsFormat.JSON:
            output.emit_rows(query_rows.as_json(top_rows), self.out)
        else:
            self.write_in(document(rows, self.top or output.DEFAULT_TOP), Format(self.totals_format.value))


class WorkOf(StrEnum):
    """Whose work is summed."""

    DEVICE = "device"
    HOST = "host"


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Whose work is summed, which of it, and by what."""

    of: Annotated[
        WorkOf, typer.Option(help="Work of the device: kernels, copies, collectives; or of the host: ops, other calls.")
    ] = WorkOf.DEVICE
    by: Annotated[
        str,
        typer.Option(
            metavar="KEY,…",
            help="Group by name, shapes, module, unit, phase, span, step or rank; of the device also by op, device or "
            "stream, of the host by thread. stack or stack,rank: flame graph. Separate keys by commas.",
        ),
    ] = "name"
    kinds: Annotated[
        str | None,
        typer.Option(
            "--kind",
            metavar="KIND,…",
            help="Of the host: cpu_op, annotation, runtime, python, overhead or os_call.  [default: cpu_op]",
        ),
    ] = None
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="By stack: compare with this run, per step and rank; only as .folded."),
    ] = None

    @property
    def keys(self) -> tuple[str, ...]:
        """Return the keys of --by."""
        return output.split_names(self.by)

    @property
    def is_by_stack(self) -> bool:
        """Return whether rows are call stacks. Raises ConfigError where other keys stand beside the stack."""
        if _STACK in self.keys and not {_STACK, _RANK}.issuperset(self.keys):
            raise ConfigError(f"--by {self.by}: a stack has the frames as keys: use --by stack or stack,rank")
        return _STACK in self.keys


@dataclass(frozen=True, kw_only=True)
class SequenceOptions:
    """Sequences of kernels in place of kernels, and where to look up the ops of kernels in CUDA graphs."""

    sequences: Annotated[
        int | None,
        typer.Option(metavar="N", help="Instead show sequences of up to N kernels that recur on a stream: 2 to 256."),
    ] = None
    launched_by: Annotated[
        str | None,
        typer.Option(metavar="OP", help="Instead show the sequences that calls of operators named …OP… launch."),
    ] = None
    eager_twin: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="The same program recorded without CUDA graphs: names ops and modules of kernels in graphs.",
        ),
    ] = None


_STACK, _RANK = "stack", "rank"


@expand_options
def kernels(
    *, work: WorkOptions, sequence: SequenceOptions, part: SelectedWork, source: RunOptions, table: TotalsOptions
) -> None:
    """Show the kernels, copies and collectives of a run, or its host ops: count, total, mean, percentiles, maximum.

    "share" is relative to the device time of all ranks, including idle time. "rank spread" is the difference between
    the ranks with most and least time, relative to the mean. op and shapes belong to the launching op; "delay" is from
    the end of the launching call to the start. On a CPU run, rows are the ops that threads computed. Each name has its
    own row; different kinds of work are never merged.

    --of host: "self time" is the time without nested slices, "share" that of the self time of all recorded slices, "on
    device" the time of the kernels that the op itself launched. "of roofline" is the time that the device needs at
    least for the operations and bytes of the calls, over the time that they took.

    --by stack writes time by call stack for flamegraph.pl; the ending of --out chooses another format:
    .speedscope.json for speedscope.app or .pftrace for ui.perfetto.dev. Of the device: kernels and copies under the
    ops, spans and Python frames around their launch; of the host: the self time of all slices by thread. Python frames
    need with_stack=True (record --stacks). With --against each stack has two values, before and after.

    --sequences finds what could be fused or captured in a CUDA graph: each kernel counts in one sequence only, "gaps"
    is the time between its kernels, "launches" the calls that launched them.
    """
    _require_applicable(work, sequence, part, table)
    if work.is_by_stack:
        _write_stacks(source, work, part, table)
    elif sequence.sequences is not None or sequence.launched_by is not None:
        _write_sequences(source, sequence, table)
    elif work.of is WorkOf.HOST:
        from tracekit.analysis.host import ops as analysis
        from tracekit.report import summary_tables

        run = source.open()
        kinds = output.split_names("cpu_op" if work.kinds is None else work.kinds)
        with output.progress() as bar:
            rows = analysis.ops(run, work.keys, kinds, on_progress=bar.trace_callback(len(run.sources)))
        table.write_rows(rows, summary_tables.totals)
    else:
        _write_kernels(source, work, sequence, table)


def _require_applicable(work: WorkOptions, sequence: SequenceOptions, part: SelectedWork, table: TotalsOptions) -> None:
    """Raise ConfigError for an option that the chosen table does not have: it would have no effect."""
    if sequence.sequences is not None and sequence.launched_by is not None:
        raise ConfigError("--sequences and --launched-by are two tables; give one of them")
    if (work.of is WorkOf.HOST or work.is_by_stack) and sequence != SequenceOptions():
        raise ConfigError("--sequences, --launched-by and --eager-twin are for kernels: without --of host, --by stack")
    if work.kinds is not None and (work.of is not WorkOf.HOST or work.is_by_stack):
        raise ConfigError("--kind is for --of host, without --by stack")
    if not work.is_by_stack and (part != SelectedWork() or work.against is not None):
        raise ConfigError("--step, --ranks and --against are for --by stack; --by step,rank shows steps and ranks")
    if work.is_by_stack and (table.top is not None or table.totals_format is not TotalsFormat.TEXT):
        raise ConfigError(
            "--by stack writes all stacks, without --top and --format: the ending of --out chooses the format"
        )


def _write_kernels(source: RunOptions, work: WorkOptions, sequence: SequenceOptions, table: TotalsOptions) -> None:
    from tracekit.analysis.compute import kernels as analysis
    from tracekit.report import summary_tables

    run = source.open()
    twin = sequence.eager_twin
    ops = analysis.recorded_ops if twin is None else _graph_ops(run, twin, cache=source.cache)
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        rows = analysis.with_launch_delays(run, work.keys, ops=ops, on_progress=callback)
    table.write_rows(rows, summary_tables.totals)
    is_without_modules = "module" in work.keys and rows["module"].null_count() == rows.height
    if is_without_modules and (missing := analysis.missing_modules(run)) is not None:
        output.notify(missing)


def _write_sequences(source: RunOptions, sequence: SequenceOptions, table: TotalsOptions) -> None:
    from tracekit.analysis.compute import kernel_sequences
    from tracekit.report import summary_tables

    run = source.open()
    if sequence.sequences is not None:
        table.write_rows(kernel_sequences.by_sequence(run, sequence.sequences), summary_tables.sequences)
    else:
        assert sequence.launched_by is not None
        table.write_rows(kernel_sequences.by_call(run, sequence.launched_by), summary_tables.sequences)


def _write_stacks(source: RunOptions, work: WorkOptions, part: SelectedWork, result: OutputOptions) -> None:
    """Write time by call stack to a file in the format of its ending, or as collapsed stacks to stdout."""
    from tracekit.analysis.host import call_trees
    from tracekit.report.export import flame_graphs

    write = flame_graphs.collapsed_stacks if result.out is None else flame_graphs.writer_for(result.out)
    if work.against is not None and write is not flame_graphs.collapsed_stacks:
        raise ConfigError("--against: only .folded files have two values per stack")
    by_rank, step, selected = _RANK in work.keys, part.step, part.rank_numbers()
    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        tree = call_trees.call_tree(run, work.of, step=step, ranks=selected, by_rank=by_rank, on_progress=callback)
    title = f"{run.name} · {work.of} time"
    if work.against is not None:
        other = run_loading.open_run(work.against, cache=source.cache, step_name=source.step_name, role=source.role)
        before = call_trees.call_tree(other, work.of, step=step, ranks=selected, by_rank=by_rank)
        shares = [1 / call_trees.steps(side, step=step, ranks=selected) for side in (other, run)]
        tree = call_trees.difference(before, tree, (shares[0], shares[1]))
    if result.out is None:
        lines = io.BytesIO()
        write(tree, lines, title)
        output.emit_rows(lines.getvalue().decode(), None)
        return
    with output.atomic_file(result.out) as file:
        write(tree, file, title)
    output.notify(f"{result.out}: {tree.height:,} stacks of {title}")


def _graph_ops(run: "Run", twin: str, *, cache: bool) -> "kernels_analysis.OpColumns":
    """Return the op columns of kernels in CUDA graphs by their twin; report the number of kernels that have one."""
    from tracekit.analysis.compute import kernels as analysis

    eager = analysis.EagerTwin(run_loading.open_run(twin, cache=cache))
    replayed, matched = analysis.replay_attribution(run, eager)
    output.notify(f"{matched:,} of {replayed:,} kernels in CUDA graphs have the op of the same kernels in {twin}")
    return eager.op_columns
