"""Which slice encloses which: vectorised arithmetic on nested slices of threads."""

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def parents(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Return, for slices sorted by lane, start and falling end, the index of the slice that encloses each; -1 for none.

    A slice that outlasts the one it began in is taken as that one's sibling.
    """
    count = len(start)
    candidate = np.arange(count, dtype=np.int64) - 1
    unresolved = np.arange(count, dtype=np.int64)
    while len(unresolved):
        above = candidate[unresolved]
        known = above >= 0
        same = known & (lane[above] == lane[unresolved])
        encloses = (
            same & (end[above] >= end[unresolved]) & (start[unresolved] < np.maximum(end[above], start[above] + 1))
        )
        candidate[unresolved[~same]] = -1
        rest = unresolved[same & ~encloses]
        # What the candidate's own search has passed over ends before the candidate does, so it cannot enclose this one.
        candidate[rest] = candidate[candidate[rest]]
        unresolved = rest
    return candidate


def nearest(parent: Ints, marked: Flags) -> Ints:
    """Return, for each slice, itself if it is marked, else its nearest marked ancestor; -1 for none."""
    count = len(parent)
    jump = np.where(marked, np.arange(count, dtype=np.int64), parent)
    while True:
        inner = np.where(jump >= 0, jump, 0)
        further = np.where((jump >= 0) & ~marked[inner], jump[inner], jump)
        if (further == jump).all():
            return jump
        jump = further
