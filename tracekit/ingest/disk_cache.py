"""A bounded folder of entries in the user's cache directory.

An entry appears whole under its name or not at all, the least recently used go when the folder outgrows its bound, and
a folder that cannot be used, or an entry that cannot be trusted, costs no more than the work that it would have saved.
"""

import errno
import functools
import hashlib
import io
import logging
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from tracekit import conventions

DIRECTORY_VARIABLE = "TRACEKIT_CACHE_DIR"
_ABANDONED_S = 3600  # no writer takes that long: what it began was left behind by one that died
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in an entry's place must not hang the reader

log = logging.getLogger(__name__)

Made = TypeVar("Made")


@dataclass(frozen=True)
class DiskCache:
    """Entries of one kind in a folder of this user's own, by key. What fails in here is said once, to debug."""

    folder: Path
    suffix: str
    max_bytes: int

    def get(self, key: str, read: Callable[[BinaryIO], Made]) -> Made | None:
        """Return what `read` makes of an entry; None where there is none, or none to trust, which is then removed."""
        path = self.path(key)
        try:
            _check_own(self.folder)
        except OSError as error:
            self.log_unusable(error)
            return None
        try:
            with _open_own(path) as file:
                made = read(file)
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 whatever bytes lie there, they can be made anew
            _drop(path, error)
            return None
        return made

    def put(self, key: str, write: Callable[[BinaryIO], None], *, unless: tuple[type[Exception], ...] = ()) -> None:
        """Store what `write` writes, and let the least recently used go; nothing where it fails or raises `unless`."""
        if not self.max_bytes:
            return
        expected: tuple[type[Exception], ...] = (OSError, *unless)
        try:
            with self.writing(key) as file:
                write(file)
        except expected as error:
            self.log_unusable(error)

    @contextmanager
    def writing(self, key: str) -> Iterator[BinaryIO]:
        """Give a file to write and read, which is the entry of `key` once the block has ended well.

        What is larger than the shelf is not kept. Raises OSError where nothing can be written.
        """
        partial_path = self.folder / f"{key}.{secrets.token_hex(8)}{conventions.PARTIAL_SUFFIX}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.folder)
        try:
            created = os.open(partial_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
            with os.fdopen(created, "w+b") as file:
                yield file
                file.flush()
                size_bytes = os.fstat(file.fileno()).st_size
            if size_bytes <= self.max_bytes:
                partial_path.replace(self.path(key))
        finally:
            partial_path.unlink(missing_ok=True)
        self._evict()

    def size_bytes(self) -> int:
        """Return how much the entries take."""
        return sum(size for _, size, _ in self._files())

    def clear(self) -> int:
        """Remove every entry and return how much that freed, in bytes."""
        files = list(self._files())
        for _, _, path in files:
            with suppress(OSError):
                path.unlink()
        return sum(size for _, size, _ in files)

    def path(self, key: str) -> Path:
        """Return where the entry of a key lies, or would."""
        return self.folder / f"{key}{self.suffix}"

    def log_unusable(self, error: Exception) -> None:
        """Say once why the folder cannot be used."""
        if not isinstance(error, FileNotFoundError):
            _say_once(f"{self.folder}: {getattr(error, 'strerror', None) or error}")

    def _files(self) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use in ns, size in bytes and path of all that lies in the folder."""
        try:
            files = [file for file in self.folder.iterdir() if file.suffix in (self.suffix, conventions.PARTIAL_SUFFIX)]
        except OSError:
            return
        for file in files:
            with suppress(OSError):  # another process may remove it meanwhile
                known = file.lstat()
                yield known.st_mtime_ns, known.st_size, file

    def _evict(self) -> None:
        abandoned_ns = time.time_ns() - _ABANDONED_S * 10**9
        files = sorted(self._files())
        held = sum(size for _, size, _ in files)
        for used_ns, size, path in files:
            is_entry = path.suffix == self.suffix
            if (held > self.max_bytes and is_entry) or (used_ns < abandoned_ns and not is_entry):
                with suppress(OSError):
                    path.unlink()
                held -= size


def folder(name: str, environment: Mapping[str, str]) -> Path | None:
    """Return a folder in the cache directory that the environment names, or in the user's usual one.

    None for a user without a home.
    """
    if named := environment.get(DIRECTORY_VARIABLE):
        return Path(named) / name
    try:
        usual = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:
        return None
    return usual / "tracekit" / name


def code_hash(root: Path, patterns: Iterable[str]) -> str:
    """Return the hash of source files: a version number is forgotten sooner or later."""
    digest = hashlib.sha256()
    for pattern in patterns:
        for file in sorted(root.glob(pattern)):
            digest.update(f"{file.relative_to(root)}\0".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()


def _check_own(folder: Path) -> None:
    """Raise OSError unless a folder is this user's own; close it to all others."""
    known = folder.lstat()
    if not stat.S_ISDIR(known.st_mode) or known.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder of this user's own")
    if stat.S_IMODE(known.st_mode) != 0o700:
        folder.chmod(0o700)


def _open_own(path: Path) -> io.BufferedReader:
    """Open a file that this user wrote. Raises OSError where it is a link, no file, or somebody else's."""
    file = os.fdopen(os.open(path, os.O_RDONLY | _NO_LINK), "rb")
    known = os.fstat(file.fileno())
    if not stat.S_ISREG(known.st_mode) or known.st_uid != os.geteuid():
        file.close()
        raise PermissionError(errno.EPERM, "not a file of this user's own")
    return file


def _drop(path: Path, error: Exception) -> None:
    _say_once(f"{path}: not used ({error})")
    with suppress(OSError):
        path.unlink()


@functools.cache
def _say_once(message: str) -> None:
    log.debug("cache: %s; going on without", message)
