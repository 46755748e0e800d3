"""Bandwidth of storage, measured as savers use it: each thread writes and syncs a file of its own, and reads it back.

Bytes are random and no two pages are equal, so that no storage compresses them or keeps them once. Files are read after
the kernel was asked to drop their pages; where it keeps them (file systems in memory), reads come from memory. Files
lie in a new folder in the measured one, which is removed at the end, also after Ctrl-C.
"""

import contextlib
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TypeAlias

from tracekit.errors import ConfigError, InputError

BLOCK_BYTES = 4 << 20
"""A write or read call: larger ones are no faster on the file systems that savers use, smaller ones cost calls."""
FOLDER_PREFIX = ".tracekit-storage-"
_MOST_THREADS = 1024
_PAGE_BYTES = _LEAST_FILE_BYTES = 1 << 12
_Work: TypeAlias = Callable[[int, threading.Event], int]
"""Work of the thread with this number, until the event is set; it returns bytes."""


@dataclass(frozen=True)
class Load:
    """What is written at once: files, each of so many bytes by a thread of its own, synced or not."""

    threads: int
    file_bytes: int
    fsync: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.threads <= _MOST_THREADS:
            raise ConfigError(f"{self.threads} threads: from 1 to {_MOST_THREADS} can be measured")
        if self.file_bytes < _LEAST_FILE_BYTES:
            raise ConfigError(f"files of {self.file_bytes} bytes: at least {_LEAST_FILE_BYTES} are needed")


@dataclass(frozen=True)
class Measurement:
    """Bandwidths of a load, in bytes/s of all threads together: bytes over the time from the first to the last thread.

    `read_bytes_per_second` is None where time ran out; `is_complete`: all bytes were written before it did.
    """

    threads: int
    file_bytes: int
    fsync: bool
    write_bytes_per_second: float
    read_bytes_per_second: float | None
    written_bytes: int
    is_complete: bool


def loads(threads: Sequence[int], load_bytes: int) -> list[Load]:
    """Loads of equally many bytes for each number of threads, with fsync, and for the last one without it."""
    synced = [Load(count, max(_LEAST_FILE_BYTES, load_bytes // max(1, count))) for count in threads]
    return [*synced, *(Load(load.threads, load.file_bytes, fsync=False) for load in synced[-1:])]


def measure(path: Path, planned: Sequence[Load], *, seconds: float) -> list[Measurement]:
    """Measure loads in a folder one after another, for at most about so many seconds in all.

    Raises InputError where it cannot be written or has not twice the space that is needed.
    """
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; name one on the storage to measure")
    largest = max(load.threads * load.file_bytes for load in planned)
    try:
        free = shutil.disk_usage(path).free
        if free < 2 * largest:
            raise InputError(f"{path}: {free:,} bytes are free, twice {largest:,} are needed: choose fewer --bytes")
        deadline_s = time.monotonic() + seconds
        with _own_folder(path) as folder:
            return [_measure_load(folder, load, deadline_s) for load in planned if time.monotonic() < deadline_s]
    except OSError as error:
        raise InputError(f"{path}: cannot be measured: {error.strerror}; check permissions and free space") from error


@contextlib.contextmanager
def _own_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that is removed at the end: SIGTERM ends the block, too, as SIGINT does."""
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _interrupt) if is_main else None
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=path))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_main:
            signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 the signature of a handler
    raise KeyboardInterrupt


def _measure_load(folder: Path, load: Load, deadline_s: float) -> Measurement:
    random = os.urandom(min(BLOCK_BYTES, load.file_bytes))
    blocks = [bytearray(random) for _ in range(load.threads)]
    files = [folder / f"{number}.bin" for number in range(load.threads)]

    def write(index: int, stop: threading.Event) -> int:
        return _write(files[index], load, blocks[index], deadline_s, stop, index=index)

    write_s, written = _parallel_duration(load.threads, write)
    is_complete = written == load.threads * load.file_bytes
    read_s, read = (0.0, 0)
    if is_complete:
        for file in files:
            _drop_pages(file)
        read_s, read = _parallel_duration(load.threads, lambda index, stop: _read(files[index], deadline_s, stop))
    for file in files:
        file.unlink(missing_ok=True)
    read_rate = read / read_s if read == written and read_s > 0 else None
    return Measurement(load.threads, load.file_bytes, load.fsync, written / write_s, read_rate, written, is_complete)


def _parallel_duration(count: int, work: _Work) -> tuple[float, int]:
    """Seconds from the common start of so many threads to the end of the last, and the sum of what each returns.

    An interrupt stops all threads before it is raised: their files are about to be removed.
    """
    stop, start = threading.Event(), threading.Barrier(count + 1)
    results: list[int | BaseException] = [0] * count

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index, stop)
        except BaseException as error:  # noqa: BLE001 raised again by the thread that waits
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(count)]
    for thread in threads:
        thread.start()
    start.wait()
    began_s = time.perf_counter()
    try:
        for thread in threads:
            thread.join()
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join()
        raise
    taken_s = time.perf_counter() - began_s
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return max(taken_s, 1e-9), sum(result for result in results if isinstance(result, int))


def _write(file: Path, load: Load, block: bytearray, deadline_s: float, stop: threading.Event, *, index: int) -> int:
    """Write a file, at most until the deadline, and sync it; return how many bytes it has."""
    written = 0
    view = memoryview(block)
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        while written < load.file_bytes and time.monotonic() < deadline_s and not stop.is_set():
            _stamp(block, (index << 40) + written)
            written += os.write(descriptor, view[: load.file_bytes - written])
        if load.fsync:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return written


def _stamp(block: bytearray, number: int) -> None:
    """Make each page of a block differ from all that were written: some storage keeps equal pages once."""
    stamp = number.to_bytes(8, "little")
    for offset in range(0, len(block) - len(stamp), _PAGE_BYTES):
        block[offset : offset + len(stamp)] = stamp


def _read(file: Path, deadline_s: float, stop: threading.Event) -> int:
    """Read a file, at most until the deadline; return how many bytes were read."""
    count = 0
    buffer = bytearray(BLOCK_BYTES)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        while time.monotonic() < deadline_s and not stop.is_set() and (length := os.readv(descriptor, [buffer])):
            count += length
    finally:
        os.close(descriptor)
    return count


def _drop_pages(file: Path) -> None:
    """Ask the kernel to forget the pages of a file, which must be clean for that."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
