"""When a step is an outlier: the rule of ``tracekit watch``, and of a recorder that opens windows by itself.

Plain Python: it runs in the training.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from enum import Enum, auto

WINDOW = 256
"""How many values a new one is compared with."""

MIN_VALUES = 16
"""With fewer values, none is an outlier."""

SPREADS = 4.0
"""How many spreads above the median an outlier is at least."""

WARM_UP_STEPS = 5
"""The first steps of a training, also after a resume, are never outliers."""

MIN_RISE_RATIO = 0.2
"""How far above the median a slow step or a loss spike is at least."""

MIN_RISE_LOG = math.log1p(MIN_RISE_RATIO)
"""The same for logarithms of step times."""

_VALUES_PER_RANK = 128
_GAUSSIAN_FACTOR = 1.4826  # times the median absolute deviation, it estimates the standard deviation of Gaussian noise


class Verdict(Enum):
    """How a value compares with the values before it."""

    NORMAL = auto()
    HIGH = auto()
    """Above the limit, but earlier values were as high: a slow stretch continues, or the noise has a heavy tail."""
    OUTLIER = auto()


class OutlierDetector:
    """The last WINDOW values of a series, and the limit above which a new value is high.

    A value is high if it is above ``median + max(SPREADS * spread, min_rise)``, where spread is 1.4826 times the
    median absolute deviation: both ignore outliers, up to half of the values (Rousseeuw & Croux, "Alternatives to the
    median absolute deviation", JASA 88, 1993; Iglewicz & Hoaglin, "How to detect and handle outliers", 1993, who take
    3.5 spreads to label single outliers in one sample; here thousands of steps are judged).

    It is an outlier if it is also above the k-th largest of the n values, k = 2 + n // 128. If the values are
    exchangeable, noise of any distribution, each order is equally likely, so that this holds for at most a share
    k / (n + 1): 1.6% with a full window, however heavy the tail. (For lognormal noise the spread keeps it below 0.1%.)
    When a training becomes slower permanently, it is reported about a dozen times, not until the faster steps leave the
    window.
    """

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._ordered: list[float] = []

    def __len__(self) -> int:
        return len(self._last)

    def add(self, value: float) -> None:
        """Add a value; of more than WINDOW values the oldest is dropped."""
        if len(self._last) == WINDOW:
            del self._ordered[bisect_left(self._ordered, self._last.popleft())]
        self._last.append(value)
        insort(self._ordered, value)

    @property
    def median(self) -> float | None:
        """Return the median of the values; None if there are none."""
        return _median(self._ordered) if self._ordered else None

    @property
    def spread(self) -> float | None:
        """Return the standard deviation estimated from the median absolute deviation; None without values."""
        if not self._ordered:
            return None
        middle = _median(self._ordered)
        return _GAUSSIAN_FACTOR * _median(sorted(abs(value - middle) for value in self._ordered))

    def limit(self, min_rise: float) -> float | None:
        """Return the value above which one is high; None with too few values."""
        if len(self._last) < MIN_VALUES:
            return None
        middle, spread = self.median, self.spread
        assert middle is not None
        assert spread is not None
        return middle + max(SPREADS * spread, min_rise)

    def judge(self, value: float, min_rise: float) -> Verdict:
        """Compare a value with the added ones."""
        if len(self._last) < MIN_VALUES or value <= _median(self._ordered) + min_rise:
            return Verdict.NORMAL  # cheaper to compute than the limit
        limit = self.limit(min_rise)
        if limit is None or value <= limit:
            return Verdict.NORMAL
        place = 2 + len(self._last) // _VALUES_PER_RANK
        return Verdict.OUTLIER if value > self._ordered[-place] else Verdict.HIGH


def _median(ordered: list[float]) -> float:
    half = len(ordered) // 2
    return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
