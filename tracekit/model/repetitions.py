"""Repetitions in a sequence of tokens.

The passes of a loop that nothing marks are found by what recurs once in each pass. Recurring runs are chosen such that
they do not overlap: what repeats, and how often.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tracekit.model.nesting import Flags, Ints

Floats = npt.NDArray[np.float64]

_GRAM_SIZES = (1, 2, 4, 8, 16, 32)
_MIN_REGULAR_RATIO = 0.5
"""Share of the sequence between occurrences that are about equally far apart: more than half is no coincidence."""
_SIMILAR_LENGTH, _SAME_DISTANCE = 0.25, 0.1
_MAX_CANDIDATES = 32
_AS_GOOD = 0.03
"""Two passes together are as alike as two single ones: among equally good lengths the shortest is the loop's."""
_WHOLE = 0.9
"""A last pass with this share of the usual length is complete; what is missing was cut with the recording."""


@dataclass(frozen=True)
class Repetition:
    """The passes of a loop in a sequence of tokens: pass k begins at index `starts[k]`, the last one ends at `end`."""

    starts: Ints
    end: int
    alike_ratio: float
    """Share of all distinct tokens that occur in a pass as often as in the median pass, averaged over the passes."""
    alike_within_ratio: float
    """The same among the distinct tokens inside the passes: the tokens before and after them do not count."""

    @property
    def count(self) -> int:
        """Return the number of passes."""
        return len(self.starts)


@dataclass(frozen=True)
class RecurringRun:
    """A run of `length` tokens, and the places where it begins; no two of its occurrences overlap."""

    length: int
    starts: Ints


@dataclass(frozen=True)
class _RecurringGrams:
    """All runs of one length that recur: their places sorted by run, and where each run begins in `places`."""

    length: int
    places: Ints
    first: Ints
    counts: Ints
    """How often each run occurs without overlapping itself."""

    def of(self, number: int) -> Ints:
        end = self.first[number + 1] if number + 1 < len(self.first) else len(self.places)
        return self.places[self.first[number] : end]


def find(tokens: Ints) -> Repetition | None:
    """Return the passes of a loop that runs through most of `tokens`; None if there is none.

    Some token, or some run of tokens, occurs once in each pass. Each such candidate is judged by how alike the passes
    are that it separates; order and number of the other tokens may differ from pass to pass.

    >>> find(np.array([7, 1, 2, 3, 3, 1, 2, 3, 3, 1, 2, 3, 3, 1])).starts.tolist()
    [1, 5, 9]
    >>> find(np.arange(20)) is None
    True
    """
    return max(find_all(tokens), key=lambda passes: (passes.count, passes.alike_ratio), default=None)


def find_all(tokens: Ints, marks: Sequence[Ints] = ()) -> list[Repetition]:
    """Return the passes of equally good loops, and those that begin at the ascending places of each of `marks`.

    Marked passes may be of different lengths: the last one is complete if it is about as long as the shortest.

    >>> counts = [passes.count for passes in find_all(np.tile([1, 2, 3, 3], 6), [np.array([0, 12])])]
    >>> counts[0], counts[-1]
    (6, 2)
    """
    codes = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    grams = dict(_grams(codes))
    rated = [passes for places in _candidates(grams, len(codes)) if (passes := _repetition(codes, places)) is not None]
    best = max((passes.alike_ratio for passes in rated), default=0.0)
    good = [passes for passes in rated if passes.alike_ratio >= best - _AS_GOOD]
    beginning = [_without_other_beginning(codes, passes) for passes in good]
    refined = [_repetition(codes, _with_prefix(codes, _from_the_first(grams, p))) or p for p in beginning]
    marked = (_repetition(codes, places, is_marked=True) for places in marks)
    return [*refined, *(passes for passes in marked if passes is not None)]


def recurring_runs(tokens: Ints, parts: Ints, *, longest: int, max_runs: int = 1000) -> list[RecurringRun]:
    """Return at most `max_runs` runs of 2 to `longest` tokens that occur at least twice, none of which overlap.

    A run lies in one part: `parts` has the number of each token's part, which never decreases. The run that covers most
    tokens comes first, of equal ones the longer, then the earlier; each further run is chosen likewise among the tokens
    that are left. A run that occurs in a row, such as the layers of a model, counts each time, from the first on.

    >>> runs = recurring_runs(np.array([7, 1, 2, 1, 2, 8]), np.zeros(6, int), longest=4)
    >>> [(run.length, run.starts.tolist()) for run in runs]
    [(2, [1, 3])]
    """
    grams = list(_recurring_grams(tokens, parts, longest))
    used: Flags = np.zeros(len(tokens), np.bool_)
    fresh, waiting = _by_cover(grams), list[tuple[int, int, int, int]]()
    upcoming, runs = next(fresh, None), list[RecurringRun]()
    while len(runs) < max_runs and (upcoming or waiting):
        if upcoming and (not waiting or upcoming < waiting[0]):
            candidate, upcoming = upcoming, next(fresh, None)
        else:
            candidate = heapq.heappop(waiting)
        starts = _free_places(grams[-candidate[1] - 2], candidate[3], used)
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


