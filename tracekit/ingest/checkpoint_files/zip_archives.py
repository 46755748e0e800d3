"""Files of torch.save: a zip archive, alone or inside a shard, with a CRC32 of each entry."""

import struct
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from tracekit.ingest.checkpoint_files import result
from tracekit.ingest.checkpoint_files.result import Part

MAGIC = b"PK\x03\x04"
SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")
_CHUNK_BYTES = 1 << 20


class _Window:
    """A byte range of a file, as a file. It is closed with the file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = 0) -> int:
        self._at = max(0, position + (0, self._at, self._length)[whence])
        return self._at

    def read(self, count: int = -1) -> bytes:
        remaining = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(remaining if count < 0 else min(count, remaining))
        self._at += len(data)
        return data


def damage(file: BinaryIO, offset: int, length: int) -> tuple[str | None, int]:
    """Return the problem of an archive of torch.save, or None, and the number of bytes verified by CRC32.

    Without CRC32 (another format, or torch was configured to write none) no byte is verified, and there is no problem.
    Raises OSError.
    """
    file.seek(offset)
    if file.read(len(MAGIC)) != MAGIC:
        return None, 0
    with _errors_collected() as errors:
        with zipfile.ZipFile(_Window(file, offset, length)) as packed:
            entries = packed.infolist()
            # torch does not compress; a compressed entry could be a zip bomb.
            has_checksums = any(entry.CRC for entry in entries)
            if not has_checksums or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return None, 0
            for entry in entries:
                with packed.open(entry) as data:
                    while data.read(_CHUNK_BYTES):
                        pass
        return None, length
    return errors[0], 0


@contextmanager
def _errors_collected() -> Iterator[list[str]]:
    errors: list[str] = []
    try:
        yield errors
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        errors.append(str(error) or type(error).__name__)


def check(folder: Path, names: list[str]) -> Part:
    """Return the problems of files of torch.save."""
    problems, notes, total, checked = [], [], 0, 0
    for name in names:
        try:
            size = (folder / name).stat().st_size
            with (folder / name).open("rb") as file:
                problem, verified_bytes = damage(file, 0, size)
        except OSError as error:
            problems.append(result.unreadable(name, error))
            continue
        total, checked = total + size, checked + verified_bytes
        if problem or not size:
            problems.append(result.problem(name, f"is damaged: {problem}" if problem else "is empty"))
        elif not verified_bytes:
            notes.append(f"{name} holds no checksums: its bytes were not verified")
    return Part("torch.save", tuple(problems), tuple(notes), len(names), total, checked)
