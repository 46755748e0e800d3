"""Many ranges of positions at once: the first position in each where a condition is true, and all positions."""

from collections.abc import Callable

import numpy as np

from tracekit.model.nesting import Flags, Ints


def first_true(low: Ints, high: Ints, condition: Callable[[Ints], Flags]) -> Ints:
    """Return the first position of each range [low, high) from which a condition is true, or its end."""
    low, high = low.copy(), high.copy()
    pending = np.flatnonzero(low < high)
    while len(pending):
        middle = (low[pending] + high[pending]) >> 1
        is_true = condition(middle)
        high[pending[is_true]] = middle[is_true]
        low[pending[~is_true]] = middle[~is_true] + 1
        pending = pending[low[pending] < high[pending]]
    return low


def positions(low: Ints, counts: Ints) -> Ints:
    """Return the positions of all ranges, one after the other.

    >>> positions(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    places: Ints = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return places
