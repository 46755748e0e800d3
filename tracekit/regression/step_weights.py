"""Weights of steps with which a mean is the median: medians do not add up, weighted means do."""

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.regression.samples import Values

WEIGHT_KEY = ("window", "rank", "step")
_MAX_TILT = 1e9
_BISECTIONS = 200
_FEW_STEPS = 5


def median_weights(times: Values) -> Values:
    """Weight of each step with which the mean is the median: the middle half counts, as alike as can be.

    >>> median_weights(np.array([5.0, 1.0, 9.0, 4.0])).round(3).tolist()
    [0.5, 0.0, 0.0, 0.5]
    """
    middle = middle_steps(times)
    weights = np.zeros(len(times))
    weights[middle] = tilted_weights(times[middle], float(np.median(times)))
    return weights


def slowest_devices(steps: pl.DataFrame) -> pl.DataFrame:
    """Return the device of each rank and step that takes longest. Columns WEIGHT_KEY, device, duration_ns.

    `steps` has the columns of `breakdown.by_step` and window and rank.
    """
    ordered = steps.sort("duration_ns", "device", descending=[True, False])
    return (
        ordered.group_by(WEIGHT_KEY, maintain_order=True)
        .first()
        .select(*WEIGHT_KEY, "device", "duration_ns")
        .sort(WEIGHT_KEY)
    )


def middle_steps(times: Values) -> npt.NDArray[np.int64]:
    """Return the indices of the middle half of steps by their times; of fewer than five the one or two in the middle.

    >>> middle_steps(np.array([5.0, 1.0, 9.0, 4.0])).tolist()
    [3, 0]
    """
    order = np.argsort(times, kind="stable")
    # Of few steps the longest may be a warm-up, which is no part of the median step.
    cut = len(times) // 4 if len(times) >= _FEW_STEPS else (len(times) - 1) // 2
    return order[cut : len(times) - cut]


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
