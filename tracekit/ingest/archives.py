"""Archives of trace files (tar, tar.gz, tar.zst, zip): their members are unpacked to a temporary folder.

Only regular files whose names some reader knows are written, below the folder, up to a limit of bytes. Links, devices,
absolute names and names with `..` are left out.
"""

import bz2
import copy
import errno
import functools
import hashlib
import io
import os
import shutil
import stat
import tarfile
import tempfile
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, cast

from tracekit.conventions import regular_files
from tracekit.errors import BadTraceError
from tracekit.ingest.budget import Budget
from tracekit.ingest.decompression import Blocks
from tracekit.model import units

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".zip")
_SPARE_DISK_BYTES = 256 << 20
_MAX_MEMBERS = 200_000
_MAX_READS_AT_END = 16
"""tarfile skips a member by reads of 10 KiB, also past the end, which a size of 10^30 in a header would never reach."""
_MAX_EXTENDED_HEADER_BYTES = 1 << 20
_MAX_NAME_BYTES = 255
_COPY_BYTES = 16 << 10  # of a truncated member, what is read before its last block is usable
_EDGE_BYTES = 1 << 20
_ZIP = b"PK\x03\x04"
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError)

IsWanted = Callable[[str], bool]


@dataclass(frozen=True)
class Unpacked:
    """The wanted members of an archive, unpacked to a folder that is removed when this object is gone."""

    path: str
    """Of the archive, as it is shown: without secrets if it is a URL."""
    folder: Path
    state: object = field(compare=False)
    """What changes, as JSON, whenever the archive changes; None if that cannot be known."""
    problems: tuple[str, ...] = field(default=(), compare=False)
    """What could not be unpacked, in words."""

    def root(self) -> Path:
        """Return the deepest folder that contains all members."""
        root = self.folder
        while len(inside := list(root.iterdir())) == 1 and inside[0].is_dir():
            root = inside[0]
        return root

    def shown(self, text: str) -> str:
        """Return a text with the path of the archive in place of that of the folder."""
        return text.replace(str(self.folder), self.path)


