"""The files behind a URL: a single file, a glob, or a folder with its subfolders, and the files next to them."""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from tracekit.conventions import object_storage
from tracekit.conventions.object_storage import StorageError
from tracekit.errors import InputError
from tracekit.ingest import remote
from tracekit.ingest.remote import RemoteFile

MAX_CONCURRENT_REQUESTS = 16
_MAX_FILES = 200_000
_WEB = ("http", "https")
_GLOB, _WEB_GLOB = re.compile(r"[*?\[]"), re.compile(r"[*\[]")  # ? begins the query of a web address
_WINDOW = re.compile(r"window\d+")

Names = Callable[[list[str]], bool]


@dataclass(frozen=True)
class Listing:
    """The files found behind a URL, in no order; of a web server, only those whose names are wanted."""

    files: tuple[RemoteFile, ...]
    is_single: bool
    folders: frozenset[str] = field(default=frozenset(), repr=False)
    """The URLs of the folders that were listed completely."""


def list_files(url: str, *, max_depth: int, is_wanted: Callable[[str], bool], is_left_out: Names) -> Listing:
    """Return the files behind a URL. Folders are searched `max_depth` levels deep, without hidden ones.

    `is_left_out(names)` says of the file names of a folder whether to leave it out. Raises InputError if the URL does
    not exist or cannot be listed.
    """
    try:
        walk = _Walk(max_depth, is_wanted, is_left_out)
        system, path = object_storage.connect(url)
        glob = (_WEB_GLOB if _is_web(url) else _GLOB).search(path)
        if glob:
            return _glob(system, url, path, walk)
        if (single := _single(system, url, path, walk)) is not None:
            return Listing((single,), is_single=True)
        files, folders = _walk(system, url.rstrip("/"), path, walk)
        if not files:
            raise StorageError(f"{object_storage.shown(url)}: {_why_none(url)}", kind=object_storage.MISSING)
        return Listing(tuple(files), False, frozenset(folders))
    except StorageError as error:
        raise InputError(str(error)) from error


class Folders:
    """The files next to those of a run, each folder listed at most once."""

    def __init__(self) -> None:
        self._known: dict[str, dict[str, RemoteFile]] = {}
        self._complete: set[str] = set()

    def add(self, listing: Listing) -> None:
        """Add the files and folders of a listing."""
        for file in listing.files:
            self._known.setdefault(file.folder, {})[file.name] = file
        self._complete |= listing.folders

    def names(self, folder: str) -> list[str]:
        """Return the names of the files known in the folder at a URL."""
        return list(self._known.get(folder.rstrip("/"), {}))

    def companion(self, file: RemoteFile, name: str) -> RemoteFile | None:
        """Return the file with this name in the folder of `file` or, if it is not there, in the one above."""
        return self.file(file.folder, name) or self._find_above(file.folder, name)

    def file(self, folder: str, name: str) -> RemoteFile | None:
        """Return the file with this name in the folder at a URL; None if there is none. Raises InputError."""
        files = self._known.setdefault(folder, {})
        if folder in self._complete or name in files:
            return files.get(name)
        if not _is_web(folder):
            files |= {file.name: file for file in _neighbours(folder)}
            self._complete.add(folder)
            return files.get(name)
        try:
            files[name] = remote.info(f"{folder}/{name}")
        except StorageError as error:
            if error.kind in object_storage.TRANSIENT:
                raise InputError(str(error)) from error
        return files.get(name)

    def _find_above(self, folder: str, name: str) -> RemoteFile | None:
        above, _, last = folder.rpartition("/")
        if above.endswith("/") or "://" not in above:
            return None
        # On a web server each absent file is a request: look only where the recorder writes.
        may_look = above in self._complete or _WINDOW.fullmatch(last) or not _is_web(folder)
        return self.file(above, name) if may_look else None


@dataclass(frozen=True)
class _Walk:
    max_depth: int
    is_wanted: Callable[[str], bool]
    is_left_out: Names


def _glob(system: Any, url: str, path: str, walk: _Walk) -> Listing:
    """Return the files that a glob matches, and those in the folders that it matches."""
    from fsspec.utils import glob_translate

    root = re.split(r"[*?\[]", path, maxsplit=1)[0].rpartition("/")[0]
    pattern = re.compile(glob_translate(path))
    files, _ = _walk(system, root if _is_web(url) else str(system.unstrip_protocol(root)), root, walk)
    places = {file: object_storage.connect(file.url)[1] for file in files}
    matching = [f for f, place in places.items() if any(pattern.match(part) for part in _parts(place, root))]
    if not matching:
        raise StorageError(f"{object_storage.shown(url)}: no file matches it; check the address", kind="missing")
    return Listing(tuple(matching), is_single=False)


