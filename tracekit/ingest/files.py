"""Find the files of a run: in a folder, a list, a glob, an archive or behind a URL. Only archives are read.

A trace in an archive or behind a URL states its origin, with the log files next to it.
"""

import contextlib
import glob
import hashlib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TypeAlias

import polars as pl

from tracekit import conventions
from tracekit.conventions import object_storage, regular_files
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import archives, readers, remote, remote_listing
from tracekit.ingest.archives import Unpacked
from tracekit.ingest.remote import RemoteFile
from tracekit.ingest.remote_listing import Folders, Listing
from tracekit.model.trace import Trace


@dataclass(frozen=True)
class RemoteTrace:
    """The origin of a remote trace: its file and its companion files, as they were listed. Can be pickled."""

    file: RemoteFile
    companions: tuple[RemoteFile, ...]
    """In the folder of the file, or one above."""
    use_cache: bool
    snapshot: RemoteFile | None = None
    """The rank's memory snapshot, next to the trace file."""

    @property
    def state(self) -> object:
        """The versions of all files; None if the server states none for one of them."""
        files = (self.file, *self.companions)
        if any(file.version is None for file in files):
            return None
        return [[file.url, file.size_bytes, file.version] for file in files]

    def sha256(self) -> str:
        """Return the hash of the trace file's content. Raises BadTraceError if it cannot be downloaded."""
        return remote.sha256(self.file, cache=self.use_cache)

    @contextlib.contextmanager
    def download(self) -> Iterator[Path]:
        """Yield the path of a temporary copy of the trace file, with its companions around it.

        Raises BadTraceError if a file cannot be downloaded; errors of the block name the URL in place of the copy.
        """
        with self.folder() as path:
            remote.fetch(self.file, path, cache=self.use_cache)
            try:
                yield path
            except BadTraceError as error:
                raise BadTraceError(self._with_urls(str(error), path)) from error

    @contextlib.contextmanager
    def folder(self) -> Iterator[Path]:
        """Yield the path that the trace file would have in a temporary folder with copies of its companions."""
        with tempfile.TemporaryDirectory(prefix="tracekit-") as above:
            path = Path(above, "run", self.file.name)
            path.parent.mkdir()
            for companion in self.companions:
                remote.fetch_current(companion, self.copy_of(companion, path), cache=self.use_cache)
            yield path

    def copy_of(self, companion: RemoteFile, path: Path) -> Path:
        """Return the path of a companion's copy, if the trace file's copy is at `path`."""
        place = path.parent if companion.folder == self.file.folder else path.parent.parent
        return place / companion.name

    def relabel_paths(self, trace: Trace, path: Path) -> Trace:
        """Return a trace that was read from the copy at `path` with URLs in place of local paths."""
        issues = trace.data_quality
        if not issues.is_empty():
            message = pl.col("message").map_elements(lambda text: self._with_urls(text, path), return_dtype=pl.String)
            issues = issues.with_columns(message)
        return trace.replace(path=self.file.shown, data_quality=issues)

    def _with_urls(self, text: str, path: Path) -> str:
        above = self.file.folder.rpartition("/")[0]
        return text.replace(str(path.parent), self.file.folder).replace(str(path.parent.parent), above)


@dataclass(frozen=True)
class ArchivedTrace:
    """The origin of a trace in an archive. Can be pickled, for workers on the same machine."""

    archive: Unpacked
    path: Path
    """Of the unpacked member."""

    @property
    def state(self) -> object:
        """The state of the archive and the member's place in it."""
        if self.archive.state is None:
            return None
        return [self.archive.state, str(self.path.relative_to(self.archive.folder))]

    def sha256(self) -> str:
        """Return the hash of the member's content. Raises BadTraceError if it is gone."""
        with regular_files.open_to_read(self.local()) as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()

    def local(self) -> Path:
        """Return the path of the unpacked member. Raises BadTraceError if it is gone, or on another machine."""
        if not self.path.is_file():
            raise BadTraceError(
                f"{self.archive.shown(str(self.path))}: the unpacked file is not on this machine; "
                "unpack the archive to a folder that all workers can read"
            )
        return self.path

    def relabel_paths(self, trace: Trace) -> Trace:
        """Return a trace of the member with the archive's path in place of that of the folder."""
        issues = trace.data_quality
        if not issues.is_empty():
            message = pl.col("message").map_elements(self.archive.shown, return_dtype=pl.String)
            issues = issues.with_columns(message)
        return trace.replace(path=self.archive.shown(trace.path), data_quality=issues)


