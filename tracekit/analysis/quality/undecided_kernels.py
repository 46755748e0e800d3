"""Kernels whose names only hint at communication, compared across ranks: collectives end together on all of them."""

import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.ingest.readers.normalize import communication_kernels
from tracekit.model import schema, units
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.sync import alignment

COLUMNS = schema.columns("name nth start_ns end_ns dur_ns busy_ns")
TOGETHER_COLUMNS = schema.columns("window name calls dur_ns busy_ns start_spread_ns end_spread_ns residual_ns") | {
    "ranks": pl.List(pl.Int64), "ends_together": pl.Boolean,
}  # fmt: skip
_MIN_CALLS = 3
_MIN_RATIO = 2.0
"""How many times farther apart starts must be than ends: kernels that compute keep their distance."""


@trace_fact
def undecided_kernels(trace: Trace) -> pl.DataFrame:
    """Return the kernels that count as compute although their names hint at communication.

    Columns COLUMNS: nth (number among the kernels of its name, by start), busy_ns (of all work of the trace); one row
    per kernel.
    """
    if not trace.on_device:
        return schema.empty(COLUMNS)
    names, _ = trace_columns.activity_names(trace)
    undecided_names = [name for name in names if communication_kernels.kind_of(name) == "undecided"]
    if not undecided_names:
        return schema.empty(COLUMNS)
    kernels = trace.activities.filter(pl.col("kind") == "compute", pl.col("name").is_in(undecided_names))
    kernels = kernels.sort("start_ns", "id")
    return kernels.select(
        "name", pl.int_range(pl.len()).over("name").cast(pl.Int64).alias("nth"), "start_ns",
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"), "dur_ns",
        pl.lit(int(trace.activities["dur_ns"].sum()), pl.Int64).alias("busy_ns"),
    )  # fmt: skip


FACTS: tuple[TraceFact, ...] = (undecided_kernels,)


@run_fact
def ending_together(run: Run) -> pl.DataFrame:
    """Spread of the starts and the ends of undecided kernels over the ranks of the run; use ``run.table``.

    Columns TOGETHER_COLUMNS: ranks (that have the kernel equally often), calls (of each), start_spread_ns and
    end_spread_ns (median over calls, first to last rank), residual_ns (clock error), ends_together (the ends are within
    half of the starts, and the starts are farther apart than the clock error); one row per window and name.
    """
    rows = run.table(undecided_kernels)
    if len(run.ranks) < 2 or rows.is_empty():
        return schema.empty(TOGETHER_COLUMNS)
    clocks = run.offsets.select("window", "rank", "residual_ns").drop_nulls()
    aligned = alignment.on_run_clock(rows, run.offsets, ("start_ns", "end_ns")).join(clocks, on=["window", "rank"])
    counted = aligned.with_columns(pl.len().over("window", "rank", "name").alias("calls"))
    usual = counted.with_columns(pl.col("calls").mode().sort().last().over("window", "name").alias("usual"))
    calls = (
        usual.filter(pl.col("calls") == pl.col("usual"))
        .group_by("window", "name", "nth")
        .agg(
            pl.col("rank").unique().sort().alias("ranks"),
            *((pl.col(column).max() - pl.col(column).min()).alias(column) for column in ("start_ns", "end_ns")),
            pl.col("dur_ns").max(), pl.col("busy_ns").max(), pl.col("residual_ns").max(),
        )
        .filter(pl.col("ranks").list.len() > 1)
    )  # fmt: skip
    table = calls.group_by("window", "name").agg(
        pl.len().cast(pl.Int64).alias("calls"), pl.col("ranks").first(), pl.col("dur_ns").sum(),
        pl.col("busy_ns", "residual_ns").max(),
        pl.col("start_ns").median().cast(pl.Int64).alias("start_spread_ns"),
        pl.col("end_ns").median().cast(pl.Int64).alias("end_spread_ns"),
    )  # fmt: skip
    is_apart = pl.col("start_spread_ns") > pl.max_horizontal(_MIN_RATIO * pl.col("end_spread_ns"), "residual_ns")
    together = table.with_columns(((pl.col("calls") >= _MIN_CALLS) & is_apart).alias("ends_together"))
    return schema.select(together.sort("window", "name"), TOGETHER_COLUMNS)


def data_quality(run: Run) -> pl.DataFrame:
    """Return an issue for undecided kernels that end together on all ranks, columns as RUN_DATA_QUALITY."""
    together = run.table(ending_together).filter("ends_together").sort("dur_ns", descending=True)
    if together.is_empty():
        return RUN_DATA_QUALITY.empty()
    first = together.row(0, named=True)
    more = f" and {together.height - 1} more" if together.height > 1 else ""
    message = (
        f"{first['name'][:80]}{more}: ranks start these kernels {units.duration(first['start_spread_ns'])} apart and "
        f"end them within {units.duration(first['end_spread_ns'])}, as in collectives. They count as compute."
    )
    share = int(together["dur_ns"].sum()) / max(int(together["busy_ns"].max() or 1), 1)  # type: ignore[arg-type]
    row = ("undecided_ending_together", message, share)
    table = pl.DataFrame([row], schema=["kind", "message", "affected_ratio"], orient="row")
    return RUN_DATA_QUALITY.conform(table)
