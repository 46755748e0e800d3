"""Streams that report to a clock when they move bytes.

A checkpoint is written in dozens of small pieces per tensor. So for a plain file only the calls below Python's buffer
are timed, which move bytes to and from the system; for other streams, every call.
"""

import io
from dataclasses import dataclass
from typing import Any

from tracekit import conventions
from tracekit.capture.checkpoints.durability import File
from tracekit.capture.checkpoints.stages import StageClock


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
    """Return a stream that writes to `raw`; the caller's work on an item counts in serialize."""
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
