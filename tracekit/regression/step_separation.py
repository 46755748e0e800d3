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

from tracekit.model import escaping, units
from tracekit.regression import contributions, significance
from tracekit.regression.metric_sources import HOST_PARTS, MIN_PART_RATIO, PART_PREFIX
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values
from tracekit.regression.significance import Observations
from tracekit.regression.thresholds import Change, Thresholds, Verdict

MIN_STEPS = 3
_MIN_FACTOR_RATIO = 0.002
_MIN_FACTOR_PARTS = 3
_MAX_NAME = 60


def decide(
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
    if not all(table["metric"].str.starts_with(PART_PREFIX).any() for table in (*reference, *candidate)):
        return changes, ()
    a, b = ([_Recording.of(table, ranks) for table in side] for side in (reference, candidate))
    if not _is_enough(a, b, thresholds.min_cpu_recordings):
        return changes, ()
    separation = _separation(a, b, thresholds.confidence)
    growth, min_ratio = step_time.change, thresholds.min_change_ratio
    center, certain = separation.net_ratio(grows=growth > 0)
    if min(abs(growth), abs(center)) < min_ratio or center * growth < 0 or not certain:
        return changes, ()
    certain = min(certain, growth, key=abs)  # the interval contains the measured change
    low, high = sorted((certain, max(2 * growth - certain, 2 * certain, key=abs)))
    verdict = Verdict.WORSE if growth > 0 else Verdict.BETTER
    decided = replace(
        step_time, low=low, high=high, is_certain=True, verdict=verdict, more_samples=0, more_recordings=0
    )
    return tuple(decided if change is step_time else change for change in changes), (separation.note(growth > 0),)


@dataclass(frozen=True)
class _Recording:
    """What the parts of one recording's steps take, in the steps that all of its ranks have."""

    parts: pl.DataFrame
    """Columns rank, step, part, value."""
    steps: pl.Series
    step_times: Values
    """Of the slowest rank."""

    @classmethod
    def of(cls, table: pl.DataFrame, ranks: Sequence[int] | None) -> "_Recording":
        table = table if ranks is None else table.filter(pl.col("rank").is_in(ranks))
        table = table.with_columns(pl.struct("window", "step").alias("step"))
        is_part = pl.col("metric").str.starts_with(PART_PREFIX)
        parts = table.filter(is_part).select("rank", "step", pl.col("metric").alias("part"), "value")
        part_ranks = parts["rank"].unique()
        timed = table.filter(pl.col("metric") == STEP_TIME, pl.col("rank").is_in(part_ranks.implode()))
        steps = timed.group_by("step").agg(pl.col("value").max(), pl.col("rank").n_unique().alias("ranks"))
        steps = steps.filter(pl.col("ranks") == len(part_ranks)).sort("step")
        return cls(parts, steps["step"], steps["value"].to_numpy())

    @property
    def is_on_host(self) -> bool:
        """Whether the parts are operators on a CPU."""
        return bool(self.parts["part"].str.starts_with(HOST_PARTS).any())

    def values(self, place: pl.DataFrame) -> Values:
        """Return the time of each step in each part, shape (steps, parts); not a number for a part that it lacks."""
        parts = place.with_row_index("column").join(self.parts.select("rank", "part").unique(), on=["rank", "part"])
        cells = pl.DataFrame({"step": self.steps}).join(parts, how="cross")
        times = cells.join(self.parts, on=["step", "rank", "part"], how="left", nulls_equal=True, maintain_order="left")
        matrix = np.full((len(self.steps), place.height), np.nan)
        # A part that a step does not have takes no time in it.
        matrix[:, parts["column"].to_numpy()] = times["value"].fill_null(0.0).to_numpy().reshape(len(self.steps), -1)
        return matrix


def _is_enough(reference: Sequence[_Recording], candidate: Sequence[_Recording], min_recordings: int) -> bool:
    recordings = (*reference, *candidate)
    if any(r.parts.is_empty() or len(r.steps) < MIN_STEPS or r.step_times.min() <= 0 for r in recordings):
        return False
    return len(reference) >= min_recordings or not any(r.is_on_host for r in recordings)


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

    def net_ratio(self, *, grows: bool) -> tuple[float, float]:
        """Return the net change of the rank whose parts grew, or shrank, most, and what of it is certain; or 0."""
        low = np.sign(self.certain) * (np.abs(self.certain) - self.margin)
        ranks = [self.rank == rank for rank in np.unique(self.rank)]
        nets = [(float(self.certain[is_rank].sum()), float(low[is_rank].sum())) for is_rank in ranks]
        center, certain = max(nets) if grows else min(nets)
        return center / self.step_ns, certain / self.step_ns if (certain > 0) is grows else 0.0

    def note(self, grows: bool) -> str:
        """Return a sentence on the part that changed most."""
        index = int(np.argmax(self.certain) if grows else np.argmin(self.certain))
        place = self.part[index].removeprefix(PART_PREFIX)
        kind, _, name = place.partition("/")[2].partition("/")
        what = contributions.noun(kind, escaping.inert(name, _MAX_NAME))
        before, after = (units.duration(float(side[index])) for side in (self.before, self.after))
        return (
            f"the step time is decided by the parts of the step: {what} on rank {self.rank[index]} changed from "
            f"{before} to {after} per step, more than steps and recordings differ by"
        )


def _separation(reference: Sequence[_Recording], candidate: Sequence[_Recording], confidence: float) -> _Separation:
    sides = (*reference, *candidate)
    place = pl.concat([side.parts.select("rank", "part") for side in sides]).unique().sort("rank", "part")
    step_ns = math.exp(float(np.mean([np.log(np.median(side.step_times)) for side in reference])))
    values = [side.values(place) for side in sides]
    # Samples leave out parts of up to this time.
    absent = np.minimum(np.nanmax(np.concatenate(values), axis=0), MIN_PART_RATIO * step_ns)
    values = [np.where(np.isnan(times), absent, times) for times in values]
    is_paired = all(side.steps.equals(sides[0].steps) for side in sides)
    a, b = significance.observations(values[: len(reference)], values[len(reference) :], is_paired=is_paired)
    a, b = (_over_ranks(side, place) for side in (a, b))
    factor, factor_spread = _machine_factor(a.mean, b.mean, _MIN_FACTOR_RATIO * step_ns)
    scatter = (float(significance.scatter(np.log(side.step_times))) for side in sides if side.is_on_host)
    host_spread = significance.SCATTER_SHARE * max(scatter, default=0.0)  # 0 on a device
    spread = math.hypot(metric_of(STEP_TIME).usual_spread, factor_spread, host_spread)
    margin = significance.Spread.of(a, b, spread * factor * a.mean).margin(confidence)
    parts = place["part"].to_list()
    return _Separation(place["rank"].to_numpy(), parts, a.mean, b.mean, b.mean - factor * a.mean, margin, step_ns)


def _over_ranks(side: Observations, place: pl.DataFrame) -> Observations:
    """Return observations whose scatter is that of all ranks in a part: few steps on one rank may agree by chance."""
    squares = place.select("part", pl.Series("scatter", side.scatter**2), pl.Series("within", side.within))
    means = squares.select(pl.col("scatter", "within").mean().over("part"))
    return replace(side, scatter=np.sqrt(means["scatter"].to_numpy()), within=means["within"].to_numpy())


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
