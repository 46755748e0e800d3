"""Bars that a candidate must not cross against its reference: ``step_time>3%``, ``idle>5ms``, ``allocations>100``."""

import re
from dataclasses import dataclass

from tracekit.errors import ConfigError
from tracekit.regression import quantities
from tracekit.regression.change import Change
from tracekit.regression.samples import LOWER_IS_BETTER

_SHAPE = re.compile(rf"\s*(?P<metric>\w+)\s*>\s*(?P<number>{quantities.NUMBER})\s*(?P<unit>[%\w]*)\s*\Z")


@dataclass(frozen=True)
class Limit:
    """How much worse one metric may get, either way of being worse: more time, or fewer tokens per second.

    `limit` is relative to the reference where `is_relative` (in points for a metric that is a share, as 0.03 for 3%),
    else in the metric's own unit: ns, bytes, a count.
    """

    text: str
    metric: str
    limit: float
    is_relative: bool

    def is_exceeded(self, change: Change) -> bool:
        """Return whether the change is beyond the bar and more than noise."""
        return self.is_beyond(change) and change.is_certain

    def is_beyond(self, change: Change) -> bool:
        """Return whether the medians are further apart than the bar allows, noise or not."""
        if not change.is_worsening:
            return False
        if not self.is_relative:
            return abs(change.difference) > self.limit
        # Next to a reference of 0, any worsening is beyond every percentage.
        return change.change is None or abs(change.change) > self.limit


def parse(text: str) -> Limit:
    """Return the bar that ``--fail-if`` names: metric > number, then % or a unit of the metric. Raises ConfigError.

    >>> parse("step_time > 3%")
    Bar(text='step_time > 3%', metric='step_time_ns', limit=0.03, is_relative=True)
    >>> parse("idle>1.5ms").limit
    1500000.0
    """
    match = _SHAPE.match(text)
    if not match:
        raise ConfigError(f"--fail-if {text!r}: expected METRIC>NUMBER with % or a unit, such as 'step_time>3%'")
    metric, number, unit = _metric(match["metric"], text), float(match["number"]), match["unit"]
    if unit == quantities.PERCENT:
        return Limit(text, metric, number / 100, is_relative=True)
    units = quantities.units_of(metric)
    if unit not in units:
        known = ", ".join(name or "no unit" for name in (quantities.PERCENT, *units))
        raise ConfigError(f"--fail-if {text!r}: {metric} cannot be told in {unit or 'a bare number'}: use {known}")
    return Limit(text, metric, number * units[unit], is_relative=False)


def _metric(name: str, text: str) -> str:
    try:
        return quantities.metric_named(name, LOWER_IS_BETTER)
    except ConfigError as error:
        raise ConfigError(f"--fail-if {text!r}: {error}") from None
