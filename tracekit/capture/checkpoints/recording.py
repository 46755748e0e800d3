"""Record a call that saves or loads so that no failure reaches the caller, and the patches that this needs."""

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

from tracekit.capture import notices
from tracekit.capture.checkpoints import io_counters, operation
from tracekit.capture.checkpoints.io_counters import Counters
from tracekit.capture.checkpoints.log_entry import Entry, with_counters
from tracekit.capture.checkpoints.operation import Operation, OperationKind, Row

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
