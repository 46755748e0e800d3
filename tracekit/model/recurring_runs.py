"""Runs of tokens that recur in a sequence, chosen such that they do not overlap: what repeats, and how often."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tracekit.model.nesting import Flags, Ints


@dataclass(frozen=True)
class RecurringRun:
    """A run of `length` tokens, and the places where it begins; no two of its occurrences overlap."""

    length: int
    starts: Ints


@dataclass(frozen=True)
class _Grams:
    """All runs of one length that recur: their places sorted by run, and where each run begins in `places`."""

    length: int
    places: Ints
    first: Ints
    counts: Ints
    """How often each run occurs without overlapping itself."""

    def of(self, number: int) -> Ints:
        end = self.first[number + 1] if number + 1 < len(self.first) else len(self.places)
        return self.places[self.first[number] : end]


def find(tokens: Ints, parts: Ints, *, longest: int, max_runs: int = 1000) -> list[RecurringRun]:
    """Return at most `max_runs` runs of 2 to `longest` tokens that occur at least twice, none of which overlap.

    A run lies in one part: `parts` has the number of each token's part, which never decreases. The run that covers most
    tokens comes first, of equal ones the longer, then the earlier; each further run is chosen likewise among the tokens
    that are left. A run that occurs in a row, such as the layers of a model, counts each time, from the first on.

    >>> [(run.length, run.starts.tolist()) for run in find(np.array([7, 1, 2, 1, 2, 8]), np.zeros(6, int), longest=4)]
    [(2, [1, 3])]
    """
    grams = list(_grams(tokens, parts, longest))
    used: Flags = np.zeros(len(tokens), np.bool_)
    fresh, waiting = _by_cover(grams), list[tuple[int, int, int, int]]()
    upcoming, runs = next(fresh, None), list[RecurringRun]()
    while len(runs) < max_runs and (upcoming or waiting):
        if upcoming and (not waiting or upcoming < waiting[0]):
            candidate, upcoming = upcoming, next(fresh, None)
        else:
            candidate = heapq.heappop(waiting)
        starts = _free(grams[-candidate[1] - 2], candidate[3], used)
        cover = -len(starts) * -candidate[1]
        if cover == candidate[0]:
            runs.append(RecurringRun(-candidate[1], starts))
            used[(starts[:, None] + np.arange(-candidate[1])).ravel()] = True
        elif len(starts) > 1:
            heapq.heappush(waiting, (cover, *candidate[1:]))
    return runs


def without_overlaps(places: Ints, length: int) -> Flags:
    """Return a mask of the ascending places where runs of `length` do not overlap, chosen from the first on.

    >>> without_overlaps(np.array([0, 1, 2, 3, 9]), 2).tolist()
    [True, False, True, False, True]
    """
    keep: Flags = np.diff(places, prepend=places[:1] - length) >= length  # nothing that precedes reaches these
    if keep.all():
        return keep
    following = np.append(np.searchsorted(places, places + length), len(places))
    keep = np.append(keep, False)
    while not np.array_equal(following, following[following]):
        keep[following[keep]] = True  # twice as far each time
        following = following[following]
    keep[following[keep]] = True
    return keep[:-1]


def _grams(tokens: Ints, parts: Ints, longest: int) -> Iterator[_Grams]:
    """Yield the runs of each length from 2 to `longest` that recur, up to the length of which none does."""
    codes = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    kinds = int(codes.max(initial=0)) + 1
    starts, grams = np.arange(len(codes), dtype=np.int64), codes
    for length in range(2, longest + 1):
        starts, grams = _longer(starts, grams, codes, parts, length, kinds)
        if not len(starts):
            return
        order = np.argsort(grams, kind="stable")
        places, group = starts[order], grams[order]
        first = np.flatnonzero(np.diff(group, prepend=-1))
        is_apart = without_overlaps(places + group * (len(codes) + length), length)
        yield _Grams(length, places, first, np.add.reduceat(is_apart.astype(np.int64), first))


def _longer(starts: Ints, grams: Ints, codes: Ints, parts: Ints, length: int, kinds: int) -> tuple[Ints, Ints]:
    """Return places and codes of the runs of `length` that recur, from those of the runs that are one token shorter."""
    begins = np.flatnonzero(np.diff(starts) == 1)  # a run can only recur if both runs that are one shorter do
    starts, grams = starts[begins], grams[begins]
    inside = parts[starts] == parts[starts + length - 1]
    starts, grams = starts[inside], grams[inside]
    _, code, counts = np.unique(grams * kinds + codes[starts + length - 1], return_inverse=True, return_counts=True)
    recurs = counts[code] > 1
    return starts[recurs], np.unique(code[recurs], return_inverse=True)[1].astype(np.int64)


def _by_cover(grams: list[_Grams]) -> Iterator[tuple[int, int, int, int]]:
    """Yield what identifies each run, in the order of `find`: -covered tokens, -length, first place, number."""
    columns = [
        (-g.counts * g.length, np.full_like(g.first, -g.length), g.places[g.first], np.arange(len(g.first)))
        for g in grams
    ]
    if not columns:
        return
    cover, length, place, number = (np.concatenate(column) for column in zip(*columns, strict=True))
    several = np.flatnonzero(cover < length)  # a run that overlaps itself may occur once
    order = several[np.lexsort((place[several], length[several], cover[several]))]
    for index in order:
        yield int(cover[index]), int(length[index]), int(place[index]), int(number[index])


def _free(grams: _Grams, number: int, used: Flags) -> Ints:
    """Return the places of a run whose tokens are all unused, without those that overlap an earlier one."""
    places = grams.of(number)
    free: Ints = places[~used[places[:, None] + np.arange(grams.length)].any(axis=1)]
    return free[without_overlaps(free, grams.length)]
