"""Saves and loads of single files: `torch.save`, `torch.load`, `safetensors.torch.save_file`, `load_file`.

Scripts call these for a few bytes as well, and to memory. Calls that move `MIN_BYTES` or take `MIN_NS` are logged; of
calls that look smaller in advance only the time is measured, so they have one stage and no counters.
"""

import contextlib
import functools
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.serialization

from tracekit import conventions
from tracekit.capture.checkpoints import operation, recording
from tracekit.capture.checkpoints.dcp import tensor_bytes
from tracekit.capture.checkpoints.operation import Operation, OperationKind, current
from tracekit.capture.checkpoints.recording import Attach, Endable, Entry, RunContext, patch_for_all

MIN_BYTES = 1 << 20
MIN_NS = 10_000_000
_MOST_ITEMS = 10_000  # inspected to decide whether an object is large

_SAFE_LOAD = OperationKind(conventions.READ, {}, conventions.PLAN)
_attached: set[Operation] = set()
_PICKLE = "data.pkl"  # the first record; storages follow, each copied from its device just before


@dataclass(frozen=True)
class Call:
    """A function that saves or loads one file: how it is logged, and its arguments, by position and name."""

    operation: str
    call: str
    kind: OperationKind
    attach: Attach
    file: tuple[int, str]
    value: tuple[int, str] | None = None
    """What is saved; None for a load."""


def begin(call: Call, context: RunContext, folder: Path, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Endable:
    """Begin to record a call."""
    file = _argument(args, kwargs, *call.file)
    if call.value is None:
        return _begin_load(call, context, folder, file)
    return _begin_save(call, context, folder, _argument(args, kwargs, *call.value), file)


class _SmallTransfer:
    """A save or load that looks too small for the log; it gets lines only if it turns out large or slow."""

    def __init__(self, call: Call, context: RunContext, folder: Path, target: Any, before_bytes: int) -> None:
        self._call = call
        self._context = context
        self._folder = folder
        self._target = target
        self._before_bytes = before_bytes
        self._start_ns = time.time_ns()

    def end(self, *, failed: bool) -> None:
        """Write one line for its only stage and one for the total, if it was not small."""
        elapsed_ns = time.time_ns() - self._start_ns
        after_bytes = None if failed else _size_bytes(self._target)
        size_bytes = None if after_bytes is None else after_bytes - self._before_bytes
        if failed or (elapsed_ns < MIN_NS and (size_bytes or 0) < MIN_BYTES):
            return
        entry = self._context.entry(self._folder, self._call.operation, self._call.call, _path(self._target))
        moved = {"bytes": size_bytes, "files": 0 if isinstance(self._target, io.BytesIO) else 1}
        # Without sampling, only the thread it ran on shows whether training waited.
        entry.write(
            [
                entry.line(stage, self._start_ns, elapsed_ns, blocking=entry.worker == conventions.MAIN, **moved)
                for stage in (self._call.kind.first_stage, conventions.TOTAL)
            ]
        )


def _attach_torch_file(running: Operation, window: contextlib.ExitStack) -> None:
    _attached.add(running)
    window.callback(_attached.discard, running)
    for name, wrap in (
        ("_open_zipfile_writer", functools.partial(_timed_open, _ZipWriter, conventions.WRITE)),
        ("_open_zipfile_reader", functools.partial(_timed_open, _ZipReader, conventions.READ)),
        ("_get_restore_location", _timed_restoring),
    ):
        window.enter_context(patch_for_all(torch.serialization, name, wrap))


class _Proxy:
    def __init__(self, raw: Any, operation: Operation) -> None:
        self._raw = raw
        self._operation = operation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class _Opener(_Proxy):
    """Wraps one of torch's context managers that open and close the file."""

    def __init__(self, raw: Any, operation: Operation, stage: str, timed: type[_Proxy]) -> None:
        super().__init__(raw, operation)
        self._stage = stage
        self._timed = timed

    def __enter__(self) -> Any:
        return self._timed(self._raw.__enter__(), self._operation)

    def __exit__(self, *failure: object) -> Any:
        with self._operation.thread_clock().inside(self._stage):
            return self._raw.__exit__(*failure)


class _ZipWriter(_Proxy):
    def write_record(self, name: str, data: Any, size_bytes: int) -> Any:
        clock = self._operation.thread_clock()
        with clock.inside(conventions.WRITE):
            written = self._raw.write_record(name, data, size_bytes)
        self._operation.count(conventions.WRITE, None, None, 1)
        self._operation.sampler.sample()
        if name == _PICKLE:
            clock.switch(conventions.STAGE)
        return written


class _ZipReader(_Proxy):
    def get_record(self, name: str) -> Any:
        with self._operation.thread_clock().inside(conventions.READ):
            record = self._raw.get_record(name)
        self._operation.count(conventions.READ, len(record), None, 1)
        return record

    def get_storage_from_record(self, name: str, size_bytes: int, dtype: Any) -> Any:
        with self._operation.thread_clock().inside(conventions.READ):
            storage = self._raw.get_storage_from_record(name, size_bytes, dtype)
        self._operation.count(conventions.READ, size_bytes, None, 1)
        self._operation.sampler.sample()
        return storage


def _begin_save(call: Call, context: RunContext, folder: Path, value: Any, target: Any) -> Endable:
    before = target.tell() if type(target) is io.BytesIO else 0

    def conclude(saved: Operation) -> Entry:
        size_bytes = _size_bytes(target)
        in_memory = isinstance(target, io.BytesIO)
        saved.count(conventions.WRITE, None if size_bytes is None else size_bytes - before, 0 if in_memory else 1)
        if not in_memory:
            saved.files.add_unsynced()
        return context.entry(folder, call.operation, call.call, _path(target))

    if tensor_bytes(value, MIN_BYTES, _MOST_ITEMS) < MIN_BYTES:
        return _SmallTransfer(call, context, folder, target, before)
    return recording.begin(call.kind, call.attach, conclude, step=context.step)


def _begin_load(call: Call, context: RunContext, folder: Path, source: Any) -> Endable:
    def conclude(load: Operation) -> Entry:
        is_sized = load.counted_bytes(conventions.TOTAL) is not None
        load.count(conventions.READ, None if is_sized else _size_bytes(source), 0 if type(source) is io.BytesIO else 1)
        return context.entry(folder, call.operation, call.call, _path(source))

    if (_size_bytes(source) or 0) < MIN_BYTES:
        return _SmallTransfer(call, context, folder, source, 0)
    return recording.begin(call.kind, call.attach, conclude, step=context.step)


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], index: int, name: str) -> Any:
    return args[index] if len(args) > index else kwargs.get(name)


