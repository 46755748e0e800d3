"""One line per training step: loss, speed, data wait, allocator counters."""

import json
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import torch

from tracekit import conventions

_MOST_PENDING = 64


class Pending:
    """A number that can be read once the device has reached an event; at once without an event."""

    def __init__(self, event: torch.cuda.Event | None, read: Callable[[], float]) -> None:
        self._event, self._read = event, read

    @property
    def ready(self) -> bool:
        """Return whether the device has reached the event."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Return the number; wait for the event if the device has not reached it."""
        if self._event is not None:
            self._event.synchronize()
        return self._read()

    def map(self, function: Callable[[float], float]) -> "Pending":
        """Return a function of the number, which can be read when the number can."""
        return Pending(self._event, lambda: function(self._read()))


class PendingScalar(Pending):
    """A number being copied from the device. `value` waits only if the copy has not finished."""

    def __init__(self, number: torch.Tensor) -> None:
        host = number.detach().to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if number.is_cuda else None
        if copied is not None:
            copied.record()
        super().__init__(copied, lambda: float(host))


Number = float | int | None | Callable[[], float] | Pending
"""A number; None, which becomes null; a function that returns one, called a step later; one that is known later."""


class MetricsLog:
    """A rank's metrics file. It gets its final name when closed; until then the name ends in ``.partial``.

    Lines reach the file about once a second.

    Lines of steps before `first_step` in an existing file stay: the training was resumed.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        self._partial = path.with_name(path.name + conventions.PARTIAL_SUFFIX)
        earlier = _lines_before(first_step, path)
        self._file: TextIO = self._partial.open("w", encoding="utf-8")
        self._file.writelines(earlier)
        self._file.flush()
        self._pending: deque[Mapping[str, Number]] = deque()
        self._collected: list[dict[str, float | None]] = []
        self._written_s = time.monotonic()

    def collect(self) -> None:
        """Collect earlier rows whose numbers are available. Functions among these may wait for the device."""
        while self._pending and (len(self._pending) > _MOST_PENDING or _is_ready(self._pending[0])):
            self._collect_oldest()

    def add(self, row: Mapping[str, Number]) -> None:
        """Add a row."""
        self._pending.append(row)
        if time.monotonic() - self._written_s > conventions.METRICS_WRITE_S:
            self._write()

    def close(self) -> None:
        """Write the remaining rows and rename the file."""
        while self._pending:
            self._collect_oldest()
        self._write()
        self._file.close()
        self._partial.replace(self._path)

    def leave_to_parent(self) -> None:
        """Write nothing more, in a forked process: what is buffered is the parent's, and would be written twice."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._file.fileno())
        os.close(null)

    def _collect_oldest(self) -> None:
        self._collected.append({name: _number(value) for name, value in self._pending.popleft().items()})

    def _write(self) -> None:
        rows, self._collected = self._collected, []
        self._file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        self._file.flush()
        self._written_s = time.monotonic()


def _is_ready(row: Mapping[str, Number]) -> bool:
    return all(value.ready for value in row.values() if isinstance(value, Pending))


def _number(value: Number) -> float | None:
    if isinstance(value, Pending):
        return value.value()
    return value() if callable(value) else value


def _lines_before(step: int, path: Path) -> list[str]:
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] < step]


def allocator_counters() -> dict[str, int]:
    """Return the counters of the CUDA caching allocator of this process's device; none without CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    counters = torch.cuda.memory_stats_as_nested_dict()
    totals = {name: counters.get(f"{kind}_bytes", {}).get("all", {}) for name, kind in _PEAKS.items()}
    peaks = {name: int(pool.get("peak", 0)) for name, pool in totals.items()}
    return peaks | {name: int(counters.get(counter, 0)) for name, counter in _COUNTERS.items()}


_PEAKS = {conventions.ALLOCATED_METRIC: "allocated", conventions.RESERVED_METRIC: "reserved"}
_COUNTERS = {
    conventions.DEVICE_ALLOC_METRIC: "num_device_alloc",
    conventions.DEVICE_FREE_METRIC: "num_device_free",
    conventions.ALLOC_RETRIES_METRIC: "num_alloc_retries",
}
