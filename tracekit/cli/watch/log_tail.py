"""Read the new lines of a growing log, one JSON object per line; each byte is read once."""

import stat
from pathlib import Path
from typing import Any, BinaryIO

from tracekit import conventions
from tracekit.ingest import untrusted_json

CHUNK_BYTES = 1 << 20
"""The most that one call reads; a longer line is not from the recorder."""

_COMPARED_BYTES = 64


class LogTail:
    """The position in a log. While the log grows, its file name ends in ``.partial``.

    Reading continues after the file is renamed or copied. If its earlier bytes changed or it got shorter, it is read
    from the start and `starts` increases. Of a file larger than `first_bytes`, only that many bytes at its end are read
    first.
    """

    def __init__(self, path: Path, *, first_bytes: int) -> None:
        self._paths = (path.with_name(path.name + conventions.PARTIAL_SUFFIX), path)
        self._first_bytes = first_bytes
        self._position = 0
        self._last_bytes = b""  # the bytes before the position
        self._is_inside_line = False
        self._last_stat: tuple[object, ...] | None = None
        self.starts = 0
        self.skipped_beginning = False
        """Whether the beginning of the file was not read."""
        self.is_closed = False
        self.is_behind = False
        """Whether more data is available."""
        self.changed_s = 0.0
        """When the file was last written, Unix time in seconds."""
        self.bad_lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Return the objects that were added since the last call, from at most CHUNK_BYTES."""
        for path in self._paths:
            try:
                status = path.stat()
                mark = (path, status.st_ino, status.st_size, status.st_mtime_ns)
                if mark == self._last_stat and not self.is_behind:
                    return []
                if not stat.S_ISREG(status.st_mode):  # reading a pipe may block
                    continue
                with path.open("rb") as file:
                    self.is_closed = path == self._paths[-1]
                    rows = self._read_new(file, status.st_size)
            except OSError:
                continue
            self._last_stat, self.changed_s = mark, status.st_mtime
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
            end = len(data)  # no more data will end the last line
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
        objects = []
        for line in lines:
            try:
                value = untrusted_json.parse(line) if line.strip() else None
            except ValueError:
                value = line
            if isinstance(value, dict):
                objects.append(value)
            elif value is not None:
                self.bad_lines += 1
        return objects
