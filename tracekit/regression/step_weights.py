"""Weights of steps with which a mean is the median: medians do not add up, weighted means do."""

import numpy as np
import numpy.typing as npt

from tracekit.regression.samples import Values

_MAX_TILT = 1e9
_BISECTIONS = 200
_FEW_STEPS = 5


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
