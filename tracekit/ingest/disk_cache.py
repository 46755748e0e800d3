"""The disk cache: a folder with a size limit in the user's cache directory, for entries of several kinds.

An entry is written to a temporary name, then renamed, so readers need no lock. Renaming and eviction of the least
recently used entries happen under an exclusive lock on the folder's lock file; a writer also locks its temporary file,
so that no other process takes it for abandoned. If the folder cannot be used, or an entry cannot be trusted, the work
is done again. Code is part of an entry's key by `code_hash`.
"""

import errno
import fcntl
import functools
import hashlib
import inspect
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
from types import ModuleType
from typing import BinaryIO, TypeVar

from tracekit import conventions

DIRECTORY_VARIABLE = "TRACEKIT_CACHE_DIR"
MAX_BYTES_VARIABLE = "TRACEKIT_CACHE_MAX_BYTES"
DEFAULT_MAX_BYTES = 10 << 30
KINDS = {
    "traces": ".trace",
    "timelines": ".tiles",
    "reports": ".report",
    "tables": ".table",
    "answers": ".answer",
    "downloads": ".copy",
    "remote facts": ".json",
}
"""What is stored, and how the names of its entries end. All kinds share the limit: the entries used last stay."""
NOWHERE = Path(os.devnull)
_ABANDONED_S = 3600  # no writer takes that long: an older temporary file belongs to a process that died
_LOCK_FILE = ".lock"
_LOCK_WAIT_S = 1.0
_LOCK_POLL_S = 0.005
_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe in place of an entry must not block the reader

_WRITERS = 64
"""Processes that may write at the same time, which share the room that one of them found."""
_room_bytes: dict[tuple[Path, int], int] = {}
"""What this process may write into a folder with a limit before it adds up the files again; changed under its lock."""

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class DiskCache:
    """Entries of one kind, by key, in a folder that only this user can read. Errors are logged once, at debug level."""

    folder: Path
    suffix: str
    max_bytes: int

    @classmethod
    def of_user(cls, kind: str, environment: Mapping[str, str] = os.environ) -> "DiskCache":
        """Entries of one of `KINDS` in the cache directory; a user without a home directory has a cache of 0 bytes.

        The environment states the directory and the limit, which all kinds share.
        """
        stated = environment.get(MAX_BYTES_VARIABLE, "")
        max_bytes = int(stated) if stated.isdecimal() else DEFAULT_MAX_BYTES
        try:
            usual = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tracekit"
        except RuntimeError:
            usual = None
        directory = Path(environment[DIRECTORY_VARIABLE]) if environment.get(DIRECTORY_VARIABLE) else usual
        return cls(NOWHERE, KINDS[kind], 0) if directory is None else cls(directory / "store", KINDS[kind], max_bytes)

    def get(self, key: str, read: Callable[[BinaryIO], T]) -> T | None:
        """The entry as `read` returns it; None if there is none. One that cannot be trusted is removed."""
        path = self.path(key)
        try:
            _check_own(self.folder)
        except OSError as error:
            self.log_unusable(error)
            return None
        try:
            with _open_own(path) as file:
                content = read(file)
            os.utime(path)
        except FileNotFoundError:
            return None
        except Exception as error:  # noqa: BLE001 whatever the entry contains, it can be made again
            _log_once(f"{path}: not used ({error})")
            _remove(path)
            return None
        return content

    def put(self, key: str, write: Callable[[BinaryIO], None], *, unless: tuple[type[Exception], ...] = ()) -> None:
        """Store what `write` writes and evict old entries; store nothing if it fails or raises `unless`."""
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
        """Yield a file to write and read; it becomes the entry of `key` when the block ends without an error.

        A file above the size limit is not stored. Raises OSError if the file cannot be written. If another process has
        the folder's lock for long, the entry is stored and eviction is left to the next writer.
        """
        partial_path = self.folder / f"{key}.{secrets.token_hex(8)}{conventions.PARTIAL_SUFFIX}"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_own(self.folder)
        try:
            created = os.open(partial_path, os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600)
            with os.fdopen(created, "w+b") as file:
                _lock(created)
                yield file
                file.flush()
                size_bytes = os.fstat(created).st_size
            with self._lock_folder() as is_locked:
                if size_bytes <= self.max_bytes:
                    partial_path.replace(self.path(key))
                if is_locked and not self._has_room(size_bytes):
                    self._evict()
        finally:
            partial_path.unlink(missing_ok=True)

    def size_bytes(self) -> int:
        """Total size of the entries of this kind."""
        return sum(size for _, size, _ in self._files(self.suffix))

    def clear(self) -> int:
        """Remove every entry of this kind and return how much that freed, in bytes. What is being written stays."""
        with self._lock_folder():
            files = self._files(self.suffix, conventions.PARTIAL_SUFFIX)
            return sum(size for _, size, path in files if not _is_being_written(path) and _remove(path))

    def path(self, key: str) -> Path:
        """Return the path of the entry of a key."""
        return self.folder / f"{key}{self.suffix}"

    def log_unusable(self, error: Exception) -> None:
        """Log once why the folder cannot be used."""
        if not isinstance(error, FileNotFoundError):
            _log_once(f"{self.folder}: {getattr(error, 'strerror', None) or error}")

    def _files(self, *suffixes: str) -> Iterator[tuple[int, int, Path]]:
        """Yield time of last use in ns, size in bytes and path of each file in the folder whose name ends so."""
        try:
            files = [file for file in self.folder.iterdir() if file.suffix in suffixes]
        except OSError:
            return
        for file in files:
            with suppress(OSError):  # another process may remove it meanwhile
                status = file.lstat()
                yield status.st_mtime_ns, status.st_size, file

    @contextmanager
    def _lock_folder(self) -> Iterator[bool]:
        """Wait briefly for the folder's lock and yield whether no other process has it.

        A folder in which no file can be locked, as on some network file systems, counts as locked.
        """
        try:
            file = os.open(self.folder / _LOCK_FILE, os.O_RDWR | os.O_CREAT | _NO_LINK, 0o600)
        except OSError:
            yield True
            return
        try:
            yield _lock(file, wait_s=_LOCK_WAIT_S)
        finally:
            with suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing does not unlock if a forked process has the file open too
            os.close(file)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether the files need not be added up after another one of this size: that takes longer, the more there are.

        They were added up before, and all processes together have room for what they have written since.
        """
        folder = (self.folder, self.max_bytes)
        _room_bytes[folder] = _room_bytes.get(folder, 0) - size_bytes
        return _room_bytes[folder] >= 0

    def _evict(self) -> None:
        abandoned_ns = time.time_ns() - _ABANDONED_S * 10**9
        files = sorted(self._files(*KINDS.values(), conventions.PARTIAL_SUFFIX))
        total_bytes = sum(size for _, size, _ in files)
        for used_ns, size, path in files:
            if path.suffix != conventions.PARTIAL_SUFFIX:
                is_surplus = total_bytes > self.max_bytes
            else:
                is_surplus = used_ns < abandoned_ns and not _is_being_written(path)
            if is_surplus:
                _remove(path)
                total_bytes -= size
        _room_bytes[self.folder, self.max_bytes] = (self.max_bytes - total_bytes) // _WRITERS


def code_hash(root: Path, patterns: Iterable[str]) -> str:
    """Return the hash of source files: unlike a version number, nobody has to remember to change it."""
    digest, root_length = hashlib.sha256(), len(str(root)) + 1
    for pattern in patterns:
        for file in sorted(map(str, root.glob(pattern))):
            digest.update(f"{file[root_length:]}\0".encode())
            with open(file, "rb", buffering=0) as source:  # noqa: PTH123  commands hash 500 files: half the time
                digest.update(source.read())
    return digest.hexdigest()


def plugin_hash(plugin: type | ModuleType) -> str:
    """Return the hash of the sources of another distribution's class or module, or of its package one folder deep."""
    try:
        source = plugin_source(plugin)
    except (TypeError, OSError):
        return f"{getattr(plugin, '__module__', plugin.__name__)} of unknown source"
    return code_hash(source, ("*.py", "*/*.py")) if source.is_dir() else code_hash(source.parent, (source.name,))


