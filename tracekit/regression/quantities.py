"""Metrics and amounts of them as people write them in options and settings: ``step_time``, ``412ms``, ``70GiB``."""

import difflib
import math
import re
from collections.abc import Iterable, Mapping

from tracekit.errors import ConfigError

PERCENT = "%"
NS: Mapping[str, float] = {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9}
BYTES: Mapping[str, float] = {
    "B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
PLAIN: Mapping[str, float] = {"": 1}
NUMBER = r"\d+\.?\d*|\.\d+"
_AMOUNT = re.compile(rf"\s*(?P<number>{NUMBER})\s*(?P<unit>[^\s\d.]*)\s*\Z")


def is_share(metric: str) -> bool:
    """Return whether a metric is a share from 0 to 1."""
    return metric.endswith("_ratio")


def short(metric: str) -> str:
    """Return a metric's name without its unit: step_time_ns is step_time."""
    return metric.removesuffix("_ns").removesuffix("_bytes")


def metric_named(name: str, metrics: Iterable[str]) -> str:
    """Return the metric of a name that may leave its unit out: step_time is step_time_ns.

    Raises ConfigError, with the nearest there is, where none is called so.
    """
    known = list(metrics)
    shortened = {short(metric): metric for metric in known}
    names = shortened | {metric: metric for metric in known}
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(shortened)}"
        raise ConfigError(f"{name} is no metric: {hint}")
    return names[name]


def units_of(metric: str) -> Mapping[str, float]:
    """Return the units that amounts of a metric may be given in, with what each is in the metric's own."""
    if metric.endswith("_ns"):
        return NS
    if metric.endswith("_bytes"):
        return BYTES
    # A share's points are told by %; a bare number of them would be read both ways.
    return {} if is_share(metric) else PLAIN


def amount(metric: str, value: object) -> float:
    """Return an amount of a metric in the metric's own unit: ``"412ms"``, ``"70GiB"``, 0.15 or ``"15%"`` of a share.

    A time and a size need their unit; a share and a count are numbers. Raises ConfigError saying what is expected.

    >>> amount("step_time_ns", "412ms")
    412000000.0
    >>> amount("overlap_ratio", "15%")
    0.15
    """
    if is_share(metric):
        return _share(metric, value)
    units = units_of(metric)
    if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] in units:
        return _finite(float(match["number"]) * units[match["unit"]], metric, value)
    if "" in units and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        return _finite(float(value), metric, value)
    raise ConfigError(f"expected {_expected(units)}, not {value!r}")


def _share(metric: str, value: object) -> float:
    number = value
    if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] == PERCENT:
        number = float(match["number"]) / 100
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1:
        return _finite(float(number), metric, value)
    raise ConfigError(f'expected a share from 0 to 1, or text such as "15%", not {value!r}')


def _finite(number: float, metric: str, value: object) -> float:
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is no amount of {metric}")
    return number


def _expected(units: Mapping[str, float]) -> str:
    if "" in units:
        return "a number that is not negative"
    example = "412ms" if "ms" in units else "70GiB"
    return f'text of a number and a unit such as "{example}" ({", ".join(units)})'
