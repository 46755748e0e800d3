"""Saves and loads of single files: `torch.save`, `torch.load`, `safetensors.torch.save_file`, `load_file`.

Scripts call these for a few bytes as well, and into memory. Logged is what moves `LEAST_BYTES` or takes `LEAST_NS`, be
it to a file or to memory; of what looks smaller beforehand only the time is taken, so it has one stage, no counters.
"""

import io
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.capture.checkpoints import operation, recording, torch_zip
from tracekit.capture.checkpoints.async_save import tensor_bytes
from tracekit.capture.checkpoints.log_entry import Entry, name_of
from tracekit.capture.checkpoints.operation import Course, Operation
from tracekit.capture.checkpoints.patching import replaced_for_all
from tracekit.capture.checkpoints.recording import Attach, Ending

LEAST_BYTES = 1 << 20
LEAST_NS = 10_000_000
_MOST_ITEMS = 10_000  # looked at to tell whether something is large

_SAFE_LOAD = Course(conventions.READ, {}, conventions.PLAN)


@dataclass(frozen=True)
class Watch:
    """Whom a recording asks: for the run's folder (None: not recorded), the rank, the optimizer steps done or None."""

    folder: Callable[[], Path | None]
    rank: Callable[[], int]
    step: Callable[[], int | None]


@dataclass(frozen=True)
class _Kind:
    operation: str
    call: str
    course: Course
    moving: str  # the stage whose bytes are the file's
    attach: Attach


