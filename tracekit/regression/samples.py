"""Per-step samples of every metric that runs are compared by, of a trace, of a run's ranks together, and of a job."""

import functools
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.regression import metrics
from tracekit.regression.metric_sources import LOGGED_METRICS, PART_PREFIX, TRACE_SOURCES, part_samples
from tracekit.regression.metrics import Aggregation, Metric

Values: TypeAlias = npt.NDArray[np.float64]

COLUMNS = {"step": pl.Int64, "metric": pl.String, "value": pl.Float64}
SAMPLE_COLUMNS = {"window": pl.Int64, "rank": pl.Int64, **COLUMNS}
_PART_RANKS = 8
_IS_METRIC = ~pl.col("metric").str.starts_with(PART_PREFIX)


@trace_fact
def samples(trace: Trace) -> pl.DataFrame:
    """Return per-step samples of the metrics that one rank measures.

    Columns step, metric, value; one row per step (of saves: per step after which something is saved) and metric that
    the trace has, and one per step and part of the step (`step_parts`).
    """
    by_key = {metric.key: metric for metric in metrics.compared_metrics() if metric.of_trace}
    of_metrics = (metric.of_trace for metric in by_key.values() if metric.of_trace)
    sources: dict[TraceFact, None] = dict.fromkeys((*TRACE_SOURCES, *of_metrics))
    parts = part_samples(trace).pipe(schema.select, COLUMNS)
    return pl.concat([*(_conform(source(trace), COLUMNS, by_key, source) for source in sources), parts])


@run_fact
def samples_across(run: Run) -> pl.DataFrame:
    """Return per-step samples of the metrics that need several ranks; call it by ``run.table(samples_across)``.

    Columns window, rank, step, metric, value.
    """
    shared = [metric for metric in metrics.compared_metrics() if metric.of_run]
    parts = [
        _conform(metric.of_run(run), SAMPLE_COLUMNS, {metric.key: metric}, metric.of_run)
        for metric in shared
        if metric.of_run
    ]
    return pl.concat(parts)


def run_samples(run: Run) -> pl.DataFrame:
    """Return the samples of all metrics of a run.

    Columns SAMPLE_COLUMNS; one row per window, rank, step and metric.
    """
    per_rank, across = run.table(samples), run.table(samples_across)
    rows = pl.concat([per_rank.select(*SAMPLE_COLUMNS), across.select(*SAMPLE_COLUMNS)]).drop_nulls("value")
    # All ranks wait for a slow one, so a few of them show what every step consists of.
    part_ranks = sorted(run.ranks)[:_PART_RANKS]
    rows = rows.filter(~pl.col("metric").str.starts_with(PART_PREFIX) | pl.col("rank").is_in(part_ranks))
    # A rank's logs are read with each of its windows; steps of other windows may have the same numbers.
    repeats = pl.col("metric").is_in(LOGGED_METRICS) & ~pl.struct("rank", "step", "metric").is_first_distinct()
    return rows.filter(~repeats).unique(["window", "rank", "step", "metric"], keep="first", maintain_order=True)


def job_samples(table: pl.DataFrame, ranks: Sequence[int] | None = None) -> dict[str, Values]:
    """Return the samples of a job as a whole, by metric, one per step (of saves: per step that is saved after).

    A step's sample is that of its worst rank for what all ranks wait for, and the mean over ranks for all else.
    """
    return {metric: values for metric, (_, values) in job_series(table, ranks).items()}


def job_series(table: pl.DataFrame, ranks: Sequence[int] | None = None) -> dict[str, tuple[pl.Series, Values]]:
    """Return the steps, as structs of window and step, and the samples of `job_samples`, by metric."""
    rows = table.lazy().filter(_IS_METRIC)
    if ranks is not None:
        rows = rows.filter(pl.col("rank").is_in(ranks))
    value = pl.col("value")
    per_step = rows.group_by("metric", "window", "step").agg(
        pl.when(pl.col("metric").first().is_in(_worst(lower_is_better=True)))
        .then(value.max())
        .when(pl.col("metric").first().is_in(_worst(lower_is_better=False)))
        .then(value.min())
        .otherwise(value.mean())
        .alias("value")
    )
    by_metric = (
        per_step.sort("metric", "window", "step").with_columns(pl.struct("window", "step").alias("step")).collect()
    )
    values = by_metric["value"].to_numpy().astype(np.float64)
    starts = by_metric["metric"].rle().struct.unnest().with_columns(pl.col("len").cum_sum().alias("end"))
    return {
        str(metric): (by_metric["step"].slice(end - count, count), values[end - count : end])
        for count, metric, end in starts.iter_rows()
    }


def without_parts(table: pl.DataFrame) -> pl.DataFrame:
    """Return the samples of metrics, without those of a step's parts; the columns are those of the table."""
    return table.filter(_IS_METRIC)


@functools.cache
def _worst(*, lower_is_better: bool) -> tuple[str, ...]:
    return tuple(
        metric.key
        for metric in metrics.all_metrics().values()
        if metric.over_ranks is Aggregation.WORST and metric.lower_is_better is lower_is_better
    )


def _conform(table: pl.DataFrame, types: schema.ColumnTypes, by_key: dict[str, Metric], source: object) -> pl.DataFrame:
    """Return the rows of the metrics in `by_key` that a source measures, with these columns."""
    if table.is_empty():
        return schema.empty(types)
    keys = [metric.key for metric in by_key.values() if source in (metric.of_trace, metric.of_run)]
    if "metric" not in table.columns:
        table = table.with_columns(pl.lit(keys[0]).alias("metric"))
    return table.filter(pl.col("metric").is_in(keys)).pipe(schema.select, types)
