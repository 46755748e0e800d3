"""Work of each unit and step, and totals of work by name: to locate what changed between runs."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import flops
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown
from tracekit.model import intervals, schema
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.trace import Trace

UNIT_COLUMNS = {"unit": pl.String, "step": pl.Int64, "metric": pl.String, "value": pl.Float64}
UNIT_METRICS = {"compute_ns": True, "exposed_communication_ns": True}
"""Metrics of a unit, and whether lower is better."""
WORK_COLUMNS = {"kind": pl.String, "phase": pl.String, "name": pl.String, "amount": pl.Float64}
FLOPS, SENT, ALLOCATED, SAVE = "flops", "sent", "allocated", "save"


@trace_fact
def unit_samples(trace: Trace) -> pl.DataFrame:
    """Return the time of each FSDP unit's work in each step.

    Columns unit, step, metric, value; one row per unit, step and metric: `compute_ns`, in which any compute of the unit
    ran, and `exposed_communication_ns`, in which its communication ran and no compute of the rank. A unit's work is
    that of FSDP's own spans, and of forward and backward where these are known.
    """
    work = trace.activities.filter(
        pl.col("unit").is_not_null(), pl.col("step").is_not_null(), pl.col("kind").is_in(("compute", "communication"))
    )
    keyed = work.with_columns(pl.struct("unit", "step", "kind").rank("dense").cast(pl.Int64).alias("key"))
    keys = keyed.select("key", "unit", "step", "kind").unique("key").sort("key")
    spans, key = _union_by_key(intervals.from_table(keyed), keyed["key"].to_numpy() - 1)
    hidden_ns = intervals.coverage(spans, _compute(trace))
    length_ns = spans[:, 1] - spans[:, 0]
    is_compute = (keys["kind"] == "compute").to_numpy()
    own_ns = np.where(is_compute[key], length_ns, length_ns - hidden_ns) if len(spans) else length_ns
    sums = np.bincount(key, own_ns, minlength=keys.height)
    metric = pl.col("kind").replace_strict(["compute", "communication"], list(UNIT_METRICS), return_dtype=pl.String)
    samples = keys.with_columns(metric.alias("metric"), pl.Series("value", sums, pl.Float64))
    return schema.select(samples, UNIT_COLUMNS).sort("unit", "metric", "step")


@trace_fact
def work(trace: Trace) -> pl.DataFrame:
    """Return the rank's work in the median step by name, saves excluded.

    Columns kind, phase, name, amount; one row per kind, phase and name. For activities (compute, communication, memcpy,
    memset) the amount is time in ns, by activity name; for `flops` the operations of `flops.flops`, by op; for `sent`
    the bytes that collectives send, by op; for `allocated` the bytes allocated in the memory of the trace's work, by
    unit ('' where unknown). It is the median over all steps, 0 in a step without it.
    """
    in_training = pl.col("step").is_not_null() & pl.col("phase").ne_missing(conventions.CHECKPOINT)
    activities = trace.activities.filter(in_training)
    sent = trace.collectives.select(pl.col("activity_id").alias("id"), "op", "sent_bytes").join(
        activities.select("id", "step", "phase"), on="id"
    )
    allocated = trace.allocations.filter(in_training, allocations.of_training(trace), pl.col("delta_bytes") > 0)
    allocated = allocated.filter(~allocations.in_collectives(trace, allocated["at_ns"]))
    computed = flops.flops(trace)
    parts = [
        computed.select("phase", "name", "step", kind=pl.lit(FLOPS), amount=pl.col("flops").cast(pl.Int64)),
        activities.select("phase", "name", "step", kind="kind", amount="dur_ns"),
        sent.select("phase", name="op", step="step", kind=pl.lit(SENT), amount="sent_bytes"),
        allocated.select("phase", name="unit", step="step", kind=pl.lit(ALLOCATED), amount="delta_bytes"),
    ]
    return _typical(pl.concat(parts), max(1, trace.steps["step"].drop_nulls().n_unique()))


@trace_fact
def save_work(trace: Trace) -> pl.DataFrame:
    """Return the stages of the rank's median blocking save. Columns as `work`, kind `save`.

    The amount is in ns, the median over saves; everything saved after one step is one save.
    """
    rows = trace.checkpoints.filter(
        pl.col("operation") == conventions.SAVE, "blocking", pl.col("stage") != conventions.TOTAL
    )
    step = pl.coalesce(pl.col("step").cast(pl.String), "checkpoint")
    stages = rows.select(
        kind=pl.lit(SAVE), phase=pl.lit(None, pl.String), name="stage", step=step, amount=pl.col("dur_ns")
    )
    return _typical(stages, max(1, stages["step"].n_unique()))


def _typical(rows: pl.DataFrame, steps: int) -> pl.DataFrame:
    place = ["kind", "phase", "name"]
    sums = rows.with_columns(pl.col("name").fill_null("")).group_by(*place, "step").agg(pl.col("amount").sum())
    # Steps without it have amount 0 and sort first.
    middle = [(pl.len() - steps + rank) for rank in ((steps - 1) // 2, steps // 2)]
    amounts = pl.col("amount").sort()
    pair = [pl.when(index >= 0).then(amounts.get(index.clip(0), null_on_oob=True)).otherwise(0) for index in middle]
    medians = sums.group_by(place).agg(((pair[0] + pair[1]) / 2).alias("amount"))
    return (
        schema.select(medians, WORK_COLUMNS)
        .filter(pl.col("amount") > 0)
        .sort("kind", "amount", *place[1:], descending=[False, True, False, False])
    )


def _compute(trace: Trace) -> Spans:
    parts = [breakdown.busy(trace, device)[0] for device in breakdown.devices(trace)]
    return intervals.union(*parts)


def _union_by_key(spans: Spans, key: npt.NDArray[np.int64]) -> tuple[Spans, npt.NDArray[np.int64]]:
    """Return the spans of each key, disjoint within it, and the key of each; keys are numbered from 0."""
    if not len(spans):
        return intervals.EMPTY, np.empty(0, np.int64)
    origin_ns = int(spans[:, 0].min())
    # Shift each key's spans to a time range of its own, so that one union keeps them separate.
    stretch_ns = int(spans[:, 1].max()) - origin_ns + 1
    if (int(key.max()) + 1) * stretch_ns >= 1 << 62:
        parts = [intervals.union(spans[key == number]) for number in range(int(key.max()) + 1)]
        return np.concatenate(parts), np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    disjoint = intervals.union(spans - origin_ns + (key * stretch_ns)[:, None])
    span_key = disjoint[:, 0] // stretch_ns
    return disjoint - (span_key * stretch_ns)[:, None] + origin_ns, span_key