def _parts(place: str, root: str) -> list[str]:
    """Return a path and its folders below `root`.

    >>> _parts("bucket/a/b", "bucket")
    ['bucket/a', 'bucket/a/b']
    """
    steps = place.removeprefix(root).strip("/").split("/")
    return [f"{root}/{'/'.join(steps[: n + 1])}" for n in range(len(steps))]


def _single(system: Any, url: str, path: str, walk: _Walk) -> RemoteFile | None:
    """File at a URL; None if a folder is there, or nothing."""
    if path.endswith("/") or (_is_web(url) and url.endswith("/")):
        return None
    try:
        details = object_storage.call_with_retries(url, lambda: system.info(path))
    except StorageError as error:
        # Without the permission to list, S3 reports 403 for keys that do not exist, such as folders.
        if error.kind == object_storage.MISSING or (error.kind == object_storage.DENIED and not _is_web(url)):
            return None
        raise
    is_page = details.get("mimetype") == "text/html" and not walk.is_wanted(RemoteFile.of(url, details).name)
    return None if details.get("type") == "directory" or is_page else RemoteFile.of(url, details)


def _walk(system: Any, url: str, path: str, walk: _Walk) -> tuple[list[RemoteFile], list[str]]:
    """Return the files in a folder and its subfolders, and the URLs of all these folders."""
    files: list[RemoteFile] = []
    folders: list[str] = []
    level = [(url, path)]
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        for depth in range(walk.max_depth + 1):
            below: list[tuple[str, str]] = []
            for (folder, place), entries in zip(level, pool.map(lambda p: _entries(system, *p), level), strict=True):
                inside = {_name(info): info for info in entries if info["name"].rstrip("/") != place.rstrip("/")}
                folder_files = {name: info for name, info in inside.items() if info.get("type") == "file"}
                if depth and walk.is_left_out(list(folder_files)):
                    continue
                folders.append(folder)
                files += [RemoteFile.of(f"{folder}/{name}", info) for name, info in folder_files.items()]
                deeper = (n for n, info in inside.items() if info.get("type") == "directory" and not n.startswith("."))
                below += [(f"{folder}/{n}", _place(inside[n]["name"], url)) for n in deeper]
            if len(files) + len(below) > _MAX_FILES:
                raise StorageError(f"{url}: more than {_MAX_FILES:,} files; name the folder of one run", kind="other")
            level = below
        if _is_web(url):
            candidates = [file for file in files if walk.is_wanted(file.name)]
            return list(filter(None, pool.map(_with_details, candidates))), folders
    return files, folders


def _entries(system: Any, folder: str, place: str) -> list[dict[str, Any]]:
    listed = object_storage.call_with_retries(folder, lambda: system.ls(place, detail=True))
    if not _is_web(folder):
        return [info for info in listed if isinstance(info, dict)]
    # An index page may link anywhere.
    inside = place.rstrip("/") + "/"
    below = [info for info in listed if info["name"].startswith(inside) and "?" not in info["name"]]
    return [info for info in below if "/" not in info["name"].removeprefix(inside).rstrip("/")]


def _with_details(file: RemoteFile) -> RemoteFile | None:
    """Return a file of a web server with size and version; None if a link leads nowhere."""
    try:
        return remote.info(file.url)
    except StorageError as error:
        if error.kind == object_storage.MISSING:
            return None
        raise


def _neighbours(folder: str) -> list[RemoteFile]:
    try:
        system, path = object_storage.connect(folder)
        entries = _entries(system, folder, path)
    except StorageError as error:
        if error.kind in object_storage.TRANSIENT:
            raise InputError(str(error)) from error
        return []
    return [RemoteFile.of(f"{folder}/{_name(info)}", info) for info in entries if info.get("type") == "file"]


def _why_none(url: str) -> str:
    if not _is_web(url):
        return "no such file or folder; check the address"
    return "the server lists no files there; name the trace files, or let it serve an index page of the folder"


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]


def _place(name: str, url: str) -> str:
    return f"{name.rstrip('/')}/" if _is_web(url) else name


def _is_web(url: str) -> bool:
    return object_storage.protocol(url) in _WEB
