"""Streams that say to a clock when they move bytes.

A checkpoint is written in dozens of small pieces a tensor. So of a plain file what lies under Python's buffer is timed,
the moving of bytes to and from the system, and not each piece; of other streams all that is asked of them.
"""

import io
from dataclasses import dataclass
from typing import Any

from tracekit import conventions
from tracekit.capture.checkpoints.durability import File
from tracekit.capture.checkpoints.stages import StageClock


@dataclass
class StreamTransfer:
    """What one stream moves: charged to `stage` of `clock`, counted in bytes and calls.

    Who writes asks for the position when an item begins, and with `paired_tells` also when it ends.
    """

    clock: StageClock
    stage: str
    file: File
    paired_tells: bool = False
    moved_bytes: int = 0
    calls: int = 0

    def add(self, size_bytes: int) -> None:
        """Count one call."""
        self.moved_bytes += size_bytes
        self.calls += 1

    def on_tell(self) -> None:
        """Take note that somebody asked for the position: of a shard, what follows belongs to another stage."""
        if self.stage == conventions.WRITE:
            ends = self.paired_tells and self.clock.stage == conventions.SERIALIZE
            self.clock.switch(conventions.STAGE if ends else conventions.SERIALIZE)


def timed_writer(raw: Any, transfer: StreamTransfer) -> Any:
    """Return a stream that writes to `raw`; what its caller does to an item is charged to serialize."""
    return _FileWriter(raw, transfer) if _is_plain(raw, io.BufferedWriter) else _ProxyWriter(raw, transfer)


def timed_reader(raw: Any, transfer: StreamTransfer) -> Any:
    """Return a stream that reads from `raw`."""
    if _is_plain(raw, io.BufferedReader):
        return io.BufferedReader(_RawReader(raw, transfer), _buffer_bytes(raw))
    return _ProxyReader(raw, transfer)


def _is_plain(stream: Any, kind: type[Any]) -> bool:
    return type(stream) is kind and type(stream.raw) is io.FileIO


def _buffer_bytes(stream: Any) -> int:
    return max(io.DEFAULT_BUFFER_SIZE, getattr(stream.raw, "_blksize", 0))


class _Raw(io.FileIO):
    """The file of another stream, which goes on to own it."""

    def __init__(self, stream: Any, mode: str, moving: StreamTransfer) -> None:
        super().__init__(stream.fileno(), mode, closefd=False)
        self.name = stream.name
        self._moving = moving


class _RawWriter(_Raw):
    def __init__(self, stream: Any, moving: StreamTransfer) -> None:
        super().__init__(stream, "wb", moving)

    def write(self, data: Any) -> int:
        moving = self._moving
        clock = moving.clock
        outer = clock.stage
        clock.switch(moving.stage)
        try:
            written = super().write(data)
        finally:
            clock.switch(outer)
        moving.moved_bytes += written or 0
        moving.calls += 1
        moving.file.synced = False
        return written


class _RawReader(_Raw):
    def __init__(self, stream: Any, moving: StreamTransfer) -> None:
        super().__init__(stream, "rb", moving)

    def readinto(self, buffer: Any) -> int:
        moving = self._moving
        moving.clock.enter(moving.stage)
        try:
            count = super().readinto(buffer)
        finally:
            moving.clock.leave()
        moving.add(count or 0)
        return count

    def readall(self) -> bytes:
        moving = self._moving
        with moving.clock.inside(moving.stage):
            data = super().readall()
        moving.add(len(data))
        return data


class _FileWriter(io.BufferedWriter):
    """Python's buffer over a file of another stream."""

    def __init__(self, stream: Any, moving: StreamTransfer) -> None:
        super().__init__(_RawWriter(stream, moving), _buffer_bytes(stream))
        self._moving = moving
        moving.file.has_unflushed = self.has_unflushed

    def has_unflushed(self) -> bool:
        """Return whether it has bytes that the system was not given yet."""
        return not self.closed and super().tell() != self.raw.tell()

    def tell(self) -> int:
        self._moving.on_tell()
        return super().tell()


class _ProxyStream:
    def __init__(self, raw: Any, moving: StreamTransfer) -> None:
        self._raw = raw
        self._moving = moving

    def close(self) -> None:
        with self._moving.clock.inside(self._moving.stage):
            self._raw.close()
        self._moving.file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


class _ProxyWriter(_ProxyStream):
    def write(self, data: Any) -> Any:
        moving = self._moving
        moving.clock.enter(moving.stage)
        try:
            written = self._raw.write(data)
        finally:
            moving.clock.leave()
        moving.file.write()
        moving.add(len(data.encode()) if isinstance(data, str) else memoryview(data).nbytes)  # JSON is text
        return written

    def tell(self) -> Any:
        self._moving.on_tell()
        return self._raw.tell()

    def flush(self) -> None:
        with self._moving.clock.inside(self._moving.stage):
            self._raw.flush()
        self._moving.file.flush()


class _ProxyReader(_ProxyStream):
    def read(self, *args: Any) -> Any:
        with self._moving.clock.inside(self._moving.stage):
            data = self._raw.read(*args)
        self._moving.add(len(data or b""))
        return data

    def readinto(self, buffer: Any) -> Any:
        with self._moving.clock.inside(self._moving.stage):
            count = self._raw.readinto(buffer)
        self._moving.add(count or 0)
        return count
