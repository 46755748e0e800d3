"""One line per training step: loss, speed, data wait, allocator counters; and the time that it took."""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import torch

from tracekit import conventions
from tracekit.capture import notices
from tracekit.conventions import log_parts, regular_files

_MOST_PENDING = 64
_SCHEDSTAT_BYTES = 128  # three numbers


class Pending:
    """A number that can be read once the device has reached an event; at once without an event."""

    def __init__(self, event: torch.cuda.Event | None, read: Callable[[], float]) -> None:
        self._event, self._read = event, read

    @property
    def ready(self) -> bool:
        """Return whether the device has reached the event."""
        return self._event is None or bool(self._event.query())

    def value(self) -> float:
        """Number; wait for the event if the device has not reached it."""
        if self._event is not None:
            self._event.synchronize()
        return self._read()

    def map(self, function: Callable[[float], float]) -> "Pending":
        """Function of the number, which can be read when the number can."""
        return Pending(self._event, lambda: function(self._read()))


class PendingScalar(Pending):
    """A number being copied from the device. `value` waits only if the copy has not finished."""

    def __init__(self, number: torch.Tensor) -> None:
        host = number.detach().to("cpu", non_blocking=True)
        copied = torch.cuda.Event() if number.is_cuda else None
        if copied is not None:
            copied.record()
        super().__init__(copied, lambda: float(host))


Number = float | int | None | Callable[[], float | None] | Pending
"""A number; None, which becomes null; a function that returns one, called a step later; one that is known later."""


