"""The lines of one save or load in a rank's checkpoint log, and their common fields."""

import collections
import os
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture import atomic_files
from tracekit.capture.checkpoints.io_counters import Counters
from tracekit.capture.checkpoints.operation import Row

_LEADING_FIELDS = ("stage", "start_ns", "dur_ns", "bytes", "files")


@dataclass(frozen=True)
class Entry:
    """The common fields of all lines of one operation; `worker` is in `conventions.WORKERS`, `thread` a native id."""

    folder: Path
    rank: int
    checkpoint: str
    operation: str
    step: int | None
    path: str | None
    call: str
    worker: str
    thread: int | None = field(default_factory=threading.get_native_id)

    def on_worker(self, worker: str) -> "Entry":
        """Return the entry for the calling thread, which is a `worker`."""
        return replace(self, worker=worker, thread=threading.get_native_id())

    def line(self, stage: str, start_ns: int, dur_ns: int, *, blocking: bool, **more: Any) -> Row:
        """Return one line. All fields but times and stage default to null."""
        row = {"stage": stage, "start_ns": start_ns, "dur_ns": max(0, dur_ns), "calls": None, **more}
        return self.lines([row], blocking=blocking)[0]

    def lines(self, rows: list[Row], *, blocking: bool) -> list[Row]:
        """Return the lines of an operation's rows."""
        operation = {"checkpoint": self.checkpoint, "operation": self.operation, "step": self.step}
        caller = {"rank": self.rank, "call": self.call, "worker": self.worker}
        ids = {"process": os.getpid(), "thread": self.thread}
        target = {"path": self.path, "blocking": blocking, **caller, **ids}
        return [{**operation, **dict.fromkeys(_LEADING_FIELDS), **target, **row} for row in rows]

    def write(self, lines: list[Row]) -> None:
        """Add lines to the rank's log. Raises OSError."""
        atomic_files.append_lines(
            self.folder / conventions.rank_file(self.rank, conventions.CHECKPOINT_LOG_SUFFIX), lines
        )


@dataclass(frozen=True)
class RunContext:
    """Callables that return the run's folder (None: not recorded), the rank, and the optimizer steps done or None."""

    folder: Callable[[], Path | None]
    rank: Callable[[], int]
    step: Callable[[], int | None]

    def entry(self, folder: Path, operation: str, call: str, path: str | None) -> Entry:
        """Return the entry of an operation on `path` that the calling thread begins."""
        is_main = threading.get_ident() == threading.main_thread().ident
        return Entry(
            folder=folder,
            rank=self.rank(),
            checkpoint=checkpoint_name(path, operation),
            operation=operation,
            step=self.step(),
            path=path,
            call=call,
            worker=conventions.MAIN if is_main else conventions.THREAD,
        )


def with_counters(row: Row, durable: bool | None, before: Counters, after: Counters) -> Row:
    """Return an operation's total row with durability and counters added."""
    return {**row, "durable": durable, **before.until(after)}


_uses: Mapping[str, collections.Counter[str]] = {
    operation: collections.Counter() for operation in conventions.CHECKPOINT_OPERATIONS
}
_uses_lock = threading.Lock()


def checkpoint_name(path: str | None, operation: str) -> str:
    """Return a name for what is saved or loaded at `path`, the same on every rank.

    It is the last two parts of the path, since checkpoints often contain files of the same name. A repeated name gets
    a number: ``run/latest``, then ``run/latest#2``.
    """
    parts = [part for part in re.split(r"[/\\]+", path or "") if part not in ("", ".")]
    name = "/".join(parts[-2:]) or "memory"
    with _uses_lock:
        _uses[operation][name] += 1
        count = _uses[operation][name]
    return name if count == 1 else f"{name}#{count}"
