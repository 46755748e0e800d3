"""The step of a run to look at first: of training alone, without a save in it."""

import polars as pl

from tracekit.analysis.checkpoint import save_stages
from tracekit.analysis.time import breakdown, summary
from tracekit.model.run import Run
from tracekit.model.trace import Fact

FACTS: tuple[Fact, ...] = (save_stages.save_spans, breakdown.by_step)
"""The facts that the functions of this module read."""


def without_saves(run: Run, steps: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a table with window and step in whose step no rank begins a save; all if each step has one."""
    saved = run.table(save_stages.save_spans).select("window", "step").drop_nulls().unique()
    rest = steps.join(saved, on=["window", "step"], how="anti", nulls_equal=True, maintain_order="left")
    return rest if rest.height else steps


def representative_step(run: Run, steps: pl.DataFrame | None = None) -> dict[str, int | None] | None:
    """Return the row of a run's breakdown by step to look at first; None where there are no steps.

    Of the slowest rank, it is the step nearest to its median, steps with a save left out. `steps`, by default those of
    the breakdown that are marked, has the columns of `summary.representative_step`.
    """
    table = run.table(breakdown.by_step).drop_nulls("step") if steps is None else steps
    return summary.representative_step(without_saves(run, table))
