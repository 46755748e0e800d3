"""Steps without saves: those in which no rank saves a checkpoint. Saves have rules of their own."""

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown, summary
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import TraceFact

FACTS: tuple[TraceFact, ...] = (breakdown.by_step, save_stages.save_spans)
"""The facts of a rule that reads steps without saves."""
PLACE = ("window", "rank", "step", "device")


def steps(run: Run) -> pl.DataFrame:
    """Return the breakdown of the steps without saves: columns window, rank and those of `breakdown.by_step`.

    A trace without marked steps is one step, null.
    """
    return without_saves(run, run.table(breakdown.by_step).filter(pl.col("duration_ns") > 0))


def without_saves(run: Run, rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows (with columns window and step) of steps in which no rank saves."""
    return _without_saves(run, rows, is_marked=False)


def representative_step(run: Run, rows: pl.DataFrame | None = None) -> dict[str, int | None] | None:
    """Return the step of a run to look at first, a row of `rows`; None where there are no steps.

    Of the slowest rank, it is the step nearest to its median, without steps that save unless all of them do. `rows`, by
    default the marked steps of the breakdown, has the columns of `summary.representative_step`, and window.
    """
    table = run.table(breakdown.by_step).drop_nulls("step") if rows is None else rows
    rest = without_saves(run, table)
    return summary.representative_step(rest if rest.height else table)


def losses(run: Run, rows: pl.DataFrame, column: str) -> pl.DataFrame:
    """Return the loss of each step without saves: the sum of `column` of `rows`, in ns, 0 where there are none.

    A trace without marked steps is one step, null, also with a save in it.

    Columns PLACE, start_ns, duration_ns, lost_ns, lost_ratio (of the step); one row per step, rank and device.
    """
    sums = rows.group_by(PLACE).agg(pl.col(column).sum().alias("lost_ns"))
    return (
        _without_saves(run, _step_times(run), is_marked=True)
        .join(sums, on=PLACE, how="left", nulls_equal=True, maintain_order="left")
        .with_columns(pl.col("lost_ns").fill_null(0))
        .with_columns((pl.col("lost_ns") / pl.col("duration_ns")).alias("lost_ratio"))
    )


@memoize
def _step_times(run: Run) -> pl.DataFrame:
    """Return these columns of all steps: many rules read them, and of many ranks the whole table is in files."""
    steps = run.scan(breakdown.by_step).filter(pl.col("duration_ns") > 0)
    return steps.select(*PLACE, "start_ns", "duration_ns").collect()


def _without_saves(run: Run, rows: pl.DataFrame, *, is_marked: bool) -> pl.DataFrame:
    """Return the rows of steps without saves; with `is_marked`, a save removes only steps that are marked."""
    saving = run.table(save_stages.save_spans).select("window", "step")
    saving = saving.drop_nulls("step") if is_marked else saving
    return rows.join(saving, on=["window", "step"], how="anti", nulls_equal=True, maintain_order="left")
