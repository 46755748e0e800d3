"""The breakdown of a run per rank, or per rank and step; its clocks, and when it begins on them."""

import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.sync import alignment

_TIMES = ("duration_ns", *breakdown.TERMS, "idle_ns")
COLUMNS = ("rank", "window", "step", *_TIMES)

EXTENT_COLUMNS = schema.columns("first_ns steps", steps=pl.List(pl.Int64))
RUN_CLOCK = schema.columns("window rank offset_ns drift at_ns zero_ns", drift=pl.Float64)


def by_step(run: Run) -> pl.DataFrame:
    """Return one row per rank, window and step, in that order. Columns are COLUMNS; see `breakdown`.

    For a rank with several devices, the slowest device counts.
    """
    return slowest_device(run.table(breakdown.by_step)).select(COLUMNS).sort("rank", "window", "step")


def by_rank(run: Run) -> pl.DataFrame:
    """Return one row per rank over its whole device window, first activity to last; `window` and `step` are null.

    Columns are COLUMNS. Several profiled windows are added up; of several devices the slowest counts.
    """
    windows = slowest_device(run.table(breakdown.by_rank))
    sums = windows.group_by("rank").agg(pl.col("step").first(), pl.col(_TIMES).sum())
    return sums.with_columns(pl.lit(None, pl.Int64).alias("window")).select(COLUMNS).sort("rank")


def by_rank_in_steps(run: Run) -> pl.DataFrame:
    """Return one row per rank, as `by_rank`, over its marked steps; where no trace marks steps, over its windows."""
    sums = slowest_device(steps_by_rank(run)).group_by("rank").agg(pl.col("step").first(), pl.col(_TIMES).sum())
    return sums.with_columns(pl.lit(None, pl.Int64).alias("window")).select(COLUMNS).sort("rank")


def steps_by_rank(run: Run) -> pl.DataFrame:
    """Return the sums of the marked steps of each rank and device; where no trace marks steps, of the whole windows.

    Columns as those of `sums_of_steps`.
    """
    steps = run.table(breakdown.by_step).drop_nulls("step")
    return run.table(breakdown.by_rank) if steps.is_empty() else sums_of_steps(steps)


def sums_of_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the sums of the steps of each rank and device, with the columns of `steps`.

    `steps` has the columns window, rank and those of `breakdown`. In the result step is null, and start_ns is that of
    the first step.
    """
    summed = [name for name in steps.columns if name.endswith("_ns") and name != "start_ns"]
    sums = steps.group_by("window", "rank", "device", maintain_order=True).agg(
        pl.lit(None, pl.Int64).alias("step"), pl.col("start_ns").min(), pl.col(summed).sum()
    )
    return sums.select(steps.columns).sort("window", "rank", "device")


@run_fact
def by_clock(run: Run) -> pl.DataFrame:
    """Return the clock offset of each trace: the columns of OFFSETS for display, one row per window and rank.

    `clock_domain` is present only where the ranks are on several clocks, `window` where there are several.
    """
    offsets = run.offsets.drop("at_ns")
    return offsets.drop(name for name in ("window", "clock_domain") if offsets[name].n_unique() < 2)


def representative_step(steps: pl.DataFrame) -> dict[str, int | None] | None:
    """Return the row to look at first: of the slowest rank, the step nearest to its median.

    `steps` is a run's breakdown by step, with the columns of `analysis.breakdown` after window and rank. None where it
    has no rows.
    """
    if steps.is_empty():
        return None
    means = (
        steps.group_by("rank").agg(pl.col("duration_ns").mean()).sort("duration_ns", "rank", descending=[True, False])
    )
    of_rank = steps.filter(pl.col("rank") == means["rank"][0])
    distance_ns = (pl.col("duration_ns") - pl.col("duration_ns").median()).abs()
    return of_rank.sort(distance_ns, "window", "start_ns").row(0, named=True)


def step_time_ns(run: Run) -> float | None:
    """Return the median over steps of the slowest rank's device window, in ns: all ranks wait for that rank.

    None where no trace marks steps.
    """
    slowest = step_times(run)
    return None if slowest.is_empty() else float(slowest.select(pl.col("duration_ns").median()).item())


def step_times(run: Run) -> pl.DataFrame:
    """Return the slowest rank's device window of each step. Columns window, step, duration_ns; in order."""
    steps = run.table(breakdown.by_step).drop_nulls("step")
    return steps.group_by("window", "step").agg(pl.col("duration_ns").max()).sort("window", "step")


def exposed_communication_ratio(run: Run) -> float | None:
    """Return the exposed communication of all ranks as a share of their time, in steps where there are any.

    None where no time was traced.
    """
    steps = run.table(breakdown.by_step)
    table = steps if steps.height else run.table(breakdown.by_rank)
    exposed_ns, whole_ns = table.select(pl.col("exposed_communication_ns", "duration_ns").sum()).row(0)
    return exposed_ns / whole_ns if whole_ns else None


def slowest_device(table: pl.DataFrame) -> pl.DataFrame:
    """Return a breakdown (columns window, rank and those of `breakdown`) with one device a rank and step: the slowest.

    One row per window, rank and step, in the order of their first rows.
    """
    slowest = pl.col("duration_ns").arg_max()
    return table.group_by("window", "rank", "step", maintain_order=True).agg(pl.all().get(slowest))


@trace_fact
def extent(trace: Trace) -> pl.DataFrame:
    """First time and steps of a trace. Columns first_ns, steps; one row.

    first_ns is the start of its first operation, activity, allocation, step or checkpoint stage; 0 without any.
    """
    starts = [trace.ops["start_ns"].min(), trace.activities["start_ns"].min(), trace.allocations["at_ns"].min()]
    starts += [trace.steps["start_ns"].min(), trace.checkpoints["start_ns"].min()]
    first_ns = min((start for start in starts if isinstance(start, int)), default=0)
    steps = trace.steps["step"].drop_nulls().unique().sort().to_list()
    return pl.DataFrame({"first_ns": [first_ns], "steps": [steps]}, schema=EXTENT_COLUMNS)


@run_fact
def run_clock(run: Run) -> pl.DataFrame:
    """Clock for the display of each trace's times: columns RUN_CLOCK, one row per window and rank.

    offset_ns, drift and at_ns convert a time to the run's clock, as in `Run.offsets`. zero_ns is when the first trace
    of the window begins on that clock. Traces that could not be aligned with others have a zero of their own.
    """
    begins = run.table(extent).select("window", "rank", "first_ns")
    clocks = run.offsets.join(begins, on=["window", "rank"], maintain_order="left")
    aligned = alignment.on_run_clock(clocks.select("window", "rank", "first_ns"), run.offsets, ("first_ns",))
    zero_ns = pl.col("zero_ns").min().over("window", "clock_domain")
    return schema.select(clocks.with_columns(zero_ns=aligned["first_ns"]).with_columns(zero_ns), RUN_CLOCK)
