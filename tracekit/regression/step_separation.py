"""Is the step time certainly worse although recordings are few? The parts of the step decide what its sum cannot.

Step times of few steps leave a wide interval. But a step consists of many parts, compute of one name or the gaps before
it, and each is measured in every step of every rank. Steps and ranks show how much a part varies within a recording. A
regression changes some parts by far more, and a busier machine changes them all alike. Therefore

- a part is compared by its median over steps, per rank. The factor that most of the step's parts have in common is the
  machine's, and does not count;
- a part has changed where the difference is beyond the interval that `significance` has for a metric: the spread that
  is usual between recordings, half of the scatter within a recording, and what the parts' factors differ by. With
  several recordings a side their spread is measured;
- the sum of these changes, decreases included, has to be a least change of the step on one rank, and the step time has
  to have changed by as much. Otherwise time moved from one part to another, and the verdict stays inconclusive.

A CPU shares its caches with other programs, and one recording in sixty had single operators at six times their usual
time for no fault of the training (docs/gate.md). On a CPU the parts decide only against several recordings.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time.step_parts import GAP
from tracekit.model import escaping, units
from tracekit.regression import significance
from tracekit.regression.change import Change, Verdict
from tracekit.regression.metric_sources import HOST_PARTS, MIN_PART_RATIO, PART_PREFIX
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values, job_samples
from tracekit.regression.thresholds import Thresholds

MIN_STEPS = 3
MIN_HOST_RECORDINGS = 3
_MIN_FACTOR_RATIO = 0.002
_MIN_FACTOR_PARTS = 3
_MAX_NAME = 60

Parts = npt.NDArray[np.float64]
"""Values of parts, shape (recordings, parts)."""


def decided(
    changes: tuple[Change, ...],
    reference: Sequence[pl.DataFrame],
    candidate: Sequence[pl.DataFrame],
    ranks: Sequence[int] | None,
    thresholds: Thresholds,
) -> tuple[tuple[Change, ...], tuple[str, ...]]:
    """Return the changes, where an inconclusive step time is decided by the parts of the step, and a note on it."""
    step_time = next((change for change in changes if change.metric == STEP_TIME), None)
    if step_time is None or step_time.verdict is not Verdict.INCONCLUSIVE or step_time.change is None:
        return changes, ()
    a, b = ([_Recording.of(table, ranks) for table in side] for side in (reference, candidate))
    if not _is_enough(a, b):
        return changes, ()
    separation = _separation(a, b, thresholds.confidence)
    growth = step_time.change
    net = separation.net_ratio(grows=growth > 0)
    least = thresholds.min_change_ratio
    if abs(growth) < least or math.copysign(1, net.center) * growth < 0 or abs(net.center) < least or not net.low:
        return changes, ()
    low, high = sorted((net.low, max(2 * growth - net.low, 2 * net.low, key=abs)))
    verdict = Verdict.WORSE if growth > 0 else Verdict.BETTER
    certain = replace(
        step_time, low=low, high=high, is_certain=True, verdict=verdict, more_samples=0, more_recordings=0
    )
    return tuple(certain if change is step_time else change for change in changes), (separation.note(growth > 0),)


@dataclass(frozen=True)
class _Recording:
    """What the parts of one recording's steps take: per rank and part the median and the scatter over steps."""

    parts: pl.DataFrame
    """Columns rank, part, median, scatter."""
    step_times: Values
    is_on_host: bool

    @classmethod
    def of(cls, table: pl.DataFrame, ranks: Sequence[int] | None) -> "_Recording":
        table = table if ranks is None else table.filter(pl.col("rank").is_in(ranks))
        is_part = pl.col("metric").str.starts_with(PART_PREFIX)
        found = table.filter(is_part).select("rank", "step", pl.col("metric").alias("part"), "value")
        steps = table.filter(pl.col("metric") == STEP_TIME, pl.col("rank").is_in(found["rank"].unique().to_list()))
        times = job_samples(table).get(STEP_TIME, np.empty(0))
        complete = steps.select("rank", "step").join(found.select("rank", "part").unique(), on="rank")
        # A part that a step does not have takes no time in it.
        values = complete.join(found, on=["rank", "step", "part"], how="left", nulls_equal=True).with_columns(
            pl.col("value").fill_null(0.0)
        )
        value = pl.col("value")
        typical = values.group_by("rank", "part").agg(
            value.median().alias("median"),
            ((value - value.median()).abs().median() * significance.deviation_factor(len(times))).alias("scatter"),
        )
        is_on_host = found["part"].str.starts_with(HOST_PARTS).any()
        return cls(typical, times, is_on_host)


def _is_enough(reference: Sequence[_Recording], candidate: Sequence[_Recording]) -> bool:
    recordings = (*reference, *candidate)
    if any(each.parts.is_empty() or len(each.step_times) < MIN_STEPS for each in recordings):
        return False
    if any(each.step_times.min() <= 0 for each in recordings):
        return False
    return len(reference) >= MIN_HOST_RECORDINGS or not any(each.is_on_host for each in recordings)


@dataclass(frozen=True)
class _Net:
    """The sum of all parts' certain changes, relative to the step, and of what is certain of each."""

    center: float
    low: float


