"""The runs that the dashboard was opened on, listed by their manifests and file sizes, without loading any."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.history import store

HISTORY = "--history="
MAX_DEPTH = 3
MAX_ENTRIES = 2000
_MAX_MANIFEST_BYTES = 1 << 20
_TRACE_ENDINGS = (".json", ".json.gz")


@dataclass(frozen=True)
class Entry:
    """One run as it lies on disk: `name` is unique in the catalog, `stamp` changes when a file of the run does."""

    name: str
    path: str
    stamp: str = ""
    files: int = 0
    size_bytes: int = 0
    strategy: str = ""
    model: str = ""
    world_size: int | None = None
    created_ns: int | None = None
    problem: str = ""
    """Why it cannot be opened, where that shows without reading a trace."""


def entries(paths: Iterable[str]) -> tuple[Entry, ...]:
    """Return the runs at `paths`: each is a run (a folder or one trace file), or a folder of them, up to three deep.

    A path that is neither becomes an entry with a `problem`. Links that lead out of the folder given are not followed.
    """
    found: dict[str, Entry] = {}
    for text in paths:
        for name, path in _runs_at(Path(text)):
            name = _unused(name, found)
            found[name] = _entry(name, path)
            if len(found) >= MAX_ENTRIES:
                return tuple(found.values())
    return tuple(found.values())


def history_file(words: Iterable[str]) -> Path | None:
    """Return the history to show: the one named by ``--history=FILE``, else history.duckdb in a folder given."""
    given = list(words)
    for word in given:
        if word.startswith(HISTORY):
            return Path(word.removeprefix(HISTORY))
    beside = (Path(word) / store.FILE for word in given)
    return next((path for path in beside if path.is_file()), None)


def _runs_at(root: Path) -> Iterator[tuple[str, Path]]:
    below = list(_runs_below(root, root, depth=0))
    if below:
        yield from below
    else:
        yield root.name or str(root), root


def _runs_below(folder: Path, root: Path, *, depth: int) -> Iterator[tuple[str, Path]]:
    if folder.is_file() or (folder.is_dir() and _trace_files(folder)):
        yield (str(folder.relative_to(root)) if folder != root else root.resolve().name), folder
        return
    if depth == MAX_DEPTH or not folder.is_dir():
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.name.startswith(".") and child.resolve().is_relative_to(root.resolve()):
            yield from _runs_below(child, root, depth=depth + 1)


def _trace_files(folder: Path) -> list[Path]:
    """Return the files of a run that lie in its folder, in order; those of further windows one folder below."""
    windows = [child for child in folder.glob("window[0-9]*") if child.is_dir()]
    return sorted(
        file
        for place in (folder, *windows)
        for file in place.iterdir()
        if file.name.endswith(_TRACE_ENDINGS) and file.name != conventions.MANIFEST_FILE and file.is_file()
    )


def _entry(name: str, path: Path) -> Entry:
    if not path.exists():
        return Entry(name, str(path), problem=f"{path}: there is no such file or folder")
    files = [path] if path.is_file() else _trace_files(path)
    if not files:
        return Entry(name, str(path), problem=f"{path}: no trace files (*.json, *.json.gz) here or in folders below")
    stats = [file.stat() for file in files]
    manifest = {} if path.is_file() else _manifest(path / conventions.MANIFEST_FILE)
    model, world_size, created_ns = (manifest.get(key) for key in ("model", "world_size", "created_ns"))
    return Entry(
        name,
        str(path),
        stamp=f"{max(stat.st_mtime_ns for stat in stats)}-{len(files)}-{sum(stat.st_size for stat in stats)}",
        files=len(files),
        size_bytes=sum(stat.st_size for stat in stats),
        strategy=str(manifest.get("strategy", "")),
        model=str(model.get("name", "")) if isinstance(model, dict) else str(model or ""),
        world_size=world_size if isinstance(world_size, int) else None,
        created_ns=created_ns if isinstance(created_ns, int) else None,
    )


def _manifest(path: Path) -> dict[str, Any]:
    # A manifest that cannot be read costs the list a few cells, not the run: loading it will say what is wrong.
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            return {}
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _unused(name: str, taken: Iterable[str]) -> str:
    names, number, chosen = set(taken), 2, name
    while chosen in names:
        chosen, number = f"{name} ({number})", number + 1
    return chosen
