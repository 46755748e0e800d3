"""``tracekit flamegraph``: time by call stack, as a file for flame graph viewers."""

from pathlib import Path
from typing import Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.options import RunOptions, SelectedWork, expand_options
from tracekit.errors import ConfigError


@expand_options
def flamegraph(
    *,
    out: Annotated[
        Path,
        typer.Option(
            "--out",
            "--output",
            "-o",
            metavar="FILE",
            help="File to write; its ending decides the format: .folded, .speedscope.json or .pftrace.",
        ),
    ],
    time_kind: Annotated[
        str,
        typer.Option("--of", metavar="KIND", help="Time of the device, by stack of the launch, or of the host."),
    ] = "device",
    by_rank: Annotated[bool, typer.Option("--by-rank", help="Show each rank by itself, not their sum.")] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Compare with this run, per step and rank; only as .folded."),
    ] = None,
    work: SelectedWork,
    source: RunOptions,
) -> None:
    """Write the time of a run by call stack, for speedscope.app, flamegraph.pl or ui.perfetto.dev.

    Of the device: the durations of kernels and copies under the ops, spans and Python frames around their launch. Of
    the host: the self time of all slices by thread. Stacks need with_stack=True (record --stacks); without, there are
    ops and spans only. With --against each stack has two values, before and after, as difffolded.pl writes them.
    """
    from tracekit.analysis.host import call_trees
    from tracekit.report.export import flame_graphs

    write = flame_graphs.writer_for(out)
    if against is not None and write is not flame_graphs.collapsed_stacks:
        raise ConfigError("--against: only .folded files have two values per stack")
    step, selected = work.step, work.rank_numbers()
    run = source.open()
    with output.progress() as bar:
        callback = bar.trace_callback(len(run.sources))
        tree = call_trees.call_tree(run, time_kind, step=step, ranks=selected, by_rank=by_rank, on_progress=callback)
    title = f"{run.name} · {time_kind} time"
    if against is not None:
        other = run_loading.open_run(against, cache=source.cache)
        before = call_trees.call_tree(other, time_kind, step=step, ranks=selected, by_rank=by_rank)
        shares = [1 / call_trees.steps(side, step=step, ranks=selected) for side in (other, run)]
        tree = call_trees.difference(before, tree, (shares[0], shares[1]))
    with output.atomic_file(out) as file:
        write(tree, file, title)
    output.notify(f"{out}: {tree.height:,} stacks of {title}")
