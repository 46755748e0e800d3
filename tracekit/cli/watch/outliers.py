"""What is usual for a series, and from where on a value is out of line with those before it."""

from bisect import bisect_left, insort
from collections import deque
from enum import Enum, auto

WINDOW = 256
"""Values that a new one is held against."""

MIN_VALUES = 16
"""With fewer, nothing is out of line."""

SPREADS = 4.0
"""How many spreads above the median a value must be."""

_VALUES_PER_RANK = 128
_GAUSSIAN_FACTOR = 1.4826  # times the median absolute deviation, it estimates the standard deviation of Gaussian noise


class Verdict(Enum):
    """How a value stands to those before it."""

    NORMAL = auto()
    HIGH = auto()
    """Beyond the bound, but the like was there before: a slow stretch goes on, or the noise has a heavy tail."""
    OUTLIER = auto()


class OutlierDetector:
    """The last WINDOW values of a series, and the bound above which a further one is out of line.

    A value is high if it is above ``median + max(SPREADS * spread, min_rise)``, where spread is 1.4826 times the
    median absolute deviation: both ignore outliers, up to half of the values (Rousseeuw & Croux, "Alternatives to the
    median absolute deviation", JASA 88, 1993; Iglewicz & Hoaglin, "How to detect and handle outliers", 1993, who take
    3.5 spreads to label single outliers in one sample; here thousands of steps are judged).

    It is out of line if it is also above the k-th largest of the n values, k = 2 + n // 128. If the values are
    exchangeable, noise of whatever distribution, each order is as likely, so that happens to no more than a share
    k / (n + 1): 1.6% with a full window, however heavy the tail. (Of lognormal noise it is below 0.1%, by the spread.)
    And when a training gets slower for good, it is said some dozen times, not for as long as the window still holds
    faster steps.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def add(self, value: float) -> None:
        """Take a value in; beyond WINDOW the oldest goes."""
        if len(self._last) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._last.popleft())]
        self._last.append(value)
        insort(self._ordered, value)

    @property
    def median(self) -> float | None:
        """Return the median of the values; None of none."""
        return _median(self._ordered) if self._ordered else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation that the values' median absolute deviation stands for; None of none."""
        if not self._ordered:
            return None
        middle = _median(self._ordered)
        return _GAUSSIAN_FACTOR * _median(sorted(abs(value - middle) for value in self._ordered))

    def limit(self, min_rise: float) -> float | None:
        """Return the value above which one is high; None with too few values to tell."""
        if len(self._last) < MIN_VALUES:
            return None
        middle, spread = self.median, self.spread
        assert middle is not None
        assert spread is not None
        return middle + max(SPREADS * spread, min_rise)

    def judge(self, value: float, min_rise: float) -> Verdict:
        """Return how a value stands to those taken in so far."""
        if len(self._last) < MIN_VALUES or value <= _median(self._ordered) + min_rise:
            return Verdict.NORMAL  # cheaper to see than the bound
        bound = self.limit(min_rise)
        if bound is None or value <= bound:
            return Verdict.NORMAL
        place = 2 + len(self._last) // _VALUES_PER_RANK
        return Verdict.OUTLIER if value > self._ordered[-place] else Verdict.HIGH


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2


class DownsampledCurve:
    """A series of any length as at most `most` means of equal stretches of it."""

    def __init__(self, most: int = 240) -> None:
        self._most = most
        self._stretch = 1
        self._sum, self._count = 0.0, 0
        self.values: list[float] = []

    def add(self, value: float) -> None:
        """Take the next value in."""
        self._sum, self._count = self._sum + value, self._count + 1
        if self._count < self._stretch:
            return
        self.values.append(self._sum / self._count)
        self._sum, self._count = 0.0, 0
        if len(self.values) == self._most:
            pairs = zip(self.values[::2], self.values[1::2], strict=True)
            self.values, self._stretch = [(a + b) / 2 for a, b in pairs], self._stretch * 2
