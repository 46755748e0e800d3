"""The streams of a checkpoint's writer or reader, and its planner's methods, timed and counted."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.operation import Operation
from tracekit.capture.replacing import replaced
from tracekit.capture.stages import StageClock
from tracekit.capture.written import File


def attach_writer(operation: Operation, window: contextlib.ExitStack, writer: Any) -> None:
    """Time a storage writer until `window` closes: its streams, and what it asks the planner for."""
    if hasattr(getattr(writer, "fs", None), "create_stream"):
        operation.worker_stage = conventions.STAGE
        paired = str(getattr(getattr(writer, "serialization_format", None), "name", "TORCH_SAVE")) != "SAFETENSORS"
        timed = functools.partial(_timed_create_stream, operation, paired_tells=paired)
        window.enter_context(replaced(writer.fs, "create_stream", timed))

    def with_timed_planner(write_data: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            with replaced(_planner(args, kwargs), "resolve_data", functools.partial(_timed_resolve_data, operation)):
                return write_data(*args, **kwargs)

        return write

    window.enter_context(replaced(writer, "write_data", with_timed_planner))


def attach_reader(operation: Operation, window: contextlib.ExitStack, reader: Any) -> None:
    """Time a storage reader until `window` closes: its streams, and what its planner takes from it."""
    operation.worker_stage = conventions.READ
    if hasattr(getattr(reader, "fs", None), "create_stream"):
        window.enter_context(replaced(reader.fs, "create_stream", functools.partial(_timed_read_stream, operation)))

    def with_timed_planner(read_data: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            copies, planner = _Copies(operation), _planner(args, kwargs)
            with (
                replaced(planner, "load_bytes", copies.timed_load_bytes),
                replaced(planner, "resolve_tensor", copies.timed_resolve_tensor),
                replaced(planner, "commit_tensor", copies.timed_commit_tensor),
            ):
                return read_data(*args, **kwargs)

        return read

    window.enter_context(replaced(reader, "read_data", with_timed_planner))


def _planner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("planner", args[-1] if args else None)


def _timed_create_stream(
    operation: Operation, create_stream: Callable[..., Any], *, paired_tells: bool
) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.clock_here()
        # The metadata file belongs to finish as a whole, the shards are taken apart.
        stage = operation.aside if clock.stage == operation.aside else conventions.WRITE
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            file = operation.written.open(raw)
            timed = _Written(raw, clock, stage, file, paired_tells=paired_tells)
            yield timed
            with clock.inside(stage):
                stream.close()
            file.flush()
        if stage == conventions.WRITE:
            clock.switch(None)  # until there is another item: a thread may be done and wait for the others
        operation.count(stage, timed.moved_bytes, 1, timed.calls)

    return create


def _timed_resolve_data(operation: Operation, resolve_data: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resolve_data)
    def resolve(write_item: Any) -> Any:
        with operation.clock_here().inside(conventions.STAGE):
            data = resolve_data(write_item)
        operation.count(conventions.STAGE, _size_bytes(data), None)
        return data

    return resolve


def _timed_read_stream(operation: Operation, create_stream: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.clock_here()
        aside = clock.stage == operation.aside
        stage, between = (operation.aside,) * 2 if aside else (conventions.READ, conventions.DESERIALIZE)
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            timed = _Read(raw, clock, stage)
            with clock.inside(between):
                yield timed
            with clock.inside(stage):
                stream.close()
        operation.count(stage, timed.moved_bytes, 1, timed.calls)

    return create


class _Copies:
    """A load planner whose handing out of a target, up to its commit, is copying; one per reading of data."""

    def __init__(self, operation: Operation) -> None:
        self._operation = operation

    def timed_load_bytes(self, load_bytes: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(load_bytes)
        def load(read_item: Any, value: Any) -> Any:
            with self._operation.clock_here().inside(conventions.DESERIALIZE):
                return load_bytes(read_item, value)

        return load

    def timed_resolve_tensor(self, resolve_tensor: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(resolve_tensor)
        def resolve(read_item: Any) -> Any:
            target = resolve_tensor(read_item)
            clock = self._operation.clock_here()
            clock.came_from = clock.stage
            clock.switch(conventions.COPY)
            return target

        return resolve

    def timed_commit_tensor(self, commit_tensor: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(commit_tensor)
        def commit(read_item: Any, tensor: Any) -> Any:
            clock = self._operation.clock_here()
            committed = commit_tensor(read_item, tensor)
            if clock.stage == conventions.COPY:
                clock.switch(clock.came_from)
                self._operation.count(conventions.COPY, _size_bytes(tensor), None, 1)
            return committed

        return commit


class _Timed:
    """A stream whose own work is charged to `stage` of a clock."""

    def __init__(self, raw: Any, clock: StageClock, stage: str) -> None:
        self._raw = raw
        self._clock = clock
        self._stage = stage
        self.moved_bytes = 0
        self.calls = 0

    def close(self) -> None:
        with self._clock.inside(self._stage):
            self._raw.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    def _moved(self, size_bytes: int) -> None:
        self.moved_bytes += size_bytes
        self.calls += 1


class _Written(_Timed):
    """A stream to write to: its caller's work on an item is charged to serialize."""

    def __init__(self, raw: Any, clock: StageClock, stage: str, file: File, *, paired_tells: bool) -> None:
        super().__init__(raw, clock, stage)
        self._file = file
        # Whether the position is asked for both before and after each item.
        self._paired_tells = paired_tells

    def write(self, data: Any) -> Any:
        with self._clock.inside(self._stage):
            written = self._raw.write(data)
        self._file.write()
        self._moved(len(data.encode()) if isinstance(data, str) else memoryview(data).nbytes)  # JSON is text
        return written

    def tell(self) -> Any:
        # torch asks for the position before and after each item; between two items it fetches the next.
        if self._stage == conventions.WRITE:
            ends = self._paired_tells and self._clock.stage == conventions.SERIALIZE
            self._clock.switch(conventions.STAGE if ends else conventions.SERIALIZE)
        return self._raw.tell()

    def flush(self) -> None:
        with self._clock.inside(self._stage):
            self._raw.flush()
        self._file.flush()

    def close(self) -> None:
        super().close()
        self._file.flush()


class _Read(_Timed):
    """A stream to read from."""

    def read(self, *args: Any) -> Any:
        with self._clock.inside(self._stage):
            data = self._raw.read(*args)
        self._moved(len(data or b""))
        return data

    def readinto(self, buffer: Any) -> Any:
        with self._clock.inside(self._stage):
            count = self._raw.readinto(buffer)
        self._moved(count or 0)
        return count


def _size_bytes(data: Any) -> int | None:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return memoryview(data.getbuffer()).nbytes if hasattr(data, "getbuffer") else None
