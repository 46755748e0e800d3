"""One metric, recordings on two sides: did what is recorded change, or only the conditions of recording?

The one statistical test of the project: `compare`, `check --baseline`, the pytest plugin and the dashboard share it.

Two recordings of the same training, minutes apart on a shared machine, differ by more than the steps within either do:
a neighbour works for minutes, a clock settles, memory is laid out differently. An interval from the steps of one
recording a side ignores that and raises false alarms. Therefore

- where there are several recordings, each counts as one observation: the median of its steps, or of its saves, and,
  where all are positive, of their logarithms, since a busy machine doubles a time as easily as it halves it. What the
  steps of a recording leave uncertain of that median is estimated by a circular block bootstrap (Politis and Romano
  1992), since neighbouring steps are alike, and is the least by which recordings must differ;
- recordings of the same steps are paired by step: what all recordings have in common at a step, such as a warm-up in
  the first one, is no scatter (a randomized block design, whose blocks are the steps);
- the spread between recordings is estimated from those of both sides and moderated by what is usual for the metric: an
  empirical Bayes estimate as limma uses for few replicates (Smyth 2004), with the weight of `PRIOR_DEGREES` further
  recordings. What is usual is the metric's least spread, that of a quiet machine, and half of the scatter of the steps
  within a recording: where steps scatter much, recordings differ much too (docs/lab/gate_accuracy.md has both). With
  one recording a side its steps are all that is known, and the interval is wide;
- the interval is Student's t for a new recording (a prediction interval: both the new one and the mean of the reference
  vary), at 99% and not 95%, because several metrics are judged at once and each may raise a false alarm;
- a change counts only from a least effect on, whatever the interval: what nobody would act on fails no build.

What makes a check sharp on a noisy machine is not the test but what is measured: CPU time, bytes sent and bytes
allocated barely depend on a neighbour, where the wall clock does. They are metrics like others here; each has the
spread that its own recordings show, so the quiet ones decide and the noisy ones are inconclusive.
"""

import bisect
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from tracekit.regression.metrics import Metric, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.thresholds import Change, Thresholds, Verdict

MIN_SAMPLES = 5
"""With fewer samples a bootstrap says nothing of their median: a normal distribution is assumed."""
MIN_PAIRED_STEPS = 3
"""Of two steps, what recordings have in common cannot be distinguished from what they differ by."""
SAME_WITHIN = 0.05
"""Two medians are called the same where the whole interval lies within this, relative or in points of a share."""
MIN_CONTAINER_SHARE = 0.01
"""A change of a part is none below this share of the reference's whole, such as of its step time."""
MAX_MORE_SAMPLES = 10_000
MAX_MORE_RECORDINGS = 100

_MAX_LOGARITHM = 50.0  # changes beyond are cut here: intervals stay finite
SCATTER_SHARE = 0.5
"""Recordings of a training differ by about this share of what the steps within one scatter by."""
_MAD_OF_NORMAL = 1.4826  # deviation of a normal distribution over its median absolute deviation
_MAD_OF_FEW = {2: 1.77, 3: 2.2, 4: 2.0}
"""What few normal samples' median deviation is multiplied by on average: the nearest deviation of three is small."""
PRIOR_DEGREES = 3.0
_ENOUGH_RECORDINGS = 3
_ENOUGH_COUNTS = 2
_ENOUGH_SAMPLES = 3
_BOOTSTRAPS = 100
_SEED = 20261121


def compare_recordings(
    metric: Metric,
    reference: Sequence[Values],
    candidate: Sequence[Values],
    *,
    total: float | None = None,
    is_paired: bool = False,
    thresholds: Thresholds | None = None,
) -> Change:
    """Compare one metric by recordings, each an array of samples, shape (n,); at least one a side, none of them empty.

    A change below the least change of `thresholds` is none: relative to the reference, or in points of a share.

    >>> from tracekit.regression.metrics import metric_of
    >>> before, after = np.array([10.0, 11, 10, 10, 11, 10]), np.array([53.0, 52, 53, 53, 52, 53])
    >>> compare_recordings(metric_of("step_time_ns"), [before], [after]).verdict.value
    'worse'
    """
    sides = MetricSides(metric, reference, candidate, total, is_paired)
    return compare_metrics([sides], thresholds or Thresholds())[0]


