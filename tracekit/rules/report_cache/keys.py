"""What a kept report is found by: the run's files as they lie there, the code that judges, and its rules."""

import dataclasses
import functools
import hashlib
import importlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.ingest import disk_cache, readers
from tracekit.rules import RULES, all_rules

MAX_FILES = 20_000
"""A folder of more files is no run to keep a report of: to look at all of them would take as long as to read one."""
_MAX_DEPTH = 5
_LOGS = (conventions.CHECKPOINT_LOG_SUFFIX, conventions.METRICS_SUFFIX)


@dataclass(frozen=True)
class FileState:
    """A file of a run as the file system tells of it, by its path from the run's folder."""

    path: str
    size_bytes: int
    changed_ns: int
    """When its content was last changed, as far as the file system tells."""
    touched_ns: int
    """When anything of it was last changed, which no program can set back."""
    links_to: str | None = None
    """The real path, where any part of the path is a link."""


@dataclass(frozen=True)
class FileStates:
    """All files that a run may be read from, by path. Two equal states hold the same run."""

    files: tuple[FileState, ...]

    @functools.cached_property
    def stamp(self) -> str:
        """Return a short text that is another where a file is."""
        told = "\0".join(f"{f.path}\0{f.size_bytes} {f.changed_ns} {f.touched_ns} {f.links_to}" for f in self.files)
        return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def file_states(path: str) -> FileStates | None:
    """Return the state of a run's files, of a folder five levels deep; None where there is none, or too many.

    Hidden folders and checkpoints are left out, as they are when a run is loaded. For a single file, that file and the
    manifest and logs beside it.
    """
    root = Path(path)
    found: list[FileState] = []
    walk = _in_folder(path, "", 0) if root.is_dir() else _single_file(root)
    for file in walk:
        found.append(file)
        if len(found) > MAX_FILES:
            return None
    if not found:
        return None
    above = root.parent if root.is_dir() else root.parent.parent
    # The logs of a window lie in the folder above it, and so may those of the folder that was named.
    logs = (_file_state(above / name, f"../{name}") for name in _logs_in(above))
    found += [log for log in logs if log is not None]
    return FileStates(tuple(sorted(found, key=lambda file: file.path)))


def run_key(path: str, known: FileStates | None = None) -> str | None:
    """Return the key of a run's report; None where none can be kept of it, such as of a URL."""
    held = file_states(path) if known is None else known
    if held is None:
        return None
    # A report names files by the path that the run was named by.
    told = repr((_code_hash(), path, str(Path(path).absolute()), held.stamp))
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()


def _in_folder(folder: str, above: str, depth: int) -> Iterator[FileState]:
    """Yield the files of a folder, and of those in it; `above` is what leads to it from the run's folder."""
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda each: each.name)
    except OSError:
        return
    if depth and any(each.name == ".metadata" or each.name.endswith(".distcp") for each in listed):
        return
    for each in listed:
        place = above + each.name
        if each.is_dir(follow_symlinks=False):
            if depth < _MAX_DEPTH and not each.name.startswith("."):
                yield from _in_folder(each.path, f"{place}/", depth + 1)
            continue
        try:
            known, links = each.stat(), each.is_symlink()
        except OSError:
            continue
        real = os.path.realpath(each.path) if links else None
        yield FileState(place, known.st_size, known.st_mtime_ns, known.st_ctime_ns, real)


def _single_file(file: Path) -> Iterator[FileState]:
    names = [file.name, conventions.MANIFEST_FILE, *_logs_in(file.parent)]
    for name in dict.fromkeys(names):
        if seen := _file_state(file.parent / name, name):
            yield seen


def _file_state(path: Path, place: str) -> FileState | None:
    try:
        real = os.path.realpath(path) if path.is_symlink() else None
        known = path.stat()
    except OSError:
        return None
    return FileState(place, known.st_size, known.st_mtime_ns, known.st_ctime_ns, real)


def _logs_in(folder: Path) -> tuple[str, ...]:
    try:
        return _names_of_logs(str(folder), folder.stat().st_mtime_ns)
    except OSError:
        return ()


@functools.lru_cache(maxsize=64)
def _names_of_logs(folder: str, changed_ns: int) -> tuple[str, ...]:  # noqa: ARG001  # part of the cache's key
    with os.scandir(folder) as entries:
        return tuple(sorted(each.name for each in entries if each.name.endswith(_LOGS)))


@functools.cache
def _code_hash() -> str:
    """Return the hash of all code that makes a report, and of the rules with their thresholds, plugins among them."""
    package = Path(conventions.__file__).parents[1]
    rules = [(rule.code, rule.__module__, rule.__qualname__, dataclasses.asdict(rule())) for rule in all_rules()]
    plugins: list[type | ModuleType] = [rule for rule in all_rules() if rule not in RULES]
    plugins += [type(reader) for reader in readers.available() if reader not in readers.READERS]
    plugins += [importlib.import_module(point.module) for point in entry_points(group="tracekit.metrics")]
    told = {
        "code": disk_cache.code_hash(package, ("**/*.py",)),
        "libraries": [pl.__version__, np.__version__],
        "rules": rules,
        "plugins": sorted({disk_cache.plugin_hash(plugin) for plugin in plugins}),
    }
    return hashlib.sha256(json.dumps(told, default=str).encode()).hexdigest()
