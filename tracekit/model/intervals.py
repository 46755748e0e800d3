"""Arithmetic on sets of time spans. A set is an int64 array of shape (n, 2) of [start, end) in ns.

All functions take spans in any order, overlapping or not, and return them sorted, disjoint and not empty. Everything
is vectorised: the cost is that of one sort.
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

Spans: TypeAlias = npt.NDArray[np.int64]
Window: TypeAlias = tuple[int, int]

EMPTY: Spans = np.empty((0, 2), np.int64)


def from_columns(start_ns: npt.ArrayLike, dur_ns: npt.ArrayLike) -> Spans:
    """Return the spans that columns of starts and durations describe, shape (n, 2), in the order given."""
    start = np.asarray(start_ns, np.int64)
    return _pairs(start, start + np.asarray(dur_ns, np.int64))


def from_table(rows: pl.DataFrame) -> Spans:
    """Return the span of each row of a table with columns start_ns and dur_ns, shape (n, 2), in order of the rows."""
    return from_columns(rows["start_ns"].to_numpy(), rows["dur_ns"].to_numpy())


def union(*sets: Spans) -> Spans:
    """Return the time covered by any of the sets, sorted and disjoint, touching spans joined.

    >>> union(np.array([[0, 4], [2, 6], [8, 9]])).tolist()
    [[0, 6], [8, 9]]
    """
    spans = np.concatenate([np.asarray(s, np.int64).reshape(-1, 2) for s in sets]) if sets else EMPTY
    lasts = spans[:, 1] > spans[:, 0]
    if lasts.all() and (spans[1:, 0] > spans[:-1, 1]).all():
        return spans  # the usual case: the result of one of these functions
    spans = spans[lasts]
    if not len(spans):
        return EMPTY
    spans = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(spans[:, 1])
    first = np.flatnonzero(np.concatenate(([True], spans[1:, 0] > reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(spans) - 1]))
    return _pairs(spans[first, 0], reach[last])


def covered_twice(spans: Spans, group: npt.NDArray[np.int64]) -> Spans:
    """Return the time covered by spans of at least two groups, sorted and disjoint. `group` has one number per span.

    >>> covered_twice(np.array([[0, 6], [0, 5], [4, 9]]), np.array([1, 1, 2])).tolist()
    [[4, 6]]
    """
    order = np.lexsort((spans[:, 0], group))
    order = order[spans[order, 1] > spans[order, 0]]
    if not len(order):
        return EMPTY
    start, end, span_group = spans[order, 0], spans[order, 1], group[order]
    # Within a group, ends up to each span; earlier groups are shifted below all times of this one.
    rank = np.argsort(np.argsort(end, kind="stable"), kind="stable")
    shift = np.cumsum(np.append(False, span_group[1:] != span_group[:-1])) * len(end)
    reach = np.sort(end)[np.maximum.accumulate(rank + shift) - shift]
    first = np.flatnonzero(np.append(True, (span_group[1:] != span_group[:-1]) | (start[1:] > reach[:-1])))
    last = np.append(first[1:] - 1, len(start) - 1)
    times = np.concatenate((start[first], reach[last]))
    change = np.repeat(np.array([1, -1]), len(first))
    time_order = np.argsort(times, kind="stable")
    times, depth = times[time_order], np.cumsum(change[time_order])
    return union(_pairs(times[:-1], times[1:])[depth[:-1] >= 2])


def intersect(a: Spans, b: Spans) -> Spans:
    """Return the time covered by both sets.

    >>> intersect(np.array([[0, 4], [6, 9]]), np.array([[3, 7]])).tolist()
    [[3, 4], [6, 7]]
    """
    a, b = union(a), union(b)
    if not len(a) or not len(b):
        return EMPTY
    # Each span of a overlaps consecutive spans of b; list the pairs without a loop.
    first = np.searchsorted(b[:, 1], a[:, 0], side="right")
    past = np.searchsorted(b[:, 0], a[:, 1], side="left")
    counts = np.maximum(past - first, 0)
    of_a = np.repeat(np.arange(len(a)), counts)
    of_b = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
    return _pairs(np.maximum(a[of_a, 0], b[of_b, 0]), np.minimum(a[of_a, 1], b[of_b, 1]))


def subtract(a: Spans, b: Spans) -> Spans:
    """Return the time covered by `a` and not by `b`.

    >>> subtract(np.array([[0, 9]]), np.array([[2, 4]])).tolist()
    [[0, 2], [4, 9]]
    """
    a, b = union(a), union(b)
    if not len(a) or not len(b):
        return a
    outside = np.concatenate(([min(a[0, 0], b[0, 0])], b.ravel(), [max(a[-1, 1], b[-1, 1])])).reshape(-1, 2)
    return intersect(a, outside)


def gaps(busy: Spans, window: Window) -> Spans:
    """Return the idle spans of a window, sorted and disjoint, shape (m, 2), in ns.

    >>> gaps(np.array([[2, 5]]), (0, 9)).tolist()
    [[0, 2], [5, 9]]
    """
    return subtract(np.array([window], np.int64), busy)


def clip(spans: Spans, window: Window) -> Spans:
    """Return the part of `spans` inside the window, as one sorted, disjoint set."""
    return intersect(spans, np.array([window], np.int64))


def length(spans: Spans) -> int:
    """Return the time covered, each moment counted once, in ns."""
    covered = union(spans)
    return int((covered[:, 1] - covered[:, 0]).sum())


def coverage(targets: Spans, by: Spans) -> npt.NDArray[np.int64]:
    """Return, for each span of `targets` as it comes, how many ns of it the set `by` covers. Shape (n,).

    >>> coverage(np.array([[0, 10], [4, 6]]), np.array([[3, 5], [9, 20]])).tolist()
    [3, 1]
    """
    by = union(by)
    targets = np.asarray(targets, np.int64).reshape(-1, 2)
    if not len(by):
        return np.zeros(len(targets), np.int64)
    before = np.concatenate(([0], np.cumsum(by[:, 1] - by[:, 0])))

    def covered_until(time: Spans) -> Spans:
        index = np.searchsorted(by[:, 0], time, side="right")
        last = np.maximum(index - 1, 0)
        inside = np.where(index > 0, np.minimum(time, by[last, 1]) - by[last, 0], 0)
        return np.where(index > 0, before[last], 0) + inside

    return np.asarray(covered_until(targets[:, 1]) - covered_until(targets[:, 0]), np.int64)


def _pairs(start_ns: Spans, end_ns: Spans) -> Spans:
    spans = np.empty((len(start_ns), 2), np.int64)
    spans[:, 0], spans[:, 1] = start_ns, end_ns
    return spans
