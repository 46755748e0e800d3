"""Bursts of collectives that could be merged into one: launched back to back, without compute in between."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.time import backward_passes, breakdown, launches, trace_columns
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.sync import collective_matching

COLUMNS = schema.columns(
    "step device phase unit lane op group group_size dtype bytes burst position count pool activity_id start_ns "
    "dur_ns exposed_ns burst_exposed_ns"
)
_ALIKE = ("lane", "op", "group", "dtype")


@trace_fact
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
        row = columns.rows_of(pooled["activity_id"].to_numpy(), together["activity_id"].to_numpy())
        calls = together.hstack([columns.values_at(pooled["pool"], row)]).sort("start_ns", "activity_id")
        parts.append(_with_exposed(calls, compute).pipe(schema.select, COLUMNS))
    return pl.concat(parts)


def _launched_together(trace: Trace, device: int | None) -> pl.DataFrame:
    work, arrays = launches.work(trace, device), launches.work_columns(trace, device)
    trains = ~trace_columns.as_flags(work["phase"] == conventions.CHECKPOINT)
    at_ns = arrays.launched_or_start_ns
    # Preparation on the collective's own lane is not compute that it waits for.
    is_compute = arrays.computes & trains & ~trace_columns.as_flags(work["role"] == "communication")
    rows = np.flatnonzero(arrays.communicates)
    order = np.lexsort((arrays.id[rows], at_ns[rows]))
    order = order[trains[rows[order]]]
    calls = collective_matching.with_groups(trace, launches.collectives(trace, device)[order]).drop("members")
    before = np.searchsorted(np.sort(at_ns[is_compute]), at_ns[rows[order]])
    alike = calls.select(pl.struct("step", *_ALIKE, pl.Series("before", before.astype(np.int64))).rle_id())
    burst = alike.to_series().to_numpy().astype(np.int64)
    first, count = np.unique(burst, return_index=True, return_counts=True)[1:]
    bursts = calls.rename({"id": "activity_id", "message_bytes": "bytes"}).hstack(
        [
            pl.Series("burst", burst),
            pl.Series("position", np.arange(len(burst)) - first[burst]),
            pl.Series("count", count[burst]),
        ]
    )
    return columns.where(bursts, trace_columns.in_steps(trace, calls))


def _pools(trace: Trace) -> pl.DataFrame:
    reduced = backward_passes.gradient_reductions(trace)
    key = pl.struct("device", "step", "backward", "op", "group", "dtype").rank("dense").cast(pl.Int64)
    return reduced.select("activity_id", key.alias("pool"))


def _with_exposed(calls: pl.DataFrame, compute: intervals.Spans) -> pl.DataFrame:
    """Return the collectives with the exposed time of each, and of its burst."""
    spans = intervals.from_table(calls)
    _, burst = np.unique(calls["burst"].to_numpy(), return_inverse=True)
    start, end = np.full(burst.max() + 1, np.iinfo(np.int64).max), np.full(burst.max() + 1, np.iinfo(np.int64).min)
    np.minimum.at(start, burst, spans[:, 0])
    np.maximum.at(end, burst, spans[:, 1])
    burst_spans = np.stack((start, end), axis=1)[burst]
    return calls.hstack(
        [
            pl.Series("exposed_ns", _exposed_ns(spans, compute)),
            pl.Series("burst_exposed_ns", _exposed_ns(burst_spans, compute)),
        ]
    )


def _exposed_ns(spans: intervals.Spans, compute: intervals.Spans) -> Ints:
    return spans[:, 1] - spans[:, 0] - intervals.coverage(spans, compute)
