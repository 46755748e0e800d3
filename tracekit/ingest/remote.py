"""Files behind URLs: their versions, their first bytes, whole downloads that are verified, and copies in the cache.

`tracekit.conventions.object_storage` opens file systems, retries and describes errors.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, BinaryIO, cast

from tracekit.conventions import object_storage, regular_files
from tracekit.conventions.object_storage import IncompleteError, StorageError
from tracekit.errors import BadTraceError
from tracekit.ingest.disk_cache import DiskCache

_CHECKSUMS = ("etag", "ETag", "generation", "md5Hash", "Content-MD5")
_TIMES = ("LastModified", "Last-Modified", "updated", "mtime", "modified", "created")
_READ_BYTES = 1 << 20
_PLAIN = {"Accept-Encoding": "identity"}  # else a server may compress, and sizes say nothing
_HASH = "sha256"
_CHANGED = "changed"
_MAX_REPLACED = 3


class DownloadError(BadTraceError):
    """A remote file could not be downloaded, for a reason that may pass or that concerns access to it."""


@dataclass(frozen=True)
class RemoteFile:
    """One file behind a URL, as its server lists it."""

    url: str
    size_bytes: int | None
    """None if the server does not state it."""
    version: str | None
    """Changes with the content: ETag or checksum, else time and size; None if the server states none of them."""
    changed_ns: int | None = field(default=None, compare=False)
    """When the server says that the file was changed, Unix time in ns; None if it does not say."""

    @classmethod
    def of(cls, url: str, details: Mapping[str, Any]) -> "RemoteFile":
        """Return a file from what fsspec's `ls` or `info` says of it."""
        size = details.get("size")
        size_bytes = size if isinstance(size, int) and size >= 0 else None
        return cls(url, size_bytes, _version(details, size_bytes), _changed_ns(details))

    @property
    def shown(self) -> str:
        """Return the URL for messages and reports, without secrets."""
        return object_storage.shown(self.url)

    @property
    def name(self) -> str:
        """Return the last part of the URL's path."""
        return self.shown.rstrip("/").rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Return the URL of the file's folder."""
        return self.shown.rstrip("/").rpartition("/")[0]


def info(url: str) -> RemoteFile:
    """Return a file as its server describes it. Raises StorageError if it cannot be accessed."""
    system, path = object_storage.connect(url)
    return RemoteFile.of(url, object_storage.call_with_retries(url, lambda: system.info(path)))


def head(file: RemoteFile, byte_count: int) -> bytes:
    """Return the first bytes of a file, fewer only if it is shorter. Raises DownloadError."""
    if file.size_bytes == 0:
        return b""

    def fetch() -> bytes:
        system, path = object_storage.connect(file.url)
        first = _first_bytes(system, path, file, byte_count)
        if len(first) < min(byte_count, file.size_bytes or 0):
            raise IncompleteError(f"{len(first):,} of the first {byte_count:,} bytes arrived")
        return first

    with _download_errors():
        return object_storage.call_with_retries(file.url, fetch)


def fetch_current(file: RemoteFile, copy: Path, *, cache: bool) -> None:
    """Write a file to the path `copy` as it is now, also where that is another version than was listed.

    For files that a running training replaces: logs and manifests. Raises DownloadError.
    """
    for _ in range(_MAX_REPLACED):
        try:
            return fetch(file, copy, cache=cache)
        except DownloadError as error:
            if not is_changed(error):
                raise
        with _download_errors():
            file = info(file.url)
    return fetch(file, copy, cache=cache)


def is_changed(error: BaseException) -> bool:
    """Return whether a download failed because the file is not the version that was listed."""
    return isinstance(error.__cause__, StorageError) and error.__cause__.kind == _CHANGED


def read(file: RemoteFile, *, cache: bool = True) -> bytes:
    """Return the content of a small file, such as a manifest, from the cache if possible. Raises DownloadError.

    If it was replaced after it was listed, that is its content now.
    """
    try:
        with local_copy(file, cache=cache) as path:
            return regular_files.read_bytes(path)
    except DownloadError as error:
        if not is_changed(error):
            raise
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        copy = Path(folder, file.name)
        fetch_current(file, copy, cache=cache)
        return regular_files.read_bytes(copy)


@contextlib.contextmanager
def local_copy(file: RemoteFile, *, cache: bool = True) -> Iterator[Path]:
    """Yield a temporary copy of a file; with `cache`, it is downloaded only once. Raises DownloadError."""
    with tempfile.TemporaryDirectory(prefix="tracekit-") as folder:
        copy = Path(folder, file.name)
        fetch(file, copy, cache=cache, keep=cache)
        yield copy


