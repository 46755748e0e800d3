"""Follow the metrics log of one rank: its rows in the order of the training, and its position."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.cli.watch.log_tail import LogTail
from tracekit.cli.watch.metrics_row import MetricsRow

Position = tuple[int, int]
"""Position in a training: how often it was resumed in the same log, and the step."""

_MAX_STEPS_AHEAD = 10_000  # a larger step forward counts only once a second line confirms it


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
            self.bad_rows += self._unconfirmed is not None
            self._unconfirmed = row

    def _advance(self, row: MetricsRow) -> RankStep:
        attempt, last = self.position or (0, -1)
        before, self.row = self.row or row, row
        self.position = (attempt + (row.step <= last), row.step)
        self.skipped += row.is_skipped
        retries, allocs = _increase(before.retries, row.retries), _increase(before.device_allocs, row.device_allocs)
        return RankStep(self.rank, self.position, row, retries, allocs)


def _follows(row: MetricsRow, step: int) -> bool:
    return step < row.step <= step + _MAX_STEPS_AHEAD


def _increase(before: float | None, now: float | None) -> int:
    return int(max(0, now - before)) if before is not None and now is not None else 0
