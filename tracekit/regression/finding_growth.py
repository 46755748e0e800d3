"""Whether the cost of a finding grew significantly: by more than the spread of recordings, and in the step time.

A rule reports costs above a threshold, and a cost can move to another rank. So a finding can be new although almost
nothing changed. Therefore a cost must meet these conditions:

- It is above the total cost of the findings of its rule in the baseline. Costs are compared as shares of the baseline's
  step.
- The step is longer by at least half of it, or by as much as fails a check. Costs before the work of the first step
  are not in step times and need no such confirmation.
- On CPUs, which other programs share, it grew by more than the step times of recordings of one training differ by, by
  the test of `significance`.
- A known cost grew by MIN_WORSE_GROWTH of itself.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.regression import significance
from tracekit.regression.baseline import KnownFinding
from tracekit.regression.metric_sources import DEVICE_PARTS
from tracekit.regression.metrics import STEP_TIME, metric_of
from tracekit.regression.samples import Values, job_samples
from tracekit.regression.thresholds import CONFIDENCE
from tracekit.rules.rule import Finding

MIN_WORSE_GROWTH = 0.25
"""A known finding is worse only where it costs at least this share of its cost more: costs vary with the host."""
_VISIBLE_SHARE = 0.5


@dataclass(frozen=True)
class StepGrowth:
    """By how much the steps of a run take longer than those of its baseline, relative to the baseline's."""

    growth_ratio: float
    """Of the median step, or of the mean step where that is more: a single stall is in the mean only."""
    mean_growth_ratio: float
    noise_ratio: float
    """Smaller costs may be the machine's: 0 on a device, which no other program shares."""

    @classmethod
    def of(
        cls, reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame], confidence: float = CONFIDENCE
    ) -> "StepGrowth | None":
        """Return the growth between the samples of two sides' recordings; None where one has no step time."""
        a, b = (_step_times(tables) for tables in (reference, candidate))
        if not a or not b:
            return None
        medians = (math.exp(float(np.mean([np.log(np.median(values)) for values in side]))) for side in (a, b))
        means = (float(np.mean([values.mean() for values in side])) for side in (a, b))
        of_median, of_mean = (after / before - 1 for before, after in (tuple(medians), tuple(means)))
        is_on_device = all(table["metric"].str.starts_with(DEVICE_PARTS).any() for table in (*reference, *candidate))
        return cls(max(of_median, of_mean), of_mean, 0.0 if is_on_device else _noise(a, b, confidence))

    def is_certain(
        self,
        finding: Finding,
        findings: Iterable[Finding],
        known_findings: Mapping[str, tuple[KnownFinding, ...]],
        min_cost_ratio: float,
    ) -> bool:
        """Return whether a finding, one of `findings`, costs so much more of the step than in the baseline.

        `known_findings` are the baseline's by id, one for each recording that has it. Beyond the baseline a finding
        costs no more than all `findings` of its code together.
        """
        before = {name: max(f.impact for f in recorded) for name, recorded in known_findings.items() if recorded}
        of_code = sum(self._share(other) for other in findings if other.code == finding.code)
        before_of_code = sum(impact for name, impact in before.items() if known_findings[name][0].code == finding.code)
        more = min(self._share(finding) - before.get(finding.id, 0.0), of_code - before_of_code)
        in_steps = max(more - finding.before_steps_ratio, 0.0)
        is_visible = self.growth_ratio >= min(_VISIBLE_SHARE * in_steps, min_cost_ratio)
        min_growth = max(min_cost_ratio, self.noise_ratio, MIN_WORSE_GROWTH * before.get(finding.id, 0.0))
        return (more if is_visible else more - in_steps) >= min_growth

    def _share(self, finding: Finding) -> float:
        """Return the cost of a finding as a share of the baseline's mean step."""
        return finding.impact * (1 + self.mean_growth_ratio)


def _step_times(tables: Sequence[pl.DataFrame]) -> list[Values]:
    series = (job_samples(table).get(STEP_TIME) for table in tables)
    return [values for values in series if values is not None and len(values) and values.min() > 0]


def _noise(reference: Sequence[Values], candidate: Sequence[Values], confidence: float) -> float:
    """Return by how much step times of recordings of the same training differ at most, by the shared test."""
    a, b = significance.observations(reference, candidate, is_logarithmic=True)
    spread = significance.Spread.of(a, b, metric_of(STEP_TIME).usual_spread)
    return math.expm1(float(spread.margin(confidence)))
