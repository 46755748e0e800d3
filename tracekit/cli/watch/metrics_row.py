"""One line of a metrics log as numbers that can be relied on."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tracekit import conventions

_MOST_STEPS = 1 << 53
_MOST = 1e300
_MOST_OTHERS = 8
_MOST_NAME = 40
_OWN = frozenset(
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
class Row:
    """What a rank tells of one step. What it does not tell, or not as a number, is None; a loss may be NaN."""

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
    others: Mapping[str, float] = field(default_factory=dict)
    """The first few further numbers, by name."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "Row | None":
        """Return the row of a line of the log; None where it has no step that could be one."""
        step = line.get("step")
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < _MOST_STEPS:
            return None
        time_ns, wait_ns = _size(line, conventions.STEP_TIME_METRIC), _size(line, conventions.DATA_WAIT_METRIC)
        return cls(
            step,
            time_ns or None,  # no step takes no time
            _number(line.get(conventions.LOSS_METRIC)),
            _size(line, conventions.TOKENS_METRIC),
            wait_ns,
            bool(_size(line, conventions.SKIPPED_METRIC)),
            _size(line, conventions.ALLOCATED_METRIC),
            _size(line, conventions.RESERVED_METRIC),
            _size(line, conventions.DEVICE_ALLOC_METRIC),
            _size(line, conventions.ALLOC_RETRIES_METRIC),
            _others(line) if len(line) > len(_OWN & line.keys()) else {},
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
    return value if value is not None and 0 <= value < _MOST else None


def _others(line: Mapping[str, Any]) -> dict[str, float]:
    found = ((name[:_MOST_NAME], _number(line[name])) for name in line.keys() - _OWN)
    numbers = sorted((name, value) for name, value in found if value is not None and math.isfinite(value))
    return dict(numbers[:_MOST_OTHERS])