RunLocation: TypeAlias = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_MAX_DEPTH = 5
_GLOB = re.compile(r"[*?\[]")


@dataclass(frozen=True)
class File:
    """One file: path or URL (without secrets) and size (0 if unknown); where it is, if it is no local file.

    The path of a file in an archive is the archive's path, followed by the path in it.
    """

    path: str
    size_bytes: int
    remote: RemoteFile | None = field(default=None, repr=False, compare=False)
    archived: ArchivedTrace | None = field(default=None, repr=False, compare=False)
    is_neighbor: bool = field(default=False, compare=False)
    """Whether it was not named itself, but lies next to a trace file that was."""

    @property
    def local(self) -> str:
        """Return the path of the file's content on this machine; not for remote files."""
        return self.path if self.archived is None else str(self.archived.path)

    @property
    def name(self) -> str:
        """Return the last part of the path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1]

    @property
    def folder(self) -> str:
        """Return the path without its last part."""
        return self.path.rstrip("/").rpartition("/")[0]

    def text(self, *, cache: bool = True) -> str:
        """Return the file's text. Raises OSError, ValueError or BadTraceError if it cannot be read as UTF-8."""
        if self.remote is None:
            return regular_files.read_text(self.local)
        return remote.read(self.remote, cache=cache).decode("utf-8")


@dataclass(frozen=True)
class RunFiles:
    """The path of a run, the files that may be traces, the manifests, and the folders of remote files.

    `partial` are traces under the name that the recorder gives them until they are complete.
    """

    root: str
    traces: tuple[File, ...]
    manifests: tuple[File, ...]
    folders: Folders = field(default_factory=Folders, repr=False, compare=False)
    partial: tuple[File, ...] = ()


def find(where: RunLocation, *, cache: bool = True) -> RunFiles:
    """Find possible traces in a folder, a list of paths, a glob, an archive or a URL (s3://, gs://, memory://, …).

    Folders are searched five levels deep, without hidden folders and checkpoints; archives in a folder are used only if
    it has no trace files. Files of other tools next to a named trace file are found, too. With `cache`, a remote
    archive is downloaded once. Raises InputError if a path does not exist or cannot be accessed, or if no file may be a
    trace; BadTraceError if an archive cannot be unpacked.
    """
    locations = [where] if isinstance(where, str | os.PathLike) else list(where)
    if not locations:
        raise InputError("no path is given; name a run's folder or its trace files")
    by_path: dict[str, File] = {}
    folders = Folders()
    single: list[File] = []
    for path in locations:
        path_files = _find_files(os.fspath(path), folders, cache=cache)
        by_path |= {file.path: file for file in path_files}
        single += [] if Path(path).is_dir() else path_files
    by_path = {file.path: file for file in _neighbors(single)} | by_path
    manifests = tuple(f for f in by_path.values() if f.name == conventions.MANIFEST_FILE)
    partial = tuple(f for f in by_path.values() if f.name.endswith(conventions.PARTIAL_SUFFIX))
    not_traces = {*manifests, *partial}
    traces = tuple(sorted((f for f in by_path.values() if f not in not_traces), key=lambda f: natural_key(f.path)))
    root = object_storage.shown(os.fspath(locations[0])) if len(locations) == 1 else common_folder(traces)
    if not traces:
        if partial or _has_logs(root, folders) or (manifests and not root.endswith(conventions.MANIFEST_FILE)):
            raise InputError(
                f"{root}: no rank has written a trace yet; if the training is running, check again when its first "
                "profiled window is complete (tracekit watch shows its progress)"
            )
        raise InputError(f"{root}: {_why_none(root)}; name a run's folder or a trace file")
    return RunFiles(root, traces, manifests, folders, partial)


def list_remote(url: str) -> Listing:
    """Return the files behind a URL that may be of a run, without reading any. Raises InputError."""
    return remote_listing.list_files(
        url, max_depth=_MAX_DEPTH, is_wanted=is_read_by_tracekit, is_left_out=_is_checkpoint
    )


