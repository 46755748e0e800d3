"""Files of `torch.save` and `torch.load`: separate reading and writing, which C++ does, from pickling."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch.serialization

from tracekit import conventions
from tracekit.capture.checkpoints.operation import Operation, current
from tracekit.capture.checkpoints.patching import patch_for_all

_PICKLE = "data.pkl"  # the first record; storages follow, each copied from its device just before


def attach(running: Operation, window: contextlib.ExitStack) -> None:
    """Time the file of an operation until `window` closes."""
    _attached.add(running)
    window.callback(_attached.discard, running)
    for name, wrap in (
        ("_open_zipfile_writer", functools.partial(_timed_open, _ZipWriter, conventions.WRITE)),
        ("_open_zipfile_reader", functools.partial(_timed_open, _ZipReader, conventions.READ)),
        ("_get_restore_location", _timed_restoring),
    ):
        window.enter_context(patch_for_all(torch.serialization, name, wrap))


_attached: set[Operation] = set()


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
