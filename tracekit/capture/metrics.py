"""One line per training step: loss, speed, data wait, allocator counters."""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TextIO

import torch

from tracekit import conventions

_MOST_PENDING = 64


class PendingScalar:
    """A number being copied from the device. `value` waits only if the copy has not finished."""

    def __init__(self, number: torch.Tensor) -> None:
        self._host = number.detach().to("cpu", non_blocking=True)
        self._copied = torch.cuda.Event() if number.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    @property
    def ready(self) -> bool:
        """Return whether the copy has finished."""
        return self._copied is None or bool(self._copied.query())

    def value(self) -> float:
        """Return the number."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._host)


Number = float | int | None | Callable[[], float] | PendingScalar
"""A number; None, which becomes null; a function that returns one, called a step later; one copied from the device."""


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

    def add(self, row: Mapping[str, Number]) -> None:
        """Add a row, and collect earlier rows whose numbers are available."""
        while self._pending and (len(self._pending) > _MOST_PENDING or _is_ready(self._pending[0])):
            self._collect_oldest()
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

    def _collect_oldest(self) -> None:
        self._collected.append({name: _number(value) for name, value in self._pending.popleft().items()})

    def _write(self) -> None:
        rows, self._collected = self._collected, []
        self._file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        self._file.flush()
        self._written_s = time.monotonic()


def _is_ready(row: Mapping[str, Number]) -> bool:
    return all(value.ready for value in row.values() if isinstance(value, PendingScalar))


def _number(value: Number) -> float | None:
    if isinstance(value, PendingScalar):
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
    whole = {name: counters.get(f"{kind}_bytes", {}).get("all", {}) for name, kind in _PEAKS.items()}
    peaks = {name: int(pool.get("peak", 0)) for name, pool in whole.items()}
    return peaks | {name: int(counters.get(counter, 0)) for name, counter in _COUNTERS.items()}


_PEAKS = {conventions.ALLOCATED_METRIC: "allocated", conventions.RESERVED_METRIC: "reserved"}
_COUNTERS = {
    conventions.DEVICE_ALLOC_METRIC: "num_device_alloc",
    conventions.DEVICE_FREE_METRIC: "num_device_free",
    conventions.ALLOC_RETRIES_METRIC: "num_alloc_retries",
}