def is_glob(path: str) -> bool:
    """Return whether a path or URL is a pattern; ? begins the query of a web address."""
    return "*" in path or "[" in path or ("?" in path and object_storage.protocol(path) not in ("http", "https"))


def common_folder(traces: Iterable[File]) -> str:
    """Path of the innermost folder with all files; of unrelated paths, the first one's folder."""
    traces = tuple(traces)
    folders = sorted({file.folder or "." for file in traces})
    if any(file.remote is not None for file in traces):
        parts = zip(*(folder.split("/") for folder in folders), strict=False)
        shared = [level[0] for level in takewhile(lambda level: len(set(level)) == 1, parts)]
        return "/".join(shared) if len(shared) > 2 else folders[0]  # 2: the protocol
    with contextlib.suppress(ValueError):  # absolute and relative paths are mixed
        return os.path.commonpath(folders)
    return folders[0] if folders else "."


def natural_key(text: str) -> tuple[str | tuple[int, str], ...]:
    """Return a sort key that orders numbers in names by value.

    >>> sorted(["rank10", "rank9"], key=natural_key)
    ['rank9', 'rank10']
    """
    return tuple(_by_value(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]+)", text)))


def _by_value(digits: str) -> tuple[int, str]:
    """Return a key of a number, which may be too long for an integer."""
    significant = digits.lstrip("0")
    return len(significant), significant


def _has_logs(root: str, folders: Folders) -> bool:
    """Return whether a recorded training has a metrics log in a folder."""
    if object_storage.is_url(root):
        return any(name.endswith(conventions.METRICS_SUFFIX) for name in folders.names(root))
    with contextlib.suppress(OSError):
        endings = (conventions.METRICS_SUFFIX, conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX)
        return any(name.endswith(endings) for name in map(str, Path(root).iterdir()))
    return False


def _entries_by_name(root: str) -> list[Path]:
    """What lies directly in a folder, by name; nothing if it is none."""
    return sorted(Path(root).iterdir()) if Path(root).is_dir() else []


def _why_none(root: str) -> str:
    if Path(root).is_file():
        if archives.is_archive(Path(root)):
            return f"no trace files ({_patterns()}) in this archive"
        return "this is a run's manifest, not a trace"
    if _GLOB.search(root) and not Path(root).exists():
        return f"no trace file matches it ({_patterns()})"
    if Path(root).is_dir() and not os.access(root, os.R_OK | os.X_OK):
        return "no permission to read this folder"
    snapshots = [file for file in _entries_by_name(root) if file.name.endswith(conventions.SNAPSHOT_SUFFIXES)]
    if snapshots:
        return f"no trace files in this folder, but a memory snapshot: tracekit memory {snapshots[0]}"
    if any(file.name.endswith(conventions.HANG_SUFFIX) for file in _entries_by_name(root)):
        return f"no trace files in this folder, but dumps of a hang: tracekit hang {root}"
    return f"no trace files ({_patterns()}) in this folder"


def _find_files(location: str, folders: Folders, *, cache: bool) -> list[File]:
    if not location:
        raise InputError("the path of a run is empty: perhaps a variable that is not set; name a run's folder")
    location = object_storage.without_file_scheme(location)
    if object_storage.is_url(location):
        return _find_remote_files(location, folders, cache=cache)
    path = Path(location)
    if path.is_dir():
        return list(map(_file, _walk_paths(path))) or _in_archives_of(path)
    if archives.is_archive(path):
        return _in_archive(archives.unpack(path, is_read_by_tracekit))
    if path.exists():
        manifest = path.parent / conventions.MANIFEST_FILE
        return [_file(p) for p in (path, manifest) if p.is_file()]
    if _GLOB.search(location):
        matched = sorted(glob.glob(location, recursive=True), key=natural_key)  # noqa: PTH207  (Path.glob needs a relative one)
        return [
            file
            for match in matched
            for file in _find_files(match, folders, cache=cache)
            if _may_be_trace(file.name) or file.name == conventions.MANIFEST_FILE
        ]
    raise InputError(f"{location}: no such file or folder; check the path")


