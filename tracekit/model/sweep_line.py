"""Sweep line: time divided at given moments, and what runs in each piece. All vectorised."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from tracekit.model.intervals import Spans

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
NEVER = np.iinfo(np.int64).min // 2
"""A time before all others, from which differences can still be taken."""


class Pieces(NamedTuple):
    """Pieces of spans: each belongs to the span with index `span`; the pieces of a span cover it exactly, in order."""

    span: Ints
    start_ns: Ints
    end_ns: Ints


def pieces(spans: Spans, *cuts: Ints) -> Pieces:
    """Divide sorted, disjoint spans at all moments in `cuts` inside them.

    >>> pieces(np.array([[0, 4], [6, 9]]), np.array([2, 5, 8])).start_ns.tolist()
    [0, 2, 6, 8]
    """
    if not len(spans):
        return Pieces(*(np.empty(0, np.int64) for _ in range(3)))
    points = distinct(np.concatenate((spans[:, 0], *cuts)))
    span_index = np.searchsorted(spans[:, 0], points, side="right") - 1
    inside = (span_index >= 0) & (points < spans[np.maximum(span_index, 0), 1])
    start, span_index = points[inside], span_index[inside]
    following = np.append(start[1:], spans[-1, 1])
    end = np.minimum(following, spans[span_index, 1])
    return Pieces(span_index, start, end)


def running(spans: Spans, at_ns: Ints) -> Ints:
    """Return, for each moment, the index of a span that covers it (of several the one that ends last); -1 for none.

    >>> running(np.array([[0, 9], [2, 4]]), np.array([3, 9])).tolist()
    [0, -1]
    """
    if not len(spans):
        return np.full(len(at_ns), -1, np.int64)
    if (spans[1:, 0] >= spans[:-1, 1]).all():  # the usual case: a set of spans that are disjoint and in order
        last = last_until(spans[:, 0], at_ns)
        return np.where((last >= 0) & (spans[np.maximum(last, 0), 1] > at_ns), last, -1)
    order = np.argsort(spans[:, 0], kind="stable")
    ends = spans[order, 1]
    reach = np.maximum.accumulate(ends)
    furthest = np.maximum.accumulate(np.where(ends == reach, np.arange(len(ends)), 0))
    last = np.searchsorted(spans[order, 0], at_ns, side="right") - 1
    covered = (last >= 0) & (reach[np.maximum(last, 0)] > at_ns)
    return np.where(covered, order[furthest[np.maximum(last, 0)]], -1)


def distinct(values: Ints) -> Ints:
    """Return the distinct values, sorted: as `np.unique`, which takes ten times as long, since it hashes them.

    >>> distinct(np.array([5, 3, 5])).tolist()
    [3, 5]
    """
    ordered = np.sort(values, axis=None)
    is_new = np.concatenate((np.ones(min(len(ordered), 1), np.bool_), ordered[1:] != ordered[:-1]))
    return np.asarray(ordered[is_new], np.int64)


def last_until(keys: Ints, times: Ints) -> Ints:
    """Return the index of the last of the sorted `keys` at or before each of `times`; -1 if there is none."""
    return np.searchsorted(keys, times, side="right") - 1


def at(values: Ints, index: Ints, otherwise: int) -> Ints:
    """Return `values` at `index`, or `otherwise` where the index is -1."""
    if not len(values):
        return np.full(len(index), otherwise, np.int64)
    return np.where(index >= 0, values[np.maximum(index, 0)], otherwise)
