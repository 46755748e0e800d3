"""One line of a metrics log as validated numbers."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit import conventions

_MAX_STEP = 1 << 53
_MAX_VALUE = 1e300
_MAX_CUSTOM_METRICS = 8
_MAX_NAME = 40
_KNOWN_METRICS = frozenset(
    {
        "step",
        "rank",
        conventions.STEP_TIME_METRIC,
        conventions.LOSS_METRIC,
        conventions.TOKENS_METRIC,
        conventions.DATA_WAIT_METRIC,
        conventions.SKIPPED_METRIC,
        conventions.ALLOCATED_METRIC,
        conventions.RESERVED_METRIC,
        conventions.DEVICE_ALLOC_METRIC,
        conventions.DEVICE_FREE_METRIC,
        conventions.ALLOC_RETRIES_METRIC,
    }
)


@dataclass(frozen=True, slots=True)
class MetricsRow:
    """The metrics of one rank and step. A value that is missing or not a number is None; a loss may be NaN."""

    step: int
    time_ns: float | None = None
    loss: float | None = None
    tokens_per_s: float | None = None
    data_wait_ns: float | None = None
    is_skipped: bool = False
    allocated_bytes: float | None = None
    reserved_bytes: float | None = None
    device_allocs: float | None = None
    retries: float | None = None
    custom_metrics: Mapping[str, float] = field(default_factory=dict)
    """The first few other numbers, by name."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "MetricsRow | None":
        """Return the row of a log line; None if its step is missing or invalid."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MAX_STEP:
            return None
        time_ns, wait_ns = _size(line, conventions.STEP_TIME_METRIC), _size(line, conventions.DATA_WAIT_METRIC)
        return cls(
            step,
            time_ns or None,  # a step time of 0 is invalid
            _number(line.get(conventions.LOSS_METRIC)),
            _size(line, conventions.TOKENS_METRIC),
            wait_ns,
            bool(_size(line, conventions.SKIPPED_METRIC)),
            _size(line, conventions.ALLOCATED_METRIC),
            _size(line, conventions.RESERVED_METRIC),
            _size(line, conventions.DEVICE_ALLOC_METRIC),
            _size(line, conventions.ALLOC_RETRIES_METRIC),
            _custom_metrics(line) if len(line) > len(_KNOWN_METRICS & line.keys()) else {},
        )


def _number(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def _size(line: Mapping[str, Any], name: str) -> float | None:
    value = _number(line.get(name))
    return value if value is not None and 0 <= value < _MAX_VALUE else None


def _custom_metrics(line: Mapping[str, Any]) -> dict[str, float]:
    found = ((name[:_MAX_NAME], _number(line[name])) for name in line.keys() - _KNOWN_METRICS)
    numbers = sorted((name, value) for name, value in found if value is not None and math.isfinite(value))
    return dict(numbers[:_MAX_CUSTOM_METRICS])
