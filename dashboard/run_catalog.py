"""The runs that the dashboard was opened on, listed by manifests, file sizes and kept reports, without loading any."""

import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tracekit import conventions
from tracekit.ingest import files, readers, untrusted_json
from tracekit.model.run import created_ns
from tracekit.regression.history import store
from tracekit.rules import report_cache
from tracekit.rules.report_cache import Summary, keys
from tracekit.rules.report_cache.keys import FileState, FileStates

HISTORY = "--history="
MAX_DEPTH = 3
MAX_ENTRIES = 2000
LISTING_TTL_S = 2.0
"""A listing is taken for true for so long, and for 20 times as long as it took."""
LIVE_S = 20.0
"""A run whose files changed so lately is taken as being recorded."""
SETTLED_S = 2.0
"""A trace that did not change for so long is taken as written to its end."""
_MAX_MANIFEST_BYTES = 1 << 20
_TTL_FACTOR = 20
_MAX_WORLD_SIZE = 1 << 31
_WINDOW = re.compile(r"window\d+")
_LOGS = (conventions.METRICS_SUFFIX, conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX)


@dataclass(frozen=True)
class RunEntry:
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
    """When it was recorded: by its manifest, else by the newest of its files."""
    problem: str = ""
    """Why it cannot be opened, where that shows without reading a trace."""
    is_live: bool = False
    """Whether its files changed a moment ago: the training may still run."""
    traces_stamp: str = ""
    """Changes when one of its traces or its manifest does; '' while one is still being written."""
    is_private: bool = False
    """Whether somebody dropped it into a page: nobody else sees it, and nothing of it is kept."""
    roots: tuple[str, ...] = ()
    """The real paths that its files may lie in."""
    summary: Summary | None = None
    """What it came to when it was checked; None where it was not, as it lies there now."""


@dataclass(frozen=True)
class Listing:
    """Runs as they lie there: of more than MAX_ENTRIES the newest, in the order of their names."""

    entries: tuple[RunEntry, ...]
    omitted: int = 0


