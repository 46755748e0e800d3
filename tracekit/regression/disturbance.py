"""What other programs on the processors can explain of a difference between recordings of a training on CPUs.

The time in which a step computes over its CPU time is its stretch: where other programs run, compute takes longer by
the clock for the same CPU time. So a time that the processors spend lies between the measured one and that without the
stretch, and so does the undisturbed difference. A verdict concerns what is left of it:

- with enough recordings of the reference, their spread shows how much they are disturbed, and only what the candidate
  is stretched beyond the most stretched of them is explained;
- with fewer, what either side is stretched;
- communication between ranks on a stretched machine may be late for any reason: all of it is explained.

Waiting for data or a disk does not stretch compute, and is explained only as far as compute is stretched meanwhile.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import polars as pl

from tracekit import conventions
from tracekit.analysis.host import step_parts
from tracekit.regression import significance
from tracekit.regression.metrics import COMPUTE_TIME, PER_SECOND, STEP_TIME, Metric, metric_of
from tracekit.regression.thresholds import Change, Thresholds

BETWEEN_RANKS = (step_parts.COMMUNICATION, step_parts.WAIT)
CPU_TIME_SHARE = 0.2
"""Where times by the clock vary, CPU times vary by a fifth of it: 4.6% against 24% (docs/lab/gate_accuracy.md)."""
_COMMUNICATION = "communication"
_MAX_EXPLAINED = 1 - 1e-9


@dataclass(frozen=True)
class Disturbance:
    """The share of each side's time on processors that other programs can have taken: 0 where nothing shows it."""

    reference_ratio: float = 0.0
    candidate_ratio: float = 0.0
    is_on_host: bool = False
    is_unknown: bool = False
    """Whether too few recordings show by how much parts of a step differ on shared processors."""

    @classmethod
    def of(
        cls, reference: Sequence[pl.DataFrame], candidate: Sequence[pl.DataFrame], limits: Thresholds
    ) -> "Disturbance":
        """Return what other programs can have taken in recordings on CPUs, by their samples."""
        before, after = ([s for s in map(stretch, side) if s is not None] for side in (reference, candidate))
        if len(reference) >= limits.min_cpu_recordings:
            most, least = max(before, default=0.0), min(after, default=0.0)
            is_starved = most > 0 and least > limits.max_cpu_stretch * most
            return cls(0.0, 1 - most / least if is_starved else 0.0, is_on_host=True)
        if max((*before, *after), default=0.0) <= limits.max_cpu_stretch:
            return cls(is_on_host=True, is_unknown=True)
        reference_ratio, candidate_ratio = (
            1 - 1 / max(1.0, max(stretches, default=1.0)) for stretches in (before, after)
        )
        return cls(reference_ratio, candidate_ratio, is_on_host=True, is_unknown=True)

    @property
    def is_disturbed(self) -> bool:
        """Whether other programs can explain anything."""
        return max(self.reference_ratio, self.candidate_ratio) > 0

    def explained_ns(self, kind: str, before_ns: float, after_ns: float) -> tuple[float, float]:
        """Return what other programs can have added to a part of the step on either side."""
        if kind in BETWEEN_RANKS:
            return (max(0.0, before_ns), max(0.0, after_ns)) if self.is_disturbed else (0.0, 0.0)
        return max(0.0, before_ns) * self.reference_ratio, max(0.0, after_ns) * self.candidate_ratio

    def apply(self, change: Change, step_ratios: tuple[float, float]) -> Change:
        """Return the change of a metric with what other programs can explain in its interval, judged again.

        `step_ratios` is the share of the step that they can explain on either side.
        """
        metric = metric_of(change.metric)
        if not self.is_disturbed or not metric.unit.is_time:
            return change
        if change.low is None or change.high is None:
            return change
        before, after = step_ratios if metric.key == STEP_TIME or metric.unit is PER_SECOND else self._ratios(metric)
        if metric.unit is PER_SECOND:  # undisturbed, a time is shorter and a rate higher
            before, after = after, before
        low = (1 + change.low) * (1 - after) - 1
        high = (1 + change.high) / (1 - min(before, _MAX_EXPLAINED)) - 1
        return significance.judge_interval(replace(change, low=low, high=high))

    def _ratios(self, metric: Metric) -> tuple[float, float]:
        if metric.cause == _COMMUNICATION:
            return 1.0, 1.0
        share = CPU_TIME_SHARE if metric.is_cpu_time else 1.0
        return share * self.reference_ratio, share * self.candidate_ratio


def stretch(samples: pl.DataFrame) -> float | None:
    """Return the time in which a step computes over its CPU time, the median over ranks and steps.

    Other threads of the process run too, so that it is mostly below 1. None where the recording does not have both.
    """
    metric, value = pl.col("metric"), pl.col("value")
    # The log of the CPU time has no windows.
    per_step = samples.lazy().filter(metric.is_in([COMPUTE_TIME, conventions.CPU_TIME_METRIC])).group_by("rank", "step")
    compute, cpu = (value.filter(metric == name).median() for name in (COMPUTE_TIME, conventions.CPU_TIME_METRIC))
    ratios = per_step.agg(compute.alias("compute"), cpu.alias("cpu")).filter(pl.col("cpu") > 0)
    median = ratios.select((pl.col("compute") / pl.col("cpu")).median()).collect().item()
    return None if median is None or not math.isfinite(median) else float(median)
