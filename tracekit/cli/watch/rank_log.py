"""One rank's metrics log, followed: its rows in the order of the training, and where the rank is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.cli.watch.log_tail import LogTail
from tracekit.cli.watch.metrics_row import MetricsRow

Position = tuple[int, int]
"""Where a training is: how often it went back (resumed in the same log), and the step."""

_MAX_STEPS_AHEAD = (
    10_000  # steps that a rank may advance from one line to the next before a second line must confirm it
)


@dataclass(frozen=True, slots=True)
class RankStep:
    """A row in its place, with what the rank's counters rose by since the row before."""

    rank: int
    position: Position
    row: MetricsRow
    new_retries: int
    new_device_allocs: int


class RankLog:
    """A rank as its metrics log tells of it."""

    def __init__(self, rank: int, path: Path, *, first_bytes: int) -> None:
        self.rank = rank
        self.tail = LogTail(path, first_bytes=first_bytes)
        self.position: Position | None = None
        self.row: MetricsRow | None = None
        self.skipped = 0
        self.bad_rows = 0
        self.grew_s = 0.0
        """When the log was last seen to grow, Unix time in seconds."""
        self._unconfirmed: MetricsRow | None = None

    def read(self, now_s: float) -> Iterator[RankStep]:
        """Yield the rows that were added, each once; `now_s` is Unix time in seconds.

        A step told twice counts once. One that goes back, or far ahead, is held until the next goes on from it: then
        the training was resumed from there; else it was a damaged line.
        """
        before_s = self.tail.changed_s
        lines = self.tail.read()
        if self.tail.changed_s != before_s:
            # By our own clock: a file server's may be another. What was there before is as old as the server says.
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
            held, self._unconfirmed = self._unconfirmed, None
            yield self._advance(held)
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
