"""What each unit's work takes in each step, and what work there is: where a change of a run lies."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions, intervals
from tracekit.analysis import breakdown
from tracekit.intervals import Spans
from tracekit.trace import Trace

UNIT_COLUMNS = {"unit": pl.String, "step": pl.Int64, "metric": pl.String, "value": pl.Float64}
UNIT_METRICS = {"compute_ns": True, "exposed_communication_ns": True}
"""What is told of a unit, and whether lower is better."""
WORK_COLUMNS = {"kind": pl.String, "phase": pl.String, "name": pl.String, "step_ns": pl.Float64}


def unit_samples(trace: Trace) -> pl.DataFrame:
    """Return what the work of each FSDP unit takes in each step.

    Columns unit, step, metric, value; one row per unit, step and metric: `compute_ns`, the time in which any of the
    unit's compute ran, and `exposed_communication_ns`, that in which its communication ran and no compute of the rank,
    of any unit, did. A unit's work is that of FSDP's own spans, and of forward and backward where these are told apart.
    """
    work = trace.activities.filter(
        pl.col("unit").is_not_null(), pl.col("step").is_not_null(), pl.col("kind").is_in(("compute", "communication"))
    )
    keyed = work.with_columns(pl.struct("unit", "step", "kind").rank("dense").cast(pl.Int64).alias("key"))
    keys = keyed.select("key", "unit", "step", "kind").unique("key").sort("key")
    spans, key = _union_by_key(intervals.from_columns(keyed["start_ns"], keyed["dur_ns"]), keyed["key"].to_numpy() - 1)
    hidden_ns = intervals.coverage(spans, _compute(trace))
    length_ns = spans[:, 1] - spans[:, 0]
    is_compute = (keys["kind"] == "compute").to_numpy()
    own_ns = np.where(is_compute[key], length_ns, length_ns - hidden_ns) if len(spans) else length_ns
    sums = np.bincount(key, own_ns, minlength=keys.height)
    metric = pl.when(pl.col("kind") == "compute").then(pl.lit("compute_ns")).otherwise(
        pl.lit("exposed_communication_ns")
    )  # fmt: skip
    told = keys.with_columns(metric.alias("metric"), pl.Series("value", sums, pl.Float64))
    return told.select(pl.col(name).cast(dtype) for name, dtype in UNIT_COLUMNS.items()).sort("unit", "metric", "step")


def work(trace: Trace) -> pl.DataFrame:
    """Return what the rank does in a step, by name, saves left out.

    Columns kind, phase, name, step_ns; one row per kind, phase and name of activities: its time in a typical step, the
    median over all steps, 0 in a step without it.
    """
    steps = trace.steps["step"].drop_nulls().n_unique()
    rows = trace.activities.filter(
        pl.col("step").is_not_null(), pl.col("phase").ne_missing(conventions.CHECKPOINT)
    )  # fmt: skip
    by_step = rows.group_by("kind", "phase", "name", "step").agg(pl.col("dur_ns").sum())
    place = ["kind", "phase", "name"]
    # A step in which it did not run counts as 0: then the median is that of a longer list.
    found = by_step.group_by(place).agg(
        pl.concat_list(pl.col("dur_ns").implode(), pl.lit(0, pl.Int64).repeat_by(max(steps, 1) - pl.len()).first())
        .list.median()
        .alias("step_ns")
        if steps
        else pl.lit(0.0).alias("step_ns")
    )
    return found.select(pl.col(name).cast(dtype) for name, dtype in WORK_COLUMNS.items()).sort(
        "step_ns", *place, descending=[True, False, False, False]
    )


def _compute(trace: Trace) -> Spans:
    parts = [breakdown.busy(trace, device)[0] for device in breakdown.devices(trace)]
    return intervals.union(*parts)


def _union_by_key(spans: Spans, key: npt.NDArray[np.int64]) -> tuple[Spans, npt.NDArray[np.int64]]:
    """Return the spans of each key, disjoint within it, and the key of each; keys are numbered from 0."""
    if not len(spans):
        return intervals.EMPTY, np.empty(0, np.int64)
    origin_ns = int(spans[:, 0].min())
    # Each key's spans on a stretch of time of its own: one union then keeps them apart.
    stretch_ns = int(spans[:, 1].max()) - origin_ns + 1
    apart = intervals.union(spans - origin_ns + (key * stretch_ns)[:, None])
    of = apart[:, 0] // stretch_ns
    return apart - (of * stretch_ns)[:, None] + origin_ns, of
