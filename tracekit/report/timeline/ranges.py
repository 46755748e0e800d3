"""Many ranges of positions at once: the first position in each where a condition is true, and all positions."""

from collections.abc import Callable

import numpy as np

from tracekit.model.nesting import Flags, Ints


def first_true(low: Ints, high: Ints, condition: Callable[[Ints], Flags]) -> Ints:
    """Return the first position of each range [low, high) from which a condition is true, or its end."""
    low, high = low.copy(), high.copy()
    left = np.flatnonzero(low < high)
    while len(left):
        middle = (low[left] + high[left]) >> 1
        is_true = condition(middle)
        high[left[is_true]] = middle[is_true]
        low[left[~is_true]] = middle[~is_true] + 1
        left = left[low[left] < high[left]]
    return low


def positions(low: Ints, counts: Ints) -> Ints:
    """Return the positions of all ranges, one after the other.

    >>> positions(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    found: Ints = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return found
