"""The weight of each step of each rank in the median step, by whose time runs are compared.

Medians of parts do not add up to the median of their sum, but weighted means do. The middle half of the steps counts,
by the time of each step's slowest rank. The weights of their cells (a step on a rank) make the weighted mean of times
equal to the step time of `compare`, the median over steps of the slowest rank. Of all such weights, the most equal ones
are used, those with the highest entropy: they have the form exp(tilt * time).
"""

import numpy as np
import polars as pl

from tracekit.regression.samples import Values

KEY = ("window", "rank", "step")
_MAX_TILT = 1e9
_BISECTIONS = 200


def slowest_devices(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the device of each rank and step that takes longest. Columns KEY, device, duration_ns.

    `steps` has the columns of `breakdown.by_step` and window and rank.
    """
    ordered = steps.sort("duration_ns", "device", descending=[True, False])
    return ordered.group_by(KEY, maintain_order=True).first().select(*KEY, "device", "duration_ns").sort(KEY)


def with_weights(cells: pl.DataFrame, step_ns: float) -> pl.DataFrame:
    """Return cells (columns KEY and duration_ns) with weight and rank_weight.

    The weights sum to 1, and the weighted times to `step_ns`, which lies between the times of the middle steps.
    rank_weight is what each rank of a step counts in a sample of that step: it sums to 1 within each step.
    """
    middle = middle_steps(cells)
    is_middle = cells.select(pl.struct("window", "step").is_in(middle.implode()))["window"].to_numpy()
    times = cells["duration_ns"].to_numpy().astype(np.float64)
    weights = np.zeros(len(times))
    weights[is_middle] = tilted_weights(times[is_middle], step_ns)
    of_rank = pl.col("of_rank")
    of_step = of_rank.sum().over("window", "step")
    # A step that only ranks have which no middle step has: all of them count alike.
    rank_weight = pl.when(of_step > 0).then(of_rank / of_step).otherwise(1 / pl.len().over("window", "step"))
    with_weight = cells.with_columns(pl.Series("weight", weights))
    with_rank = with_weight.with_columns(pl.col("weight").sum().over("rank").alias("of_rank"))
    return with_rank.with_columns(rank_weight.alias("rank_weight")).drop("of_rank")


def middle_steps(cells: pl.DataFrame) -> pl.Series:
    """Return the middle half of the steps by the time of the slowest rank, as structs of window and step."""
    slowest = cells.group_by("window", "step").agg(pl.col("duration_ns").max()).sort("duration_ns", "window", "step")
    cut = slowest.height // 4
    return slowest.slice(cut, slowest.height - 2 * cut).select(pl.struct("window", "step")).to_series()


def tilted_weights(times: Values, mean: float) -> Values:
    """Return weights that sum to 1, with which the times have this mean; as equal as can be.

    >>> tilted_weights(np.array([1.0, 2.0, 3.0]), 2.0).round(3).tolist()
    [0.333, 0.333, 0.333]
    >>> tilted_weights(np.array([1.0, 2.0]), 1.75).round(3).tolist()
    [0.25, 0.75]
    """
    spread = float(np.ptp(times))
    if spread == 0:
        return np.full(len(times), 1 / len(times))
    away = (times - mean) / spread
    low, high = -_MAX_TILT, _MAX_TILT
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if _softmax(middle * away) @ away < 0 else (low, middle)
    return _softmax((low + high) / 2 * away)


def _softmax(exponents: Values) -> Values:
    raised = np.exp(exponents - exponents.max())
    return np.asarray(raised / raised.sum())
