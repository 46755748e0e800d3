"""A log of one rank while it is written, one JSON object a line: what is new in it, each byte read once."""

import stat
from pathlib import Path
from typing import Any, BinaryIO

from tracekit import conventions
from tracekit.ingest import untrusted_json

CHUNK_BYTES = 1 << 20
"""What one call reads at most; a longer line is none of ours."""

_COMPARED_BYTES = 64


class LogTail:
    """Where reading a log got to. The log is looked for under its name and, while it grows, that name and ``.partial``.

    A file that is renamed or copied goes on where it was; one whose bytes are others than those read before, or that
    is shorter, is read anew and `starts` counts on. Of a file larger than `first_bytes` only that much of its end is
    read at first.
    """

    def __init__(self, path: Path, *, first_bytes: int) -> None:
        self._paths = (path.with_name(path.name + conventions.PARTIAL_SUFFIX), path)
        self._first_bytes = first_bytes
        self._position = 0
        self._last_bytes = b""  # what stands before the position
        self._is_inside_line = False
        self._last_stat: tuple[object, ...] | None = None
        self.starts = 0
        self.skipped_beginning = False
        """Whether the beginning of the file was left out."""
        self.is_closed = False
        self.is_behind = False
        """Whether there is more to read already."""
        self.changed_s = 0.0
        """When the file was last written to, Unix time in seconds."""
        self.bad_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects that were added since the last call, from at most CHUNK_BYTES."""
        for path in self._paths:
            try:
                found = path.stat()
                mark = (path, found.st_ino, found.st_size, found.st_mtime_ns)
                if mark == self._last_stat and not self.is_behind:
                    return []
                if not stat.S_ISREG(found.st_mode):  # a pipe would never answer
                    continue
                with path.open("rb") as file:
                    self.is_closed = path == self._paths[-1]
                    rows = self._read_new(file, found.st_size)
            except OSError:
                continue
            self._last_stat, self.changed_s = mark, found.st_mtime
            return rows
        return []

    def _read_new(self, file: BinaryIO, size_bytes: int) -> list[dict[str, Any]]:
        if not self.starts or not self._is_continued(file):
            self._start(size_bytes)
        file.seek(self._position)
        data = file.read(CHUNK_BYTES)
        self.is_behind = len(data) == CHUNK_BYTES
        end = data.rfind(b"\n") + 1
        if self.is_closed and not self.is_behind:
            end = len(data)  # nobody will end the last line
        lines = data[:end].split(b"\n")
        if self._is_inside_line and end:
            lines, self._is_inside_line = lines[1:], False
        if not end and self.is_behind:
            self.bad_lines += not self._is_inside_line
            end, self._is_inside_line = len(data), True
        self._position += end
        self._last_bytes = (self._last_bytes + data[:end])[-_COMPARED_BYTES:]
        return self._objects(lines)

    def _is_continued(self, file: BinaryIO) -> bool:
        file.seek(self._position - len(self._last_bytes))
        return file.read(len(self._last_bytes)) == self._last_bytes

    def _start(self, size_bytes: int) -> None:
        self.starts += 1
        self._position = max(0, size_bytes - self._first_bytes)
        self._last_bytes = b""
        self._is_inside_line = self.skipped_beginning = self._position > 0

    def _objects(self, lines: list[bytes]) -> list[dict[str, Any]]:
        found = []
        for line in lines:
            try:
                value = untrusted_json.parse(line) if line.strip() else None
            except ValueError:
                value = line
            if isinstance(value, dict):
                found.append(value)
            elif value is not None:
                self.bad_lines += 1
        return found
