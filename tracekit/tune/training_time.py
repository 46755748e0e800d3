"""Training time per step by the metrics log, saves included: what changes of saves and of data loading are judged by.

Profiled steps are those between saves, in which a save in the background costs time instead of saving some. Workers of
a data loader finish several batches at once, so that the median step waits for none of them.
"""

from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.model.fact import trace_fact
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.regression.metrics import NS, Aggregation, Metric
from tracekit.regression.samples import Values
from tracekit.regression.significance import MetricSides, compare_metrics
from tracekit.regression.thresholds import Change, Thresholds

METRIC = Metric(
    "training_time_ns", "training time per step", NS, "Mean time of a step by the log, saves included.",
    over_ranks=Aggregation.WORST, usual_spread=0.05,
)  # fmt: skip
_WARM_UP_STEPS = 1
"""Steps at the beginning that are left out: the first one allocates and starts threads."""


@trace_fact
def logged_step_times(trace: Trace) -> pl.DataFrame:
    """Time of each step by the metrics log, in ns. Columns step, value; one row per logged step."""
    rows = trace.metrics.filter(pl.col("name") == conventions.STEP_TIME_METRIC, pl.col("step").is_not_null())
    return rows.select("step", "value").drop_nulls()


def change(reference: Sequence[Run], candidate: Sequence[Run], thresholds: Thresholds) -> Change | None:
    """Change of the training time per step between recordings of two sides; None where one logged no steps."""
    sides = [[_training_time(run) for run in runs] for runs in (reference, candidate)]
    if any(not len(values) for side in sides for values in side):
        return None
    (compared,) = compare_metrics([MetricSides(METRIC, sides[0], sides[1])], thresholds)
    return compared


def _training_time(run: Run) -> Values:
    """Mean time of a step on the slowest rank, without warm-up, shape (1,); shape (0,) where no step is logged."""
    rows = run.table(logged_step_times).unique(["rank", "step"], keep="last")
    steady = rows.filter(pl.col("step") >= pl.col("step").min() + _WARM_UP_STEPS)
    means = steady.group_by("rank").agg(pl.col("value").mean())["value"]
    return np.array([means.max()] if len(means) else [], dtype=np.float64)