def _neighbors(files: Iterable[File]) -> Iterator[File]:
    """Yield the files of other tools, such as execution traces, in the folders of trace files on this machine."""
    local = [file.path for file in files if file.remote is None and file.archived is None]
    traces = [Path(path) for path in local if not path.lower().endswith(readers.companion_suffixes())]
    for folder in dict.fromkeys(path.parent for path in traces if path.name != conventions.MANIFEST_FILE):
        with contextlib.suppress(OSError):
            companions = [p for p in sorted(folder.iterdir()) if p.name.lower().endswith(readers.companion_suffixes())]
            yield from (replace(_file(path), is_neighbor=True) for path in companions if path.is_file())


def _walk_paths(root: Path) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = sorted(name for name in folders if not name.startswith(".")) if depth < _MAX_DEPTH else []
        if _is_checkpoint(names):
            folders[:] = []
            continue
        for name in sorted(names):
            path = Path(folder, name)
            if _may_be_trace(name.removesuffix(conventions.PARTIAL_SUFFIX)) and path.is_file():
                yield path


def _in_archives_of(folder: Path) -> list[File]:
    """Return the files in the archives that lie in a folder.

    If all their manifests are the same, or only one archive has one, it is the manifest of the folder: each archive
    then has some ranks of one run.
    """
    paths = sorted(p for p in folder.iterdir() if p.name.lower().endswith(archives.SUFFIXES) and archives.is_archive(p))
    files = [file for path in paths for file in _in_archive(archives.unpack(path, is_read_by_tracekit))]
    manifests = [file for file in files if file.name == conventions.MANIFEST_FILE]
    if len({regular_files.read_bytes(file.local) for file in manifests}) != 1:
        return files
    shared = replace(manifests[0], path=str(folder / conventions.MANIFEST_FILE))
    return [*(file for file in files if file.name != conventions.MANIFEST_FILE), shared]


def _in_archive(archive: Unpacked) -> list[File]:
    files = [_file(path) for path in _walk_paths(archive.root())]
    if not files and archive.problems:
        raise BadTraceError(archive.problems[0].rstrip("."))
    return [replace(f, path=archive.shown(f.path), archived=ArchivedTrace(archive, Path(f.path))) for f in files]


def _find_remote_files(url: str, folders: Folders, *, cache: bool) -> list[File]:
    """Return the files of a URL that may be traces or manifests, and add what lies next to them to `folders`."""
    listing = list_remote(url)
    folders.add(listing)
    if listing.is_single:
        if listing.files[0].name.lower().endswith(archives.SUFFIXES):
            return _in_remote_archive(listing.files[0], cache=cache)
        manifest = folders.file(listing.files[0].folder, conventions.MANIFEST_FILE)
        return [_remote(file) for file in (*listing.files, manifest) if file is not None]
    return [_remote(file) for file in listing.files if _may_be_trace(file.name)]


def _in_remote_archive(file: RemoteFile, *, cache: bool) -> list[File]:
    state = None if file.version is None else [file.url, file.size_bytes, file.version]
    with remote.local_copy(file, cache=cache) as copy:
        return _in_archive(archives.unpack_copy(copy, is_read_by_tracekit, url=file.shown, state=state))


def _remote(file: RemoteFile) -> File:
    return File(file.shown, file.size_bytes or 0, file)


def is_read_by_tracekit(name: str) -> bool:
    """Return whether some reader reads files with this name: a trace, a manifest, a log or a snapshot."""
    plain = name.lower().removesuffix(conventions.PARTIAL_SUFFIX)
    return any(reader.has_name(plain) for reader in readers.available())


def _may_be_trace(name: str) -> bool:
    is_other = name.startswith(".") or name == conventions.TRUTH_FILE or name.endswith(conventions.HANG_SUFFIX)
    lower = name.lower()
    return (readers.may_have_traces(lower) or lower.endswith(readers.companion_suffixes())) and not is_other


def _patterns() -> str:
    most_common_first = sorted(readers.trace_suffixes(), key=lambda suffix: not suffix.startswith(".json"))
    return ", ".join(f"*{suffix}" for suffix in most_common_first)


def _is_checkpoint(names: Iterable[str]) -> bool:
    """Return whether these file names are of a checkpoint of torch.distributed.checkpoint, complete or not."""
    return any(name == ".metadata" or name.endswith(".distcp") for name in names)


def _file(path: Path) -> File:
    return File(str(path), path.stat().st_size)
