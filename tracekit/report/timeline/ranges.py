"""Many ranges of places at once: where in each a condition begins to hold, and all their places."""

from collections.abc import Callable

import numpy as np

from tracekit.model.nesting import Flags, Ints


def first_true(low: Ints, high: Ints, holds: Callable[[Ints], Flags]) -> Ints:
    """Return the first place of each range [low, high) from which on a condition holds; its end where it never does."""
    low, high = low.copy(), high.copy()
    left = np.flatnonzero(low < high)
    while len(left):
        middle = (low[left] + high[left]) >> 1
        held = holds(middle)
        high[left[held]] = middle[held]
        low[left[~held]] = middle[~held] + 1
        left = left[low[left] < high[left]]
    return low


def positions(low: Ints, counts: Ints) -> Ints:
    """Return the places of all ranges, one after the other.

    >>> places(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    found: Ints = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return found