class MetricsLog:
    """A rank's metrics file. It gets its final name when closed; until then the name ends in ``.partial``.

    Lines reach the file about once a second. A file of `part_bytes` becomes a closed part of the log, with a number.

    `on_row` is called with each row, in order, after it was written.

    Lines of steps before `first_step` in existing files stay: the training was resumed.
    """

    def __init__(
        self,
        path: Path,
        *,
        first_step: int = 0,
        part_bytes: int = log_parts.PART_BYTES,
        on_row: Callable[[Mapping[str, float | None]], None] | None = None,
    ) -> None:
        self._path = path
        self._on_row = on_row
        self._partial = path.with_name(path.name + conventions.PARTIAL_SUFFIX)
        self._part_bytes = part_bytes
        earlier, replaced = _earlier_lines(path, first_step)
        self._file: TextIO = self._partial.open("w", encoding="utf-8")
        self._file.writelines(earlier)
        self._file.flush()
        for part in replaced:
            part.unlink()
        self._closed_count = len(log_parts.closed_parts(path.name, lambda name: path.with_name(name).exists()))
        # Rows, each with the names of its values that were no numbers when it was added.
        self._pending: deque[tuple[dict[str, Any], list[str]]] = deque()
        self._collected: list[dict[str, float | None]] = []
        self._no_numbers: set[str] = set()
        self._written_s = time.monotonic()

    def collect(self) -> None:
        """Collect earlier rows whose numbers are available. Functions among these may wait for the device."""
        while self._pending:
            if len(self._pending) <= _MOST_PENDING:
                row, late_names = self._pending[0]
                for name in late_names:
                    value = row[name]
                    if isinstance(value, Pending) and not value.ready:
                        return
            self._collect_oldest()

    def add(self, row: Mapping[str, Number | torch.Tensor]) -> None:
        """Add a row. A tensor of one element is copied from its device; its value is read a step later."""
        values: dict[str, Any] = dict(row)
        late_names = []
        for name, value in values.items():
            if value is None or type(value) is int or type(value) is float:
                continue  # without a call: this code runs in each step, when the model has used the processor's caches
            values[name] = _without_tensor(value)
            late_names.append(name)
        if late_names or self._pending:
            self._pending.append((values, late_names))
        else:
            self._collected.append(values)
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
        row, late_names = self._pending.popleft()
        for name in late_names:
            row[name] = self._number(name, row[name])
        self._collected.append(row)

    def _number(self, name: str, value: Any) -> float | None:
        """Value of a metric; None if it cannot become a number: the first time for each name, stderr says so."""
        number = _read(value)
        if number is None or type(number) is int or type(number) is float:
            return number
        try:
            return float(number)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            if name not in self._no_numbers:
                self._no_numbers.add(name)
                notices.notify(f"the metric {name} is a {type(number).__name__}, no number: it is recorded as null")
            return None

    def _write(self) -> None:
        rows, self._collected = self._collected, []
        self._file.write("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows))
        self._file.flush()
        self._written_s = time.monotonic()
        if self._on_row is not None:
            for row in rows:  # together: in each step this code would have left the processor's caches
                self._on_row(row)
        if self._file.tell() >= self._part_bytes:
            self._close_part()

    def _close_part(self) -> None:
        self._file.close()
        self._closed_count += 1
        self._partial.replace(self._path.with_name(log_parts.part_name(self._path.name, self._closed_count)))
        self._file = self._partial.open("w", encoding="utf-8")


def _earlier_lines(path: Path, first_step: int) -> tuple[list[str], list[Path]]:
    """Lines of steps before `first_step` in the last files of a log, and the closed parts that they replace.

    Closed parts before these stay as they are: each of their steps is earlier.
    """
    files = [path.with_name(name) for name in log_parts.files(path.name, lambda name: path.with_name(name).exists())]
    lines: list[str] = []
    replaced: list[Path] = []
    for file in reversed(files):
        is_closed_part = file.name.removesuffix(conventions.PARTIAL_SUFFIX) != path.name
        rows = [(_step(line), line) for line in regular_files.read_text(file).splitlines(keepends=True)]
        if is_closed_part and all(step < first_step for step, _ in rows):
            break
        lines = [line for step, line in rows if 0 <= step < first_step] + lines
        replaced += [file] if is_closed_part else []
    return lines, replaced


def _step(line: str) -> int:
    """Step of a line of the log; -1 of one that was not written to its end."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1


def allocator_counters() -> dict[str, int]:
    """Counters of the CUDA caching allocator of this process's device; none without CUDA."""
    if not torch.cuda.is_initialized():
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


class ProcessorWait:
    """Time for which the thread that reads it was ready to run and had no processor.

    The file stays open: to open it in each step takes ten times as long as to read it.
    """

    def __init__(self) -> None:
        self._thread = 0
        self._file: BinaryIO | None = None

    def read(self) -> int | None:
        """Time since the start of the calling thread, in ns; None outside Linux."""
        try:
            if self._file is None or self._thread != threading.get_native_id():
                self.close()
                self._file = open("/proc/thread-self/schedstat", "rb", buffering=0)  # noqa: PTH123, SIM115 no path to compose
                self._thread = threading.get_native_id()
            return int(os.pread(self._file.fileno(), _SCHEDSTAT_BYTES, 0).split()[1])
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
        self._file = None


class StepTimer:
    """Times what lies between `begin` and `end`, in ns.

    On a GPU that is the time between two events on the current stream: a host that only queues work returns from a step
    before the device has done it, and waits for many steps at once where it reads a value.
    """

    def __init__(self, device: str) -> None:
        self._on_device = device == "cuda"
        self._began: tuple[int, torch.cuda.Event | None] | None = None
        self._measured: deque[Pending] = deque(maxlen=_MOST_PENDING)
        self.latest_ns = 0
        """The time of the latest step that is known to have ended; 0 before the first one."""

    def begin(self) -> None:
        """Begin a step."""
        self._began = time.perf_counter_ns(), self._event()

    def skip(self) -> None:
        """Leave the current step out: nobody saw it begin."""
        self._began = None

    def end(self) -> Pending | int | None:
        """Time of the step that ends now; None if it is unknown."""
        if self._began is None:
            return None
        began_ns, began = self._began
        took_ns = max(1, time.perf_counter_ns() - began_ns)
        ended = self._event() if began is not None else None
        if began is None or ended is None:
            self.latest_ns = took_ns
            return took_ns
        pending = Pending(ended, lambda: max(1, round(began.elapsed_time(ended) * 1e6)))
        self._measured.append(pending)
        while self._measured and self._measured[0].ready:
            self.latest_ns = int(self._measured.popleft().value())
        self.latest_ns = self.latest_ns or took_ns
        return pending

    def _event(self) -> torch.cuda.Event | None:
        """Record an event; None on the CPU, before the training uses the GPU, and where the GPU has failed."""
        if not (self._on_device and torch.cuda.is_initialized()):
            return None
        try:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        except RuntimeError:  # the training's own next call raises it
            return None
        return event


def _without_tensor(value: Number | torch.Tensor) -> Any:
    """A metric as it is now: the program may overwrite a tensor before its value is read."""
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        return value
    return float(value.detach()) if value.device.type == "cpu" else PendingScalar(value)


def _read(value: Any) -> object:
    if isinstance(value, Pending):
        return value.value()
    return value() if callable(value) else value
