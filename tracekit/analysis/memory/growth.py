"""Memory growth from step to step: a robust slope with its confidence interval."""

import math
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit import conventions
from tracekit.analysis.memory import allocations
from tracekit.model.fact import trace_fact
from tracekit.model.trace import Trace

COLUMNS = {
    "device": pl.Int64, "source": pl.String, "steps": pl.Int64, "first_step": pl.Int64, "last_step": pl.Int64,
    "first_bytes": pl.Int64, "last_bytes": pl.Int64, "slope_bytes": pl.Float64, "low_bytes": pl.Float64,
    "high_bytes": pl.Float64, "spread_bytes": pl.Float64,
}  # fmt: skip
LEAST_STEPS = 5
_MOST_STEPS = 1500  # 1.1 million pairs
_DEVIATIONS = 2.5758293  # 99%
_EVENTS, _METRICS = "events", "metrics"


@trace_fact
def growth(trace: Trace) -> pl.DataFrame:
    """Return the growth of allocated memory per step.

    Columns device, source (events: of the allocator in the trace; metrics: the log of every step), steps, first_step,
    last_step, first_bytes, last_bytes, slope_bytes (per step: the median over all pairs of steps), low_bytes and
    high_bytes (its 99% confidence interval), spread_bytes (interquartile range of the steps with that growth removed);
    one row per device and source with at least 5 steps. Steady growth has low_bytes above 0. (Theil-Sen slope with
    Kendall's interval: robust to a quarter of outlier steps.) The first step of the log fills caches and is left out.
    On the host, blocks whose free the profiler cannot see, because a thread without a profiler makes it, are left out:
    unfreed allocations inside collectives, and unfreed blocks of a size of which another was allocated again at the
    same address without a free in between.
    """
    series = [*_from_events(trace), *_from_log(trace)]
    rows = [
        (device, source, *_slope(steps, used)) for device, source, steps, used in series if len(steps) >= LEAST_STEPS
    ]
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def _from_events(trace: Trace) -> Iterator[tuple[int | None, str, pl.Series, pl.Series]]:
    """Yield each device with the bytes that are allocated at the end of each step, by the allocator's events."""
    if trace.allocations.is_empty():
        return
    usage = allocations.live(trace).filter(allocations.of_training(trace))
    usage = usage.with_columns(pl.col("live_bytes") - _unseen_frees(trace, usage["event"])).drop_nulls("step")
    ends = usage.group_by("device", "step").agg(pl.col("live_bytes").last()).sort("device", "step")
    for (device,), part in ends.group_by("device", maintain_order=True):
        yield device, _EVENTS, part["step"], part["live_bytes"]


def _from_log(trace: Trace) -> Iterator[tuple[int | None, str, pl.Series, pl.Series]]:
    """Yield the bytes that are allocated at the end of each step but the first, by the metrics log."""
    if trace.metrics.is_empty():
        return
    logged = trace.metrics.filter(pl.col("name") == conventions.ALLOCATED_METRIC).drop_nulls().sort("step").slice(1)
    yield None, _METRICS, logged["step"], logged["value"].cast(pl.Int64)


def _unseen_frees(trace: Trace, event: pl.Series) -> pl.Series:
    """Return, for each event, the host bytes whose free the profiler could not see."""
    if trace.on_device:
        return pl.zeros(len(event), pl.Int64, eager=True)
    unfreed = allocations.blocks(trace).filter(~pl.col("freed"))
    # A backend such as gloo holds the tensors of a collective until one of its own threads drops them.
    proven_sizes = unfreed.filter(pl.col("end_event").is_not_null())["bytes"].unique()
    is_lost = allocations.in_collectives(trace, unfreed["start_ns"]) | unfreed["bytes"].is_in(proven_sizes.implode())
    lost = unfreed.filter(is_lost)
    return pl.Series(allocations.live_bytes_at(lost, event.to_numpy().astype(np.int64)))


def _slope(steps: pl.Series, used: pl.Series) -> tuple[int, int, int, int, int, float, float, float, float]:
    x, y = steps.to_numpy().astype(np.int64), used.to_numpy().astype(np.float64)
    if len(x) > _MOST_STEPS:
        picked = np.linspace(0, len(x) - 1, _MOST_STEPS).astype(np.int64)
        x, y = x[picked], y[picked]
    slope, low, high = theil_sen(x, y)
    lower, upper = np.percentile(y - slope * x, (25, 75))
    span = int(steps[0]), int(steps[-1]), int(used[0]), int(used[-1])
    return len(steps), *span, slope, low, high, float(upper - lower)


def theil_sen(x: npt.NDArray[np.int64], y: npt.NDArray[np.float64]) -> tuple[float, float, float]:
    """Return the median slope over all pairs and the ends of its 99% confidence interval (Sen 1968).

    It equals `scipy.stats.theilslopes` (a test compares them), whose import alone takes 0.75 s of CPU in every check.

    >>> theil_sen(np.arange(8), np.array([0, 2, 4, 6, 90, 10, 12, 14.0]))[0]
    2.0
    """
    first, second = np.triu_indices(len(x), 1)
    slopes = np.sort((y[second] - y[first]) / (x[second] - x[first]))
    n, pairs = len(x), len(slopes)
    reach = _DEVIATIONS * math.sqrt(n * (n - 1) * (2 * n + 5) / 18)
    low = max(round((pairs - reach) / 2) - 1, 0)
    high = min(round((pairs + reach) / 2), pairs - 1)
    return float(np.median(slopes)), float(slopes[low]), float(slopes[high])
