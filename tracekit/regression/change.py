"""One metric, two runs: by how much its median changed, and whether the samples can tell.

Samples vary, so the change of a median comes with an interval: 95% of the changes that would be seen had other steps of
the same two runs been recorded (percentile bootstrap; Efron and Tibshirani, An Introduction to the Bootstrap, 1993,
chapter 13). Samples are taken as independent of each other, and the two runs as recorded under the same conditions:
what a machine does for minutes at a time, no interval within a run can tell.
"""

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from tracekit.regression.quantities import is_share
from tracekit.regression.samples import LOWER_IS_BETTER

Values: TypeAlias = npt.NDArray[np.float64]

MIN_SAMPLES = 5
"""Below 5 samples a side, even the extremes of both runs don't make a 95% interval for their medians."""
MIN_EFFECT = 0.01
"""A change smaller than this is no change: of the reference's median, or in points for a metric that is a share."""
MIN_STEP_SHARE = 0.005
"""A change of a time within the step is no change either below this share of the reference's step time."""
SAME_WITHIN = 0.05
"""Two medians are called the same where the whole interval lies within this, on the same scale as MIN_EFFECT."""
MAX_MORE_SAMPLES = 10_000

_RESAMPLES = 4000
_INTERVAL_PERCENTILES = (2.5, 97.5)
_SEED = 20260801
_CHUNK_SAMPLES = 2_000_000  # bounds the memory of long runs' resamples
_TIMES_WITHIN_STEP = (
    "compute_ns",
    "communication_ns",
    "exposed_communication_ns",
    "exposed_transfer_ns",
    "transfer_ns",
    "idle_ns",
    "data_wait_ns",
)


class Verdict(StrEnum):
    """What a comparison of one metric comes to, seen from the candidate."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    CANNOT_TELL = "cannot tell"


@dataclass(frozen=True)
class Change:
    """How one metric differs between the reference and the candidate.

    Medians are over steps, in the metric's own unit. `change` and its 95% interval `low` to `high` are relative to the
    reference, or in points (0.01 = one) for a metric that is a share; they are null where the reference is 0, and the
    interval also where there are fewer than MIN_SAMPLES samples.
    """

    metric: str
    reference: float
    candidate: float
    reference_samples: int
    candidate_samples: int
    change: float | None
    low: float | None
    high: float | None
    is_certain: bool
    """Whether the interval leaves out no change at all."""
    verdict: Verdict
    more_samples: int = 0
    """About how many more samples a side would tell, where the verdict is that these cannot."""
    more_recordings: int = 0
    """The same of recordings, where it is not the steps within each that differ too much but recordings."""

    @property
    def difference(self) -> float:
        """Return candidate minus reference, in the metric's own unit."""
        return self.candidate - self.reference

    @property
    def is_worsening(self) -> bool:
        """Whether the candidate's median is on the bad side of the reference's."""
        return self.difference > 0 if LOWER_IS_BETTER[self.metric] else self.difference < 0


def compare_samples(metric: str, reference: Values, candidate: Values, *, step_ns: float | None = None) -> Change:
    """Compare one metric by its samples, shape (n,) each. `step_ns` is the reference's step time, where it has one.

    >>> before, after = np.array([10.0, 11, 10, 10, 11, 10]), np.array([13.0, 12, 13, 13, 12, 13])
    >>> compare_samples("step_time_ns", before, after).verdict.value
    'worse'
    """
    a, b = float(np.median(reference)), float(np.median(candidate))
    scale = _Scale.of(metric, a, step_ns)
    count = min(len(reference), len(candidate))
    low, high = _interval(reference, candidate, scale) if count >= MIN_SAMPLES else (None, None)
    change = scale.change(a, b)
    verdict = _verdict(metric, change, low, high, scale=scale)
    return Change(
        metric,
        reference=a,
        candidate=b,
        reference_samples=len(reference),
        candidate_samples=len(candidate),
        change=change if scale.is_told else None,
        low=low if scale.is_told else None,
        high=high if scale.is_told else None,
        is_certain=_leaves_out_zero(low, high),
        verdict=verdict,
        more_samples=_more_samples(count, change, low, high, scale=scale) if verdict is Verdict.CANNOT_TELL else 0,
    )


