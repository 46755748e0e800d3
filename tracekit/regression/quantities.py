"""Units of metrics: amounts as people write them in options and settings (``412ms``, ``70GiB``), and as reports do."""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from tracekit.errors import ConfigError
from tracekit.model import units

PERCENT = "%"
NUMBER = r"\d+\.?\d*|\.\d+"
_AMOUNT = re.compile(rf"\s*(?P<number>{NUMBER})\s*(?P<unit>[^\s\d.]*)\s*\Z")


def _plain(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:,.4g}"


@dataclass(frozen=True)
class Unit:
    """A unit of metrics: its name, how amounts of it are written, and the scales of a chart's axis."""

    name: str
    text: Callable[[float], str] = _plain
    """A value in words: 12.4e6 ns is "12.4 ms"."""
    suffixes: Mapping[str, float] = field(default_factory=dict)
    """The units that settings and options may use, each in this unit; '' where a bare number is meant."""
    ticks: tuple[tuple[float, str], ...] = ((1.0, ""),)
    """What an axis divides by and writes behind its numbers, the largest scale first."""
    is_time: bool = False
    """Whether it depends on how fast the machine runs: a time, or a rate."""

    def amount(self, value: object) -> float:
        """Return an amount in this unit: ``"412ms"``, ``"70GiB"``, 0.15 or ``"15%"`` of a share.

        A time, a size and a clock need their unit; a share and a count are numbers. Raises ConfigError naming what is
        expected.

        >>> NS.amount("412ms"), SHARE.amount("15%")
        (412000000.0, 0.15)
        """
        if self is SHARE:
            return _share(value)
        if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] in self.suffixes:
            return _finite(float(match["number"]) * self.suffixes[match["unit"]], value)
        if "" in self.suffixes and isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            return _finite(float(value), value)
        if "" in self.suffixes:
            raise ConfigError(f"expected a number that is not negative, not {value!r}")
        example = {NS.name: "412ms", MHZ.name: "1755MHz"}.get(self.name, "70GiB")
        raise ConfigError(
            f'expected text of a number and a unit such as "{example}" ({", ".join(self.suffixes)}), not {value!r}'
        )

    def scale(self, largest: float) -> tuple[float, str]:
        """Return the divisor of an axis whose values reach `largest`, and the unit behind its numbers."""
        return next((tick for tick in self.ticks if largest >= tick[0]), self.ticks[-1])


NS = Unit(
    "ns",
    units.duration,
    {"ns": 1, "us": 1e3, "µs": 1e3, "ms": 1e6, "s": 1e9},
    ((1e9, " s"), (1e6, " ms"), (1e3, " µs"), (1.0, " ns")),
    is_time=True,
)
BYTES = Unit(
    "bytes",
    units.size,
    {"B": 1, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40},
    ((2.0**30, " GiB"), (2.0**20, " MiB"), (2.0**10, " KiB"), (1.0, " B")),
)
SHARE = Unit("ratio", units.share, {}, ((0.01, "%"),))
"""A share from 0 to 1. Limits on its points need %: a bare number of them would be ambiguous."""
COUNT = Unit("count", suffixes={"": 1})
PER_SECOND = Unit("1/s", suffixes={"": 1}, is_time=True)
MHZ = Unit("MHz", "{:,.0f} MHz".format, {"MHz": 1, "GHz": 1e3}, ((1.0, " MHz"),))
FLOP = Unit("FLOP", units.operations, {"": 1})


def _share(value: object) -> float:
    number = value
    if isinstance(value, str) and (match := _AMOUNT.match(value)) and match["unit"] == PERCENT:
        number = float(match["number"]) / 100
    if isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= 1:
        return _finite(float(number), value)
    raise ConfigError(f'expected a share from 0 to 1, or text such as "15%", not {value!r}')


def _finite(number: float, value: object) -> float:
    if not math.isfinite(number):
        raise ConfigError(f"{value!r} is not a finite number")
    return number
