"""One metric, recordings on two sides: did what is recorded change, or only the moment at which it was?

Two recordings of the same training, minutes apart on a shared machine, differ by more than the steps within either do:
a neighbour works for minutes, a clock settles, memory falls out differently. An interval from the steps of one
recording a side (`tracekit.regression.change`) knows nothing of that and cries wolf. So here

- a recording counts as one observation: the median of its steps, or of its saves, and, where all are positive, of their
  logarithms, for a machine that is busy doubles a time as easily as it halves it. What the steps of a recording leave
  uncertain of that is found by a circular block bootstrap (Politis and Romano 1992), for neighbouring steps are alike,
  and is the least by which recordings must differ;
- the spread between recordings is learnt from those of the baseline, which holds several, and moderated by what is
  usual for such a metric: an empirical Bayes estimate as limma has it for few replicates (Smyth 2004), with the weight
  of `_PRIOR_DEGREES` recordings more. What is usual is a least spread, that of a quiet machine, and half of what the
  steps of one recording scatter by: where they scatter much, recordings differ much too (docs/gate.md has both). With a
  baseline of one recording that is all that is known, and the interval is wide;
- the interval is that of Student's t for a new recording (the prediction interval: both the new one and the mean of the
  baseline vary), at 99% and not 95%, because several metrics are judged at once and each may cry wolf;
- a change counts only from a least effect on, whatever the interval: what nobody would act on fails no build.

What makes a gate sharp on a noisy machine is not the test but what is measured: the time that the processors ran for
the training, bytes sent and bytes allocated barely notice a neighbour, where the wall clock does. They are metrics like
others here; each has the spread that its own recordings show, so the quiet ones decide and the loud ones cannot tell.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from tracekit.regression.change import MAX_MORE_SAMPLES, MIN_SAMPLES, SAME_WITHIN, Change, Values, Verdict
from tracekit.regression.quantities import is_share
from tracekit.regression.samples import LOWER_IS_BETTER
from tracekit.regression.thresholds import MIN_CHANGE_RATIO

CONFIDENCE = 0.99
MIN_STEP_SHARE = 0.01
"""A change of a time within the step is none either below this share of the reference's step."""
MIN_CHECKPOINT_EFFECT = 0.1
"""The same of what a save takes: saves are rare, and storage has its moods."""
MAX_MORE_RECORDINGS = 100
_MOST_LOGARITHM = 50.0  # a change beyond is told as this: intervals stay finite

_WITHIN_STEP = (
    "compute_ns", "communication_ns", "exposed_communication_ns", "exposed_transfer_ns", "transfer_ns",
    "idle_ns", "data_wait_ns",
)  # fmt: skip
_OF_SAVES = ("checkpoint_blocked_ns", "checkpoint_cpu_ns")
_LEAST_SPREADS = {
    "cpu_time_ns": 0.015,
    "checkpoint_cpu_ns": 0.03,
    "checkpoint_blocked_ns": 0.1,
    "idle_ns": 0.05,
    "data_wait_ns": 0.05,
    "transfer_ns": 0.03,
    "exposed_transfer_ns": 0.03,
    "communication_ns": 0.03,
    "exposed_communication_ns": 0.03,
    "exposed_communication_ratio": 0.01,
    "overlap_ratio": 0.01,
}
_LEAST_OF_TIMES = 0.015
_SCATTER_SHARE = 0.5
_MAD_OF_NORMAL = 1.4826
_PRIOR_DEGREES = 3.0
_ENOUGH_RECORDINGS = 3
_ENOUGH_COUNTS = 2
_BOOTSTRAPS = 100
_SEED = 20261121


def least_spread(metric: str) -> float:
    """Return by how much recordings of the same differ at least: a standard deviation, relative, or points of a share.

    Counts and sizes need not differ at all.
    """
    if metric in _LEAST_SPREADS:
        return _LEAST_SPREADS[metric]
    return _LEAST_OF_TIMES if metric.endswith("_ns") or metric == "tokens_per_second" else 0.0


