"""One line per training step: loss, speed, allocator counters."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import torch

from tracekit import conventions

Number = float | int | Callable[[], float]
"""A number, or a function that gives it, called one step later, so that reading a loss does not stop the device."""


class MetricsLog:
    """A rank's metrics file. It bears its final name once closed; while it grows, that name and ``.partial``.

    Of a file that is there already, the lines of steps before `first_step` are kept: the training was resumed.
    """

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        self._path = path
        self._partial = path.with_name(path.name + conventions.PARTIAL_SUFFIX)
        earlier = _lines_before(first_step, path)
        self._file: TextIO = self._partial.open("w", encoding="utf-8", buffering=1)
        self._file.writelines(earlier)
        self._pending: Mapping[str, Number] = {}

    def add(self, row: Mapping[str, Number]) -> None:
        """Write the row added before this one, and keep this one until the next."""
        self._write_pending()
        self._pending = row

    def close(self) -> None:
        """Write what is left and give the file its name."""
        self._write_pending()
        self._file.close()
        self._partial.replace(self._path)

    def _write_pending(self) -> None:
        row, self._pending = self._pending, {}
        if row:
            values: dict[str, Any] = {name: value() if callable(value) else value for name, value in row.items()}
            self._file.write(json.dumps(values, separators=(",", ":")) + "\n")


def _lines_before(step: int, path: Path) -> list[str]:
    if step == 0 or not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [line for line in lines if json.loads(line)["step"] < step]


def allocator_counters() -> dict[str, int]:
    """Return the counters of the CUDA caching allocator of this process's device; none without CUDA."""
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):
        return {}
    counters = torch.cuda.memory_stats()
    names = {
        conventions.ALLOCATED_METRIC: "allocated_bytes.all.peak",
        conventions.RESERVED_METRIC: "reserved_bytes.all.peak",
        conventions.DEVICE_ALLOC_METRIC: "num_device_alloc",
        conventions.DEVICE_FREE_METRIC: "num_device_free",
        conventions.ALLOC_RETRIES_METRIC: "num_alloc_retries",
    }
    return {metric: int(counters.get(name, 0)) for metric, name in names.items()}