@dataclass(frozen=True, eq=False)
class MetricSides:
    """The samples of one metric in the recordings of both sides, each an array of shape (n,), none of them empty."""

    metric: Metric
    reference: Sequence[Values]
    candidate: Sequence[Values]
    total: float | None = None
    """The reference's value of the metric that contains this one, where it has one."""
    is_paired: bool = False
    """Whether samples of one index are of one step."""

    @property
    def is_logarithmic(self) -> bool:
        """Whether the samples are compared by their logarithms."""
        return not self.metric.is_share and all(float(values.min()) > 0 for values in self.recordings)

    @property
    def recordings(self) -> tuple[Values, ...]:
        """The recordings of both sides."""
        return (*self.reference, *self.candidate)


def compare_metrics(metrics: Sequence[MetricSides], thresholds: Thresholds) -> list[Change]:
    """Compare metrics as `compare_recordings` does, those with equally many samples together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, sides in enumerate(metrics):
        counts = tuple(map(len, sides.reference)), tuple(map(len, sides.candidate))
        alike.setdefault((*counts, sides.is_logarithmic, sides.is_paired), []).append(index)
    changes: dict[int, Change] = {}
    for (*_, is_logarithmic, is_paired), indices in alike.items():
        a, b = (
            [np.stack(recordings, axis=1) for recordings in zip(*side, strict=True)]
            for side in ([metrics[i].reference for i in indices], [metrics[i].candidate for i in indices])
        )
        before, after = observations(a, b, is_logarithmic=bool(is_logarithmic), is_paired=bool(is_paired))
        for column, index in enumerate(indices):
            changes[index] = _change(metrics[index], before.quantity(column), after.quantity(column), thresholds)
    return [changes[index] for index in range(len(metrics))]


def _change(sides: MetricSides, a: "Observations", b: "Observations", limits: Thresholds) -> Change:
    metric = sides.metric
    scale = _Scale.of(metric, a.center, sides.total, limits.min_change_ratio, is_logarithmic=a.is_logarithmic)
    difference = float(b.mean - a.mean) / scale.unit
    low = high = None
    verdict, more = Verdict.INCONCLUSIVE, (0, 0)
    if _is_enough(a, b, metric.usual_spread):
        spread = Spread.of(a, b, metric.usual_spread * scale.unit)
        margin = float(spread.margin(limits.confidence)) / scale.unit
        low, high = scale.interval(difference, margin)
        verdict = _verdict(metric, scale.change(difference), (low, high), scale.effect, scale.within)
        if verdict is Verdict.INCONCLUSIVE:
            more = _more(difference, spread, min(a.samples, b.samples), scale, limits.confidence)
    else:
        more = max(1, _ENOUGH_SAMPLES - min(a.samples, b.samples)), 0
    return Change(
        metric.key,
        reference=a.center,
        candidate=b.center,
        reference_samples=a.samples,
        candidate_samples=b.samples,
        change=scale.change(difference) if scale.is_shown else None,
        low=low if scale.is_shown else None,
        high=high if scale.is_shown else None,
        is_certain=low is not None and high is not None and (low > 0 or high < 0),
        verdict=verdict,
        more_samples=more[0],
        more_recordings=more[1],
        least_change=scale.effect,
        same_within=scale.within,
    )


def judge_interval(change: Change) -> Change:
    """Return a change with the verdict of its interval, which is not null."""
    assert change.low is not None
    assert change.high is not None
    interval, metric = (change.low, change.high), metric_of(change.metric)
    center = min(max(change.change or 0.0, change.low), change.high)
    verdict = _verdict(metric, center, interval, change.least_change, change.same_within)
    is_certain = change.low > 0 or change.high < 0
    return replace(change, verdict=verdict, is_certain=is_certain)


@functools.lru_cache(maxsize=1024)
def student_t(probability: float, degrees: float) -> float:
    """Return the quantile of Student's t distribution.

    >>> round(student_t(0.995, 4), 3), round(student_t(0.975, 30), 3)
    (4.604, 2.042)
    """
    from scipy.special import stdtrit  # imported here: it takes 0.3 s, and most commands compare nothing

    return float(stdtrit(degrees, probability))


def scatter(values: Values) -> Values:
    """Return by how much samples scatter, along the first axis: a robust standard deviation, 0 for a single sample.

    >>> round(float(scatter(np.array([10.0, 11, 9, 10, 50]))), 2)
    1.48
    """
    return deviation_factor(len(values)) * np.median(np.abs(values - np.median(values, axis=0)), axis=0)


def deviation_factor(count: int) -> float:
    """Return the factor from the median deviation of so many normal samples to their standard deviation."""
    return _MAD_OF_FEW.get(count, _MAD_OF_NORMAL)


def variance_of_median(values: Values) -> Values:
    """Return the variance of the median of neighbouring samples, along the first axis, by a circular block bootstrap.

    `scipy.stats.bootstrap` resamples independent observations only, and neighbouring steps are alike.
    """
    count = len(values)
    if count < _ENOUGH_SAMPLES:
        return np.zeros(values.shape[1:])
    if count < MIN_SAMPLES:
        return np.asarray(math.pi / 2 * values.var(axis=0, ddof=1) / count)  # a bootstrap of so few draws the same ones
    medians = np.median(values[_resamples(count)], axis=1)
    # Along contiguous memory, where the variance of equal numbers is 0 and not a rounding error.
    return np.asarray(np.ascontiguousarray(medians.T).var(axis=-1))


@functools.lru_cache(maxsize=16)
def _resamples(count: int) -> npt.NDArray[np.int64]:
    """Return the indices of the samples that each bootstrap draws, shape (_BOOTSTRAPS, count)."""
    block = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(_SEED).integers(0, count, (_BOOTSTRAPS, -(-count // block)))
    indices = (starts[:, :, None] + np.arange(block)) % count
    return indices.reshape(_BOOTSTRAPS, -1)[:, :count]


def observations(
    reference: Sequence[Values], candidate: Sequence[Values], *, is_logarithmic: bool = False, is_paired: bool = False
) -> tuple["Observations", "Observations"]:
    """Return both sides' observations, from the samples of each recording, shape (n,) or (n, quantities)."""
    recordings = (*reference, *candidate)
    medians = [np.median(values, axis=0) for values in recordings]
    series = [np.log(values) if is_logarithmic else values for values in recordings]
    if is_paired:
        deviations = np.stack(recordings) - np.stack(medians)[:, None]
        # What is left of the deviations of so many recordings without their mean is smaller than their scatter.
        lost = math.sqrt(len(recordings) / (len(recordings) - 1))
        unexplained = [*(lost * (deviations - deviations.mean(axis=0)))]
        paired = [rest / middle if is_logarithmic else rest for rest, middle in zip(unexplained, medians, strict=True)]
    # The logarithm of the median, not the median of logarithms: of two middle values it is the one that is shown.
    middles = np.log(medians) if is_logarithmic else np.stack(medians)
    within, scatters = ([statistic(values) for values in series] for statistic in (variance_of_median, scatter))
    if is_paired:
        # Neither is less than the noise: steps differ by their effects too, paired steps by those of a regression.
        within = [np.minimum(variance, variance_of_median(rest)) for variance, rest in zip(within, paired, strict=True)]
        scatters = [np.minimum(deviation, scatter(rest)) for deviation, rest in zip(scatters, paired, strict=True)]
    samples = [len(values) for values in recordings]
    first, second = (
        Observations(
            middles[side], np.mean(within[side], axis=0), np.mean(scatters[side], axis=0), sum(samples[side]),
            is_logarithmic,
        )
        for side in (slice(0, len(reference)), slice(len(reference), None))
    )  # fmt: skip
    return first, second


