"""Follow the metrics log of one rank: its lines as validated numbers, in the order of the training."""

import math
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tracekit import conventions
from tracekit.conventions import device_metrics, log_parts, regular_files
from tracekit.ingest import untrusted_json

CHUNK_BYTES = 1 << 20
"""The most that one call reads; a longer line is not from the recorder."""

_COMPARED_BYTES = 64


class LogTail:
    """The position in a log. While the log grows, its file name ends in ``.partial``.

    Reading continues after the file is renamed or copied, and in the next file after it became a closed part of the
    log. If its earlier bytes changed or it got shorter, it is read from the start and `starts` increases. Of a log
    larger than `first_bytes`, only about that many bytes at its end are read first.
    """

    def __init__(self, path: Path, *, first_bytes: int) -> None:
        self._path = path
        self._part = 1
        """The number that the file being read has as a closed part of the log."""
        self._first_bytes = first_bytes
        self._position = 0
        self._last_bytes = b""  # the bytes before the position
        self._is_inside_line = False
        self._last_stat: tuple[object, ...] | None = None
        self.starts = 0
        self.skipped_beginning = False
        """Whether the beginning of the file was not read."""
        self.is_closed = False
        self.is_behind = False
        """Whether more data is available."""
        self.changed_s = 0.0
        """When the file was last written, Unix time in seconds."""
        self.bad_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects that were added since the last call, from at most CHUNK_BYTES."""
        number = self._part
        closed_part = self._path.with_name(log_parts.part_name(self._path.name, number))
        for path in (closed_part, self._path.with_name(self._path.name + conventions.PARTIAL_SUFFIX), self._path):
            try:
                status = path.stat()
                mark = (path, status.st_ino, status.st_size, status.st_mtime_ns)
                if mark == self._last_stat and not self.is_behind:
                    return []
                if not stat.S_ISREG(status.st_mode):  # reading a pipe may block
                    continue
                with regular_files.open_to_read(path) as file:
                    self.is_closed = path == self._path
                    rows = self._read_new(file)
            except OSError:
                continue
            self._last_stat, self.changed_s = mark, status.st_mtime
            if path == closed_part and number == self._part and not self.is_behind:
                self._part, self._position, self._last_bytes, self.is_behind = number + 1, 0, b"", True
            return rows
        self.is_behind = False
        return []

    def _read_new(self, file: BinaryIO) -> list[dict[str, Any]]:
        if not self.starts or not self._is_continued(file):
            number = self._part
            self._start()
            if self._part != number:  # of another file, which the next call reads
                self.is_behind = True
                return []
        file.seek(self._position)
        data = file.read(CHUNK_BYTES)
        self.is_behind = len(data) == CHUNK_BYTES
        end = data.rfind(b"\n") + 1
        if self.is_closed and not self.is_behind:
            end = len(data)  # no more data will end the last line
        lines = data[:end].split(b"\n")
        if self._is_inside_line and end:
            lines, self._is_inside_line = lines[1:], False
        if not end and self.is_behind:
            self.bad_lines += not self._is_inside_line
            end, self._is_inside_line = len(data), True
        self._position += end
        self._last_bytes = (self._last_bytes + data[:end])[-_COMPARED_BYTES:]
        return self._objects(lines)

    def _is_continued(self, file: BinaryIO) -> bool:
        name = self._path.name
        if self._part > 1 and not self._path.with_name(log_parts.part_name(name, self._part - 1)).is_file():
            return False
        file.seek(self._position - len(self._last_bytes))
        return file.read(len(self._last_bytes)) == self._last_bytes

    def _start(self) -> None:
        names = log_parts.files(self._path.name, lambda name: self._path.with_name(name).is_file())
        closed_count = len(log_parts.closed_parts(self._path.name, names.__contains__))
        sizes_bytes = [self._path.with_name(name).stat().st_size for name in names]
        self._part = closed_count + 1
        position = sum(sizes_bytes[closed_count:]) - self._first_bytes
        while position < 0 and self._part > 1:
            self._part -= 1
            position += sizes_bytes[self._part - 1]
        self.starts += 1
        self._position = max(0, position)
        self._last_bytes = b""
        self._is_inside_line = self._position > 0
        self.skipped_beginning = self._position > 0 or self._part > 1

    def _objects(self, lines: list[bytes]) -> list[dict[str, Any]]:
        objects = []
        for line in lines:
            try:
                value = untrusted_json.parse(line) if line.strip() else None
            except ValueError:
                value = line
            if isinstance(value, dict):
                objects.append(value)
            elif value is not None:
                self.bad_lines += 1
        return objects


Position = tuple[int, int]
"""Position in a training: how often it was resumed in the same log, and the step."""

_MAX_STEPS_AHEAD = 10_000  # a larger step forward counts only once a second line confirms it
_MAX_STEP = 1 << 53
_MAX_VALUE = 1e300
_MAX_CUSTOM_METRICS = 8
_MAX_NAME = 40
_KNOWN_METRICS = frozenset(
    {
        "step",
        "rank",
        conventions.STEP_TIME_METRIC,
        conventions.CPU_TIME_METRIC,
        conventions.PROCESSOR_WAIT_METRIC,
        conventions.LOSS_METRIC,
        conventions.TOKENS_METRIC,
        conventions.TOKENS_PER_GPU_METRIC,
        conventions.DATA_WAIT_METRIC,
        conventions.COLLECTIVE_WAIT_METRIC,
        conventions.SKIPPED_METRIC,
        conventions.ALLOCATED_METRIC,
        conventions.RESERVED_METRIC,
        conventions.DEVICE_ALLOC_METRIC,
        conventions.DEVICE_FREE_METRIC,
        conventions.ALLOC_RETRIES_METRIC,
        *device_metrics.NAMES,
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
    collective_wait_ns: float | None = None
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
            _size(line, conventions.COLLECTIVE_WAIT_METRIC),
            bool(_size(line, conventions.SKIPPED_METRIC)),
            _size(line, conventions.ALLOCATED_METRIC),
            _size(line, conventions.RESERVED_METRIC),
            _size(line, conventions.DEVICE_ALLOC_METRIC),
            _size(line, conventions.ALLOC_RETRIES_METRIC),
            _custom_metrics(line) if len(line) > len(_KNOWN_METRICS & line.keys()) else {},
        )


@dataclass(frozen=True, slots=True)
class RankStep:
    """A row at its position, with the increase of the rank's counters since the previous row."""

    rank: int
    position: Position
    row: MetricsRow
    new_retries: int
    new_device_allocs: int


