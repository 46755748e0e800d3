"""Profiled windows and checkpoint saves so far, from a run's manifest and checkpoint logs."""

import math
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.cli.watch.training_state import EventKind, Save, StepEvent
from tracekit.ingest.readers import manifest
from tracekit.model.manifest import Manifest

_MAX_SAVES = 64
_WRITING_STEPS = 2  # steps after a window during which its trace is written


class ManifestFile:
    """``run.json``, reloaded when it changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / conventions.MANIFEST_FILE
        self._last_stat: tuple[int, int, int] | None = None
        self.content = Manifest()

    def read(self) -> None:
        """Reload the file if it changed. An unreadable or invalid file changes nothing."""
        try:
            status = self._path.stat()
        except OSError:
            return
        mark = (status.st_ino, status.st_size, status.st_mtime_ns)
        if mark != self._last_stat and (content := manifest.read(self._path)) is not None:
            self._last_stat, self.content = mark, content

    def events_at(self, step: int) -> Iterator[StepEvent]:
        """Yield the windows that contain a step, or whose trace is being written during it."""
        for window in self.content.windows:
            end = window.first_step + window.steps
            if window.first_step <= step < end:
                yield StepEvent(EventKind.PROFILED, count=window.window)
            elif end <= step < end + _WRITING_STEPS:
                yield StepEvent(EventKind.TRACE_WRITTEN, count=window.window)


class Saves:
    """The checkpoint saves of all ranks so far, from the lines of their checkpoint logs.

    The line of stage "total" is the time that blocked the training, or all of a background save; that of stage
    "complete", if there is one, lasts from the same start to the end of all work.
    """

    def __init__(self) -> None:
        self.count = 0
        # With the (rank, stage) pairs seen.
        self._last: deque[tuple[Save, set[tuple[int, str]]]] = deque(maxlen=_MAX_SAVES)

    @property
    def last(self) -> Save | None:
        """Return the save that was logged last."""
        return self._last[-1][0] if self._last else None

    def add(self, rank: int, line: Mapping[str, Any]) -> None:
        """Add a line of a rank's checkpoint log."""
        dur_ns, stage, name = _whole(line.get("dur_ns")), line.get("stage"), line.get("checkpoint")
        if line.get("operation") != conventions.SAVE or not isinstance(name, str) or dur_ns is None:
            return
        if stage not in (conventions.TOTAL, conventions.COMPLETE):
            return
        step, rank_stage = _whole(line.get("step")), (rank, str(stage))
        is_total = stage == conventions.TOTAL
        size_bytes = (_whole(line.get("bytes")) or 0) if is_total else 0
        is_blocking = is_total and line.get("blocking") is not False
        blocked_ns, background_ns = (dur_ns, 0) if is_blocking else (0, dur_ns)
        for index, (save, rank_stages) in enumerate(self._last):
            if (save.checkpoint, save.step) == (name, step) and rank_stage not in rank_stages:
                longest = max(save.blocked_ns, blocked_ns), max(save.background_ns, background_ns)
                self._last[index] = (Save(name, step, *longest, save.bytes + size_bytes), {*rank_stages, rank_stage})
                return
        self.count += 1
        self._last.append((Save(name, step, blocked_ns, background_ns, size_bytes), {rank_stage}))

    def events_at(self, step: int, median_ns: float | None) -> Iterator[StepEvent]:
        """Yield the saves that ran during a step: started at its end, at its start or, in the background, earlier.

        The median step time determines how many steps a background save lasts.
        """
        for save, _ in self._last:
            if save.step is None or step < save.step - 1:
                continue
            if save.blocked_ns and step <= save.step:
                yield StepEvent(EventKind.SAVE, dur_ns=save.blocked_ns, name=save.checkpoint)
            elif save.background_ns and step <= save.step + math.ceil(save.background_ns / (median_ns or math.inf)):
                yield StepEvent(EventKind.BACKGROUND_SAVE, dur_ns=save.background_ns, name=save.checkpoint)


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63 else None