def is_archive(path: Path) -> bool:
    """Return whether a file is an archive of files, by its content; False if it cannot be read.

    A checkpoint of torch.save is a zip archive too, but not of files.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return False
        head = next(iter(Blocks(str(path))), b"")
    except (OSError, BadTraceError):
        return False
    return is_tar(head) or (head.startswith(_ZIP) and not _is_checkpoint(path))


def is_tar(head: bytes) -> bool:
    """Return whether these are the first bytes of a tar archive: a header with the right checksum."""
    try:
        tarfile.TarInfo.frombuf(head[:512], "utf-8", "surrogateescape")
    except (tarfile.HeaderError, ValueError):
        return False
    return True


def unpack(path: Path, is_wanted: IsWanted) -> Unpacked:
    """Return the members of an archive whose names (without folders) are wanted. An archive is unpacked only once.

    A truncated or damaged archive is unpacked as far as possible; `problems` says what is missing. Raises BadTraceError
    if it cannot be read, or if its members need more than its budget or the free disk.
    """
    try:
        status = path.stat()
        return _unpack_version(path, status.st_size, status.st_mtime_ns, is_wanted)
    except OSError as error:
        raise BadTraceError(f"{path}: cannot be unpacked: {error.strerror or error}") from None


def unpack_copy(copy: Path, is_wanted: IsWanted, *, url: str, state: object) -> Unpacked:
    """Return the members of an archive at a URL, from a copy, as `unpack` does. Raises BadTraceError."""
    try:
        return _unpack(copy, is_wanted, shown_path=url, state=state)
    except OSError as error:
        raise BadTraceError(f"{url}: cannot be unpacked: {error.strerror or error}") from None


@functools.lru_cache(maxsize=8)
def _unpack_version(path: Path, size_bytes: int, modified_ns: int, is_wanted: IsWanted) -> Unpacked:
    return _unpack(path, is_wanted, shown_path=str(path), state=[size_bytes, modified_ns, _edges(path)])


def _unpack(path: Path, is_wanted: IsWanted, *, shown_path: str, state: object) -> Unpacked:
    folder = Path(tempfile.mkdtemp(prefix="tracekit-archive-")).resolve()
    try:
        target = _Target(folder, is_wanted, Budget.of_file(shown_path, path.stat().st_size))
        (_unpack_zip if _starts_as_zip(path) else _unpack_tar)(path, target)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    unpacked = Unpacked(shown_path, folder, state, tuple(target.problems))
    weakref.finalize(unpacked, shutil.rmtree, folder, ignore_errors=True)
    return unpacked


class _Target:
    """Writes members below a folder, as far as the budget and the free disk allow."""

    def __init__(self, folder: Path, is_wanted: IsWanted, budget: Budget) -> None:
        self.problems: list[str] = []
        self.archive = budget.path
        self._folder, self._is_wanted, self._budget = folder, is_wanted, budget
        self._free_bytes = _free_bytes(folder)
        self._members = 0

    def wants(self, name: str) -> bool:
        """Return whether to unpack a member, and record an unusable name. Raises BadTraceError for too many."""
        self._members += 1
        if self._members > _MAX_MEMBERS:
            raise BadTraceError(f"{self.archive}: more than {_MAX_MEMBERS:,} files; unpack the folder of one run")
        parts = PurePosixPath(name).parts
        if parts and parts[-1].lower().endswith(SUFFIXES):
            self.problems.append(f"{self.archive}: {name!r:.200} is an archive itself; unpack it and name the folder.")
            return False
        if not parts or not self._is_wanted(parts[-1]) or any(part.startswith(".") and part != ".." for part in parts):
            return False
        if "\0" in name or PurePosixPath(name).is_absolute() or ".." in parts:
            self.problems.append(f"{self.archive}: left out a file whose name leads out of the archive: {name!r:.200}.")
            return False
        lengths = [len(os.fsencode(part)) for part in parts]
        if max(lengths) > _MAX_NAME_BYTES or sum(lengths) > 4 * _MAX_NAME_BYTES:
            self.problems.append(f"{self.archive}: left out a file whose name is too long for a disk: {name!r:.200}.")
            return False
        return True

    def write(self, name: str, content: IO[bytes]) -> None:
        """Write a member, or its start if it is damaged."""
        path = self._folder.joinpath(*PurePosixPath(name).parts)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # as tar does: a later member of the same name replaces an earlier one
            with path.open("xb") as file:
                self._copy(content, file)
        except _DAMAGED as error:
            self.problems.append(f"{self.archive}: {name!r:.200} is damaged ({error}); copy the archive again.")
        except OSError:
            if path.parent.is_dir() and not path.is_dir():
                raise  # the disk is full
            self.problems.append(f"{self.archive}: {name!r:.200} has the name of a folder or a file of another member.")

    def _copy(self, content: IO[bytes], file: IO[bytes]) -> None:
        while block := content.read(_COPY_BYTES):
            self._budget.unpack(len(block))
            self._free_bytes -= len(block)
            if self._free_bytes < 0:
                raise BadTraceError(
                    f"{self.archive}: needs more than the disk of {self._folder.parent} has; set TMPDIR to another, or "
                    "unpack it yourself and name the folder"
                )
            file.write(block)


def _unpack_zip(path: Path, target: _Target) -> None:
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if not entry.filename:  # on which ZipInfo.is_dir of Python 3.11 fails
                    target.problems.append(f"{target.archive}: a file without a name was left out.")
                elif not entry.is_dir() and not _is_link(entry) and target.wants(entry.filename):
                    _unpack_entry(archive, entry, target)
    except _DAMAGED as error:
        raise BadTraceError(
            f"{target.archive}: the zip archive is damaged or truncated ({error}); copy it again"
        ) from None


def _unpack_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, target: _Target) -> None:
    try:
        content = _open_entry(archive, entry)
    except _DAMAGED as error:  # encrypted, or compressed in a way that Python does not know
        target.problems.append(f"{target.archive}: {entry.filename!r:.200} cannot be unpacked ({error}).")
        return
    with content:
        target.write(entry.filename, content)


def _open_entry(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> IO[bytes]:
    """Content of a member. zipfile bounds what it holds in memory only of members that are stored or deflated."""
    if entry.compress_type in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        return archive.open(entry)
    if entry.compress_type != zipfile.ZIP_BZIP2:
        raise NotImplementedError(f"compression method {entry.compress_type}")
    packed = copy.copy(entry)
    packed.compress_type, packed.file_size = zipfile.ZIP_STORED, entry.compress_size
    del packed.CRC  # of the content; bzip2 has its own
    return cast("IO[bytes]", bz2.BZ2File(archive.open(packed)))


def _unpack_tar(path: Path, target: _Target) -> None:
    blocks = Blocks(str(path))
    with io.BufferedReader(_Stream(iter(blocks)), 1 << 18) as stream:
        try:
            with tarfile.open(fileobj=stream, mode="r|", tarinfo=_BoundedTarInfo) as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else it remembers every member
                    content = archive.extractfile(member) if member.isreg() and target.wants(member.name) else None
                    if content is not None:
                        target.write(member.name, content)
        except _DAMAGED as error:
            blocks.broken = blocks.broken or f"the tar archive is damaged or ends early ({error})"
    if blocks.broken:
        target.problems.append(f"{target.archive}: {blocks.broken}; files after that place are missing; copy it again.")


class _BoundedTarInfo(tarfile.TarInfo):
    """A header of a tar archive; extended headers, which tarfile reads to memory, have a limit."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> "_BoundedTarInfo":
        header = super().frombuf(buf, encoding, errors)
        if not (header.isreg() or header.isdir()) and header.size > _MAX_EXTENDED_HEADER_BYTES:
            raise tarfile.ReadError(f"an extended header of {header.size:,} bytes")
        return header


