"""``tracekit summary``: where the time goes, in one table."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import opening, output
from tracekit.cli.opening import UseCache
from tracekit.cli.output import Format, Output, TextOrJson


class By(StrEnum):
    """What a row of the summary stands for."""

    RANK = "rank"
    STEP = "step"


def summary(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A folder of traces, or one trace file.")],
    *,
    by: Annotated[By, typer.Option("--by", help="One row per rank, or one per rank and step.")] = By.RANK,
    table_format: TextOrJson = Format.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Show where the time goes: compute, communication, copies, what overlaps and what is exposed, idle.

    compute + exposed communication + exposed copy + idle = duration, exactly. By rank, a row is the rank's whole device
    window, first activity to last; by step, each step's.
    """
    from tracekit.analysis import breakdown
    from tracekit.analysis import summary as measured
    from tracekit.reports import tables

    opened = opening.opened(run, cache=cache)
    with output.progress() as bar:
        opened.measure((breakdown.by_rank, breakdown.by_step), bar.measured(len(opened.sources)))
    rows = measured.by_rank(opened) if by is By.RANK else measured.by_step(opened)
    if table_format is Format.JSON:
        output.emit(tables.as_json(rows), out)
    else:
        output.emit(tables.as_text(rows, width=output.width(out), color=output.color(out)), out)
