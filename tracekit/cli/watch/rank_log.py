"""One rank's metrics log, followed: its rows in the order of the training, and where the rank is."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit.cli.watch.log_tail import Tail
from tracekit.cli.watch.metrics_row import Row

Position = tuple[int, int]
"""Where a training is: how often it went back (resumed in the same log), and the step."""

_MOST_AHEAD = 10_000  # steps that a rank may advance from one line to the next before a second line must confirm it


@dataclass(frozen=True, slots=True)
class Told:
    """A row in its place, with what the rank's counters rose by since the row before."""

    rank: int
    position: Position
    row: Row
    new_retries: int
    new_device_allocs: int


class RankLog:
    """A rank as its metrics log tells of it."""

    def __init__(self, rank: int, path: Path, *, first_bytes: int) -> None:
        self.rank = rank
        self.tail = Tail(path, first_bytes=first_bytes)
        self.position: Position | None = None
        self.row: Row | None = None
        self.skipped = 0
        self.bad_rows = 0
        self.grew_s = 0.0
        """When the log was last seen to grow, Unix time in seconds."""
        self._held: Row | None = None

    def read(self, now_s: float) -> Iterator[Told]:
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
            row = Row.of(line)
            if row is None:
                self.bad_rows += 1
            else:
                yield from self._taken(row)

    def _taken(self, row: Row) -> Iterator[Told]:
        if self.position is None or _follows(row, self.position[1]):
            self._held = None
            yield self._placed(row)
        elif self._held is not None and _follows(row, self._held.step):
            held, self._held = self._held, None
            yield self._placed(held)
            yield self._placed(row)
        elif row.step != self.position[1]:
            self.bad_rows += self._held is not None
            self._held = row

    def _placed(self, row: Row) -> Told:
        attempt, last = self.position or (0, -1)
        before, self.row = self.row or row, row
        self.position = (attempt + (row.step <= last), row.step)
        self.skipped += row.is_skipped
        retries, allocs = _rise(before.retries, row.retries), _rise(before.device_allocs, row.device_allocs)
        return Told(self.rank, self.position, row, retries, allocs)


def _follows(row: Row, step: int) -> bool:
    return step < row.step <= step + _MOST_AHEAD


def _rise(before: float | None, now: float | None) -> int:
    return int(max(0, now - before)) if before is not None and now is not None else 0