@dataclass(frozen=True)
class Observations:
    """One side's recordings: of each quantity the median of each recording's samples, or the logarithm of that."""

    medians: Values
    """Shape (recordings,) or (recordings, quantities); the other arrays are numbers, or of shape (quantities,)."""
    within: Values
    """Variance of such a median that the samples of the recording itself leave, the mean over recordings."""
    scatter: Values
    """By how much the samples of a recording scatter: a standard deviation, robust, the mean over recordings."""
    samples: int
    is_logarithmic: bool = False

    def quantity(self, column: int) -> "Observations":
        """Return the observations of one of several quantities."""
        within, scatter = (values[column] for values in (self.within, self.scatter))
        return replace(self, medians=self.medians[:, column], within=within, scatter=scatter)

    @property
    def mean(self) -> Values:
        """Return the mean of the recordings' medians."""
        return np.asarray(self.medians.mean(axis=0))

    @property
    def center(self) -> float:
        """Return the mean of the recordings of a single quantity, in its own unit."""
        return math.exp(self.mean) if self.is_logarithmic else float(self.mean)


@dataclass(frozen=True)
class Spread:
    """By how much recordings of one side differ, as variances in the unit of the observations, and their degrees."""

    reference: Values
    candidate: Values
    degrees: float
    recordings: tuple[int, int]
    within: Values
    """The part of both variances together that more steps within each recording would remove."""

    @classmethod
    def of(cls, a: Observations, b: Observations, min_deviation: Values | float) -> "Spread":
        """Return the spread of two sides; recordings differ by at least `min_deviation`, a standard deviation."""
        squares = sum(((side.medians - side.mean) ** 2).sum(axis=0) for side in (a, b))
        degrees = PRIOR_DEGREES + len(a.medians) + len(b.medians) - 2
        usual = min_deviation**2 + (SCATTER_SHARE * a.scatter) ** 2
        between = (PRIOR_DEGREES * (usual + a.within) + squares) / degrees
        reference = np.maximum(between, a.within)
        # Where the candidate's steps scatter more than the reference's, its own interval is wider.
        candidate = reference + np.maximum(0.0, b.within - a.within)
        return cls(reference, candidate, degrees, (len(a.medians), len(b.medians)), a.within + b.within)

    def margin(self, confidence: float, more: int = 0) -> Values:
        """Return the reach of the interval on either side, with `more` recordings on each of them."""
        references, candidates = (count + more for count in self.recordings)
        deviation = np.sqrt(self.reference / references + self.candidate / candidates)
        return student_t(0.5 + confidence / 2, self.degrees + 2 * more) * deviation