def begin_torch_save(watch: Watch, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ending:
    """Begin to record a call of ``torch.save``."""
    return _begin_save(_TORCH_SAVE, watch, folder, _argument(args, kwargs, 0, "obj"), _argument(args, kwargs, 1, "f"))


def begin_torch_load(watch: Watch, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ending:
    """Begin to record a call of ``torch.load``."""
    return _begin_load(_TORCH_LOAD, watch, folder, _argument(args, kwargs, 0, "f"))


def begin_safetensors_save(watch: Watch, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ending:
    """Begin to record a call of ``safetensors.torch.save_file``."""
    tensors, target = _argument(args, kwargs, 0, "tensors"), _argument(args, kwargs, 1, "filename")
    return _begin_save(_SAFETENSORS_SAVE, watch, folder, tensors, target)


def begin_safetensors_load(watch: Watch, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ending:
    """Begin to record a call of ``safetensors.torch.load_file``."""
    return _begin_load(_SAFETENSORS_LOAD, watch, folder, _argument(args, kwargs, 0, "filename"))


def worker_here() -> str:
    """Return which of `conventions.WORKERS` the calling thread is."""
    is_main = threading.get_ident() == threading.main_thread().ident
    return conventions.MAIN if is_main else conventions.THREAD


def _begin_save(kind: _Kind, watch: Watch, folder: Path, value: Any, target: Any) -> Ending:
    before = target.tell() if type(target) is io.BytesIO else 0

    def conclude(saved: Operation) -> Entry:
        size_bytes = _size_bytes(target)
        in_memory = isinstance(target, io.BytesIO)
        saved.count(kind.moving, None if size_bytes is None else size_bytes - before, 0 if in_memory else 1)
        if not in_memory:
            saved.written.never_synced()
        return _entry(kind, watch, folder, target)

    if tensor_bytes(value, LEAST_BYTES, _MOST_ITEMS) < LEAST_BYTES:
        return _Brief(kind, watch, folder, target, before)
    return _begin(kind, watch, conclude)


def _begin_load(kind: _Kind, watch: Watch, folder: Path, source: Any) -> Ending:

    def conclude(loaded: Operation) -> Entry:
        known = loaded.counted_bytes(conventions.TOTAL) is not None
        loaded.count(conventions.READ, None if known else _size_bytes(source), 0 if type(source) is io.BytesIO else 1)
        return _entry(kind, watch, folder, source)

    if (_size_bytes(source) or 0) < LEAST_BYTES:
        return _Brief(kind, watch, folder, source, 0)
    return _begin(kind, watch, conclude)


def _begin(kind: _Kind, watch: Watch, conclude: Callable[[Operation], Entry]) -> Ending:
    return recording.begin(kind.course, kind.attach, conclude, step=watch.step)


class _Brief:
    """A save or load that looks too small for the log; it gets lines only if it proves not to be."""

    def __init__(self, kind: _Kind, watch: Watch, folder: Path, target: Any, before_bytes: int) -> None:
        self._kind = kind
        self._watch = watch
        self._folder = folder
        self._target = target
        self._before_bytes = before_bytes
        self._start_ns = time.time_ns()

    def end(self, *, failed: bool) -> None:
        """Write a line for the stage it is taken for, and one for the total, if it was not small."""
        elapsed_ns = time.time_ns() - self._start_ns
        found = None if failed else _size_bytes(self._target)
        size_bytes = None if found is None else found - self._before_bytes
        if failed or (elapsed_ns < LEAST_NS and (size_bytes or 0) < LEAST_BYTES):
            return
        entry = _entry(self._kind, self._watch, self._folder, self._target)
        moved = {"bytes": size_bytes, "files": 0 if isinstance(self._target, io.BytesIO) else 1}
        # It was not watched: only where it runs tells whether training waited.
        entry.write(
            [
                entry.line(stage, self._start_ns, elapsed_ns, blocking=entry.worker == conventions.MAIN, **moved)
                for stage in (self._kind.course.first, conventions.TOTAL)
            ]
        )


def _entry(kind: _Kind, watch: Watch, folder: Path, target: Any) -> Entry:
    path = _path(target)
    return Entry(
        folder=folder,
        rank=watch.rank(),
        checkpoint=name_of(path, kind.operation),
        operation=kind.operation,
        step=watch.step(),
        path=path,
        call=kind.call,
        worker=worker_here(),
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _path(target: Any) -> str | None:
    name = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None


def _size_bytes(target: Any) -> int | None:
    """Return the size of a file, or of what was written to memory; None where it is neither, or not there."""
    if type(target) is io.BytesIO:
        return target.getbuffer().nbytes
    try:
        if isinstance(target, str | os.PathLike):
            return os.stat(target).st_size  # noqa: PTH116 half the cost of Path's, for each small file
        return os.fstat(target.fileno()).st_size if isinstance(target, io.IOBase) else None
    except (OSError, ValueError):
        return None


def _attach_safetensors(_: Operation, window: ExitStack) -> None:
    window.enter_context(replaced_for_all(sys.modules["safetensors.torch"], "serialize_file", _timed_writing))


def _timed_writing(original: Callable[..., Any]) -> Callable[..., Any]:
    def serialize_file(*args: Any, **kwargs: Any) -> Any:
        running = operation.here()
        if running is None:
            return original(*args, **kwargs)
        with running.clock_here().inside(conventions.WRITE):
            return original(*args, **kwargs)

    return serialize_file


def _attach_nothing(_: Operation, window: ExitStack) -> None:
    """Time nothing: what C++ does there is one stage."""


_TORCH_SAVE = _Kind(conventions.SAVE, conventions.TORCH_SAVE, operation.FILE_SAVE, conventions.WRITE, torch_zip.attach)
_TORCH_LOAD = _Kind(conventions.LOAD, conventions.TORCH_LOAD, operation.FILE_LOAD, conventions.READ, torch_zip.attach)
_SAFETENSORS_SAVE = _Kind(
    conventions.SAVE, conventions.SAFETENSORS_SAVE, operation.FILE_SAVE, conventions.WRITE, _attach_safetensors
)
_SAFETENSORS_LOAD = _Kind(conventions.LOAD, conventions.SAFETENSORS_LOAD, _SAFE_LOAD, conventions.READ, _attach_nothing)
