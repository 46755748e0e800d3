"""What reading one file may take, by its size: every reader draws on it, so no file takes all memory or time.

Traces compress to a tenth, in rare cases to a hundredth, and take several bytes an event; a file that is made to
exhaust a machine unpacks to a thousand times its size, or to millions of empty objects.
"""

import math
import os
import time
from dataclasses import dataclass

from tracekit.errors import BadTraceError, ConfigError
from tracekit.model import units

VARIABLE = "TRACEKIT_READ_BUDGET"
"""Environment variable: a factor for all bounds of all files."""
BYTES_RATIO, LEAST_BYTES = 250, 64 << 20
OBJECTS_PER_BYTE, LEAST_OBJECTS = 4, 2_000_000
BYTES_PER_S, LEAST_S = 1 << 20, 60
"""Of CPU time: a tenth of the speed at which slow processors read the slowest format."""


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
        return OverBudgetError(
            f"{self.path}: {what}; if you trust it, allow more: {VARIABLE}={2 * factor():g}, else record it again"
        )


def factor() -> float:
    """Factor for all bounds, which the user states. Raises ConfigError if it is no positive number."""
    stated = os.environ.get(VARIABLE, "1")
    try:
        value = float(stated)
    except ValueError:
        value = math.nan
    if not 0 < value < 1e6:
        raise ConfigError(f"{VARIABLE}={stated!r}: name a factor, such as 4")
    return value