class RankLog:
    """The state of a rank according to its metrics log."""

    def __init__(self, rank: int, path: Path, *, first_bytes: int) -> None:
        self.rank = rank
        self.tail = LogTail(path, first_bytes=first_bytes)
        self.position: Position | None = None
        self.row: MetricsRow | None = None
        self.skipped = 0
        self.bad_rows = 0
        self.grew_s = 0.0
        """When the log last grew, Unix time in seconds."""
        self._unconfirmed: MetricsRow | None = None

    def read(self, now_s: float) -> Iterator[RankStep]:
        """Yield each new row once; `now_s` is Unix time in seconds.

        A repeated step counts once. A step that goes back, or far ahead, is accepted only if the next one follows it:
        then the training was resumed there. Otherwise its line was damaged.
        """
        before_s = self.tail.changed_s
        lines = self.tail.read()
        if self.tail.changed_s != before_s:
            # Use the local clock, which a file server's may differ from; for data written before, the server's.
            self.grew_s = now_s if before_s else min(now_s, self.tail.changed_s)
        for line in lines:
            row = MetricsRow.of(line)
            if row is None:
                self.bad_rows += 1
            else:
                yield from self._accept(row)

    def _accept(self, row: MetricsRow) -> Iterator[RankStep]:
        if self.position is None or _follows(row, self.position[1]):
            self._unconfirmed = None
            yield self._advance(row)
        elif self._unconfirmed is not None and _follows(row, self._unconfirmed.step):
            confirmed, self._unconfirmed = self._unconfirmed, None
            yield self._advance(confirmed)
            yield self._advance(row)
        elif row.step != self.position[1]:
            if self._unconfirmed is not None:
                self.bad_rows += 1
            self._unconfirmed = row

    def _advance(self, row: MetricsRow) -> RankStep:
        attempt, last = self.position or (0, -1)
        before, self.row = self.row or row, row
        self.position = (attempt + 1 if row.step <= last else attempt, row.step)
        if row.is_skipped:
            self.skipped += 1
        retries, allocs = _increase(before.retries, row.retries), _increase(before.device_allocs, row.device_allocs)
        return RankStep(self.rank, self.position, row, retries, allocs)


def _follows(row: MetricsRow, step: int) -> bool:
    return step < row.step <= step + _MAX_STEPS_AHEAD


def _increase(before: float | None, now: float | None) -> int:
    return int(max(0, now - before)) if before is not None and now is not None else 0


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
    pairs = ((name[:_MAX_NAME], _number(line[name])) for name in line.keys() - _KNOWN_METRICS)
    numbers = sorted((name, value) for name, value in pairs if value is not None and math.isfinite(value))
    return dict(numbers[:_MAX_CUSTOM_METRICS])
