"""Which of the files that a save wrote were on the disk, as far as a system call can promise, when it ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_Key = tuple[int, int]


@dataclass
class File:
    """One file being written: whether the stream still holds bytes back, and whether all else was synced."""

    unflushed: bool = False
    synced: bool = True
    has_unflushed: Callable[[], bool] | None = None
    """Tells it better than `held_back` does, where the stream can be asked."""

    def write(self) -> None:
        """Take note of a write to the stream."""
        self.unflushed, self.synced = True, False

    def flush(self) -> None:
        """Take note that the stream handed all that it held to the system."""
        self.unflushed = False

    def sync(self) -> None:
        """Take note of a sync: what the stream holds back at that moment is not part of it."""
        self.synced = not (self.unflushed if self.has_unflushed is None else self.has_unflushed())


class WrittenFiles:
    """The files of one save on one rank."""

    def __init__(self) -> None:
        self._files: dict[_Key, File] = {}
        self._unidentified = 0

    def open(self, stream: Any) -> File:
        """Return the file behind a stream that was opened to write."""
        try:
            key = _key(stream.fileno())
        except (AttributeError, OSError, ValueError):
            self._unidentified += 1
            return File()
        return self._files.setdefault(key, File())

    def add_unsynced(self) -> None:
        """Take note of a file that nobody syncs."""
        self._files[0, -len(self._files)] = File(synced=False)

    def sync(self, descriptor: int | None) -> None:
        """Take note that a descriptor was synced; None is every file."""
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
        """Return whether every file was synced after its last byte; None where not all were seen, or none was."""
        if self._unidentified or not self._files:
            return None
        return all(file.synced for file in self._files.values())


def _key(descriptor: int) -> _Key:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
