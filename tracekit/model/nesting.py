"""Which slice encloses which: vectorised arithmetic on nested slices of threads."""

import bisect

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def parents(lane: Ints, start: Ints, end: Ints) -> Ints:
    """Return the index of the slice that encloses each slice, -1 for none. Slices: by lane, start and descending end.

    A slice that ends after the one it began in counts as its sibling.
    """
    return parents_and_crossings(lane, start, end)[0]


def parents_and_crossings(lane: Ints, start: Ints, end: Ints) -> tuple[Ints, Ints, Ints]:
    """Return `parents`, the slices that end after one in which they began, and the latter, an index for each."""
    crossings: list[tuple[Ints, Ints]] = []
    count = len(start)
    candidate = np.arange(count, dtype=np.int64) - 1
    unresolved = np.arange(count, dtype=np.int64)
    while len(unresolved):
        above = candidate[unresolved]
        has_candidate = above >= 0
        same = has_candidate & (lane[above] == lane[unresolved])
        encloses = (
            same & (end[above] >= end[unresolved]) & (start[unresolved] < np.maximum(end[above], start[above] + 1))
        )
        candidate[unresolved[~same]] = -1
        is_outside = same & ~encloses
        rest = unresolved[is_outside]
        above = above[is_outside]
        is_crossing = start[rest] < end[above]
        if is_crossing.any():
            crossings.append((rest[is_crossing], above[is_crossing]))
        # Slices that the candidate's own search skipped end before the candidate, so they cannot enclose this slice.
        candidate[rest] = candidate[candidate[rest]]
        unresolved = rest
    late, around = zip(*crossings, strict=True) if crossings else ((np.empty(0, np.int64),), (np.empty(0, np.int64),))
    return candidate, np.concatenate(late), np.concatenate(around)


def nearest(parent: Ints, marked: Flags) -> Ints:
    """Return, for each slice, itself if it is marked, else its nearest marked ancestor; -1 for none."""
    if not marked.any():
        return np.full(len(parent), -1, np.int64)
    jump = np.where(marked, np.arange(len(parent), dtype=np.int64), parent)
    below = np.flatnonzero((jump >= 0) & ~marked[jump])
    while len(below):
        above = jump[jump[below]]  # twice as far each time
        jump[below] = above
        below = below[(above >= 0) & ~marked[above]]
    return jump


def order(lane: Ints, start: Ints, end: Ints, number: Ints | None = None) -> Ints:
    """Return the order that `parents` needs: by lane, start and descending end, ties by `number`, then in input order.

    >>> order(np.array([0, 0, 0]), np.array([5, 1, 1]), np.array([6, 2, 9])).tolist()
    [2, 1, 0]
    >>> order(np.array([0, 0]), np.array([1, 1]), np.array([2, 2]), np.array([8, 7])).tolist()
    [1, 0]
    """
    if not len(start):
        return np.empty(0, np.int64)
    ties = () if number is None else (number,)
    # Files are nearly sorted, so a stable sort by one key is fast; the few ties are sorted afterwards.
    since = start - start.min()
    if int(lane.max() + 1) * int(since.max() + 1) >= 1 << 62:
        return np.lexsort((*ties, -end, start, lane))
    key = lane * (since.max() + 1) + since
    rows = np.argsort(key, kind="stable")
    key = key[rows]
    same = key[1:] == key[:-1]
    if same.any():
        tied = np.flatnonzero(np.concatenate((same, [False])) | np.concatenate(([False], same)))
        rows[tied] = rows[tied][np.lexsort((*(values[rows[tied]] for values in ties), -end[rows[tied]], key[tied]))]
    return rows


def levels(parent: Ints, rows: Ints) -> list[Ints]:
    """Return `rows` by the number of slices around each, outermost first: one array per depth that occurs.

    `parent` has the index of the slice around each slice, -1 for none; that of one of `rows` is one of them, too.

    >>> [level.tolist() for level in levels(np.array([-1, 0, 0, 1]), np.arange(4))]
    [[0], [1, 2], [3]]
    """
    depth, jump = (parent >= 0).astype(np.int64), parent.copy()
    while len(below := rows[jump[rows] >= 0]):
        further = jump[below]
        depth[below], jump[below] = depth[below] + depth[further], jump[further]  # twice as far each time
    order = rows[np.argsort(depth[rows], kind="stable")]
    return np.split(order, np.flatnonzero(np.diff(depth[order])) + 1) if len(order) else []


def longest_rise(values: Ints) -> Ints:
    """Indices of a longest sequence of values that do not fall.

    >>> longest_rise(np.array([1, 9, 2, 3, 0, 4])).tolist()
    [0, 2, 3, 5]
    """
    tails: list[int] = []
    at: list[int] = []
    before = np.full(len(values), -1, np.int64)
    for index, value in enumerate(values.tolist()):
        place = bisect.bisect_right(tails, value)
        before[index] = at[place - 1] if place else -1
        tails[place : place + 1] = [value]
        at[place : place + 1] = [index]
    chain = []
    index = at[-1] if at else -1
    while index >= 0:
        chain.append(index)
        index = int(before[index])
    return np.array(chain[::-1], np.int64)
