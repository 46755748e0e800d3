"""Limits, of one type: which metrics fail a check and from which change on, what `--fail-if` allows, and budgets."""

import fnmatch
import re
from dataclasses import dataclass
from enum import StrEnum

from tracekit.errors import ConfigError
from tracekit.regression import metrics
from tracekit.regression.metrics import all_metrics, metric_of

CONFIDENCE = 0.99  # several metrics are judged at once, and each may raise a false alarm
MIN_CHANGE_RATIO = 0.03
MIN_NEW_COST_RATIO = 0.05
MAX_CPU_STRETCH = 1.1
MIN_CPU_RECORDINGS = 3  # with fewer, 14 of 76 pairs of three equal steps failed on shared processors


class Verdict(StrEnum):
    """The result of comparing one metric, from the candidate's point of view."""

    BETTER = "better"
    WORSE = "worse"
    SAME = "same"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Change:
    """How one metric differs between the reference and the candidate.

    Medians are over steps, their mean over recordings, in the metric's own unit. `change` and its interval `low` to
    `high` are relative to the reference, or in points (0.01 = one) for a share; they are null where the reference is
    0, and the interval also where there are too few samples.
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
    """Whether the interval excludes no change at all."""
    verdict: Verdict
    more_samples: int = 0
    """About how many more samples a side would decide, where the verdict is inconclusive."""
    more_recordings: int = 0
    """The same of recordings, where recordings differ too much and not the steps within each."""
    least_change: float = MIN_CHANGE_RATIO
    """A smaller change is none; as `change`."""
    same_within: float = MIN_CHANGE_RATIO
    """The metric is the same where the whole interval lies within this."""

    @property
    def difference(self) -> float:
        """Return candidate minus reference, in the metric's own unit."""
        return self.candidate - self.reference

    @property
    def is_slower(self) -> bool:
        """Whether a time grew: by its verdict, which leaves out what other programs explain, else by the medians."""
        is_decided = self.verdict in (Verdict.WORSE, Verdict.BETTER)
        return self.verdict is Verdict.WORSE if is_decided else self.difference >= 0

    @property
    def is_worsening(self) -> bool:
        """Whether the candidate's median is on the bad side of the reference's."""
        return metric_of(self.metric).is_worse(self.difference)


_LIMIT = re.compile(rf"\s*(?P<metric>\w+)\s*>\s*(?P<number>{metrics.NUMBER})\s*(?P<unit>[%\w]*)\s*\Z")


def failing_metrics() -> tuple[str, ...]:
    """Return the metrics that fail a check where they are worse than the baseline's, unless settings say otherwise.

    They are what somebody pays for (time, arithmetic, memory, traffic, saves), and not what such time consists of:
    compute and idle time shift from one to the other at no cost.
    """
    return tuple(metric.key for metric in all_metrics().values() if metric.fails_check)


@dataclass(frozen=True)
class Thresholds:
    """What counts as a regression: which metrics fail where worse, the least change, and how sure that must be."""

    metrics: tuple[str, ...] | None = None
    """The keys of the metrics that fail; None for `failing_metrics`."""
    min_change_ratio: float = MIN_CHANGE_RATIO
    confidence: float = CONFIDENCE
    min_new_cost_ratio: float = MIN_NEW_COST_RATIO
    """A finding that is new, or costs so much more of the step than in the baseline, fails whatever its severity."""
    max_cpu_stretch: float = MAX_CPU_STRETCH
    """On a CPU, a recording starves whose compute takes so many times its CPU time, and as that of the reference."""
    min_cpu_recordings: int = MIN_CPU_RECORDINGS
    """So many recordings of a reference show by how much times differ on a CPU that other programs use."""

    def is_failing(self, metric: str) -> bool:
        """Return whether a metric fails a check where it is worse."""
        return metric in (failing_metrics() if self.metrics is None else self.metrics)


class Bound(StrEnum):
    """What a limit bounds: a metric's value, its change in the metric's unit, or its change relative to before."""

    VALUE = "value"
    CHANGE = "change"
    RELATIVE_CHANGE = "relative change"


@dataclass(frozen=True)
class Limit:
    """A limit of one metric: of its value (a budget), or of how much worse it may get (``--fail-if``).

    `limit` is in the metric's unit; of a relative change it is a ratio, and in points for a share (0.03 for 3%). A
    budget is of the run, or of each rank or unit that a pattern names.
    """

    metric: str
    limit: float
    bound: Bound = Bound.VALUE
    text: str = ""
    """How the user wrote it."""
    ranks: str = ""
    """Ranks such as ``0-3,8``, each by itself; ``*`` for all of them."""
    units: str = ""
    """A pattern such as ``layers.*``: each FSDP unit that it matches, by itself."""

    @property
    def name(self) -> str:
        """Return its name in reports: ``step_time``, ``compute of layers.*``."""
        short = metric_of(self.metric).short
        parts = ([f"rank {self.ranks}"] if self.ranks else []) + ([self.units] if self.units else [])
        return f"{short} of {', '.join(parts)}" if parts else short

    @property
    def is_minimum(self) -> bool:
        """Whether a budget is the least value that is allowed."""
        return not metric_of(self.metric).lower_is_better

    def is_beyond(self, value: float) -> bool:
        """Return whether a value is past the limit."""
        return value < self.limit if self.is_minimum else value > self.limit

    def is_exceeded(self, change: Change) -> bool:
        """Return whether a change is past the limit and significant."""
        return self.is_past(change) and change.is_certain

    def is_past(self, change: Change) -> bool:
        """Return whether the medians are further apart than the limit allows, noise or not."""
        if not change.is_worsening:
            return False
        if self.bound is Bound.CHANGE:
            return abs(change.difference) > self.limit
        # Relative to a reference of 0, any worsening is past every percentage.
        return change.change is None or abs(change.change) > self.limit

    def applies_to_rank(self, rank: int) -> bool:
        """Return whether it limits this rank."""
        if self.ranks in ("", "*"):
            return True
        spans = (part.partition("-") for part in self.ranks.split(","))
        return any(int(first) <= rank <= int(last or first) for first, _, last in spans)

    def applies_to_unit(self, unit: str) -> bool:
        """Return whether it limits this unit."""
        return fnmatch.fnmatchcase(unit, self.units)


def parse_limit(text: str) -> Limit:
    """Return the limit that ``--fail-if`` names: metric > number, then % or a unit of the metric. Raises ConfigError.

    >>> parse_limit("step_time > 3%").limit
    0.03
    >>> parse_limit("idle>1.5ms").limit
    1500000.0
    """
    match = _LIMIT.match(text)
    if not match:
        raise ConfigError(f"--fail-if {text!r}: expected METRIC>NUMBER with % or a unit, such as 'step_time>3%'")
    try:
        metric = metrics.find(match["metric"], metrics.compared_metrics())
    except ConfigError as error:
        raise ConfigError(f"--fail-if {text!r}: {error}") from None
    number, unit = float(match["number"]), match["unit"]
    if unit == metrics.PERCENT:
        return Limit(metric.key, number / 100, Bound.RELATIVE_CHANGE, text)
    suffixes = metric.unit.suffixes
    if unit not in suffixes:
        units = ", ".join(name or "no unit" for name in (metrics.PERCENT, *suffixes))
        stated = f"the unit {unit}" if unit else "a bare number"
        raise ConfigError(f"--fail-if {text!r}: {stated} is ambiguous or unknown for {metric.key}: use {units}")
    return Limit(metric.key, number * suffixes[unit], Bound.CHANGE, text)
