"""What a run's manifest and checkpoint logs say was recorded so far: windows and saves."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.cli.watch.training_state import EventKind, ProfiledWindow, Save, StepEvent
from tracekit.ingest import untrusted_json

_MAX_MANIFEST_BYTES = 16 << 20
_MAX_SAVES = 64
_MAX_WORLD_SIZE = 200_000
_WRITING_STEPS = 2  # steps after a window beside which its trace is written


class Manifest:
    """``run.json``, read again when it changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / conventions.MANIFEST_FILE
        self._last_stat: tuple[int, int, int] | None = None
        self.strategy: str | None = None
        self.world_size: int | None = None
        self.windows: tuple[ProfiledWindow, ...] = ()

    def read(self) -> None:
        """Take in what is new. What cannot be read or understood leaves everything as it was."""
        try:
            found = self._path.stat()
            mark = (found.st_ino, found.st_size, found.st_mtime_ns)
            if mark == self._last_stat or found.st_size > _MAX_MANIFEST_BYTES:
                return
            told = untrusted_json.parse(self._path.read_bytes())
        except (OSError, ValueError):
            return
        self._last_stat = mark
        if isinstance(told, dict):
            self.strategy = told["strategy"] if isinstance(told.get("strategy"), str) else None
            world_size = _whole(told.get("world_size"))
            self.world_size = world_size if world_size and world_size <= _MAX_WORLD_SIZE else None
            windows = told.get("windows")
            self.windows = tuple(_windows(windows)) if isinstance(windows, list) else ()

    def events_at(self, step: int) -> Iterator[StepEvent]:
        """Yield the windows that a step lies in, or beside the writing of which."""
        for window in self.windows:
            end = window.first_step + window.steps
            if window.first_step <= step < end:
                yield StepEvent(EventKind.PROFILED, count=window.window)
            elif end <= step < end + _WRITING_STEPS:
                yield StepEvent(EventKind.TRACE_WRITTEN, count=window.window)


def _windows(told: list[Any]) -> Iterator[ProfiledWindow]:
    for window in told:
        if isinstance(window, dict):
            numbers = [_whole(window.get(name)) for name in ("window", "first_step", "steps")]
            if None not in numbers:
                yield ProfiledWindow(*(number for number in numbers if number is not None))


class Saves:
    """The checkpoints saved so far, of all ranks, by the lines of their checkpoint logs.

    The line of stage "total" is what the training waited for, or all of a save in the background; that of stage
    "complete", where there is one, runs from the same start to the end of all work.
    """

    def __init__(self) -> None:
        self.count = 0
        self._last: deque[tuple[Save, set[tuple[int, str]]]] = deque(maxlen=_MAX_SAVES)  # with who told which stage

    @property
    def last(self) -> Save | None:
        """Return the save whose log came last."""
        return self._last[-1][0] if self._last else None

    def add(self, rank: int, line: Mapping[str, Any]) -> None:
        """Take in a line of a rank's checkpoint log."""
        dur_ns, stage, name = _whole(line.get("dur_ns")), line.get("stage"), line.get("checkpoint")
        if line.get("operation") != conventions.SAVE or not isinstance(name, str) or dur_ns is None:
            return
        if stage not in (conventions.TOTAL, conventions.COMPLETE):
            return
        step, told = _whole(line.get("step")), (rank, str(stage))
        is_total = stage == conventions.TOTAL
        size_bytes = (_whole(line.get("bytes")) or 0) if is_total else 0
        is_blocking = is_total and line.get("blocking") is not False
        blocked_ns, background_ns = (dur_ns, 0) if is_blocking else (0, dur_ns)
        for index, (save, tellers) in enumerate(self._last):
            if (save.checkpoint, save.step) == (name, step) and told not in tellers:
                longest = max(save.blocked_ns, blocked_ns), max(save.background_ns, background_ns)
                self._last[index] = (Save(name, step, *longest, save.bytes + size_bytes), {*tellers, told})
                return
        self.count += 1
        self._last.append((Save(name, step, blocked_ns, background_ns, size_bytes), {told}))

    def events_at(self, step: int, usual_ns: float | None) -> Iterator[StepEvent]:
        """Yield the saves that ran in a step: begun at its end or at its beginning or, in the background, before.

        How many steps a save in the background lasts is reckoned with the usual time of a step.
        """
        for save, _ in self._last:
            if save.step is None or step < save.step - 1:
                continue
            if save.blocked_ns and step <= save.step:
                yield StepEvent(EventKind.SAVE, dur_ns=save.blocked_ns, name=save.checkpoint)
            elif save.background_ns and step <= save.step + math.ceil(save.background_ns / (usual_ns or math.inf)):
                yield StepEvent(EventKind.BACKGROUND_SAVE, dur_ns=save.background_ns, name=save.checkpoint)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
