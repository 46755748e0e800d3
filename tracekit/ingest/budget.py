"""What reading one file may take, by its size: every reader draws on it, so no file takes all memory or time.

Traces compress to a tenth, in rare cases to a hundredth, and take several bytes an event; a file that is made to
exhaust a machine unpacks to a thousand times its size, or to millions of empty objects.
"""

import functools
import math
import os
import time
from dataclasses import dataclass

from tracekit.errors import BadTraceError, ConfigError
from tracekit.ingest import pickle_child
from tracekit.model import units

VARIABLE = "TRACEKIT_READ_BUDGET"
"""Environment variable: a factor for all bounds of all files."""
BYTES_RATIO, LEAST_BYTES = 250, 64 << 20
OBJECTS_PER_BYTE, LEAST_OBJECTS = 4, 2_000_000
BYTES_PER_S, LEAST_S = 1 << 20, 60
"""Of CPU time: a tenth of the speed at which slow processors read the slowest format."""


LEAST_VALUES, BYTES_PER_VALUE = 8_000_000, 24
"""Of a document that is parsed to Python values at once: each takes up to about 90 bytes of memory."""
MAX_DEPTH, _LEAST_DEPTH, _MOST_DEPTH = 100, 16, 400
"""Levels of lists and objects: what is copied, compared or written again may recurse; Python allows 1,000 calls."""
# Objects take up to 12 times the bytes of their pickle (events without stacks), and tables of them come on top. A text
# is two bytes where it is repeated. A slow processor reads ten times as fast.
_PICKLES = pickle_child.Limits(
    memory_bytes=256 << 20, memory_ratio=24, json_bytes=16 << 20, json_ratio=32, seconds=30, bytes_per_s=4 << 20
)


class OverBudgetError(BadTraceError):
    """A file that needs more than its budget."""


@dataclass
class Budget:
    """What is left to read one file. It is drawn on by one thread."""

    path: str
    bytes_left: int
    objects_left: int
    seconds: float
    _began_s: float | None = None

    @classmethod
    def of_file(
        cls,
        path: str,
        size_bytes: int,
    ) -> "Budget":
        """The budget of a file of this size."""
        allowed = factor()
        return cls(
            path,
            int(allowed * max(LEAST_BYTES, BYTES_RATIO * size_bytes)),
            int(allowed * max(LEAST_OBJECTS, OBJECTS_PER_BYTE * size_bytes)),
            allowed * (LEAST_S + size_bytes / BYTES_PER_S),
        )

    def unpack(self, count: int) -> None:
        """Take bytes of content. Raises OverBudgetError, also if the time is over."""
        self.bytes_left -= count
        if self.bytes_left < 0:
            raise self.over("unpacks to far more bytes than files of its size have")
        if self._began_s is None:
            self._began_s = time.thread_time()
        if time.thread_time() - self._began_s > self.seconds:
            raise self.over(f"takes more than {units.duration(int(self.seconds * 1e9))} to read")

    def build(self, count: int) -> None:
        """Take objects, such as events or packets. Raises OverBudgetError."""
        self.objects_left -= count
        if self.objects_left < 0:
            raise self.over("has far more events than files of its size have")

    def over(self, what: str) -> OverBudgetError:
        """The error of a file that needs more."""
        return OverBudgetError(f"{self.path}: {what}; {remedy()}, else record it again")


def remedy() -> str:
    """What to do about a file that needs more than its budget."""
    return f"if you trust it, allow more: {VARIABLE}={2 * factor():g}"


def value_count(size_bytes: int) -> int:
    """Values that a parsed document of this size may have."""
    return int(factor() * (LEAST_VALUES + size_bytes / BYTES_PER_VALUE))


def depth() -> int:
    """Levels of lists and objects that a parsed document may have."""
    return max(_LEAST_DEPTH, min(int(factor() * MAX_DEPTH), _MOST_DEPTH))


def pickle_limits() -> pickle_child.Limits:
    """What the process that reads a pickle may take."""
    allowed = factor()
    return pickle_child.Limits(
        memory_bytes=int(allowed * _PICKLES.memory_bytes),
        memory_ratio=allowed * _PICKLES.memory_ratio,
        json_bytes=int(allowed * _PICKLES.json_bytes),
        json_ratio=allowed * _PICKLES.json_ratio,
        seconds=allowed * _PICKLES.seconds,
        bytes_per_s=_PICKLES.bytes_per_s / allowed,
    )


def factor() -> float:
    """Factor for all bounds, which the user states. Raises ConfigError if it is no positive number."""
    return _parse_factor(os.environ.get(VARIABLE, "1"))


@functools.lru_cache(maxsize=8)
def _parse_factor(stated: str) -> float:
    try:
        value = float(stated)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise ConfigError(f"{VARIABLE}={stated!r}: name a factor, such as 4")
    return value