def compare_recordings(
    metric: str,
    reference: Sequence[Values],
    candidate: Sequence[Values],
    *,
    step_ns: float | None = None,
    min_effect: float = MIN_CHANGE_RATIO,
) -> Change:
    """Compare one metric by recordings, each an array of samples, shape (n,); at least one a side, none of them empty.

    `step_ns` is the reference's step time, where it has one. A change of less than `min_effect` is none: of the
    reference, or in points of a share. The interval of the change returned is at CONFIDENCE.
    """
    logarithmic = not is_share(metric) and all(float(values.min()) > 0 for values in (*reference, *candidate))
    a, b = _Side.of(reference, logarithmic=logarithmic), _Side.of(candidate, logarithmic=logarithmic)
    scale = _Scale.of(metric, a, step_ns, min_effect)
    difference = (b.place - a.place) / scale.unit
    if not _is_enough(a, b, least_spread(metric)):
        lacking = MIN_SAMPLES - min(a.samples, b.samples)
        return _told(metric, a, b, difference, None, scale, verdict=Verdict.CANNOT_TELL, more=(max(1, lacking), 0))
    spread = _Spread.of(a, b, least_spread(metric), scale.unit)
    reach = spread.reach(len(a.places), len(b.places))
    verdict = _verdict(metric, scale.change(difference), scale.interval(difference, reach), scale)
    more = _more(difference, spread, a, b, scale) if verdict is Verdict.CANNOT_TELL else (0, 0)
    return _told(metric, a, b, difference, reach, scale, verdict=verdict, more=more)


