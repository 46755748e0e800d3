"""Bursts of collectives that could be merged into one: launched back to back, without compute in between."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import backward_passes, breakdown, launches
from tracekit.model import intervals, schema
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "step device phase unit lane op group group_size dtype bytes burst position count pool activity_id start_ns "
    "dur_ns exposed_ns burst_exposed_ns"
)
_ALIKE = ("lane", "op", "group", "dtype")


def bursts(trace: Trace) -> pl.DataFrame:
    """Return the collectives of training, each with the burst and pool that it belongs to.

    Columns COLUMNS: position and count in the burst, exposed_ns of the collective, burst_exposed_ns of the burst from
    its first start to its last end; one row per collective. A burst: collectives of one lane, op, group and type that
    the host launched without other compute or collectives in between, so that all data was ready at the first launch. A
    pool: the gradient reductions of one backward pass, op, group and type, which a larger bucket would merge; null for
    other collectives.
    """
    parts = [schema.empty(COLUMNS)]
    pooled = _pools(trace)
    for device in breakdown.devices(trace):
        together = _launched_together(trace, device)
        if together.is_empty():
            continue
        compute, _, _ = breakdown.busy(trace, device)
        calls = together.join(pooled, on="activity_id", how="left").sort("start_ns", "activity_id")
        parts.append(_with_exposed(calls, compute).pipe(schema.select, COLUMNS))
    return pl.concat(parts)


def _launched_together(trace: Trace, device: int | None) -> pl.DataFrame:
    work = launches.work(trace, device).filter(
        pl.col("kind").is_in(["compute", "communication"]), pl.col("phase").ne_missing(conventions.CHECKPOINT)
    )
    messages = launches.messages(trace)
    # Preparation on the collective's own lane is not compute that it waits for.
    others = work.filter((pl.col("kind") == "compute") & (pl.col("role") != "communication"))
    calls = work.filter(pl.col("kind") == "communication").join(messages, on="id", how="left", maintain_order="left")
    at_ns = pl.coalesce("launched_ns", "start_ns").alias("at_ns")
    calls = calls.with_columns(at_ns).sort("at_ns", "id")
    before = np.searchsorted(np.sort(others.select(at_ns).to_series().to_numpy()), calls["at_ns"].to_numpy())
    alike = pl.struct("step", *_ALIKE, pl.Series("before", before.astype(np.int64))).rle_id().cast(pl.Int64)
    return (
        calls.with_columns(alike.alias("burst"), pl.col("id").alias("activity_id"))
        .with_columns(
            pl.int_range(pl.len()).over("burst").alias("position"),
            pl.len().over("burst").alias("count"),
            pl.col("message_bytes").alias("bytes"),
        )
        .filter(trace.in_steps)
    )


def _pools(trace: Trace) -> pl.DataFrame:
    reduced = backward_passes.gradient_reductions(trace)
    key = pl.struct("device", "step", "backward", "op", "group", "dtype").rank("dense").cast(pl.Int64)
    return reduced.select("activity_id", key.alias("pool")).unique("activity_id")


def _with_exposed(calls: pl.DataFrame, compute: intervals.Spans) -> pl.DataFrame:
    """Return the collectives with the exposed time of each, and of its burst."""
    spans = intervals.from_table(calls)
    end_ns = pl.col("start_ns") + pl.col("dur_ns")
    whole = calls.select(
        pl.col("start_ns").min().over("burst"), (end_ns.max() - pl.col("start_ns").min()).over("burst").alias("dur_ns")
    )
    return calls.with_columns(
        pl.Series("exposed_ns", _exposed_ns(spans, compute)),
        pl.Series("burst_exposed_ns", _exposed_ns(intervals.from_table(whole), compute)),
    )


def _exposed_ns(spans: intervals.Spans, compute: intervals.Spans) -> Ints:
    return spans[:, 1] - spans[:, 0] - intervals.coverage(spans, compute)
