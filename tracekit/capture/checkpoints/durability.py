"""Which of the files that a save wrote were on the disk, as far as a system call can promise, when it ended."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_Key = tuple[int, int]


@dataclass
class File:
    """One file being written: whether the stream still holds bytes back, and whether all else was synced."""

    held_back: bool = False
    synced: bool = True
    holds_back: Callable[[], bool] | None = None
    """Tells it better than `held_back` does, where the stream can be asked."""

    def write(self) -> None:
        """Take note of a write to the stream."""
        self.held_back, self.synced = True, False

    def flush(self) -> None:
        """Take note that the stream handed all that it held to the system."""
        self.held_back = False

    def sync(self) -> None:
        """Take note of a sync: what the stream holds back at that moment is not part of it."""
        self.synced = not (self.held_back if self.holds_back is None else self.holds_back())


class Written:
    """The files of one save on one rank."""

    def __init__(self) -> None:
        self._files: dict[_Key, File] = {}
        self._strangers = 0

    def open(self, stream: Any) -> File:
        """Return the file behind a stream that was opened to write."""
        try:
            key = _key(stream.fileno())
        except (AttributeError, OSError, ValueError):
            self._strangers += 1
            return File()
        return self._files.setdefault(key, File())

    def never_synced(self) -> None:
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
        if self._strangers or not self._files:
            return None
        return all(file.synced for file in self._files.values())


def _key(descriptor: int) -> _Key:
    found = os.fstat(descriptor)
    return found.st_dev, found.st_ino
