"""The runs that an agent may read: those in the folders that the server was started with, and nothing else."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from tracekit import conventions
from tracekit.errors import InputError, did_you_mean
from tracekit.ingest import archives, files, readers
from tracekit.ingest.readers import logs
from tracekit.model.manifest import Manifest
from tracekit.rules import report_cache

MAX_DEPTH = 3
MAX_RUNS = 500


class Roots:
    """Folders of runs, runs, files of runs and folders of hang dumps, by names that an agent uses."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Take the paths. Raises InputError where one does not exist."""
        for path in paths:
            if not path.exists():
                raise InputError(f"{path}: there is no such file or folder; check the path")
        self._paths = [path.resolve() for path in paths]

    def runs(self) -> dict[str, Path]:
        """Paths by name, as they are now; a link that leads out of all roots is none of them."""
        by_name: dict[str, Path] = {}
        for root in self._paths:
            for path in self._runs_below(root, MAX_DEPTH):
                name = root.name if path == root else f"{root.name}/{path.relative_to(root)}"
                if len(by_name) < MAX_RUNS:
                    by_name.setdefault(name.encode("utf-8", "replace").decode(), path)
        return by_name

    def path(self, name: str) -> str:
        """The path of a run. Raises InputError for a name that `runs` does not have, also for a path.

        A run with a file that links out of all roots is refused, too.
        """
        runs = self.runs()
        if name not in runs:
            raise InputError(f"{name}: no run has this name{did_you_mean(name, runs)}; list_runs gives the names")
        linked = self.link_outside(runs[name])
        if linked:
            raise InputError(f"{name}: {linked} links out of the folders of this server, so it is not read")
        return str(runs[name])

    def job(self, path: str) -> tuple[str, str | None]:
        """What to load for a run: its job's folder and its role there, where runs beside it state other roles."""
        folder, role = Path(path).parent, manifest(Path(path)).role
        if role is None or not self._contains(folder) or self.link_outside(folder):
            return path, None
        stated = {manifest(other).role for other in _folders(folder) if self._contains(other)}
        return (str(folder), role) if stated - {None, role} else (path, None)

    def link_outside(self, path: Path) -> str:
        """The first file of a run that links out of all roots; "" without one."""
        states = report_cache.run_states(str(path))
        links = ((file.path, file.links_to) for file in (states.files if states else ()) if file.links_to is not None)
        return next((file for file, target in links if not self._contains(Path(target))), "")

    def _runs_below(self, folder: Path, depth: int) -> Iterator[Path]:
        if not self._contains(folder):
            return
        names = None if folder.is_file() else _names(folder)
        if names is None or any(map(_is_of_run, names)):
            yield folder
            return
        runs = [run for child in _folders(folder) for run in self._runs_below(child, depth - 1)] if depth else []
        yield from runs
        # Without runs below, any JSON file may be a trace, and an archive may have some.
        if not runs and any(map(_may_have_traces, names)):
            yield folder

    def _contains(self, path: Path) -> bool:
        real = Path(os.path.realpath(path))
        return any(real.is_relative_to(root) for root in self._paths)


def manifest(path: Path) -> Manifest:
    """What run.json states of a run; an empty one without it."""
    return (logs.read_manifest(path / conventions.MANIFEST_FILE) if path.is_dir() else None) or Manifest()


def contents(path: Path) -> list[str]:
    """What a run has, by the names of its files: traces, memory snapshots, hang dumps."""
    states = report_cache.run_states(str(path))
    names = [file.path.rpartition("/")[2].lower() for file in states.files] if states else []
    names += [name.lower() for name in _names(path)] if path.is_dir() else [path.name.lower()]
    kinds = {
        "traces": any(map(_is_named_trace, names)),
        "memory snapshots": any(name.endswith(conventions.SNAPSHOT_SUFFIXES) for name in names),
        "hang dumps": any(name.endswith(conventions.HANG_SUFFIX) for name in names),
    }
    # A JSON file of any other name is a trace at most where nothing else is there.
    kinds["traces"] |= not any(kinds.values()) and any(map(_may_have_traces, names))
    return [kind for kind, is_there in kinds.items() if is_there]


def _is_of_run(name: str) -> bool:
    """Return whether a file of this name makes its folder a run."""
    other = (conventions.HANG_SUFFIX, *conventions.SNAPSHOT_SUFFIXES)
    return name == conventions.MANIFEST_FILE or name.lower().endswith(other) or _is_named_trace(name)


def _is_named_trace(name: str) -> bool:
    """Return whether a file is a trace by its name: a JSON file may be anything, unless its name says."""
    lower = name.lower()
    other = (conventions.TRUTH_FILE, conventions.MANIFEST_FILE, conventions.HANG_SUFFIX, *conventions.SNAPSHOT_SUFFIXES)
    is_named = "trace" in lower or "rank" in lower or not lower.endswith(".json")
    return readers.may_have_traces(lower) and is_named and not lower.endswith(other)


def _may_have_traces(name: str) -> bool:
    lower = name.lower()
    return readers.may_have_traces(lower) or lower.endswith(archives.SUFFIXES)


def _names(folder: Path) -> list[str]:
    try:
        return [child.name for child in folder.iterdir() if child.is_file() and not child.name.startswith(".")]
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
    try:
        children = [child for child in folder.iterdir() if child.is_dir() and not child.name.startswith(".")]
    except OSError:
        return []
    return sorted(children, key=lambda child: files.natural_key(child.name))