def fetch(file: RemoteFile, copy: Path, *, cache: bool, keep: bool = False) -> None:
    """Write a file to the path `copy`, from the cache if it is there; with `keep`, store it there.

    Raises DownloadError if it cannot be downloaded, or is not the version that was listed.
    """
    stored = DiskCache.of_user("downloads") if cache and file.version is not None else None
    key = _key(file, "copy")
    if stored is not None and stored.get(key, lambda source: _copy_to(source, copy)):
        return
    with _download_errors():
        object_storage.call_with_retries(file.url, lambda: _download(file, copy))
    _hashes[file] = _sha256(copy)
    if cache:
        remember(file, _HASH, _hashes[file])
    if stored is not None and keep:
        stored.put(key, lambda target: _copy_from(copy, target))


def sha256(file: RemoteFile, *, cache: bool = True) -> str:
    """Return the SHA-256 of a file's content, known since its download. Raises DownloadError."""
    digest = _hashes.get(file) or (recall(file, _HASH) if cache else None)
    if not isinstance(digest, str):
        with local_copy(file, cache=False) as copy:
            return _sha256(copy)
    return digest


def recall(file: RemoteFile, what: str) -> Any:
    """The entry of the user's cache for this version of a file; None if it has nothing."""
    return None if file.version is None else DiskCache.of_user("remote facts").get(_key(file, what), json.load)


def remember(file: RemoteFile, what: str, value: Any) -> None:
    """Store a JSON value about this version of a file in the user's cache."""
    if file.version is not None:
        facts = DiskCache.of_user("remote facts")
        facts.put(_key(file, what), lambda target: cast("None", target.write(json.dumps(value).encode())))


_hashes: dict[RemoteFile, str] = {}
"""SHA-256 of what this process downloaded, for commands without a cache; some 300 bytes per file."""


def _first_bytes(system: Any, path: str, file: RemoteFile, byte_count: int) -> bytes:
    if object_storage.protocol(file.url) not in ("http", "https"):
        end = byte_count if file.size_bytes is None else min(byte_count, file.size_bytes)
        return bytes(system.cat_file(path, start=0, end=end))[:byte_count]
    # A server that has no ranges sends the whole file; this stops reading it.
    headers = {**_PLAIN, "Range": f"bytes=0-{byte_count - 1}"}
    received = bytearray()
    with system.open(path, "rb", block_size=0, size=file.size_bytes or byte_count, headers=headers) as stream:
        while len(received) < byte_count and (block := stream.read(byte_count - len(received))):
            received += block
    return bytes(received)


def _download(file: RemoteFile, copy: Path) -> None:
    system, path = object_storage.connect(file.url)
    options = {"headers": _PLAIN} if object_storage.protocol(file.url) in ("http", "https") else {}
    system.get_file(path, str(copy), **options)
    size_bytes = copy.stat().st_size
    now = RemoteFile.of(file.url, system.info(path)) if file.version is not None else file
    if now.version is not None and now.version != file.version:
        raise StorageError(f"{file.shown}: changed while it was being analysed; run the command again", kind=_CHANGED)
    if file.size_bytes is not None and size_bytes != file.size_bytes:
        raise IncompleteError(f"{size_bytes:,} of {file.size_bytes:,} bytes arrived")


@contextlib.contextmanager
def _download_errors() -> Iterator[None]:
    try:
        yield
    except StorageError as error:
        raise DownloadError(str(error)) from error


def _sha256(copy: Path) -> str:
    with regular_files.open_to_read(copy) as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _version(details: Mapping[str, Any], size_bytes: int | None) -> str | None:
    for name in _CHECKSUMS:
        if details.get(name):
            return f"{name.lower()} {details[name]}"
    for name in _TIMES:
        if (changed := details.get(name)) is not None:
            return f"{changed.timestamp() if hasattr(changed, 'timestamp') else changed} {size_bytes}"
    return None


def _changed_ns(details: Mapping[str, Any]) -> int | None:
    for name in _TIMES:
        changed = details.get(name)
        if isinstance(changed, str):
            changed = _parse_time(changed)
        if isinstance(changed, datetime):
            changed = changed.timestamp()
        if isinstance(changed, int | float):
            return int(changed * 1e9)
    return None


def _parse_time(text: str) -> datetime | None:
    """Return the time in a text as GCS (ISO 8601) or a web server (RFC 9110) writes it."""
    for parse in (datetime.fromisoformat, parsedate_to_datetime):
        with contextlib.suppress(ValueError):
            return parse(text)
    return None


def _key(file: RemoteFile, what: str) -> str:
    text = json.dumps([what, file.url, file.size_bytes, file.version])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _copy_to(source: BinaryIO, copy: Path) -> bool:
    with copy.open("wb") as target:
        shutil.copyfileobj(source, target, _READ_BYTES)
    return True


def _copy_from(copy: Path, target: BinaryIO) -> None:
    with regular_files.open_to_read(copy) as source:
        shutil.copyfileobj(source, target, _READ_BYTES)