class _Stream(io.RawIOBase):
    """Blocks of bytes as a file that is read once from its start."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._block = blocks, memoryview(b"")
        self._reads_at_end = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        if not self._block:
            self._block = memoryview(next(self._blocks, b""))
        if not self._block:
            self._reads_at_end += 1
            if self._reads_at_end > _MAX_READS_AT_END:
                raise tarfile.ReadError("unexpected end of data")
        count = min(len(buffer), len(self._block))
        buffer[:count] = self._block[:count]
        self._block = self._block[count:]
        return count


def _free_bytes(folder: Path) -> int:
    free_bytes = shutil.disk_usage(folder).free - _SPARE_DISK_BYTES
    if free_bytes <= 0:
        raise OSError(errno.ENOSPC, f"less than {units.size(_SPARE_DISK_BYTES)} is free in {folder.parent}; set TMPDIR")
    return free_bytes


def _is_link(entry: zipfile.ZipInfo) -> bool:
    return stat.S_ISLNK(entry.external_attr >> 16)


def _starts_as_zip(path: Path) -> bool:
    with regular_files.open_to_read(path) as file:
        return file.read(len(_ZIP)) == _ZIP


def _is_checkpoint(path: Path) -> bool:
    """Return whether a zip archive is one of torch.save: NAME/data.pkl is its first file."""
    with regular_files.open_to_read(path) as file:
        head = file.read(30 + _MAX_NAME_BYTES)
    name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    return name.endswith(b"/data.pkl")


def _edges(path: Path) -> str:
    """Return the hash of the first and last MiB of a file."""
    with regular_files.open_to_read(path) as file:
        edges = hashlib.sha256(file.read(_EDGE_BYTES))
        file.seek(max(_EDGE_BYTES, os.fstat(file.fileno()).st_size - _EDGE_BYTES))
        edges.update(file.read(_EDGE_BYTES))
    return edges.hexdigest()
