"""Watch the folder of a run: `Watch.poll` reads new data, `Watch.state` returns the state of the training."""

import math
import os
import re
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.cli.watch.rank_log import LogTail, RankLog
from tracekit.cli.watch.steps import GRACE_S, StepMonitor
from tracekit.cli.watch.training_state import EventKind, OutlierStep, Save, StepEvent, TrainingState
from tracekit.ingest.readers import logs
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
        if mark != self._last_stat and (content := logs.read_manifest(self._path)) is not None:
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


STALLED_S = 10.0
"""A log is stalled if it did not grow for this long, and for ten median steps."""

_STALLED_STEPS = 10
_FIRST_BYTES = 16 << 20  # of all ranks' logs together, read when a watch begins
_FIRST_BYTES_OF_RANK = (32 << 10, 4 << 20)  # at least, at most
_METRICS = re.compile(
    rf"rank(\d{{5,7}}){re.escape(conventions.METRICS_SUFFIX)}(?:{re.escape(conventions.PARTIAL_SUFFIX)})?"
)
_MAX_OUTLIERS = 10
_MAX_STEPS_SEARCHED = 100


class Watch:
    """A running or ended training that records into a folder.

    Its memory does not grow with the number of steps. Of long logs only the end is read at first. If a log is replaced
    or truncated, it starts again.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.starts = 0
        """How often it started to read the logs: more than once if they were replaced."""
        self._start()

    @property
    def has_logs(self) -> bool:
        """Whether a rank has a metrics log."""
        return bool(self._ranks)

    def poll(self, now_s: float) -> None:
        """Read new data; `now_s` is Unix time in seconds. A missing folder has none."""
        if not self._read(now_s):
            self._start()
            self._read(now_s)
        positions = [log.position for log in self._ranks.values() if not log.tail.is_closed]
        logged = [position for position in positions if position is not None]
        self.is_over = self._has_ended(now_s)
        if self.is_over:
            self.judge_pending()
        elif logged and len(logged) == len(positions):
            self._steps.judge_ready(min(logged), now_s)
        else:
            self._steps.judge_ready(None, now_s)

    def judge_pending(self) -> None:
        """Judge all steps read so far without waiting for late ranks."""
        self._steps.judge_ready(None, float("inf"))

    def take_new_outliers(self) -> list[OutlierStep]:
        """Return the outliers since the last call."""
        return [self._with_windows(outlier) for outlier in self._steps.take_new_outliers()]

    def state(self, now_s: float) -> TrainingState:
        """Return the current state; `now_s` is Unix time in seconds."""
        logs = self._ranks.values()
        rows = [log.row for log in logs if log.row is not None]
        front = max((log.position for log in logs if log.position), default=None)
        slowest = min((log for log in logs if log.position), key=lambda log: log.position or (0, 0), default=None)
        quiet_s = min((now_s - log.grew_s for log in logs), default=None)
        steps = self._steps
        lag = front[1] - slowest.position[1] if front and slowest and slowest.position else 0
        if slowest and not slowest.tail.is_closed and lag <= _buffered_steps(steps.median_ns):
            lag = 0  # the rank may have done these steps and not written them yet
        return TrainingState(
            name=self.folder.name or str(self.folder),
            strategy=self._manifest.content.strategy,
            world_size=self._manifest.content.world_size,
            is_over=self.is_over,
            quiet_s=None if quiet_s is None else max(0.0, quiet_s),
            steps_done=front[1] + 1 if front else 0,
            first_step_read=steps.first_step,
            step_time_ns=steps.step_time_ns,
            median_step_ns=steps.median_ns,
            spread_ratio=steps.spread_ratio,
            tokens_per_s=steps.tokens_per_s,
            loss=steps.loss,
            loss_curve=tuple(steps.loss_curve.values),
            data_wait_ratio=steps.data_wait_ratio,
            skipped_updates=max((log.skipped for log in logs), default=0),
            custom_metrics=next((row.custom_metrics for row in rows if row.custom_metrics), {}),
            allocated_bytes=_most(row.allocated_bytes for row in rows),
            reserved_bytes=_most(row.reserved_bytes for row in rows),
            retries=_sum(row.retries for row in rows),
            device_allocs=_sum(row.device_allocs for row in rows),
            ranks_logging=len(self._ranks),
            ranks_closed=sum(log.tail.is_closed for log in logs),
            slowest_rank=slowest.rank if slowest and lag > 0 else None,
            lag_steps=max(0, lag),
            stalled_ranks=self._stalled_ranks(now_s),
            missing_ranks=self._missing_ranks(),
            saves=self._saves.count,
            last_save=self._saves.last,
            windows=self._manifest.content.windows,
            outlier_count=steps.outlier_count,
            outliers=tuple(self._with_windows(outlier) for outlier in tuple(steps.outliers)[-_MAX_OUTLIERS:]),
            bad_lines=sum(log.tail.bad_lines + log.bad_rows for log in logs),
        )

    def _start(self) -> None:
        self.starts += 1
        self._ranks: dict[int, RankLog] = {}
        self._checkpoints: dict[int, LogTail] = {}
        self._manifest = ManifestFile(self.folder)
        self._saves = Saves()
        self._steps = StepMonitor(self._recorded_events)
        self.is_over = False
        """Whether every rank's log is closed: the training has ended."""

    def _has_ended(self, now_s: float) -> bool:
        logs = self._ranks.values()
        if not logs or not all(log.tail.is_closed for log in logs):
            return False
        # A rank without a log may not have created it yet.
        return not self._missing_ranks() or now_s - max(log.grew_s for log in logs) > GRACE_S

    def _missing_ranks(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self._manifest.content.world_size or 0)) - set(self._ranks)))

    def _recorded_events(self, step: int, median_ns: float | None) -> Iterator[StepEvent]:
        yield from self._saves.events_at(step, median_ns)
        yield from self._manifest.events_at(step)

    def _with_windows(self, outlier: OutlierStep) -> OutlierStep:
        """Return it with the profiled windows during it, which are known only when their traces are written."""
        steps = range(outlier.step, min(outlier.last_step, outlier.step + _MAX_STEPS_SEARCHED) + 1)
        windows = dict.fromkeys(window for step in steps for window in self._manifest.events_at(step))
        return replace(outlier, events=(*outlier.events, *(event for event in windows if event not in outlier.events)))

    def _read(self, now_s: float) -> bool:
        """Read new data; return False if a log was replaced, so that earlier data is invalid."""
        self._find_logs()
        self._manifest.read()
        is_behind = True
        while is_behind:
            is_behind = False
            for log in self._ranks.values():
                for rank_step in log.read(now_s):
                    self._steps.add(rank_step, now_s, skipped_beginning=log.tail.skipped_beginning)
                is_behind |= log.tail.is_behind
            for rank, tail in self._checkpoints.items():
                for line in tail.read():
                    self._saves.add(rank, line)
                is_behind |= tail.is_behind
            tails = (*(log.tail for log in self._ranks.values()), *self._checkpoints.values())
            if any(tail.starts > 1 for tail in tails):
                return False
        return True

    def _find_logs(self) -> None:
        try:
            with os.scandir(self.folder) as entries:
                matches = [match for entry in entries if (match := _METRICS.fullmatch(entry.name))]
        except OSError:
            return
        new = sorted({int(match[1]) for match in matches} - set(self._ranks))
        min_bytes, max_bytes = _FIRST_BYTES_OF_RANK
        first_bytes = max(min_bytes, min(_FIRST_BYTES // max(1, len(new)), max_bytes))
        for rank in new:
            path = self.folder / conventions.rank_file(rank, conventions.METRICS_SUFFIX)
            self._ranks[rank] = RankLog(rank, path, first_bytes=first_bytes)
            saves = self.folder / conventions.rank_file(rank, conventions.CHECKPOINT_LOG_SUFFIX)
            self._checkpoints[rank] = LogTail(saves, first_bytes=first_bytes)

    def _stalled_ranks(self, now_s: float) -> dict[int, float]:
        limit_s = max(STALLED_S, _STALLED_STEPS * (self._steps.median_ns or 0) / 1e9)
        quiet = ((log.rank, now_s - log.grew_s) for log in self._ranks.values() if not log.tail.is_closed)
        return {rank: quiet_s for rank, quiet_s in quiet if quiet_s > limit_s}


def _buffered_steps(median_step_ns: float | None) -> float:
    """Return the number of steps that a rank may have done and its log does not have yet."""
    return 0 if not median_step_ns else conventions.METRICS_WRITE_S * 1e9 / median_step_ns + 1


def _most(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _sum(values: Iterable[float | None]) -> int | None:
    numbers = [value for value in values if value is not None]
    return int(sum(numbers)) if numbers else None
