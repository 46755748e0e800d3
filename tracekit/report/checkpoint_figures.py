"""The pictures of checkpoints in a report: all saves, and the stages of the one that takes longest."""

from collections.abc import Iterator

import polars as pl

from tracekit.analysis.checkpoint import saves
from tracekit.model.run import Run
from tracekit.report import charts
from tracekit.report.memory_figures import ReportFigure


def of_run(run: Run) -> Iterator[ReportFigure]:
    """Yield the saves of a run, the stages of the longest, and what storage gave; nothing without a checkpoint log."""
    each = run.run_table(saves.by_save)
    if each.is_empty():
        return
    if each.height > 1:
        told = "Time that training was blocked, and time until all was written, of the slowest rank."
        yield ReportFigure("saves", "Checkpoints", told, charts.save_clocks(each))
    longest = each.sort("written_ns", "start_ns", descending=[True, False])["save"][0]
    lines = run.run_table(saves.stages).filter(pl.col("save") == longest)
    told = (
        f"Of {longest}, on each rank. Stages take turns, tensor by tensor: a bar puts the time of each together, in "
        "order of first entry."
    )
    yield ReportFigure("save-stages", "Stages of the longest save", told, charts.save_stages(lines))
    clocks = run.run_table(saves.by_rank)
    if clocks["storage_bytes_per_s"].drop_nulls().len() > 1:
        told = "Bytes by the time in writing and syncing them."
        yield ReportFigure("save-bandwidth", "Durable write rate of each rank", told, charts.save_bandwidth(clocks))