@dataclass(frozen=True)
class _Scale:
    """What a metric's change is measured on: relative to the reference, in points, or in `unit` if `relative` is 0."""

    relative: float
    """The reference's median, to which changes are relative; 0 where they are not."""
    unit: float
    effect: float
    """The smallest change that counts."""
    within: float
    """Two medians no further apart are the same."""
    is_told: bool
    """Whether a reader can make something of numbers on this scale."""

    @classmethod
    def of(cls, metric: str, reference: float, step_ns: float | None) -> "_Scale":
        if is_share(metric):
            return cls(0.0, 1.0, MIN_EFFECT, SAME_WITHIN, is_told=True)
        # A time within the step can double and still be nothing: it counts by its share of the step.
        step_share_ns = MIN_STEP_SHARE * (step_ns or 0.0) if metric in _TIMES_WITHIN_STEP else 0.0
        if reference > 0:
            least = step_share_ns / reference
            return cls(reference, 1.0, max(MIN_EFFECT, least), max(SAME_WITHIN, least), is_told=True)
        unit = step_ns if step_ns and step_share_ns else 1.0
        return cls(0.0, unit, MIN_STEP_SHARE, MIN_STEP_SHARE, is_told=False)

    def change(self, reference: float, candidate: float) -> float:
        return (candidate - reference) / (self.relative or self.unit)

    def changes(self, references: Values, candidates: Values) -> Values:
        if self.relative and references.min() > 0:
            return np.asarray((candidates - references) / references)
        return np.asarray((candidates - references) / (self.relative or self.unit))


def _interval(reference: Values, candidate: Values, scale: _Scale) -> tuple[float, float]:
    random = np.random.default_rng(_SEED)
    # Each side is drawn from its own steps: which run a step belongs to is not left to chance.
    medians = [_resampled_medians(side, random) for side in (reference, candidate)]
    low, high = np.percentile(scale.changes(medians[0], medians[1]), _INTERVAL_PERCENTILES)
    return float(low), float(high)


def _resampled_medians(values: Values, random: np.random.Generator) -> Values:
    """Return the medians of `_RESAMPLES` samples drawn from `values` with replacement, of the same size."""
    count = len(values)
    rows = max(1, _CHUNK_SAMPLES // count)
    chunks = [min(rows, _RESAMPLES - done) for done in range(0, _RESAMPLES, rows)]
    return np.concatenate([np.median(values[random.integers(0, count, (n, count))], axis=1) for n in chunks])


def _verdict(metric: str, change: float, low: float | None, high: float | None, *, scale: _Scale) -> Verdict:
    if low is None or high is None:
        return Verdict.CANNOT_TELL
    if _leaves_out_zero(low, high) and abs(change) >= scale.effect:
        return Verdict.WORSE if (change > 0) == LOWER_IS_BETTER[metric] else Verdict.BETTER
    return Verdict.SAME if max(abs(low), abs(high)) <= scale.within else Verdict.CANNOT_TELL


def _leaves_out_zero(low: float | None, high: float | None) -> bool:
    return low is not None and high is not None and (low > 0 or high < 0)


def _more_samples(count: int, change: float, low: float | None, high: float | None, *, scale: _Scale) -> int:
    """Return about how many more samples a side would leave no doubt: intervals narrow with the root of their number.

    Enough for the interval to leave out zero if the change is as it seems, or to lie within what counts as the same,
    whichever comes first.
    """
    if low is None or high is None:
        return MIN_SAMPLES - count
    distance = abs(change)
    toward_zero = change - low if change > 0 else high - change
    outward = max(high - change, change - low)
    ways = [count * (toward_zero / distance) ** 2] if distance >= scale.effect else []
    ways += [count * (outward / (scale.within - distance)) ** 2] if distance < scale.within else []
    wanted = min(ways, default=float(MAX_MORE_SAMPLES))
    return max(1, min(math.ceil(wanted) - count, MAX_MORE_SAMPLES))