def _grams(codes: Ints) -> Iterator[tuple[int, Ints]]:
    """Yield, for each size, the code of the run of that many tokens that begins at each place."""
    size = 1
    while size <= _GRAM_SIZES[-1] and 2 * size <= len(codes):
        yield size, codes
        pairs = codes[:-size] * (codes.max() + 1) + codes[size:]
        codes, size = np.unique(pairs, return_inverse=True)[1].astype(np.int64), 2 * size


def _candidates(grams: dict[int, Ints], length: int) -> list[Ints]:
    """Return the places of runs of tokens that recur regularly, one for each number of occurrences.

    All that occur once per pass are as far apart as the passes are long, so the most common distance is the passes'.
    """
    regular: dict[int, list[tuple[float, Ints]]] = {}
    for codes in grams.values():
        places = np.argsort(codes, kind="stable")
        first = np.flatnonzero(np.diff(codes[places], prepend=-1))
        counts = np.diff(first, append=len(places))
        distance, ratio = _distances(codes[places], places, first, counts, length)
        for row in np.flatnonzero(ratio >= _MIN_REGULAR_RATIO).tolist():
            where = places[first[row] : first[row] + counts[row]]
            regular.setdefault(int(counts[row]), []).append((float(distance[row]), where))
    largest = sorted(regular.values(), key=len, reverse=True)[:_MAX_CANDIDATES]
    return [_most_common(alike) for alike in largest]


def _most_common(alike: list[tuple[float, Ints]]) -> Ints:
    """Return the places whose distance most others share, of these the first in the sequence."""
    ordered = sorted(alike, key=lambda pair: pair[0])
    distances = np.array([distance for distance, _ in ordered])
    until = np.searchsorted(distances, distances * (1 + _SAME_DISTANCE), side="right")
    first = int(np.argmax(until - np.arange(len(distances))))
    return min((places for _, places in ordered[first : int(until[first])]), key=lambda places: int(places[0]))


