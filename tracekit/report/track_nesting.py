"""Slices of one track must nest: those that overlap without nesting go to separate layers."""

import heapq

import numpy as np
import numpy.typing as npt

from tracekit.model import nesting
from tracekit.model.nesting import Flags, Ints

BEGIN, END = 1, 2
_MAX_NESTING = 64


def order(track: Ints, start_ns: Ints, dur_ns: Ints) -> Ints:
    """Return the order by track and start; of slices with the same start the longest comes first."""
    return nesting.order(track, start_ns, start_ns + dur_ns)


def layers(track: Ints, start_ns: Ints, dur_ns: Ints) -> Ints:
    """Return the layer of each slice within its track, from 0, so that the slices of each layer nest.

    Each slice goes to the first layer in which it crosses no earlier slice; from layer 64 on, to one in which it
    overlaps no slice.
    """
    layer = np.zeros(len(track), np.int64)
    sequence = order(track, start_ns, dur_ns)
    layer[sequence] = _layers(track[sequence], start_ns[sequence], (start_ns + dur_ns)[sequence])
    return layer


def rows(track: Ints, start_ns: Ints, dur_ns: Ints) -> Ints:
    """Return the row of each slice within its track, from 0: the slices of one row do not overlap.

    A slice lies one row below the slice that encloses it; each layer lies below the layer before it.

    >>> rows(np.zeros(4, np.int64), np.array([0, 1, 5, 6]), np.array([9, 2, 2, 8])).tolist()
    [0, 1, 1, 2]
    """
    row = np.zeros(len(track), np.int64)
    sequence = order(track, start_ns, dur_ns)
    start, end = start_ns[sequence], (start_ns + dur_ns)[sequence]
    _, dense = np.unique(track[sequence], return_inverse=True)
    layer = _layers(dense, start, end)
    if layer.any():
        key, of_layer = np.unique(dense * (layer.max() + 1) + layer, return_inverse=True)
        first = np.searchsorted(key, key // (layer.max() + 1) * (layer.max() + 1))
        regrouped = order(of_layer, start, end - start)
        sequence, start, end, of_layer = (column[regrouped] for column in (sequence, start, end, of_layer))
    else:
        of_layer = dense
        first = np.arange(int(dense.max(initial=-1)) + 1)
    depth = _depths(nesting.parents(of_layer, start, end))
    height = np.zeros(len(first), np.int64)
    np.maximum.at(height, of_layer, depth + 1)
    above = np.cumsum(height) - height
    row[sequence] = depth + (above - above[first])[of_layer]
    return row


def events(track: Ints, start_ns: Ints, dur_ns: Ints) -> tuple[Ints, Ints, Ints]:
    """Return the begins and ends of nested slices in the order that a reader with a stack needs.

    Each of shape (2n,): the row, BEGIN or END, the time. By track, then by time; at one time first the ends, the inner
    before the outer, then the begins, the outer before the inner. An empty slice ends right after its begin.
    """
    rows = order(track, start_ns, dur_ns)
    place = np.arange(len(rows))
    empty = dur_ns[rows] == 0
    row = np.concatenate((rows, rows))
    kind = np.repeat(np.array([BEGIN, END], np.int64), len(rows))
    at_ns = np.concatenate((start_ns[rows], (start_ns + dur_ns)[rows]))
    after_ends = np.concatenate((np.ones(len(rows), bool), empty))
    turn = np.concatenate((place, np.where(empty, place, -place)))
    sequence = np.lexsort((kind, turn, after_ends, at_ns, track[row]))
    return row[sequence], kind[sequence], at_ns[sequence]


def _layers(track: Ints, start: Ints, end: Ints) -> Ints:
    """Return the layer of each slice; slices are in `order`."""
    layer = np.zeros(len(track), np.int64)
    for number in np.unique(track[_crosses(track, start, end)]):
        of_track = np.flatnonzero(track == number)
        layer[of_track] = _first_fit_layers(start[of_track], end[of_track])
    return layer


def _depths(parent: Ints) -> Ints:
    depth, jump = (parent >= 0).astype(np.int64), parent.copy()
    pending = np.flatnonzero(jump >= 0)
    while len(pending):  # twice as far each time
        above = jump[pending]
        depth[pending] += depth[above]
        jump[pending] = jump[above]
        pending = pending[jump[pending] >= 0]
    return depth


def _crosses(track: Ints, start: Ints, end: Ints) -> Flags:
    """Flag slices that begin in an earlier slice of their track and end after it; slices are in `order`.

    Of several such slices in a track, at least one is flagged.
    """
    crosses = np.zeros(len(track), bool)
    above = np.arange(len(track), dtype=np.int64) - 1
    pending = np.arange(len(track), dtype=np.int64)
    while len(pending):
        other = above[pending]
        same = (other >= 0) & (track[other] == track[pending])
        crossing = same & (start[pending] < end[other]) & (end[other] < end[pending])
        crosses[pending[crossing]] = True
        enclosed = same & (end[other] >= end[pending]) & (start[pending] < np.maximum(end[other], start[other] + 1))
        above[pending[~same]] = -1
        pending = pending[same & ~crossing & ~enclosed]
        above[pending] = above[above[pending]]
    return crosses


def _first_fit_layers(start: npt.NDArray[np.int64], end: npt.NDArray[np.int64]) -> list[int]:
    # One by one: whether a layer has room depends on all earlier slices. Few tracks have crossing slices.
    stacks: list[list[int]] = []
    rest: list[tuple[int, int]] = []  # when each layer beyond is free again
    layer = []
    for begins, ends in zip(start.tolist(), end.tolist(), strict=True):
        number = next((i for i, open_ends in enumerate(stacks) if _has_room(open_ends, begins, ends)), len(stacks))
        if number == _MAX_NESTING:
            number = _free_layer(rest, begins, ends)
        elif number == len(stacks):
            stacks.append([])
        if number < _MAX_NESTING:
            stacks[number].append(ends)
        layer.append(number)
    return layer


def _free_layer(rest: list[tuple[int, int]], begins: int, ends: int) -> int:
    """Return a layer in which nothing overlaps the slice: checking all layers for nesting would be unbounded."""
    number = _MAX_NESTING + len(rest)
    if rest and rest[0][0] <= begins:
        number = heapq.heappop(rest)[1]
    heapq.heappush(rest, (max(ends, begins + 1), number))
    return number


def _has_room(open_ends: list[int], begins: int, ends: int) -> bool:
    while open_ends and open_ends[-1] <= begins:
        open_ends.pop()
    return not open_ends or open_ends[-1] >= ends
