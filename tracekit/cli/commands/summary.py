"""``tracekit summary``: where the time goes, in one table."""

from enum import StrEnum
from typing import Annotated

import typer

from tracekit.cli import output, run_loading
from tracekit.cli.output import Format, Output, TextOrJson
from tracekit.cli.run_loading import RunArgument, UseCache


class By(StrEnum):
    """What a row of the summary stands for."""

    RANK = "rank"
    STEP = "step"
    COLLECTIVE = "collective"
    CLOCK = "clock"
    CONTENTION = "contention"


def summary(
    run: RunArgument,
    *,
    by: Annotated[
        By,
        typer.Option(
            "--by", help="One row per rank, rank and step, collective and rank, clock, or rank and pair of kinds."
        ),
    ] = By.RANK,
    table_format: TextOrJson = Format.TEXT,
    cache: UseCache = True,
    out: Output = None,
) -> None:
    """Show where the time goes: compute, communication, copies, what overlaps and what is exposed, idle.

    compute + exposed communication + exposed copy + idle = duration, exactly. By rank, a row is the rank's whole device
    window, first activity to last; by step, each step's. By collective: how long each rank waited for the last one to
    come, how often it was that one, and how fast the data then moved. By clock: how far each rank's clock was off, and
    the residual below which nothing is told across ranks. By contention: how many times as long each kind of work takes
    beside another as alone, with a 95% interval.
    """
    from tracekit.analysis.communication import collective_instances
    from tracekit.analysis.compute import collective_contention, contention
    from tracekit.analysis.time import breakdown
    from tracekit.analysis.time import summary as measured
    from tracekit.model.trace import Fact
    from tracekit.report import summary_tables
    from tracekit.sync import collective_matching

    opened = run_loading.open_run(run, cache=cache)
    with output.progress() as bar:
        facts: dict[By, list[Fact]] = {
            By.COLLECTIVE: [collective_matching.calls],
            By.CLOCK: [collective_matching.calls],
            By.CONTENTION: [collective_matching.calls, contention.by_step, collective_contention.calls],
        }
        opened.measure(facts.get(by, [breakdown.by_rank, breakdown.by_step]), bar.trace_callback(len(opened.sources)))
    measures = {
        By.RANK: measured.by_rank,
        By.STEP: measured.by_step,
        By.COLLECTIVE: collective_instances.by_collective,
        By.CLOCK: measured.by_clock,
        By.CONTENTION: collective_contention.all_pairs,
    }
    rows = measures[by](opened)
    if table_format is Format.JSON:
        output.emit(summary_tables.as_json(rows), out)
    else:
        output.emit(summary_tables.as_text(rows, width=output.width(out), color=output.color(out)), out)