def _path(target: Any) -> str | None:
    name = target if isinstance(target, str | os.PathLike) else getattr(target, "name", None)
    return os.fsdecode(name) if isinstance(name, str | bytes | os.PathLike) else None


def _size_bytes(target: Any) -> int | None:
    """Size of a file or memory buffer; None for anything else, or a missing file."""
    if type(target) is io.BytesIO:
        return target.getbuffer().nbytes
    try:
        if isinstance(target, str | os.PathLike):
            return os.stat(target).st_size  # noqa: PTH116 half the cost of Path's, for each small file
        return os.fstat(target.fileno()).st_size if isinstance(target, io.IOBase) else None
    except (OSError, ValueError):
        return None


def _attach_safetensors(_: Operation, window: ExitStack) -> None:
    window.enter_context(patch_for_all(sys.modules["safetensors.torch"], "serialize_file", _timed_writing))


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


def _current() -> Operation | None:
    running = current()
    return running if running in _attached else None


def _timed_open(timed: "type[_Proxy]", stage: str, original: Callable[..., Any]) -> Callable[..., Any]:
    def open_zip(*args: Any, **kwargs: Any) -> Any:
        operation = _current()
        if operation is None:
            return original(*args, **kwargs)
        with operation.thread_clock().inside(stage):
            opener = original(*args, **kwargs)
        return _Opener(opener, operation, stage, timed)

    return open_zip


def _timed_restoring(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_restore_location(*args: Any, **kwargs: Any) -> Any:
        restore = original(*args, **kwargs)
        operation = _current()
        if operation is None:
            return restore

        def timed_restore(*args: Any, **kwargs: Any) -> Any:
            with operation.thread_clock().inside(conventions.COPY):
                return restore(*args, **kwargs)

        return timed_restore

    return get_restore_location


TORCH_SAVE = Call(
    conventions.SAVE, conventions.TORCH_SAVE, operation.FILE_SAVE, _attach_torch_file, (1, "f"), value=(0, "obj")
)
TORCH_LOAD = Call(conventions.LOAD, conventions.TORCH_LOAD, operation.FILE_LOAD, _attach_torch_file, (0, "f"))
SAFETENSORS_SAVE = Call(
    conventions.SAVE,
    conventions.SAFETENSORS_SAVE,
    operation.FILE_SAVE,
    _attach_safetensors,
    (1, "filename"),
    value=(0, "tensors"),
)
SAFETENSORS_LOAD = Call(conventions.LOAD, conventions.SAFETENSORS_LOAD, _SAFE_LOAD, _attach_nothing, (0, "filename"))
