"""The streams of a checkpoint's writer or reader, and its planner's methods, timed and counted."""

import contextlib
import functools
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from tracekit import conventions
from tracekit.capture.checkpoints.io_counters import File
from tracekit.capture.checkpoints.operation import Operation, StageClock
from tracekit.capture.checkpoints.recording import patch_method


def attach_writer(operation: Operation, window: contextlib.ExitStack, writer: Any) -> None:
    """Time a storage writer until `window` closes: its streams, and its requests to the planner."""
    if hasattr(getattr(writer, "fs", None), "create_stream"):
        operation.worker_stage = conventions.STAGE
        paired = str(getattr(getattr(writer, "serialization_format", None), "name", "TORCH_SAVE")) != "SAFETENSORS"
        timed = functools.partial(_timed_create_stream, operation, tells_twice=paired)
        window.enter_context(patch_method(writer.fs, "create_stream", timed))

    def with_timed_planner(write_data: Callable[..., Any]) -> Callable[..., Any]:
        def write(*args: Any, **kwargs: Any) -> Any:
            sizes_bytes: list[int] = []
            timed = functools.partial(_timed_resolve_data, operation, sizes_bytes)
            with patch_method(_planner(args, kwargs), "resolve_data", timed):
                written = write_data(*args, **kwargs)
            operation.count(conventions.STAGE, sum(sizes_bytes) if sizes_bytes else None, None)
            return written

        return write

    window.enter_context(patch_method(writer, "write_data", with_timed_planner))


def attach_reader(operation: Operation, window: contextlib.ExitStack, reader: Any) -> None:
    """Time a storage reader until `window` closes: its streams, and its planner's methods."""
    operation.worker_stage = conventions.READ
    if hasattr(getattr(reader, "fs", None), "create_stream"):
        window.enter_context(patch_method(reader.fs, "create_stream", functools.partial(_timed_read_stream, operation)))

    def with_timed_planner(read_data: Callable[..., Any]) -> Callable[..., Any]:
        def read(*args: Any, **kwargs: Any) -> Any:
            planner = _planner(args, kwargs)
            with (
                patch_method(planner, "load_bytes", functools.partial(_timed_load_bytes, operation)),
                patch_method(planner, "resolve_tensor", functools.partial(_timed_resolve_tensor, operation)),
                patch_method(planner, "commit_tensor", functools.partial(_timed_commit_tensor, operation)),
            ):
                operation.whole_bytes = _checkpoint_bytes(reader)
                return read_data(*args, **kwargs)

        return read

    window.enter_context(patch_method(reader, "read_data", with_timed_planner))


@dataclass
class StreamTransfer:
    """The transfers of one stream: counted in `stage` of `clock`, and in bytes and calls.

    The writer calls tell() when an item begins, and with `tells_twice` also when it ends.
    """

    clock: StageClock
    stage: str
    file: File
    tells_twice: bool = False
    moved_bytes: int = 0
    calls: int = 0

    def add(self, size_bytes: int) -> None:
        """Count one call."""
        self.moved_bytes += size_bytes
        self.calls += 1

    def on_tell(self) -> None:
        """Handle a call of tell(): in a shard it begins another stage."""
        if self.stage == conventions.WRITE:
            ends = self.tells_twice and self.clock.stage == conventions.SERIALIZE
            self.clock.switch(conventions.STAGE if ends else conventions.SERIALIZE)


def timed_writer(raw: Any, transfer: StreamTransfer) -> Any:
    """Stream that writes to `raw`; the caller's work on an item counts in serialize."""
    return _FileWriter(raw, transfer) if _is_plain(raw, io.BufferedWriter) else _ProxyWriter(raw, transfer)


def timed_reader(raw: Any, transfer: StreamTransfer) -> Any:
    """Stream that reads from `raw`."""
    if _is_plain(raw, io.BufferedReader):
        return io.BufferedReader(_RawReader(raw, transfer), _buffer_bytes(raw))
    return _ProxyReader(raw, transfer)