def plugin_source(plugin: type | ModuleType) -> Path:
    """The file of another distribution's class or module, or its package. Raises TypeError or OSError if unknown."""
    source = Path(inspect.getfile(plugin))
    return source.parent if (source.parent / "__init__.py").exists() else source


def _lock(file: int, *, wait_s: float = 0.0) -> bool:
    """Lock an open file; False if another process still has the lock after `wait_s`."""
    deadline_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_LOCK_POLL_S)
        except OSError:  # the file system has no locks
            return True
        else:
            return True


def _is_being_written(path: Path) -> bool:
    """Return whether a living process writes a temporary file, as far as locks show."""
    if path.suffix != conventions.PARTIAL_SUFFIX:
        return False
    try:
        file = os.open(path, os.O_RDWR | _NO_LINK)
    except OSError:
        return False
    try:
        return not _lock(file)
    finally:
        os.close(file)


def _remove(path: Path) -> bool:
    with suppress(OSError):
        path.unlink()
        return True
    return False


def _check_own(folder: Path) -> None:
    """Remove other users' access to a folder. Raises OSError unless this user owns it."""
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "not a folder of this user's own")
    if stat.S_IMODE(status.st_mode) & 0o077:
        folder.chmod(status.st_mode & 0o700)  # read-only for its owner if it was


def _open_own(path: Path) -> io.BufferedReader:
    """Open a file that this user owns. Raises OSError if it is a link, not a regular file, or of another user."""
    file = os.fdopen(os.open(path, os.O_RDONLY | _NO_LINK), "rb")
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
        file.close()
        raise PermissionError(errno.EPERM, "not a file of this user's own")
    return file


@functools.cache
def _log_once(message: str) -> None:
    log.debug("cache: %s; continuing without it", message)
