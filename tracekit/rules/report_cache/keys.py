"""The key of a cached report: the state of the run's files, the hash of the code, and the rules."""

import dataclasses
import functools
import hashlib
import importlib
import itertools
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.conventions import object_storage
from tracekit.conventions.devices import DeviceOverride
from tracekit.ingest import disk_cache, files, readers
from tracekit.ingest.remote import RemoteFile
from tracekit.model import plugins
from tracekit.rules.registry import RULES, all_rules

MAX_FILES = 20_000
"""Reports of folders with more files are not cached: checking all files would take as long as reading a trace."""
_MAX_DEPTH = 5
_LOGS = (conventions.CHECKPOINT_LOG_SUFFIX, conventions.METRICS_SUFFIX)


@dataclass(frozen=True)
class FileState:
    """The state of a file of a run in the file system, by its path from the run's folder."""

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
    """The states of all files of a run, by path. Equal states mean an unchanged run."""

    files: tuple[FileState, ...]

    @functools.cached_property
    def stamp(self) -> str:
        """Return a short hash that changes with any file."""
        text = "\0".join(
            f"{f.path}\0{f.size_bytes} {f.changed_ns} {f.touched_ns} {f.links_to} {f.version}" for f in self.files
        )
        return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def file_states(path: str) -> FileStates | None:
    """Return the states of a run's files, in a folder down to five levels; None if there are no files, or too many.

    Hidden folders and checkpoints are left out, as in loading. For a single file: that file, and the manifest, logs and
    files of other tools next to it. For a URL the files are listed; None also if the server states no version of one.
    """
    if object_storage.is_url(path):
        return remote_states(files.list_remote(path).files, path)
    root = Path(path)
    walk = _in_folder(path, "", 0) if root.is_dir() else _single_file(root)
    states = list(itertools.islice(walk, MAX_FILES + 1))
    if not 0 < len(states) <= MAX_FILES:
        return None
    above = root.parent if root.is_dir() else root.parent.parent
    # The logs of a window are in its parent folder, so the run's own logs may be there too.
    states += filter(None, (_file_state(above / name, f"../{name}") for name in _logs_in(above)))
    return FileStates(tuple(sorted(states, key=lambda file: file.path)))


def remote_states(listed: Iterable[RemoteFile], url: str) -> FileStates | None:
    """Return the states of the files of a run behind a URL; None if one has no version, or there are too many."""
    read = [file for file in listed if files.is_read_by_tracekit(file.name)]
    states = [
        FileState(file.url.removeprefix(url.rstrip("/")).lstrip("/"), file.size_bytes or 0, 0, 0, version=file.version)
        for file in read
        if file.version is not None
    ]
    if len(states) < len(read) or not 0 < len(read) <= MAX_FILES:
        return None
    return FileStates(tuple(sorted(states, key=lambda state: state.path)))


def run_key(path: str, known_states: FileStates | None = None, devices: Sequence[DeviceOverride] = ()) -> str | None:
    """Return the key of a run's report; None if it cannot be cached.

    `devices` are what a user states of devices. Raises InputError if a URL cannot be listed.
    """
    states = file_states(path) if known_states is None else known_states
    if states is None:
        return None
    # The report's file names depend on how the run's path was written.
    absolute = path if object_storage.is_url(path) else str(Path(path).absolute())
    text = repr((_code_hash(), path, absolute, states.stamp, *devices))
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


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
        if state := _file_state(file, relative):
            yield state


def _single_file(file: Path) -> Iterator[FileState]:
    names = (file.name, conventions.MANIFEST_FILE, *_logs_in(file.parent), *_companions_in(file.parent))
    states = (_file_state(file.parent / name, name) for name in dict.fromkeys(names))
    yield from filter(None, states)


def _file_state(file: Path | os.DirEntry[str], relative: str) -> FileState | None:
    try:
        real = os.path.realpath(file) if file.is_symlink() else None
        status = file.stat()
    except OSError:
        return None
    return FileState(relative, status.st_size, status.st_mtime_ns, status.st_ctime_ns, real)


def _companions_in(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(p.name for p in sorted(folder.iterdir()) if p.name.lower().endswith(readers.companion_suffixes()))
    except OSError:
        return ()


def _logs_in(folder: Path) -> tuple[str, ...]:
    try:
        return _names_of_logs(str(folder), folder.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(maxsize=64)
def _names_of_logs(folder: str, changed_ns: int) -> tuple[str, ...]:  # noqa: ARG001  # part of the cache's key
    with os.scandir(folder) as entries:
        return tuple(sorted(file.name for file in entries if file.name.endswith(_LOGS)))


@functools.cache
def _code_hash() -> str:
    """Return the hash of all code that makes a report, and of the rules with their thresholds, plugins among them."""
    package = Path(conventions.__file__).parents[1]
    rules = [(rule.code, rule.__module__, rule.__qualname__, dataclasses.asdict(rule())) for rule in all_rules()]
    added: list[type | ModuleType] = [rule for rule in all_rules() if rule not in RULES]
    added += [type(reader) for reader in readers.available() if reader not in readers.READERS]
    added += [
        importlib.import_module(point.module)
        for group in ("tracekit.metrics", "tracekit.causes")
        for point in plugins.entry_points(group=group)
    ]
    parts = {
        "code": disk_cache.code_hash(package, ("**/*.py",)),
        "libraries": [pl.__version__, np.__version__],
        "rules": rules,
        "plugins": sorted({disk_cache.plugin_hash(plugin) for plugin in added}),
    }
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()
