"""Per-step samples of every metric that runs are compared by, of a trace, of a run's ranks together, and of a job."""

import functools
import re
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.communication import collective_instances, exposed_communication
from tracekit.analysis.host import step_parts
from tracekit.model import schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace, TraceFact
from tracekit.regression import metric_sources, metrics
from tracekit.regression.metric_sources import (
    FASTEST_PREFIX,
    FASTEST_SPREAD_PREFIX,
    LOGGED_METRICS,
    PART_PREFIX,
    TRACE_SOURCES,
    part_samples,
)
from tracekit.regression.metrics import Aggregation, Metric

Values: TypeAlias = npt.NDArray[np.float64]

COLUMNS = {"step": pl.Int64, "metric": pl.String, "value": pl.Float64}
SAMPLE_COLUMNS = {"window": pl.Int64, "rank": pl.Int64, **COLUMNS}
_PART_RANKS = 8
_LOCATION = re.compile(r"(?P<file>.+)\((?P<line>\d+)\): ")
_IS_METRIC = ~pl.col("metric").str.contains("/", literal=True)  # parts of a step have a prefix


@trace_fact
def samples(trace: Trace) -> pl.DataFrame:
    """Return per-step samples of the metrics that one rank measures.

    Columns step, metric, value; one row per step (of saves: per step after which something is saved) and metric that
    the trace has, and one per step and part of the step (`metric_sources.part_samples`).
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
    per_rank = separate_waits(per_rank.select(*SAMPLE_COLUMNS), run.table(exposed_communication.exposed_by_step))
    rows = pl.concat([per_rank, across.select(*SAMPLE_COLUMNS)]).drop_nulls("value")
    part_ranks = _part_ranks(rows)
    rows = rows.filter(_IS_METRIC | pl.col("rank").is_in(part_ranks))
    rows = pl.concat([rows, _fastest_samples(run)])
    # A rank's logs are read with each of its windows; steps of other windows may have the same numbers.
    repeats = pl.col("metric").is_in(LOGGED_METRICS) & ~pl.struct("rank", "step", "metric").is_first_distinct()
    return rows.filter(~repeats).unique(["window", "rank", "step", "metric"], keep="first", maintain_order=True)


def _fastest_samples(run: Run) -> pl.DataFrame:
    """Time of the calls of each part on CPUs, each on the rank and in the step where it is fastest. SAMPLE_COLUMNS.

    One row per part without a step, and one of how much more the calls take where only half of the steps count.
    """
    calls = run.table(step_parts.fastest_calls)
    times = pl.col("fastest_ns", "even_ns", "odd_ns")
    fastest = calls.group_by("part", "name", "operator", "number").agg(times.min())
    spread_ns = (pl.col("even_ns") + pl.col("odd_ns")) / 2 - pl.col("fastest_ns")
    sums = fastest.group_by("part", "name").agg(
        pl.col("fastest_ns").sum().cast(pl.Float64).alias(FASTEST_PREFIX),
        spread_ns.sum().alias(FASTEST_SPREAD_PREFIX),
    )
    key = pl.concat_str("part", pl.lit("/"), pl.col("name").str.head(metric_sources.MAX_PART_NAME))
    rows = sums.with_columns(key.alias("key")).unpivot(
        [FASTEST_PREFIX, FASTEST_SPREAD_PREFIX], index="key", variable_name="prefix"
    )
    first = (pl.lit(calls[column].min()).alias(column) for column in ("window", "rank"))
    metric = pl.concat_str("prefix", "key").alias("metric")
    return rows.with_columns(*first, metric, step=None).pipe(schema.select, SAMPLE_COLUMNS).sort("metric")


def separate_waits(table: pl.DataFrame, exposed: pl.DataFrame) -> pl.DataFrame:
    """Return samples of which the parts of communication have no waiting for ranks, which is a part of its own.

    `exposed` is `exposed_communication.exposed_by_step`: waiting is taken from all communication of a step alike.
    """
    key = ["window", "rank", "step"]
    slowest = exposed.sort("duration_ns", "device", descending=[True, False]).unique(key, maintain_order=True)
    waited = slowest.filter(pl.col("waited_ns") > 0).select(
        *key, wait_ratio=pl.col("waited_ns") / pl.col("exposed_communication_ns")
    )
    is_communication = pl.col("metric").str.contains(f"^{PART_PREFIX}[a-z]+/{step_parts.COMMUNICATION}/")
    rows = table.filter(is_communication).join(waited, on=key, how="inner", nulls_equal=True)
    if rows.is_empty():
        return table
    waits = rows.with_columns((pl.col("value") * pl.col("wait_ratio")).round().alias("wait_ns"))
    kept = waits.with_columns((pl.col("value") - pl.col("wait_ns")).alias("value")).select(*SAMPLE_COLUMNS)
    metric = pl.col("metric").str.replace(f"/{step_parts.COMMUNICATION}/.*$", f"/{step_parts.WAIT}/")
    sums = waits.group_by(*key, metric).agg(pl.col("wait_ns").sum().alias("value"))
    rest = table.join(rows, on=[*key, "metric"], how="anti", nulls_equal=True, maintain_order="left")
    return pl.concat([rest, kept, sums.select(*SAMPLE_COLUMNS).sort(*SAMPLE_COLUMNS)])


def places_of_parts(run: Run) -> dict[tuple[int, str], str]:
    """Return where in the program each rank spends the time of its parts: (1, "data/") at "data.py:20".

    Of waiting for ranks it is the rank that most of it waits for. Parts of which no place is recorded are left out.
    """
    located = run.table(metric_sources.part_places).filter(pl.col("rank").is_in(_part_ranks(run.table(samples))))
    rows = located.unique(["rank", "metric"], keep="first", maintain_order=True).select("rank", "metric", "place")
    places = {(rank, metric.split("/", 2)[2]): _short_place(place) for rank, metric, place in rows.iter_rows()}
    last = run.table(collective_instances.instances).select("window", "instance", "last_known_rank")
    waits = run.table(collective_instances.waits).join(last, on=["window", "instance"])
    sums = waits.filter(pl.col("rank") != pl.col("last_known_rank")).group_by("rank", "last_known_rank").agg(
        pl.col("wait_ns").sum()
    )  # fmt: skip
    longest = sums.filter(pl.col("wait_ns") > 0).sort(
        "rank", "wait_ns", "last_known_rank", descending=[False, True, False]
    )
    of_waits = longest.unique("rank", keep="first", maintain_order=True)
    return places | {(rank, f"{step_parts.WAIT}/"): f"rank {last}" for rank, last, _ in of_waits.iter_rows()}


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


def _part_ranks(rows: pl.DataFrame) -> list[int]:
    """Return the ranks whose parts are kept: the first ones, and the one that waits least, for which others wait."""
    ranks = sorted(rows["rank"].unique().to_list())
    if len(ranks) <= _PART_RANKS:
        return ranks
    is_wait = pl.col("metric").str.contains(f"^{PART_PREFIX}[a-z]+/{step_parts.WAIT}/")
    waits = rows.group_by("rank").agg(pl.col("value").filter(is_wait).sum()).sort("value", "rank")
    return sorted({*ranks[: _PART_RANKS - 1], int(waits["rank"][0])})


def _short_place(location: str) -> str:
    """Return a place in the form that editors open.

    >>> _short_place("src/data.py(20): fetched")
    'src/data.py:20'
    """
    match = _LOCATION.match(location)
    return f"{match['file']}:{match['line']}" if match else location
