"""Which files of a save were durable when it ended, as far as a system call can guarantee."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_Key = tuple[int, int]


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
        """Return the file behind a stream that was opened to write."""
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


def _key(descriptor: int) -> _Key:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino
