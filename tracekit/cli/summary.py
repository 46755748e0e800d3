"""``tracekit summary``: where the time goes, in one table."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import opening, output
from tracekit.cli.opening import RunArgument, UseCache
from tracekit.cli.output import Format, Output, TextOrJson


class By(StrEnum):
    """What a row of the summary stands for."""

    RANK = "rank"
    STEP = "step"
    COLLECTIVE = "collective"
    CLOCK = "clock"


def summary(
    run: RunArgument,
    *,
    by: Annotated[
        By, typer.Option("--by", help="One row per rank, per rank and step, per collective and rank, or per clock.")
    ] = By.RANK,
    table_format: TextOrJson = Format.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Show where the time goes: compute, communication, copies, what overlaps and what is exposed, idle.

    compute + exposed communication + exposed copy + idle = duration, exactly. By rank, a row is the rank's whole device
    window, first activity to last; by step, each step's. By collective: how long each rank waited for the last one to
    come, how often it was that one, and how fast the data then moved. By clock: how far each rank's clock was off, and
    the residual below which nothing is told across ranks.
    """
    from tracekit import match
    from tracekit.analysis import breakdown, instances
    from tracekit.analysis import summary as measured
    from tracekit.reports import tables

    opened = opening.opened(run, cache=cache)
    with output.progress() as bar:
        facts = (match.calls,) if by in (By.COLLECTIVE, By.CLOCK) else (breakdown.by_rank, breakdown.by_step)
        opened.measure(facts, bar.measured(len(opened.sources)))
    measures = {
        By.RANK: measured.by_rank,
        By.STEP: measured.by_step,
        By.COLLECTIVE: instances.by_collective,
        By.CLOCK: measured.by_clock,
    }
    rows = measures[by](opened)
    if table_format is Format.JSON:
        output.emit(tables.as_json(rows), out)
    else:
        output.emit(tables.as_text(rows, width=output.width(out), color=output.color(out)), out)
