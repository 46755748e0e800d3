"""Slow steps of one rank that come again and again, or last: the reason to open a deep window by itself.

A window opens seconds after its reason, so a single slow step is gone by then: only what recurs or lasts is a reason.
Plain Python, and no clock but the steps' own times.
"""

import heapq
import math
import statistics
from collections import deque
from itertools import pairwise
from typing import Any, NamedTuple

from tracekit.conventions.outlier_detector import (
    MIN_RISE_LOG,
    SPREADS,
    WARM_UP_STEPS,
    WINDOW,
    OutlierDetector,
    Verdict,
)

NS_PER_S = 10**9
LASTING_NS = 3 * NS_PER_S
"""What is over sooner cannot be recorded: so long takes a window from its request to its first step."""

MIN_STALLS = 5
"""With 3, and 2% of the time, a tenth of trainings of 1,500 steps whose noise has a heavy tail opened a window."""

MIN_COST_RATIO = 0.03
"""Share of the training's time that stalls take, or a lasting rise."""

REST_STEPS = 256
"""Steps after a window, or a request for one, until the next request."""

_MIN_VALUES = 64  # with 16, as in `watch`, the spread is 20% off: 1 of 1,000 steps of lognormal noise is slow
_RECENT_STEPS, _RECENT_NS = 2 * WINDOW, 8 * LASTING_NS
_STALL_STEPS = 8  # of a longer stretch, each 8 slow steps count as a stall
_MAX_STALLS = 4096
_GAPS = 8
_MAJOR_RATIO = 0.5  # of the MIN_STALLS-th largest excess
_BLOCK_STEPS = 32
_BLOCKS = 2  # a single slow block of 3 s may be another program's
_MEDIAN_ERROR = 1.2533  # of a median of n Gaussian values, over that of their mean: sqrt(pi / 2)


class Outlier(NamedTuple):
    """Why a window is requested: `step` of `rank` took `ratio` times the median of the steps before it."""

    step: int
    rank: int
    ratio: float
    median_ns: int
    gap_steps: int = 1
    """The most steps from one slow step to the next, of the last ones."""
    is_regular: bool = True
    """Whether all of these gaps are equal, or differ by one step."""

    def reason(self) -> dict[str, int | float]:
        """Fields for the manifest."""
        return {"step": self.step, "rank": self.rank, "ratio": round(self.ratio, 3), "median_ns": self.median_ns}

    @classmethod
    def parse(cls, value: Any) -> "Outlier | None":
        """Outlier of a JSON object; None for anything else."""
        kinds = {"step": int, "rank": int, "ratio": float, "median_ns": int, "gap_steps": int, "is_regular": bool}
        if not isinstance(value, dict) or any(type(value.get(name)) is not kind for name, kind in kinds.items()):
            return None
        is_valid = (
            value["step"] >= 0 and value["rank"] >= 0 and value["gap_steps"] > 0 and 0 < value["ratio"] < math.inf
        )
        return cls(**{name: value[name] for name in kinds}) if is_valid else None


class _Stall(NamedTuple):
    step: int
    end_ns: int
    """Time of all steps up to the end of its first slow step."""


class _SlowStep(NamedTuple):
    step: int
    excess_ns: float
    """Beyond the median, of the part of its time that is judged."""