def student_t(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t, by Cornish and Fisher's expansion: within 1% from 3 degrees of freedom on.

    >>> round(student_t(0.995, 4), 1), round(student_t(0.975, 30), 2)
    (4.6, 2.04)
    """
    z, n = NormalDist().inv_cdf(probability), degrees
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
        + (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / (92160 * n**4)
    )


def variance_of_median(values: Values) -> float:
    """Return the variance of the median of a series of neighbouring samples, by a circular block bootstrap."""
    count = len(values)
    if count < MIN_SAMPLES or not np.ptp(values):
        return 0.0
    block = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(_SEED).integers(0, count, (_BOOTSTRAPS, -(-count // block)))
    drawn = (starts[:, :, None] + np.arange(block)) % count
    medians = np.median(values[drawn.reshape(_BOOTSTRAPS, -1)[:, :count]], axis=1)
    return float(medians.var())


@dataclass(frozen=True)
class _Side:
    """One side's recordings, each by the median of its samples, or by that of their logarithms."""

    places: Values
    logarithmic: bool
    within: float
    """Variance of such a median that the samples of the recording itself leave, the mean over recordings."""
    scatter: float
    """By how much the samples of a recording scatter: a standard deviation, robust, the mean over recordings."""
    samples: int

    @classmethod
    def of(cls, recordings: Sequence[Values], *, logarithmic: bool) -> "_Side":
        taken = [np.log(values) if logarithmic else values for values in recordings]
        places = np.array([float(np.median(values)) for values in taken])
        within = float(np.mean([variance_of_median(values) for values in taken]))
        apart = [float(np.median(np.abs(values - np.median(values)))) for values in taken]
        return cls(places, logarithmic, within, _MAD_OF_NORMAL * float(np.mean(apart)), sum(map(len, taken)))

    @property
    def place(self) -> float:
        return float(self.places.mean())

    @property
    def center(self) -> float:
        """Return the middle of the recordings, in the metric's own unit."""
        return math.exp(self.place) if self.logarithmic else self.place


@dataclass(frozen=True)
class _Scale:
    """What a change is measured in: relative to the reference, in points, or in steps where the reference is 0."""

    unit: float
    logarithmic: bool
    effect: float
    within: float
    is_told: bool
    """Whether a reader can make something of numbers on this scale."""

    @classmethod
    def of(cls, metric: str, side: _Side, step_ns: float | None, min_effect: float) -> "_Scale":
        reference = side.center
        if is_share(metric):
            return cls(1.0, False, min_effect, SAME_WITHIN, is_told=True)
        least_ns = MIN_STEP_SHARE * (step_ns or 0.0) if metric in _WITHIN_STEP else 0.0
        if reference <= 0:
            unit = step_ns if step_ns and least_ns else 1.0
            return cls(unit, False, MIN_STEP_SHARE, MIN_STEP_SHARE, is_told=False)
        least = max(min_effect, MIN_CHECKPOINT_EFFECT) if metric in _OF_SAVES else min_effect
        effect = max(least, least_ns / reference)
        unit = 1.0 if side.logarithmic else reference
        return cls(unit, side.logarithmic, effect, max(SAME_WITHIN, effect), is_told=True)

    def change(self, difference: float) -> float:
        """Return a difference of places as a change: of logarithms as a ratio, less 1."""
        return math.expm1(min(difference, _MOST_LOGARITHM)) if self.logarithmic else difference

    def interval(self, difference: float, reach: float) -> tuple[float, float]:
        """Return the changes so far from a difference on either side."""
        return self.change(difference - reach), self.change(difference + reach)


@dataclass(frozen=True)
class _Spread:
    """By how much recordings of one side differ, as variances on the scale of the change, and how sure that is."""

    reference: float
    candidate: float
    degrees: float
    own: float
    """The share of the variance that more steps within each recording would take away."""

    @classmethod
    def of(cls, a: _Side, b: _Side, least: float, unit: float) -> "_Spread":
        within_a, within_b = a.within / unit**2, b.within / unit**2
        seen = sum(float(((side.places - side.place) ** 2).sum()) for side in (a, b)) / unit**2
        seen_degrees = len(a.places) + len(b.places) - 2
        degrees = _PRIOR_DEGREES + seen_degrees
        usual = least**2 + (_SCATTER_SHARE * a.scatter / unit) ** 2
        between = (_PRIOR_DEGREES * (usual + within_a) + seen) / degrees
        reference = max(between, within_a)
        # A moment more restless than those of the baseline widens the interval of what was recorded in it.
        candidate = reference + max(0.0, within_b - within_a)
        whole = reference + candidate
        return cls(reference, candidate, degrees, min(1.0, (within_a + within_b) / whole) if whole else 0.0)

    def reach(self, references: int, candidates: int) -> float:
        """Return how far the interval reaches on either side with so many recordings."""
        deviation = math.sqrt(self.reference / references + self.candidate / candidates)
        return student_t(0.5 + CONFIDENCE / 2, self.degrees) * deviation


def _is_enough(a: _Side, b: _Side, least: float) -> bool:
    # Several recordings tell of the spread even where each has a save or two; counts hardly have any.
    fewest = _ENOUGH_COUNTS if least == 0 else MIN_SAMPLES
    return min(a.samples, b.samples) >= fewest or len(a.places) >= _ENOUGH_RECORDINGS


def _verdict(metric: str, change: float, interval: tuple[float, float], scale: _Scale) -> Verdict:
    low, high = interval
    if (low > 0 or high < 0) and abs(change) >= scale.effect:
        return Verdict.WORSE if (change > 0) == LOWER_IS_BETTER[metric] else Verdict.BETTER
    return Verdict.SAME if max(abs(low), abs(high)) <= scale.within else Verdict.CANNOT_TELL


def _more(difference: float, spread: _Spread, a: _Side, b: _Side, scale: _Scale) -> tuple[int, int]:
    """Return about how many more samples, or recordings, a side would leave no doubt; one of them is 0.

    Enough for the interval to leave out zero if the change is as it seems, or to lie within what counts as the same.
    """
    apart = abs(difference) if abs(scale.change(difference)) >= scale.effect else 0.0
    wanted = max(apart, scale.within - abs(difference))
    if spread.own > 0.5:
        count = min(a.samples, b.samples)
        ratio = spread.reach(len(a.places), len(b.places)) / wanted if wanted > 0 else math.inf
        more = math.ceil(count * min(ratio**2 - 1, MAX_MORE_SAMPLES)) if ratio < math.inf else MAX_MORE_SAMPLES
        return max(1, min(more, MAX_MORE_SAMPLES)), 0
    for more in range(1, MAX_MORE_RECORDINGS):
        spread = replace(spread, degrees=spread.degrees + 2)
        if spread.reach(len(a.places) + more, len(b.places) + more) <= wanted:
            return 0, more
    return 0, MAX_MORE_RECORDINGS


def _told(
    metric: str,
    a: _Side,
    b: _Side,
    difference: float,
    reach: float | None,
    scale: _Scale,
    *,
    verdict: Verdict,
    more: tuple[int, int],
) -> Change:
    low, high = (None, None) if reach is None else scale.interval(difference, reach)
    return Change(
        metric,
        reference=a.center,
        candidate=b.center,
        reference_samples=a.samples,
        candidate_samples=b.samples,
        change=scale.change(difference) if scale.is_told else None,
        low=low if scale.is_told else None,
        high=high if scale.is_told else None,
        is_certain=low is not None and high is not None and (low > 0 or high < 0),
        verdict=verdict,
        more_samples=more[0],
        more_recordings=more[1],
    )