class Catalog:
    """The runs at some paths, for all who look: listed anew when the last listing is old.

    To list looks at every file of every run, so what takes long is listed less often.
    """

    def __init__(self, paths: Iterable[str], clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take the paths; runs are looked for when they are asked for."""
        self._paths, self._clock_s = tuple(paths), clock_s
        self._lock = threading.Lock()
        self._last: Listing | None = None
        self._until_s = 0.0

    def listing(self) -> Listing:
        """Return the runs as they are now, or were a moment ago."""
        with self._lock:
            began_s = self._clock_s()
            if self._last is None or began_s >= self._until_s:
                self._last = list_runs(self._paths)
                ended_s = self._clock_s()
                self._until_s = ended_s + max(LISTING_TTL_S, _TTL_FACTOR * (ended_s - began_s))
            return self._last

    def forget(self) -> None:
        """List anew when asked next."""
        self._until_s = 0.0


def entries(paths: Iterable[str]) -> tuple[RunEntry, ...]:
    """Return the entries of `listed`."""
    return list_runs(paths).entries


def list_runs(paths: Iterable[str]) -> Listing:
    """Return the runs at `paths`: each is a run (a folder or one trace file), or a folder of them, up to three deep.

    A path that is neither becomes an entry with a `problem`, and so does a run with a file that is a link to a place
    outside of all `paths`. Folders that are such links are not followed.
    """
    named = [Path(text) for text in paths]
    roots = tuple({os.path.realpath(path if _is_dir(path) else path.parent): None for path in named})
    places = [place for root in named for place in _runs_at(root, roots)]
    found: dict[str, RunEntry] = {}
    for name, path in _newest_runs(places):
        name = _unique_name(name, found)
        found[name] = entry(name, path, roots)
    return Listing(tuple(found.values()), len(places) - len(found))


def entry(name: str, path: Path, roots: tuple[str, ...], *, is_private: bool = False) -> RunEntry:
    """Return what is known of one run without reading a trace of it."""
    if not _is_dir(path) and not _is_file(path):
        return RunEntry(name, str(path), problem=f"{path}: there is no such file or folder that can be looked into")
    state = keys.file_states(str(path))
    held = state.files if state else ()
    traces = [file for file in held if _may_be_trace(_name_of(file))]
    changed_ns = max((file.changed_ns for file in held), default=None)
    manifest = _manifest(path / conventions.MANIFEST_FILE) if _is_dir(path) and not link_outside(state, roots) else {}
    model = manifest.get("model")
    is_live = not is_private and _changed_within(held, LIVE_S)
    problem = _problem(path, state, roots, has_traces=bool(traces), is_live=is_live)
    return RunEntry(
        name,
        str(path),
        stamp=_stamp(path, state),
        files=len(traces),
        size_bytes=sum(file.size_bytes for file in traces),
        strategy=str(manifest.get("strategy") or ""),
        model=str(model.get("name", "")) if isinstance(model, dict) else str(model or ""),
        world_size=_world_size(manifest),
        created_ns=created_ns(manifest) or changed_ns,
        problem=problem,
        is_live=is_live,
        traces_stamp=_traces_stamp(held),
        is_private=is_private,
        roots=roots,
        summary=None if problem or is_private else report_cache.summary(str(path), state),
    )


def link_outside(state: FileStates | None, roots: Sequence[str]) -> str:
    """Return the file of a run that is a link to a place outside of `roots`; '' where none is."""
    links = [file for file in (state.files if state else ()) if file.links_to is not None]
    for file in links:
        real = Path(str(file.links_to))
        if not any(real.is_relative_to(root) for root in roots):
            return file.path
    return ""


def history_file(words: Iterable[str]) -> Path | None:
    """Return the history to show: the one named by ``--history=FILE``, else history.duckdb in a folder given."""
    given = list(words)
    for word in given:
        if word.startswith(HISTORY):
            return Path(word.removeprefix(HISTORY))
    beside = (Path(word) / store.FILE for word in given)
    return next((path for path in beside if _is_file(path) and not path.is_symlink()), None)


def _newest_runs(places: Sequence[tuple[str, Path]]) -> Sequence[tuple[str, Path]]:
    """Return the MAX_ENTRIES places that changed last, in the order that they came in."""
    if len(places) <= MAX_ENTRIES:
        return places
    by_age = sorted(range(len(places)), key=lambda number: (_changed_ns(places[number][1]), number))
    return [places[number] for number in sorted(by_age[-MAX_ENTRIES:])]


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _runs_at(root: Path, roots: Sequence[str]) -> Iterator[tuple[str, Path]]:
    below = list(_runs_below(root, root, roots, depth=0))
    if below:
        yield from below
    else:
        yield root.name or str(root), root


def _runs_below(folder: Path, root: Path, roots: Sequence[str], *, depth: int) -> Iterator[tuple[str, Path]]:
    if _is_file(folder):
        yield root.resolve().name, folder
        return
    try:
        with os.scandir(folder) as listed:
            children = list(listed)
    except OSError:
        return
    name = str(folder.relative_to(root)) if folder != root else root.resolve().name
    sure = _contains_traces(children, _is_trace_by_name)
    if sure:
        yield name, folder
        return
    folders = [each for each in children if _is_dir(each) and not each.name.startswith(".")] * (depth < MAX_DEPTH)
    folders.sort(key=lambda each: files.natural_key(each.name))
    some = False
    for child in folders:
        if not child.is_symlink() or _is_link_inside(Path(child.path), roots):
            for found in _runs_below(Path(child.path), root, roots, depth=depth + 1):
                some = True
                yield found
    # Any JSON file may be a trace, unless there are runs below; without one a training may not have written it yet.
    if not some and (_contains_traces(children, _may_be_trace) or (depth and _has_logs(children))):
        yield name, folder


def _contains_traces(children: Sequence[os.DirEntry[str]], is_trace: Callable[[str], bool]) -> bool:
    if any(is_trace(each.name) and _is_file(each) for each in children):
        return True
    windows = (each for each in children if _WINDOW.fullmatch(each.name) and _is_dir(each) and not each.is_symlink())
    return any(is_trace(name) for window in windows for name in _names_in(window.path))


def _is_dir(place: Path | os.DirEntry[str]) -> bool:
    try:
        return place.is_dir()
    except OSError:  # a loop of links, or a link into a folder that is closed to us
        return False


def _is_file(place: Path | os.DirEntry[str]) -> bool:
    try:
        return place.is_file()
    except OSError:
        return False


def _names_in(folder: str) -> Sequence[str]:
    try:
        return [each.name for each in Path(folder).iterdir()]
    except OSError:
        return ()


def _has_logs(children: Sequence[os.DirEntry[str]]) -> bool:
    return any(each.name.endswith(_LOGS) for each in children)


def _is_trace_by_name(name: str) -> bool:
    return _may_be_trace(name) and ("trace" in name.lower() or "rank" in name.lower() or not name.endswith(".json"))


def _may_be_trace(name: str) -> bool:
    other = (conventions.MANIFEST_FILE, conventions.TRUTH_FILE)
    return name.lower().endswith(readers.trace_suffixes()) and not name.startswith(".") and name not in other


def _is_link_inside(link: Path, roots: Sequence[str]) -> bool:
    """Return whether a linked folder lies in what was named, and not above itself."""
    real = link.resolve()
    return any(real.is_relative_to(root) for root in roots) and not link.parent.resolve().is_relative_to(real)


def _problem(path: Path, state: FileStates | None, roots: Sequence[str], *, has_traces: bool, is_live: bool) -> str:
    linked = link_outside(state, roots)
    if linked:
        return (
            f"{path}: {linked} is a link to a place that the dashboard was not opened on, so nothing of this run is "
            "read; put the file itself there, or name that place, too"
        )
    if has_traces:
        return ""
    if is_live:
        return f"{path}: no trace yet; the training is being recorded, so wait for its first profiled window"
    return (
        f"{path}: no trace files (*.json, *.json.gz) here or in folders below; open another folder, or record a run "
        "into it: tracekit record -- COMMAND"
    )


def _stamp(path: Path, state: FileStates | None) -> str:
    told = f"{path}\0{state.stamp if state else ''}"
    return hashlib.sha256(told.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _traces_stamp(held: Sequence[FileState]) -> str:
    told = tuple(file for file in held if _may_be_trace(_name_of(file)) or _name_of(file) == conventions.MANIFEST_FILE)
    return "" if _changed_within(told, SETTLED_S) else FileStates(told).stamp


def _changed_within(held: Iterable[FileState], seconds: float) -> bool:
    now_ns = time.time_ns()
    return any(now_ns - file.changed_ns < seconds * 1e9 for file in held)


def _name_of(file: FileState) -> str:
    return file.path.rpartition("/")[2]


def _manifest(path: Path) -> dict[str, Any]:
    # A manifest that cannot be read costs the list a few cells, not the run: loading it will say what is wrong.
    try:
        if path.stat().st_size > _MAX_MANIFEST_BYTES:
            return {}
        manifest = untrusted_json.parse(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _world_size(manifest: Mapping[str, Any]) -> int | None:
    told = manifest.get("world_size")
    is_count = isinstance(told, int) and not isinstance(told, bool) and 0 < told < _MAX_WORLD_SIZE
    return told if is_count else None


def _unique_name(name: str, taken: Iterable[str]) -> str:
    # A name that is no text (bytes of another time's encoding) cannot be sent to a browser.
    name = name.encode("utf-8", "replace").decode()
    names, number, chosen = set(taken), 2, name
    while chosen in names:
        chosen, number = f"{name} ({number})", number + 1
    return chosen