class SlowSteps:
    """The steps of a rank in order; `add` returns an `Outlier` when slow ones recur or last.

    Slow is what `OutlierDetector` calls high, of the logarithms of step times. Slow steps recur when there were
    MIN_STALLS of them over LASTING_NS or more, and they cost MIN_COST_RATIO. They last when the medians of two blocks
    of steps, each of LASTING_NS or more, are above that of the steps before by MIN_RISE_RATIO and SPREADS standard
    errors.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._detector = OutlierDetector()
        self._warm_up = WARM_UP_STEPS
        self._elapsed_ns = 0
        self._rest_until = 0
        self._stalls: deque[_Stall] = deque(maxlen=_MAX_STALLS)
        self._slow_steps: deque[_SlowStep] = deque(maxlen=_MAX_STALLS)
        self._last_times_ns: deque[float] = deque(maxlen=_BLOCK_STEPS)
        self._block: list[float] = []
        self._block_ns = 0
        self._slow_blocks = 0
        self._block_reference: float | None = None
        self._block_limit = math.inf

    @property
    def step_ns(self) -> int:
        """Median time of the last steps, that of waits included; 0 before the first one."""
        return round(statistics.median(self._last_times_ns)) if self._last_times_ns else 0

    def rest(self, until_step: int) -> None:
        """Forget the slow steps so far, and request nothing before a step: a window has been requested."""
        self._rest_until = max(self._rest_until, until_step)
        self._forget()

    def add(self, step: int, step_ns: float, judged_ns: float | None = None) -> Outlier | None:
        """Add a step; `judged_ns` is the part of its time that is judged, None where its slowness is explained."""
        self._elapsed_ns += round(step_ns)
        self._last_times_ns.append(step_ns)
        if self._warm_up or judged_ns is None:
            self._warm_up = max(0, self._warm_up - 1)
            return None
        value = math.log(max(1.0, judged_ns))
        outlier = None
        if step >= self._rest_until:
            verdict = self._detector.judge(value, MIN_RISE_LOG)
            if verdict is not Verdict.NORMAL and len(self._detector) >= _MIN_VALUES:
                outlier = self._add_slow_step(step, judged_ns)
            outlier = self._add_to_block(step, value, step_ns) or outlier
        self._detector.add(value)
        if outlier is not None:
            self.rest(step + REST_STEPS)
        return outlier

    def _add_slow_step(self, step: int, judged_ns: float) -> Outlier | None:
        median_ns = math.exp(self._detector.median or 0.0)
        is_new = not self._stalls or self._slow_steps[-1].step != step - 1
        if is_new or step - self._stalls[-1].step >= _STALL_STEPS:
            self._stalls.append(_Stall(step, self._elapsed_ns))
        self._slow_steps.append(_SlowStep(step, judged_ns - median_ns))
        self._drop_old_stalls(step)
        duration_ns = self._elapsed_ns - self._stalls[0].end_ns
        if len(self._stalls) < MIN_STALLS or duration_ns < LASTING_NS:
            return None
        # What a single stall takes beyond the others does not recur.
        recurring_ns = heapq.nlargest(MIN_STALLS, [slow_step.excess_ns for slow_step in self._slow_steps])[-1]
        cost_ns = sum(min(slow_step.excess_ns, recurring_ns) for slow_step in self._slow_steps)
        if cost_ns < MIN_COST_RATIO * duration_ns:
            return None
        return self._recurring(median_ns, recurring_ns)

    def _recurring(self, median_ns: float, recurring_ns: float) -> Outlier:
        """Reason: the last of the slow steps that cost most; noise adds smaller ones at no regular distance."""
        major = [slow_step for slow_step in self._slow_steps if slow_step.excess_ns >= _MAJOR_RATIO * recurring_ns]
        gaps = [later.step - earlier.step for earlier, later in pairwise(major)][-_GAPS:]
        ratio, is_regular = 1 + major[-1].excess_ns / median_ns, max(gaps) - min(gaps) <= 1
        return Outlier(major[-1].step, self._rank, ratio, round(median_ns), max(gaps), is_regular)

    def _drop_old_stalls(self, step: int) -> None:
        """Drop stalls that are older than _RECENT_STEPS and _RECENT_NS: the rest recurs."""
        while step - self._stalls[0].step > _RECENT_STEPS and self._elapsed_ns - self._stalls[0].end_ns > _RECENT_NS:
            self._stalls.popleft()
        while self._slow_steps[0].step < self._stalls[0].step:
            self._slow_steps.popleft()

    def _add_to_block(self, step: int, value: float, step_ns: float) -> Outlier | None:
        if not self._block and not self._slow_blocks:
            self._set_block_limit()
        self._block.append(value)
        self._block_ns += round(step_ns)
        if len(self._block) < _BLOCK_STEPS or self._block_ns < LASTING_NS:
            return None
        median, mean_step_ns = statistics.median(self._block), self._block_ns / len(self._block)
        self._block, self._block_ns = [], 0
        if self._block_reference is None or median <= self._block_limit:
            self._slow_blocks = 0
            return None
        reference_ns = math.exp(self._block_reference)
        if math.exp(median) - reference_ns < MIN_COST_RATIO * mean_step_ns:
            return None
        self._slow_blocks += 1
        if self._slow_blocks < _BLOCKS:
            return None
        return Outlier(step, self._rank, math.exp(median - self._block_reference), round(reference_ns))

    def _set_block_limit(self) -> None:
        median, spread = self._detector.median, self._detector.spread
        if median is None or spread is None or len(self._detector) < _MIN_VALUES:
            self._block_reference = None
            return
        error = spread * _MEDIAN_ERROR / math.sqrt(_BLOCK_STEPS)
        self._block_reference, self._block_limit = median, median + max(SPREADS * error, MIN_RISE_LOG)

    def _forget(self) -> None:
        self._stalls.clear()
        self._slow_steps.clear()
        self._block, self._block_ns, self._slow_blocks = [], 0, 0