class _Raw(io.FileIO):
    """The file of another stream, which still owns it."""

    def __init__(self, stream: Any, mode: str, transfer: StreamTransfer) -> None:
        super().__init__(stream.fileno(), mode, closefd=False)
        self.name = stream.name
        self._transfer = transfer


class _RawWriter(_Raw):
    def __init__(self, stream: Any, transfer: StreamTransfer) -> None:
        super().__init__(stream, "wb", transfer)

    def write(self, data: Any) -> int:
        transfer = self._transfer
        clock = transfer.clock
        outer = clock.stage
        clock.switch(transfer.stage)
        try:
            written = super().write(data)
        finally:
            clock.switch(outer)
        transfer.moved_bytes += written or 0
        transfer.calls += 1
        transfer.file.synced = False
        return written


class _RawReader(_Raw):
    def __init__(self, stream: Any, transfer: StreamTransfer) -> None:
        super().__init__(stream, "rb", transfer)

    def readinto(self, buffer: Any) -> int:
        transfer = self._transfer
        transfer.clock.enter(transfer.stage)
        try:
            count = super().readinto(buffer)
        finally:
            transfer.clock.leave()
        transfer.add(count or 0)
        return count

    def readall(self) -> bytes:
        transfer = self._transfer
        with transfer.clock.inside(transfer.stage):
            data = super().readall()
        transfer.add(len(data))
        return data


class _FileWriter(io.BufferedWriter):
    """Python's buffer over a file of another stream."""

    def __init__(self, stream: Any, transfer: StreamTransfer) -> None:
        super().__init__(_RawWriter(stream, transfer), _buffer_bytes(stream))
        self._transfer = transfer
        transfer.file.has_unflushed = self.has_unflushed

    def has_unflushed(self) -> bool:
        """Return whether it has unflushed bytes."""
        return not self.closed and super().tell() != self.raw.tell()

    def tell(self) -> int:
        self._transfer.on_tell()
        return super().tell()


class _ProxyStream:
    def __init__(self, raw: Any, transfer: StreamTransfer) -> None:
        self._raw = raw
        self._transfer = transfer

    def close(self) -> None:
        with self._transfer.clock.inside(self._transfer.stage):
            self._raw.close()
        self._transfer.file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class _ProxyWriter(_ProxyStream):
    def write(self, data: Any) -> Any:
        transfer = self._transfer
        transfer.clock.enter(transfer.stage)
        try:
            written = self._raw.write(data)
        finally:
            transfer.clock.leave()
        transfer.file.write()
        transfer.add(len(data.encode()) if isinstance(data, str) else memoryview(data).nbytes)  # JSON is text
        return written

    def tell(self) -> Any:
        self._transfer.on_tell()
        return self._raw.tell()

    def flush(self) -> None:
        with self._transfer.clock.inside(self._transfer.stage):
            self._raw.flush()
        self._transfer.file.flush()


class _ProxyReader(_ProxyStream):
    def read(self, *args: Any) -> Any:
        with self._transfer.clock.inside(self._transfer.stage):
            data = self._raw.read(*args)
        self._transfer.add(len(data or b""))
        return data

    def readinto(self, buffer: Any) -> Any:
        with self._transfer.clock.inside(self._transfer.stage):
            count = self._raw.readinto(buffer)
        self._transfer.add(count or 0)
        return count


def _checkpoint_bytes(reader: Any) -> int | None:
    """Bytes of all shards by the reader's metadata; None where the metadata lacks lengths."""
    shards = getattr(reader, "storage_data", None)
    lengths = [getattr(info, "length", None) for info in shards.values()] if isinstance(shards, dict) else []
    valid_lengths = [length for length in lengths if isinstance(length, int)]
    return sum(valid_lengths) if valid_lengths and len(valid_lengths) == len(lengths) else None


