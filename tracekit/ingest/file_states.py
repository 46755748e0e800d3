"""The states of files on this machine: equal states mean unchanged files. Needs the standard library only.

A key of stored reports and answers has the states of the files that these were made of, so it must be known before
readers and tables are imported.
"""

import functools
import hashlib
import itertools
import os
import stat
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tracekit import conventions

MAX_FILES = 20_000
"""More files have no states: to check all of them would take as long as reading a trace."""
_MAX_DEPTH = 5
_LOGS = (
    conventions.CHECKPOINT_LOG_SUFFIX,
    conventions.METRICS_SUFFIX,
    conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX,
)


@dataclass(frozen=True)
class FileState:
    """The state of a file in the file system, by its path; of a run's file, from the run's folder."""

    path: str
    size_bytes: int
    changed_ns: int
    """The file's modification time."""
    touched_ns: int
    """The file's status change time, which no program can set back."""
    links_to: str | None = None
    """The real path, if the file is a link."""
    version: str = ""
    """The version of a remote file, which has no times here."""


@dataclass(frozen=True)
class FileStates:
    """The states of several files, by path. Equal states mean unchanged files."""

    files: tuple[FileState, ...]

    @functools.cached_property
    def stamp(self) -> str:
        """A short hash that changes with any file."""
        text = "\0".join(
            f"{f.path}\0{f.size_bytes} {f.changed_ns} {f.touched_ns} {f.links_to} {f.version}" for f in self.files
        )
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]

    @property
    def touched_ns(self) -> int:
        """The latest status change of a file; 0 without files."""
        return max((file.touched_ns for file in self.files), default=0)


def of_run(path: str, companion_suffixes: tuple[str, ...]) -> FileStates | None:
    """States of a run's files, in a folder down to five levels; None if there are no files, or too many.

    Hidden folders and checkpoints are left out, as in loading. For a single file: that file, and the manifest, logs and
    files of other tools next to it, which have `companion_suffixes`.
    """
    root = Path(path)
    if not root.exists():
        return None
    walk = _in_folder(path, "", 0) if root.is_dir() else _single_file(root, companion_suffixes)
    states = list(itertools.islice(walk, MAX_FILES + 1))
    if not 0 < len(states) <= MAX_FILES:
        return None
    above = root.parent if root.is_dir() else root.parent.parent
    # The logs of a window are in its parent folder, so the run's own logs may be there too.
    states += filter(None, (_file_state(f"{above}{os.sep}{name}", f"../{name}") for name in _logs_in(above)))
    return FileStates(tuple(sorted(states, key=lambda file: file.path)))


def of_files(paths: Iterable[str]) -> FileStates:
    """States of files and folders themselves, without those that do not exist."""
    # At the end of the path of a link, a separator would lead to what it names.
    return FileStates(tuple(filter(None, (_file_state(path.rstrip(os.sep) or path, path) for path in paths))))


def of_tree(root: str, suffix: str = "", *, left_out: Collection[str] = ("__pycache__",)) -> FileStates | None:
    """States of the files with a suffix in a folder and in its folders that are not hidden; None if too many."""
    walk = (f"{folder}{os.sep}{name}" for folder, names in walk_visible(root, left_out) for name in sorted(names))
    paths = list(itertools.islice((path for path in walk if path.endswith(suffix)), MAX_FILES + 1))
    return of_files(paths) if len(paths) <= MAX_FILES else None


def walk_visible(root: str, left_out: Collection[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield each folder with the names of its files: no hidden folder, virtual environment or one that is left out."""
    for folder, folders, names in itertools.islice(os.walk(root), MAX_FILES):
        if "pyvenv.cfg" in names and folder != root:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in left_out)
        yield folder, names


def _in_folder(folder: str, above: str, depth: int) -> Iterator[FileState]:
    """Yield the files of a folder and its subfolders; `above` is its path from the run's folder."""
    try:
        with os.scandir(folder) as entries:
            files = sorted(entries, key=lambda file: file.name)
    except OSError:
        return
    if depth and any(file.name == ".metadata" or file.name.endswith(".distcp") for file in files):
        return
    for file in files:
        relative = above + file.name
        if file.is_dir(follow_symlinks=False):
            if depth < _MAX_DEPTH and not file.name.startswith("."):
                yield from _in_folder(file.path, f"{relative}/", depth + 1)
            continue
        if state := _file_state(file.path, relative):
            yield state


def _single_file(file: Path, companion_suffixes: tuple[str, ...]) -> Iterator[FileState]:
    companions = _names_in(file.parent, companion_suffixes)
    names = (file.name, conventions.MANIFEST_FILE, *_logs_in(file.parent), *companions)
    yield from filter(None, (_file_state(str(file.parent / name), name) for name in dict.fromkeys(names)))


def _file_state(path: str, name: str) -> FileState | None:
    real_path = None
    try:
        # By the functions of os: a command asks for a thousand sources, and pathlib takes five times as long.
        status = os.lstat(path)
        if stat.S_ISLNK(status.st_mode):
            real_path, status = os.path.realpath(path), Path(path).stat()
    except OSError:
        return None
    return FileState(name, status.st_size, status.st_mtime_ns, status.st_ctime_ns, real_path)


def _logs_in(folder: Path) -> tuple[str, ...]:
    try:
        return _names_of_logs(folder, folder.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(maxsize=64)
def _names_of_logs(folder: Path, changed_ns: int) -> tuple[str, ...]:  # noqa: ARG001  # part of the cache's key
    return _names_in(folder, _LOGS)


def _names_in(folder: Path, suffixes: tuple[str, ...]) -> tuple[str, ...]:
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted(file.name for file in entries if file.name.lower().endswith(suffixes)))
    except OSError:
        return ()
