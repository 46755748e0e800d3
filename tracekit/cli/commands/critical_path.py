"""``tracekit critical-path``: the chain of waits that made a step as long as it was."""

from typing import Annotated

import typer

from tracekit.cli.options import RunOptions, TableOptions, expand_options

_TOP = 15


@expand_options
def critical_path(
    *,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Explain this step.  [default: the representative one of the slowest rank]"),
    ] = None,
    top: Annotated[int, typer.Option(metavar="N", min=1, help="Show N owners, and N rows of slack, as text.")] = _TOP,
    source: RunOptions,
    table: TableOptions,
) -> None:
    """Show the critical path of one step over all ranks: shortening what is not on it saves nothing.

    The path goes back from the end of the step on its slowest rank, from each host call, kernel or collective to what
    it waited for last. Its parts add up to the step. Least slack is how much later other work could end without
    delaying the step.
    """
    from tracekit.replay.graph.critical_path import path
    from tracekit.report import critical_path as report

    run = source.measure(path.FACTS)
    critical = path.critical_path(run, step)
    table.write(report.document(critical, run=run.name, top=top))