def _planner(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("planner", args[-1] if args else None)


def _timed_create_stream(
    operation: Operation, create_stream: Callable[..., Any], *, tells_twice: bool
) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.thread_clock()
        # The metadata file counts in finish as a whole; shards are split into stages.
        stage = operation.kind.metadata_stage if clock.stage == operation.kind.metadata_stage else conventions.WRITE
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            transfer = StreamTransfer(clock, stage, operation.files.open(raw), tells_twice)
            # Between two items torch fetches the next; each item ends with the second of two calls of tell().
            timed = timed_writer(raw, transfer)
            if isinstance(timed, io.BufferedWriter):
                # Flushing the rest must fail here, as it would in the wrapped stream.
                stream.enter_context(contextlib.closing(timed))
            yield timed
            with clock.inside(stage):
                stream.close()
            transfer.file.flush()
        if stage == conventions.WRITE:
            clock.switch(None)  # until the next item: a thread may have finished and wait for the others
        operation.count(stage, transfer.moved_bytes, 1, transfer.calls)

    return create


def _timed_resolve_data(
    operation: Operation, sizes_bytes: list[int], resolve_data: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(resolve_data)
    def resolve(write_item: Any) -> Any:
        clock = operation.thread_clock()
        outer = clock.stage
        if outer == conventions.STAGE:  # the stage between the items of a file
            data = resolve_data(write_item)
        else:
            clock.switch(conventions.STAGE)
            try:
                data = resolve_data(write_item)
            finally:
                clock.switch(outer)
        size_bytes = _size_bytes(data)
        if size_bytes is not None:
            sizes_bytes.append(size_bytes)
        return data

    return resolve


def _timed_read_stream(operation: Operation, create_stream: Callable[..., Any]) -> Callable[..., Any]:
    @contextlib.contextmanager
    def create(*args: Any, **kwargs: Any) -> Iterator[Any]:
        clock = operation.thread_clock()
        aside = clock.stage == operation.kind.metadata_stage
        stage, between = (operation.kind.metadata_stage,) * 2 if aside else (conventions.READ, conventions.DESERIALIZE)
        with contextlib.ExitStack() as stream:
            with clock.inside(stage):
                raw = stream.enter_context(create_stream(*args, **kwargs))
            transfer = StreamTransfer(clock, stage, File())
            with clock.inside(between):
                yield timed_reader(raw, transfer)
            with clock.inside(stage):
                stream.close()
        operation.count(stage, transfer.moved_bytes, 1, transfer.calls)

    return create


# From handing out a target to its commit counts as copy.


def _timed_load_bytes(operation: Operation, load_bytes: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load_bytes)
    def load(read_item: Any, value: Any) -> Any:
        with operation.thread_clock().inside(conventions.DESERIALIZE):
            return load_bytes(read_item, value)

    return load


def _timed_resolve_tensor(operation: Operation, resolve_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(resolve_tensor)
    def resolve(read_item: Any) -> Any:
        target = resolve_tensor(read_item)
        clock = operation.thread_clock()
        clock.previous_stage = clock.stage
        clock.switch(conventions.COPY)
        return target

    return resolve


def _timed_commit_tensor(operation: Operation, commit_tensor: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(commit_tensor)
    def commit(read_item: Any, tensor: Any) -> Any:
        clock = operation.thread_clock()
        committed = commit_tensor(read_item, tensor)
        if clock.stage == conventions.COPY:
            clock.switch(clock.previous_stage)
            operation.count(conventions.COPY, _size_bytes(tensor), None, 1)
        return committed

    return commit


def _size_bytes(data: Any) -> int | None:
    if isinstance(data, torch.Tensor):
        return int(data.nbytes)
    return memoryview(data.getbuffer()).nbytes if hasattr(data, "getbuffer") else None


def _is_plain(stream: Any, kind: type[Any]) -> bool:
    return type(stream) is kind and type(stream.raw) is io.FileIO


def _buffer_bytes(stream: Any) -> int:
    return max(io.DEFAULT_BUFFER_SIZE, getattr(stream.raw, "_blksize", 0))
