"""The system's counters of I/O and of CPU scheduling delay around a save or load, and whether its files are durable.

Linux reports them under /proc. A counter that is missing or unreadable is None.
"""

import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

_PROC = "/proc"
_DIRTY = re.compile(rb"^(Dirty|Writeback): +(\d+) kB$", re.MULTILINE)
_PRESSURE = re.compile(rb"^(some|full) .*total=(\d+)$", re.MULTILINE)
_OWN_IO = re.compile(rb"^(read_bytes|write_bytes): (\d+)$", re.MULTILINE)
_MOST_BYTES = 8192
_INCREASING = ("io_some_ns", "io_full_ns", "cpu_ns", "run_delay_ns", "storage_written_bytes", "storage_read_bytes")

Change = dict[str, int | None]
_Key = tuple[int, int]


@dataclass(frozen=True)
class Counters:
    """One reading: of the machine (pages, pressure), of the process (bytes), of one thread of it (processor)."""

    thread: int
    dirty_bytes: int | None
    writeback_bytes: int | None
    io_some_ns: int | None
    io_full_ns: int | None
    cpu_ns: int | None
    run_delay_ns: int | None
    storage_written_bytes: int | None
    storage_read_bytes: int | None

    def until(self, later: "Counters") -> Change:
        """Fields of the log: levels before and after, and the increase of the counters."""
        levels = {
            "dirty_before_bytes": self.dirty_bytes,
            "dirty_after_bytes": later.dirty_bytes,
            "writeback_before_bytes": self.writeback_bytes,
            "writeback_after_bytes": later.writeback_bytes,
        }
        return levels | {name: _difference(getattr(self, name), getattr(later, name)) for name in _INCREASING}


def read(thread: int, proc: str = _PROC) -> Counters:
    """Read all counters; `thread` is the native id of the thread of this process whose processor time is meant."""
    pages = _values(_DIRTY, _text(f"{proc}/meminfo"), 1024)
    pressure = _values(_PRESSURE, _text(f"{proc}/pressure/io"), 1000)
    process_io = _values(_OWN_IO, _text(f"{proc}/self/io"))
    fields = _text(f"{proc}/self/task/{thread}/schedstat").split()
    cpu_ns, run_delay_ns = (int(fields[0]), int(fields[1])) if len(fields) == 3 else (None, None)
    if thread == threading.get_native_id():
        cpu_ns = time.thread_time_ns()  # the same clock, but exact: Linux updates the other once per tick
    return Counters(
        thread=thread,
        dirty_bytes=pages.get("Dirty"),
        writeback_bytes=pages.get("Writeback"),
        io_some_ns=pressure.get("some"),
        io_full_ns=pressure.get("full"),
        cpu_ns=cpu_ns,
        run_delay_ns=run_delay_ns,
        storage_written_bytes=process_io.get("write_bytes"),
        storage_read_bytes=process_io.get("read_bytes"),
    )


def read_processor_time(thread: int) -> Counters:
    """Read only this thread's CPU time, which opens no file and never waits for the GIL."""
    unread = dict.fromkeys(field.name for field in fields(Counters))
    return Counters(**unread | {"thread": thread, "cpu_ns": time.thread_time_ns()})  # type: ignore[arg-type]


@dataclass
class File:
    """One file being written: whether its stream has unflushed bytes, and whether all others were synced."""

    unflushed: bool = False
    synced: bool = True
    has_unflushed: Callable[[], bool] | None = None
    """More exact than `unflushed`, where the stream can report it."""

    def write(self) -> None:
        """Record a write to the stream."""
        self.unflushed, self.synced = True, False

    def flush(self) -> None:
        """Record that the stream has flushed all its bytes."""
        self.unflushed = False

    def sync(self) -> None:
        """Record a sync, which does not include unflushed bytes."""
        self.synced = not (self.unflushed if self.has_unflushed is None else self.has_unflushed())


class WrittenFiles:
    """The files of one save on one rank."""

    def __init__(self) -> None:
        self._files: dict[_Key, File] = {}
        self._unidentified = 0

    def open(self, stream: Any) -> File:
        """File behind a stream that was opened to write."""
        try:
            key = _key(stream.fileno())
        except (AttributeError, OSError, ValueError):
            self._unidentified += 1
            return File()
        return self._files.setdefault(key, File())

    def add_unsynced(self) -> None:
        """Add a file that is never synced."""
        self._files[0, -len(self._files)] = File(synced=False)

    def sync(self, descriptor: int | None) -> None:
        """Record the sync of a descriptor; None is every file."""
        if descriptor is None:
            for file in self._files.values():
                file.sync()
            return
        try:
            file = self._files.get(_key(descriptor), File())
        except OSError:
            return
        file.sync()

    def durable(self) -> bool | None:
        """Return whether every file was synced after its last byte; None where that is unknown."""
        if self._unidentified or not self._files:
            return None
        return all(file.synced for file in self._files.values())


def _text(path: str) -> bytes:
    # os.open costs half as much as open, and this runs twice per save.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        return os.read(descriptor, _MOST_BYTES)
    except OSError:
        return b""
    finally:
        os.close(descriptor)


def _values(pattern: re.Pattern[bytes], text: bytes, unit: int = 1) -> dict[str, int]:
    return {name.decode(): int(value) * unit for name, value in pattern.findall(text)}


def _difference(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _key(descriptor: int) -> _Key:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
