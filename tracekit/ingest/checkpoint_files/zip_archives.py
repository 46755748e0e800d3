"""What torch.save writes: a zip file, alone or at some place in a shard, with a CRC32 of each entry."""

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
    """A stretch of a file, as a file. It is closed with the file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = max(0, at + (0, self._at, self._length)[whence])
        return self._at

    def read(self, count: int = -1) -> bytes:
        left = max(0, self._length - self._at)
        self._file.seek(self._offset + self._at)
        data = self._file.read(left if count < 0 else min(count, left))
        self._at += len(data)
        return data


def damage(file: BinaryIO, offset: int, length: int) -> tuple[str | None, int]:
    """Return what is wrong with what torch.save wrote at a place, or None, and how many bytes a CRC32 vouches for.

    Without CRC32 (another format, or torch was told to write none) nothing is vouched for, and nothing found wrong.
    Raises OSError.
    """
    file.seek(offset)
    if file.read(len(MAGIC)) != MAGIC:
        return None, 0
    with _errors_collected() as told:
        with zipfile.ZipFile(_Window(file, offset, length)) as packed:
            entries = packed.infolist()
            # torch compresses nothing; what is compressed could be made to expand without an end.
            has_checksums = any(entry.CRC for entry in entries)
            if not has_checksums or any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
                return None, 0
            for entry in entries:
                with packed.open(entry) as data:
                    while data.read(_CHUNK_BYTES):
                        pass
        return None, length
    return told[0], 0


@contextmanager
def _errors_collected() -> Iterator[list[str]]:
    told: list[str] = []
    try:
        yield told
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError, struct.error) as error:
        told.append(str(error) or type(error).__name__)


def check(folder: Path, names: list[str]) -> Part:
    """Return what is wrong with files that torch.save wrote."""
    problems, notes, total, checked = [], [], 0, 0
    for name in names:
        try:
            size = (folder / name).stat().st_size
            with (folder / name).open("rb") as file:
                wrong, vouched = damage(file, 0, size)
        except OSError as error:
            problems.append(result.unreadable(name, error))
            continue
        total, checked = total + size, checked + vouched
        if wrong or not size:
            problems.append(result.problem(name, f"is damaged: {wrong}" if wrong else "is empty"))
        elif not vouched:
            notes.append(f"{name} holds no checksums: its bytes were not verified")
    return Part("torch.save", tuple(problems), tuple(notes), len(names), total, checked)