@dataclass(frozen=True)
class _Separation:
    """Each part's change in ns, beyond the machine's factor, and its interval."""

    rank: npt.NDArray[np.int64]
    part: Sequence[str]
    before: Values
    after: Values
    difference: Values
    margin: Values
    step_ns: float

    @property
    def certain(self) -> Values:
        """Return the change of each part that changed for certain, 0 of the others."""
        return np.where(np.abs(self.difference) > self.margin, self.difference, 0.0)

    def net_ratio(self, *, grows: bool) -> _Net:
        """Return the net change of the rank whose parts grew, or shrank, most."""
        center = self.certain
        low = np.sign(center) * (np.abs(center) - self.margin)
        nets = [(float(center[own].sum()), float(low[own].sum())) for own in self._of_ranks()]
        best = max(nets) if grows else min(nets)
        is_sure = best[1] > 0 if grows else best[1] < 0
        return _Net(best[0] / self.step_ns, best[1] / self.step_ns if is_sure else 0.0)

    def note(self, grows: bool) -> str:
        """Return a sentence on the part that changed most."""
        index = int(np.argmax(self.certain) if grows else np.argmin(self.certain))
        place = self.part[index].removeprefix(PART_PREFIX)
        kind, _, name = place.partition("/")[2].partition("/")
        what = f"{'the gap before ' * (kind == GAP)}{escaping.inert(name, _MAX_NAME)}"
        before, after = (units.duration(float(side[index])) for side in (self.before, self.after))
        return (
            f"the step time is decided by the parts of the step: {what} on rank {self.rank[index]} changed from "
            f"{before} to {after} per step, more than steps and recordings differ by"
        )

    def _of_ranks(self) -> list[npt.NDArray[np.bool_]]:
        return [self.rank == rank for rank in np.unique(self.rank)]


def _separation(reference: Sequence[_Recording], candidate: Sequence[_Recording], confidence: float) -> _Separation:
    sides = (*reference, *candidate)
    place = pl.concat([each.parts.select("rank", "part") for each in sides]).unique().sort("rank", "part")
    step_ns = math.exp(float(np.mean([np.median(np.log(each.step_times)) for each in reference])))
    a, b = _aligned(reference, place, "median"), _aligned(candidate, place, "median")
    a, b = _filled(a, b, MIN_PART_RATIO * step_ns)
    scatter_a, scatter_b = (
        _over_ranks(np.nan_to_num(_aligned(side, place, "scatter")), place) for side in (reference, candidate)
    )
    factor, factor_spread = _machine_factor(a.mean(0), b.mean(0), _MIN_FACTOR_RATIO * step_ns)
    spread = math.hypot(metric_of(STEP_TIME).usual_spread, factor_spread, _host_spread(sides))
    usual = (spread * factor * a.mean(0)) ** 2 + (significance.SCATTER_SHARE * scatter_a) ** 2
    squares = ((a - a.mean(0)) ** 2).sum(0) + ((b - b.mean(0)) ** 2).sum(0)
    degrees = significance.PRIOR_DEGREES + len(a) + len(b) - 2
    between = (significance.PRIOR_DEGREES * usual + squares) / degrees
    # Where the candidate's steps scatter more than the reference's, its own interval is wider.
    steps = min(len(each.step_times) for each in candidate)
    of_candidate = between + math.pi / 2 / steps * np.maximum(0.0, scatter_b**2 - scatter_a**2)
    quantile = significance.student_t(0.5 + confidence / 2, degrees)
    return _Separation(
        place["rank"].to_numpy(),
        place["part"].to_list(),
        a.mean(0),
        b.mean(0),
        b.mean(0) - factor * a.mean(0),
        quantile * np.sqrt(between / len(a) + of_candidate / len(b)),
        step_ns,
    )


def _host_spread(sides: Sequence[_Recording]) -> float:
    """Return what the steps of recordings on a CPU say of the spread between recordings; 0 on a device."""
    scatter = (significance.scatter(np.log(each.step_times)) for each in sides if each.is_on_host)
    return significance.SCATTER_SHARE * max(scatter, default=0.0)


def _aligned(recordings: Sequence[_Recording], place: pl.DataFrame, column: str) -> Parts:
    """Return a column of each recording by rank and part, not a number where it lacks the part."""
    joined = (place.join(each.parts, on=["rank", "part"], how="left", maintain_order="left") for each in recordings)
    return np.stack([table[column].cast(pl.Float64).fill_null(np.nan).to_numpy() for table in joined])


def _filled(a: Parts, b: Parts, least_ns: float) -> tuple[Parts, Parts]:
    """Return both sides with what a recording lacks: its samples leave out parts of up to `least_ns`."""
    highest = np.nanmax(np.concatenate([a, b]), axis=0)
    absent = np.minimum(highest, least_ns)
    return np.where(np.isnan(a), absent, a), np.where(np.isnan(b), absent, b)


def _over_ranks(scatter: Parts, place: pl.DataFrame) -> Values:
    """Return the root mean square over recordings and ranks: few steps on one rank may agree by chance."""
    squares = place.select("part", pl.Series("square", (scatter**2).mean(0)))
    return squares.select(pl.col("square").mean().over("part").sqrt()).to_series().to_numpy()


def _machine_factor(before: Values, after: Values, least_ns: float) -> tuple[float, float]:
    """Return the factor that parts have in common, the median by their time, and the spread of its logarithm."""
    both = (before > least_ns) & (after > least_ns)
    if both.sum() < _MIN_FACTOR_PARTS:
        return 1.0, 0.0
    ratios, weights = np.log(after[both] / before[both]), np.sqrt(before[both] * after[both])
    center = _weighted_median(ratios, weights)
    spread = significance.deviation_factor(len(ratios)) * _weighted_median(np.abs(ratios - center), weights)
    return math.exp(center), spread


def _weighted_median(values: Values, weights: Values) -> float:
    order = np.argsort(values)
    shares = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(shares, 0.5)])