@dataclass(frozen=True)
class _Scale:
    """What a change is measured in: relative to the reference, in points, or in wholes where the reference is 0."""

    unit: float
    logarithmic: bool
    effect: float
    within: float
    is_shown: bool
    """Whether numbers on this scale mean something to a reader."""

    @classmethod
    def of(
        cls, metric: Metric, reference: float, total: float | None, min_change: float, *, is_logarithmic: bool
    ) -> "_Scale":
        if metric.is_share:
            return cls(1.0, False, min_change, SAME_WITHIN, is_shown=True)
        min_effect = MIN_CONTAINER_SHARE * (total or 0.0) if metric.part_of else 0.0
        if reference <= 0:
            unit = total if total and min_effect else 1.0
            return cls(unit, False, MIN_CONTAINER_SHARE, MIN_CONTAINER_SHARE, is_shown=False)
        effect = max(min_change, metric.least_change_ratio, min_effect / reference)
        unit = 1.0 if is_logarithmic else reference
        return cls(unit, is_logarithmic, effect, max(SAME_WITHIN, effect), is_shown=True)

    def change(self, difference: float) -> float:
        """Return a difference of medians as a change: of logarithms as a ratio, less 1."""
        return math.expm1(min(difference, _MAX_LOGARITHM)) if self.logarithmic else difference

    def interval(self, difference: float, margin: float) -> tuple[float, float]:
        """Return the changes at this margin on either side of a difference."""
        return self.change(difference - margin), self.change(difference + margin)


def _is_enough(a: Observations, b: Observations, usual_spread: float) -> bool:
    # Several recordings show the spread even where each has a save or two; counts hardly have any.
    fewest = _ENOUGH_COUNTS if usual_spread == 0 else _ENOUGH_SAMPLES
    return min(a.samples, b.samples) >= fewest or len(a.medians) >= _ENOUGH_RECORDINGS


def _verdict(metric: Metric, change: float, interval: tuple[float, float], effect: float, within: float) -> Verdict:
    low, high = interval
    if (low > 0 or high < 0) and abs(change) >= effect:
        return Verdict.WORSE if metric.is_worse(change) else Verdict.BETTER
    return Verdict.SAME if max(abs(low), abs(high)) <= within else Verdict.INCONCLUSIVE


def _more(difference: float, spread: Spread, samples: int, scale: _Scale, confidence: float) -> tuple[int, int]:
    """Return about how many more samples, or recordings, a side would decide; one of them is 0.

    Enough for the interval to exclude zero if the change is as it seems, or to lie within what counts as the same.
    """
    distance = abs(difference) if abs(scale.change(difference)) >= scale.effect else 0.0
    target = max(distance, scale.within - abs(difference)) * scale.unit
    if spread.within > 0.5 * (spread.reference + spread.candidate):
        ratio = float(spread.margin(confidence)) / target if target > 0 else math.inf
        more = math.ceil(samples * min(ratio**2 - 1, MAX_MORE_SAMPLES)) if ratio < math.inf else MAX_MORE_SAMPLES
        return max(1, min(more, MAX_MORE_SAMPLES)), 0
    counts = range(1, MAX_MORE_RECORDINGS)  # the more, the smaller the margin
    return 0, 1 + bisect.bisect_left(counts, x=True, key=lambda more: bool(spread.margin(confidence, more) <= target))
