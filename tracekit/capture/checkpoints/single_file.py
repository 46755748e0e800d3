"""Saves and loads of single files: `torch.save`, `torch.load`, `safetensors.torch.save_file`, `load_file`.

Scripts call these for a few bytes as well, and to memory. Calls that move `MIN_BYTES` or take `MIN_NS` are logged; of
calls that look smaller in advance only the time is measured, so they have one stage and no counters.
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
from tracekit.capture.checkpoints.log_entry import Entry, checkpoint_name
from tracekit.capture.checkpoints.operation import Operation, OperationKind
from tracekit.capture.checkpoints.patching import replaced_for_all
from tracekit.capture.checkpoints.recording import Attach, Endable

MIN_BYTES = 1 << 20
MIN_NS = 10_000_000
_MOST_ITEMS = 10_000  # inspected to decide whether an object is large

_SAFE_LOAD = OperationKind(conventions.READ, {}, conventions.PLAN)


@dataclass(frozen=True)
class RunContext:
    """Callables that return the run's folder (None: not recorded), the rank, and the optimizer steps done or None."""

    folder: Callable[[], Path | None]
    rank: Callable[[], int]
    step: Callable[[], int | None]


@dataclass(frozen=True)
class _Call:
    operation: str
    call: str
    kind: OperationKind
    transfer_stage: str  # the stage whose bytes are the file's
    attach: Attach


def begin_torch_save(watch: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endable:
    """Begin to record a call of ``torch.save``."""
    return _begin_save(_TORCH_SAVE, watch, folder, _argument(args, kwargs, 0, "obj"), _argument(args, kwargs, 1, "f"))


def begin_torch_load(watch: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endable:
    """Begin to record a call of ``torch.load``."""
    return _begin_load(_TORCH_LOAD, watch, folder, _argument(args, kwargs, 0, "f"))


def begin_safetensors_save(watch: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endable:
    """Begin to record a call of ``safetensors.torch.save_file``."""
    tensors, target = _argument(args, kwargs, 0, "tensors"), _argument(args, kwargs, 1, "filename")
    return _begin_save(_SAFETENSORS_SAVE, watch, folder, tensors, target)


def begin_safetensors_load(watch: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endable:
    """Begin to record a call of ``safetensors.torch.load_file``."""
    return _begin_load(_SAFETENSORS_LOAD, watch, folder, _argument(args, kwargs, 0, "filename"))


def current_worker() -> str:
    """Return which of `conventions.WORKERS` the calling thread is."""
    is_main = threading.get_ident() == threading.main_thread().ident
    return conventions.MAIN if is_main else conventions.THREAD


def _begin_save(call: _Call, watch: RunContext, folder: Path, value: Any, target: Any) -> Endable:
    before = target.tell() if type(target) is io.BytesIO else 0

    def conclude(saved: Operation) -> Entry:
        size_bytes = _size_bytes(target)
        in_memory = isinstance(target, io.BytesIO)
        saved.count(call.transfer_stage, None if size_bytes is None else size_bytes - before, 0 if in_memory else 1)
        if not in_memory:
            saved.files.add_unsynced()
        return _entry(call, watch, folder, target)

    if tensor_bytes(value, MIN_BYTES, _MOST_ITEMS) < MIN_BYTES:
        return _SmallTransfer(call, watch, folder, target, before)
    return _begin(call, watch, conclude)


def _begin_load(call: _Call, watch: RunContext, folder: Path, source: Any) -> Endable:

    def conclude(loaded: Operation) -> Entry:
        known = loaded.counted_bytes(conventions.TOTAL) is not None
        loaded.count(conventions.READ, None if known else _size_bytes(source), 0 if type(source) is io.BytesIO else 1)
        return _entry(call, watch, folder, source)

    if (_size_bytes(source) or 0) < MIN_BYTES:
        return _SmallTransfer(call, watch, folder, source, 0)
    return _begin(call, watch, conclude)


def _begin(call: _Call, watch: RunContext, make_entry: Callable[[Operation], Entry]) -> Endable:
    return recording.begin(call.kind, call.attach, make_entry, step=watch.step)


class _SmallTransfer:
    """A save or load that looks too small for the log; it gets lines only if it turns out large or slow."""

    def __init__(self, kind: _Call, watch: RunContext, folder: Path, target: Any, before_bytes: int) -> None:
        self._kind = kind
        self._watch = watch
        self._folder = folder
        self._target = target
        self._before_bytes = before_bytes
        self._start_ns = time.time_ns()

    def end(self, *, failed: bool) -> None:
        """Write one line for its only stage and one for the total, if it was not small."""
        elapsed_ns = time.time_ns() - self._start_ns
        found = None if failed else _size_bytes(self._target)
        size_bytes = None if found is None else found - self._before_bytes
        if failed or (elapsed_ns < MIN_NS and (size_bytes or 0) < MIN_BYTES):
            return
        entry = _entry(self._kind, self._watch, self._folder, self._target)
        moved = {"bytes": size_bytes, "files": 0 if isinstance(self._target, io.BytesIO) else 1}
        # Without sampling, only the thread it ran on shows whether training waited.
        entry.write(
            [
                entry.line(stage, self._start_ns, elapsed_ns, blocking=entry.worker == conventions.MAIN, **moved)
                for stage in (self._kind.kind.first_stage, conventions.TOTAL)
            ]
        )


def _entry(call: _Call, watch: RunContext, folder: Path, target: Any) -> Entry:
    path = _path(target)
    return Entry(
        folder=folder,
        rank=watch.rank(),
        checkpoint=checkpoint_name(path, call.operation),
        operation=call.operation,
        step=watch.step(),
        path=path,
        call=call.call,
        worker=current_worker(),
    )


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _path(target: Any) -> str | None:
    name = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None


def _size_bytes(target: Any) -> int | None:
    """Return the size of a file or memory buffer; None for anything else, or a missing file."""
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
        running = operation.current()
        if running is None:
            return original(*args, **kwargs)
        with running.thread_clock().inside(conventions.WRITE):
            return original(*args, **kwargs)

    return serialize_file


def _attach_nothing(_: Operation, window: ExitStack) -> None:
    """Time nothing: C++ does all the work in one stage."""


_TORCH_SAVE = _Call(conventions.SAVE, conventions.TORCH_SAVE, operation.FILE_SAVE, conventions.WRITE, torch_zip.attach)
_TORCH_LOAD = _Call(conventions.LOAD, conventions.TORCH_LOAD, operation.FILE_LOAD, conventions.READ, torch_zip.attach)
_SAFETENSORS_SAVE = _Call(
    conventions.SAVE, conventions.SAFETENSORS_SAVE, operation.FILE_SAVE, conventions.WRITE, _attach_safetensors
)
_SAFETENSORS_LOAD = _Call(conventions.LOAD, conventions.SAFETENSORS_LOAD, _SAFE_LOAD, conventions.READ, _attach_nothing)
