"""Record a call that saves or loads so that no failure reaches the caller: patches, and lines of the log."""

import collections
import contextlib
import functools
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

from tracekit import conventions
from tracekit.capture import atomic_files, notices
from tracekit.capture.checkpoints import io_counters, operation
from tracekit.capture.checkpoints.io_counters import Counters
from tracekit.capture.checkpoints.operation import Operation, OperationKind, Row

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
        """Entry for the calling thread, which is a `worker`."""
        return replace(self, worker=worker, thread=threading.get_native_id())

    def line(self, stage: str, start_ns: int, dur_ns: int, *, blocking: bool, **more: Any) -> Row:
        """Return one line. All fields but times and stage default to null."""
        row = {"stage": stage, "start_ns": start_ns, "dur_ns": max(0, dur_ns), "calls": None, **more}
        return self.lines([row], blocking=blocking)[0]

    def lines(self, rows: list[Row], *, blocking: bool) -> list[Row]:
        """Lines of an operation's rows."""
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
        """Entry of an operation on `path` that the calling thread begins."""
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


Attach = Callable[[Operation, contextlib.ExitStack], None]
MakeEntry = Callable[[Operation], Entry | None]
HandOver = Callable[[list[Row]], None]
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclass
class Recording:
    """One operation being recorded on the thread that created this.

    `make_entry` is called after success and returns the lines' common fields, or None for no lines. With `hand_over`,
    the lines are passed to that and not written: where another thread is saving, any call that releases the GIL waits
    for it. So of the counters only the CPU time is read then.
    """

    operation: Operation
    before: Counters
    window: contextlib.ExitStack
    make_entry: MakeEntry
    blocking: bool | None = None  # None: determined by sampling
    hand_over: HandOver | None = None
    begun_count: ClassVar[int] = 0
    """Operations that have begun in this process."""

    def end(self, *, failed: bool) -> None:
        """End it; write its lines unless the call failed. All patches are removed even where this raises."""
        try:
            self.operation.stop()
            blocking = self.operation.sampler.is_blocked() if self.blocking is None else self.blocking
            after = (io_counters.read_processor_time if self.hand_over else io_counters.read)(self.before.thread)
        finally:
            self.window.close()
        entry = None if failed else self.make_entry(self.operation)
        if entry is None:
            return
        *rows, total = self.operation.rows()
        total = with_counters(total, self.operation.files.durable(), self.before, after)
        total["whole_bytes"] = self.operation.whole_bytes
        (self.hand_over or entry.write)(entry.lines([*rows, total], blocking=blocking))


def begin(
    kind: OperationKind,
    attach: Attach,
    make_entry: MakeEntry,
    *,
    step: Callable[[], int | None],
    blocking: bool | None = None,
    hand_over: HandOver | None = None,
) -> Recording:
    """Begin to record the calling thread. No patch stays if this raises."""
    Recording.begun_count += 1
    before = io_counters.read(threading.get_native_id())
    with contextlib.ExitStack() as window:
        window.enter_context(operation.span())
        running = Operation(kind, step)
        window.callback(running.close_span)
        window.enter_context(operation.running(running))
        for name in ("fsync", "sync"):
            window.enter_context(patch_for_all(os, name, operation.timed_sync))
        attach(running, window)
        return Recording(running, before, window.pop_all(), make_entry, blocking, hand_over)


class Endable(Protocol):
    """A recording that is ended when its call has ended."""

    def end(self, *, failed: bool) -> None:
        """End the recording; `failed` where the call raised."""


class RecordedCall(contextlib.AbstractContextManager["RecordedCall"]):
    """Records the block if `begin` returns a recording. Failures are reported once, and never raised."""

    def __init__(self, begin: Callable[[], "Endable | None"]) -> None:
        self._begin = begin
        self.recording: Endable | None = None

    def __enter__(self) -> "RecordedCall":  # noqa: PYI034 typing.Self is not in Python 3.10
        try:
            self.recording = self._begin()
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            report_once(error)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.recording is None:
            return
        try:
            self.recording.end(failed=kind is not None)
        except Exception as failure:  # noqa: BLE001 whatever fails here, the training continues
            report_once(failure)


_reported: set[str] = set()


def guard(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it never raises: an error is reported on stderr once, and None is returned."""

    @functools.wraps(function)
    def harmless(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:  # noqa: BLE001 whatever fails here, the training continues
            report_once(error)
        return None

    return harmless


def report_once(error: Exception) -> None:
    """Report that recording failed, each kind of failure once."""
    what = "the checkpoint log was not written" if isinstance(error, OSError) else "a checkpoint was not recorded"
    if what not in _reported:
        _reported.add(what)
        notices.report_failure(what, error)


@contextlib.contextmanager
def patch_method(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wrap a method of one object, not of its class, for the block, if the object allows it."""
    original = getattr(owner, name, None)
    previous = getattr(owner, "__dict__", {}).get(name)
    wrapped = wrap(original) if callable(original) else None
    if wrapped is None or not _set(owner, name, wrapped):
        yield
        return
    try:
        yield
    finally:
        # It may have been replaced again meanwhile.
        if owner.__dict__.get(name) is wrapped:
            if previous is None:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)


@contextlib.contextmanager
def patch_for_all(owner: Any, name: str, wrap: Wrap) -> Iterator[None]:
    """Wrap a function of a module or class while at least one thread is in such a block.

    `wrap` gets the original function; it must be the same for each block of an owner and name. A name that `owner`
    lacks is ignored.
    """
    if not callable(getattr(owner, name, None)):
        yield
        return
    with _lock:
        patch = _patches.setdefault((id(owner), name), _Patch(getattr(owner, name)))
        if patch.count == 0:
            patch.original = getattr(owner, name)
            patch.wrapped = functools.wraps(patch.original)(wrap(patch.original))
            setattr(owner, name, patch.wrapped)
        patch.count += 1
    try:
        yield
    finally:
        with _lock:
            patch.count -= 1
            if patch.count == 0 and getattr(owner, name) is patch.wrapped:
                setattr(owner, name, patch.original)


def with_counters(row: Row, durable: bool | None, before: Counters, after: Counters) -> Row:
    """Operation's total row with durability and counters added."""
    return {**row, "durable": durable, **before.until(after)}


_uses: Mapping[str, collections.Counter[str]] = {
    operation: collections.Counter() for operation in conventions.CHECKPOINT_OPERATIONS
}
_uses_lock = threading.Lock()


def checkpoint_name(path: str | None, operation: str) -> str:
    """Name for what is saved or loaded at `path`, the same on every rank.

    It is the last two parts of the path, since checkpoints often contain files of the same name. A repeated name gets a
    number: ``run/latest``, then ``run/latest#2``.
    """
    parts = [part for part in re.split(r"[/\\]+", path or "") if part not in ("", ".")]
    name = "/".join(parts[-2:]) or "memory"
    with _uses_lock:
        _uses[operation][name] += 1
        count = _uses[operation][name]
    return name if count == 1 else f"{name}#{count}"


@dataclass
class _Patch:
    original: Any
    wrapped: Any = None
    count: int = 0


_patches: dict[tuple[int, str], _Patch] = {}

_lock = threading.Lock()


def _set(owner: Any, name: str, value: Any) -> bool:
    try:
        setattr(owner, name, value)
    except (AttributeError, TypeError):
        return False
    return getattr(owner, "__dict__", {}).get(name) is value