def _distances(group: Ints, places: Ints, first: Ints, counts: Ints, length: int) -> tuple[Floats, Floats]:
    """Return each group's median distance, and the share of the sequence between members about that far apart."""
    within = np.flatnonzero(np.diff(group) == 0)
    distance, owner = places[within + 1] - places[within], group[within]
    ordered = np.lexsort((distance, owner))
    firsts = first - np.arange(len(first))
    typical = np.zeros(len(first))
    several = counts > 1
    typical[several] = distance[ordered][firsts[several] + (counts[several] - 1) // 2]
    similar = np.abs(distance - typical[owner]) <= _SIMILAR_LENGTH * typical[owner]
    ratio = np.bincount(owner, weights=np.where(similar, distance, 0), minlength=len(first)) / length
    return typical, ratio * counts / np.maximum(counts - 1, 1)  # the last pass has no distance


def _repetition(codes: Ints, places: Ints, *, is_marked: bool = False) -> Repetition | None:
    """Return the passes that begin at `places`, without an incomplete last one; None for fewer than two."""
    lengths = np.diff(places) if len(places) > 1 else np.zeros(1, np.int64)
    length, rest = int(np.median(lengths)), len(codes) - int(places[-1])
    last = rest if rest <= lengths.max() else length  # what is longer than any pass is not only a pass
    least = int(lengths.min()) if is_marked else length
    starts, end = (places, int(places[-1]) + last) if rest >= _WHOLE * least else (places[:-1], int(places[-1]))
    if len(starts) < 2:
        return None
    names = int(codes.max()) + 1
    part = np.searchsorted(starts, np.arange(starts[0], end), side="right") - 1
    cells, often = np.unique(part * names + codes[starts[0] : end], return_counts=True)
    usual = _lower_medians(cells % names, often, len(starts), names)
    alike = np.bincount(cells % names, weights=often == usual[cells % names], minlength=names) / len(starts)
    inside = np.bincount(cells % names, minlength=names) > 0
    return Repetition(starts, end, float(alike.sum() / names), float(alike.sum() / inside.sum()))


def _lower_medians(name: Ints, often: Ints, passes: int, names: int) -> Ints:
    """Return the count of each name in the median pass; passes without it count as 0."""
    ordered = np.lexsort((often, name))
    present = np.bincount(name, minlength=names)
    first = np.cumsum(present) - present
    place = (passes - 1) // 2 - (passes - present)  # of the median among the passes that have it
    medians = np.zeros(names, np.int64)
    in_most = place >= 0
    medians[in_most] = often[ordered][first[in_most] + place[in_most]]
    return medians


def _from_the_first(grams: dict[int, Ints], passes: Repetition) -> Ints:
    """Return the places of the earliest run of tokens that recurs in step with the passes found.

    A run that makes the first pass longer or shorter than the others occurs by chance before the loop.
    """
    earlier = ((place, size, starts) for size, codes in grams.items() for place, starts in _recurring(codes, passes))
    for _, _, run_starts in sorted(earlier, key=lambda entry: entry[:2]):
        if _alternate(run_starts, passes.starts) and _is_first_similar(np.diff(run_starts)):
            return run_starts
    return passes.starts


def _without_other_beginning(codes: Ints, passes: Repetition) -> Repetition:
    """Return the passes without those before the first that is as long as most, and followed by such a pass."""
    lengths = np.diff(passes.starts)
    usual = float(np.median(lengths))
    similar = np.abs(lengths - usual) <= _SIMILAR_LENGTH * usual
    first = np.flatnonzero(similar[:-1] & similar[1:])
    return (_repetition(codes, passes.starts[first[0] :]) or passes) if len(first) and first[0] else passes


def _is_first_similar(lengths: Ints) -> bool:
    """Return whether the first pass is as long as the others: else something else came before the loop."""
    usual = float(np.median(lengths))
    return abs(float(lengths[0]) - usual) <= _SIMILAR_LENGTH * usual


def _recurring(codes: Ints, passes: Repetition) -> Iterator[tuple[int, Ints]]:
    """Yield first place and all places of each code that occurs as often as there are passes, or once more."""
    places = np.argsort(codes, kind="stable")
    counts = np.bincount(codes)
    ends = np.cumsum(counts)
    for code in np.flatnonzero((counts == passes.count) | (counts == passes.count + 1)).tolist():
        starts = places[ends[code] - counts[code] : ends[code]]
        if starts[0] < passes.starts[0]:
            yield int(starts[0]), starts


def _with_prefix(codes: Ints, starts: Ints) -> Ints:
    """Return `starts` moved back by the tokens before the first pass that stand before most others as well."""
    first, later = int(starts[0]), starts[1:]
    back = np.arange(1, first + 1)
    same = codes[later[:, None] - back] == codes[first - back] if first else np.zeros((0, 0), bool)
    differs = np.flatnonzero(2 * same.sum(axis=0) < len(later))
    return starts - (int(differs[0]) if len(differs) else first)


def _alternate(first: Ints, second: Ints) -> bool:
    """Return whether two ascending sequences take turns."""
    order = np.argsort(np.concatenate((first, second)), kind="stable")
    is_first: Flags = order < len(first)
    return bool((is_first[1:] != is_first[:-1]).all())


def _recurring_grams(tokens: Ints, parts: Ints, longest: int) -> Iterator[_RecurringGrams]:
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
        yield _RecurringGrams(length, places, first, np.add.reduceat(is_apart.astype(np.int64), first))


def _longer(starts: Ints, grams: Ints, codes: Ints, parts: Ints, length: int, kinds: int) -> tuple[Ints, Ints]:
    """Return places and codes of the runs of `length` that recur, from those of the runs that are one token shorter."""
    begins = np.flatnonzero(np.diff(starts) == 1)  # a run can only recur if both runs that are one shorter do
    starts, grams = starts[begins], grams[begins]
    inside = parts[starts] == parts[starts + length - 1]
    starts, grams = starts[inside], grams[inside]
    _, code, counts = np.unique(grams * kinds + codes[starts + length - 1], return_inverse=True, return_counts=True)
    recurs = counts[code] > 1
    return starts[recurs], np.unique(code[recurs], return_inverse=True)[1].astype(np.int64)


def _by_cover(grams: list[_RecurringGrams]) -> Iterator[tuple[int, int, int, int]]:
    """Yield -covered tokens, -length, first place and number of each run, in the order of `recurring_runs`."""
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


def _free_places(grams: _RecurringGrams, number: int, used: Flags) -> Ints:
    """Return the places of a run whose tokens are all unused, without those that overlap an earlier one."""
    places = grams.of(number)
    free: Ints = places[~used[places[:, None] + np.arange(grams.length)].any(axis=1)]
    return free[without_overlaps(free, grams.length)]
