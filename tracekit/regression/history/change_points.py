"""Change-point detection in a short, noisy series: where the level changed permanently, and where it only drifts.

The numbers are medians, one per run: few (tens, rarely hundreds), noisy by a few percent, with outliers (a busy
machine). The series is divided into segments of a constant level at the lowest total cost (optimal partitioning;
Jackson et al. 2005, An algorithm for optimal partitioning of data on an interval; PELT computes the same). The cost of
a segment is the sum of the squared distances of its runs from their median, in units of the noise, each at most
`_FAR`²: the biweight loss of Fearnhead and Rigaill (2019, Changepoint detection in the presence of outliers, JASA 114),
so that a single outlier is never a change. The noise is estimated from differences between neighbours, which neither
changes nor drift inflate. Each change costs `price`. It is set by simulation: fewer than 3 of 100 series of 10 to 100
runs without a change show one, for normal noise and for noise with much heavier tails.

No library is used, because this method measured better here. E-divisive, the energy distance with a permutation test
(Matteson and James 2014, JASA 109), which MongoDB and Apache Otava use, was tried, also with rank sums and clipped
means in place of energies. With 5 runs after a change, there are too few permutations for a small p-value. A single
outlier next to the change prevented half of the detections, because a permuted series loses the order of its runs.

If all changes go in one direction, they are compared with a straight line (Theil and Sen's) through the same runs, at
the same cost and a price slightly lower than that of one change. If the line costs less, the result is drift: the
metric grows slowly, and no single commit is the cause.

Runs that are not independent (the same busy hour, another machine with the same name) look like changes and are
reported as such. So a series should contain only runs with one fingerprint.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Values: TypeAlias = npt.NDArray[np.float64]

MIN_RUNS = 3
"""Runs that a level needs: fewer may be a bad day."""
LEAST_RUNS = 2 * MIN_RUNS
"""The fewest runs in which a change can be found."""
MIN_DRIFT_RUNS = 16
"""Runs that a slope needs: in fewer, a change looks like one."""
MOST_RUNS = 400
"""Runs that are looked at, the latest: the time it takes grows with their number cubed."""

_FAR = 3.0  # times the noise, as which a distance counts at most: a single outlier is no change
_LEAST_NOISE = 0.2  # of the least change that is one: what counts exactly is not infinitely sure of itself
_ROUNDING = 1e-9
_PRICE = 12.0
_SLOPE_DISCOUNT = 1.5
_FAR_DIFFERENCE = 2.5
_OF_CLIPPED = 1.02  # what clipping normal noise at that takes from its standard deviation
_MAD_TO_SIGMA = 1.4826  # of the normal distribution


@dataclass(frozen=True)
class LevelShift:
    """The level changed for good at run `index` (counted from 0), the first that has the new one.

    `before` and `after` are the medians of the runs up to the neighbouring changes.
    """

    index: int
    before: float
    after: float


@dataclass(frozen=True)
class Drift:
    """The level went steadily from `before` to `after` over the runs `first` to `past` (half-open)."""

    first: int
    past: int
    before: float
    after: float


@dataclass(frozen=True)
class Trend:
    """What became of a series: its changes and its drifts, in order. Neither: its level is constant."""

    shifts: tuple[LevelShift, ...] = ()
    drifts: tuple[Drift, ...] = ()


def trend(values: Values, *, min_change: float) -> Trend:
    """Find the changes of level and drifts of a series, of at least `min_change` in its own unit.

    `values` has shape (n,), in the order of time. Of more than `MOST_RUNS` only the latest are looked at; `index` still
    counts from the first.

    >>> found = trend(np.array([10.0, 10.1, 9.9, 10.0, 10.1, 10.0, 12.1, 12.0, 11.9, 12.0, 12.1, 12.0]), min_change=0.1)
    >>> [(step.index, step.before, step.after) for step in found.shifts]
    [(6, 10.0, 12.0)]
    """
    if len(values) < LEAST_RUNS:
        return Trend()
    skipped = max(0, len(values) - MOST_RUNS)
    series = _Series.of(values[skipped:], min_change)
    slopes: list[tuple[int, int]] = []
    edges = [
        i for stairs, a, b in series.stairs(series.cheapest()) for i in _unless_slope(series, stairs, a, b, slopes)
    ]
    slopes += [
        (a, b)
        for a, b in pairwise([0, *edges, len(series.values)])
        if not any(first < b and a < past for first, past in slopes) and series.is_slope(a, b, ())
    ]
    return _trend(series, edges, sorted(slopes), skipped=skipped, min_change=min_change)


def price(count: int) -> float:
    """Return the cost of a change in a series of `count` runs: the more places it may lie at, the more it must show."""
    return _PRICE + max(0.0, math.log(max(count, 1) / 20))


def _trend(
    series: "_Series", edges: Sequence[int], slopes: Sequence[tuple[int, int]], *, skipped: int, min_change: float
) -> Trend:
    drifts = {bounds: series.drift(*bounds) for bounds in slopes}
    bounds = [0, *edges, len(series.values)]
    begins = {a: drifts[a, b].before if (a, b) in drifts else series.level(a, b) for a, b in pairwise(bounds)}
    ends = {b: drifts[a, b].after if (a, b) in drifts else series.level(a, b) for a, b in pairwise(bounds)}
    steps = [LevelShift(edge + skipped, ends[edge], begins[edge]) for edge in edges]
    sloped = [Drift(d.first + skipped, d.past + skipped, d.before, d.after) for d in drifts.values()]
    return Trend(
        tuple(step for step in steps if abs(step.after - step.before) >= min_change),
        tuple(drift for drift in sloped if abs(drift.after - drift.before) >= min_change),
    )


def _unless_slope(
    series: "_Series", stairs: Sequence[int], first: int, past: int, slopes: list[tuple[int, int]]
) -> list[int]:
    """Return the changes of stairs that are no slope; add what is one to `slopes`."""
    if not stairs:
        return []
    if series.is_slope(first, past, stairs):
        slopes.append((first, past))
        return []
    if len(stairs) == 1:
        return list(stairs)
    bounds = [first, *stairs, past]
    rises = {
        i: abs(series.level(i, b) - series.level(a, i)) for a, i, b in zip(bounds, stairs, bounds[2:], strict=False)
    }
    largest = max(stairs, key=lambda i: rises[i])
    earlier, later = [i for i in stairs if i < largest], [i for i in stairs if i > largest]
    return [
        *_unless_slope(series, earlier, first, largest, slopes),
        largest,
        *_unless_slope(series, later, largest, past, slopes),
    ]


@dataclass(frozen=True, eq=False)
class _Series:
    """Numbers with their noise, and the cost and level of any stretch of them."""

    values: Values
    noise: float

    @classmethod
    def of(cls, values: Values, min_change: float) -> "_Series":
        largest = float(np.abs(values).max())
        return cls(values, max(noise(values), _LEAST_NOISE * min_change, _ROUNDING * largest) or 1.0)

    def cheapest(self) -> list[int]:
        """Return the indices at which the cheapest split into levels changes."""
        count = len(self.values)
        costs, per_change = self._costs(), price(count)
        best = np.full(count + 1, np.inf)
        best[0] = -per_change
        came_from = np.zeros(count + 1, dtype=np.int64)
        for past in range(MIN_RUNS, count + 1):
            totals = best[: past - MIN_RUNS + 1] + costs[: past - MIN_RUNS + 1, past] + per_change
            came_from[past] = int(totals.argmin())
            best[past] = totals[came_from[past]]
        edges: list[int] = []
        edge = int(came_from[count])
        while edge > 0:
            edges.append(edge)
            edge = int(came_from[edge])
        return edges[::-1]

    def _costs(self) -> Values:
        """Return the cost of each stretch of one level, shape (n, n + 1): from a run to past another."""
        count = len(self.values)
        costs = np.full((count, count + 1), np.inf)
        for length in range(MIN_RUNS, count + 1):
            windows = np.lib.stride_tricks.sliding_window_view(self.values, length)
            away = windows - np.median(windows, axis=1, keepdims=True)
            firsts = np.arange(len(windows))
            costs[firsts, firsts + length] = self._cost(away, axis=1)
        return costs

    def _cost(self, away: Values, axis: int = 0) -> Values:
        return np.asarray(np.minimum(np.square(away / self.noise), _FAR**2).sum(axis=axis))

    def stairs(self, edges: Sequence[int]) -> Iterable[tuple[list[int], int, int]]:
        """Yield neighbouring changes that go one way, with the runs from the level before them to that after them."""
        bounds = [0, *edges, len(self.values)]
        levels = [self.level(a, b) for a, b in pairwise(bounds)]
        ups = [after > before for before, after in pairwise(levels)]
        begin = 0
        for number in range(1, len(edges) + 1):
            if number == len(edges) or ups[number] != ups[begin]:
                yield list(edges[begin:number]), bounds[begin], bounds[number + 1]
                begin = number

    def is_slope(self, first: int, past: int, stairs: Sequence[int]) -> bool:
        """Return whether a straight line describes a stretch at lower cost than levels that change at `stairs`."""
        values = self.values[first:past]
        if len(values) < MIN_DRIFT_RUNS:
            return False
        intercept, slope = _line(values)
        bounds = [0, *(i - first for i in stairs), len(values)]
        levels = sum(float(self._cost(values[a:b] - np.median(values[a:b]))) for a, b in pairwise(bounds))
        line = float(self._cost(values - intercept - slope * np.arange(len(values))))
        per_change = price(len(self.values))
        return line + per_change - _SLOPE_DISCOUNT < levels + per_change * len(stairs)

    def drift(self, first: int, past: int) -> Drift:
        """Return the slope of a stretch."""
        intercept, slope = _line(self.values[first:past])
        return Drift(first, past, intercept, intercept + slope * (past - first - 1))

    def level(self, first: int, past: int) -> float:
        """Return the level of a stretch."""
        return float(np.median(self.values[first:past]))


def noise(values: Values) -> float:
    """Return the standard deviation of a series around its level, from differences of neighbours, far ones clipped.

    >>> round(noise(np.random.default_rng(1).normal(100, 3, 4000)), 1)
    3.0
    """
    away = np.abs(np.diff(values))
    typical = float(np.median(away)) * _MAD_TO_SIGMA
    clipped = np.minimum(away, _FAR_DIFFERENCE * typical)
    return float(np.sqrt(np.mean(np.square(clipped)) / 2)) * _OF_CLIPPED


def _line(values: Values) -> tuple[float, float]:
    """Return intercept and slope of Theil and Sen's line: the median of all pairs' slopes."""
    first, second = np.triu_indices(len(values), 1)
    slope = float(np.median((values[second] - values[first]) / (second - first)))
    return float(np.median(values - slope * np.arange(len(values)))), slope
