"""The runs that the dashboard was opened on, listed from manifests, file sizes and cached reports without loading."""

import hashlib
import itertools
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dashboard import remote_catalog, settings
from dashboard.background_checks import BackgroundChecks
from dashboard.run_entry import (
    LIVE_S,
    SETTLED_S,
    RunEntry,
    is_snapshot,
    is_trace_by_name,
    may_be_trace,
    may_have_traces,
)
from tracekit import conventions
from tracekit.conventions import object_storage, regular_files
from tracekit.ingest import files
from tracekit.ingest.file_states import FileState, FileStates
from tracekit.ingest.readers import logs
from tracekit.model import units
from tracekit.model.manifest import Manifest
from tracekit.regression.history import store
from tracekit.rules import report_cache

HISTORY = "--history="
MAX_DEPTH = 3
MAX_ENTRIES = 2000
_HEAD_BYTES = 1 << 16
LISTING_TTL_S = 2.0
"""How long a listing is valid: at least this, and at least 20 times as long as it took."""
REMOTE_LISTING_TTL_S = 15.0
"""The same for URLs: each listing is a request that somebody pays for."""
_TTL_FACTOR = 20
_WINDOW = re.compile(r"window\d+")
_LOGS = (conventions.METRICS_SUFFIX, conventions.METRICS_SUFFIX + conventions.PARTIAL_SUFFIX)


@dataclass(frozen=True)
class Listing:
    """The runs by name; of more than MAX_ENTRIES only the newest."""

    entries: tuple[RunEntry, ...]
    omitted: int = 0
    skipped: tuple[str, ...] = ()
    """The folders that were not searched for runs, each with the reason."""


class Catalog:
    """The runs at some paths, shared by all sessions and listed again when the last listing has expired.

    A listing stats every file of every run, so a slow one stays valid for longer.
    """

    def __init__(self, paths: Iterable[str], clock_s: Callable[[], float] = time.monotonic) -> None:
        """Take the paths; nothing is listed yet."""
        self._paths, self._clock_s = tuple(paths), clock_s
        self.checks = BackgroundChecks()
        self._lock = threading.Lock()
        self._last: Listing | None = None
        self._until_s = 0.0

    def listing(self) -> Listing:
        """Return the runs as they are now or were a moment ago."""
        with self._lock:
            began_s = self._clock_s()
            if self._last is None or began_s >= self._until_s:
                self._last = self._with_errors(list_runs(self._paths))
                ended_s = self._clock_s()
                least_s = REMOTE_LISTING_TTL_S if any(map(object_storage.is_url, self._paths)) else LISTING_TTL_S
                self._until_s = ended_s + max(least_s, _TTL_FACTOR * (ended_s - began_s))
            return self._last

    def _with_errors(self, listing: Listing) -> Listing:
        errors = self.checks.errors
        entries = (replace(entry, check_error=errors.get(entry.stamp, "")) for entry in listing.entries)
        return replace(listing, entries=tuple(entries)) if errors else listing

    def forget(self) -> None:
        """Let the next call list again."""
        self._until_s = 0.0


def list_runs(paths: Iterable[str]) -> Listing:
    """Return the runs at `paths`: each is a run (a folder or one trace file), or a folder of runs, up to three deep.

    A path may be a URL, whose runs come last. A path that is neither becomes an entry with a `problem`, and so does a
    run with a file that links to a path outside of all `paths`. Folders that are such links are not followed.
    """
    paths = list(paths)
    local_paths = [Path(text) for text in paths if not object_storage.is_url(text)]
    roots = tuple({os.path.realpath(path if _is(path.is_dir) else path.parent): None for path in local_paths})
    skipped: list[str] = []
    runs = [run for root in local_paths for run in _runs_at(root, roots, skipped)]
    newest = set(sorted(range(len(runs)), key=lambda number: (_changed_ns(runs[number][1]), number))[-MAX_ENTRIES:])
    by_name: dict[str, RunEntry] = {}
    for name, path in (run for number, run in enumerate(runs) if number in newest):
        name = _unique_name(name, by_name)
        by_name[name] = entry(name, path, roots)
    remote = [run for url in paths if object_storage.is_url(url) for run in remote_catalog.list_runs(url)]
    for remote_run in remote[: max(MAX_ENTRIES - len(by_name), 0)]:
        name = _unique_name(remote_run.name, by_name)
        by_name[name] = replace(remote_run, name=name)
    return Listing(tuple(by_name.values()), len(runs) + len(remote) - len(by_name), tuple(skipped))


def entry(name: str, path: Path, roots: tuple[str, ...], *, is_private: bool = False) -> RunEntry:
    """Return the entry of one run, without reading its traces."""
    is_folder = _is(path.is_dir)
    if not is_folder and not _is(path.is_file):
        return RunEntry(name, str(path), problem=f"{path}: there is no such file, or no such folder that can be read")
    state = report_cache.run_states(str(path))
    run_files = state.files if state else ()
    # A file that was named itself is what its content says; the page says so if it is no snapshot.
    pickles = [file for file in run_files if is_snapshot(_name_of(file)) or (not is_folder and _is_pickle(file))]
    traces = [
        file for file in run_files if may_have_traces(_name_of(file)) and not (pickles and _is_other_json(path, file))
    ]
    snapshots = [] if traces else pickles
    # An unreadable manifest leaves a few cells of the list empty; loading the run reports the error.
    is_readable = is_folder and not link_outside(state, roots)
    manifest = (logs.read_manifest(path / conventions.MANIFEST_FILE) if is_readable else None) or Manifest()
    is_live = not is_private and _changed_within(run_files, LIVE_S)
    problem = _problem(path, state, roots, has_traces=bool(traces), snapshots=len(snapshots), is_live=is_live)
    return RunEntry(
        name,
        str(path),
        stamp=_stamp(path, state),
        files=len(traces),
        snapshots=0 if link_outside(state, roots) else len(snapshots),
        has_snapshots=bool(pickles),
        size_bytes=sum(file.size_bytes for file in traces or snapshots),
        role=manifest.role or "",
        strategy=manifest.strategy or "",
        model=manifest.model.name,
        world_size=manifest.world_size,
        created_ns=manifest.created_ns or max((file.changed_ns for file in run_files), default=None),
        problem=problem,
        is_live=is_live,
        traces_stamp=_traces_stamp(run_files),
        is_private=is_private,
        roots=roots,
        summary=None if problem or is_private else report_cache.summary(str(path), state, settings.read_settings()),
    )


def link_outside(state: FileStates | None, roots: Sequence[str]) -> str:
    """Return the file of a run that links to a path outside of `roots`; '' if there is none."""
    links = ((file.path, file.links_to) for file in (state.files if state else ()) if file.links_to is not None)
    return next((path for path, real in links if not _is_inside(Path(real), roots)), "")


def history_file(arguments: Iterable[str]) -> Path | None:
    """Return the history to show: that of ``--history=FILE``, else history.duckdb in a folder of the arguments."""
    arguments = list(arguments)
    for argument in arguments:
        if argument.startswith(HISTORY):
            return Path(argument.removeprefix(HISTORY))
    candidates = (Path(argument) / store.FILE for argument in arguments)
    return next((path for path in candidates if _is(path.is_file) and not path.is_symlink()), None)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def _runs_at(root: Path, roots: Sequence[str], skipped: list[str]) -> Iterator[tuple[str, Path]]:
    yield from list(_runs_below(root, root, roots, skipped, depth=0)) or [(root.name or str(root), root)]


def _runs_below(
    folder: Path, root: Path, roots: Sequence[str], skipped: list[str], *, depth: int
) -> Iterator[tuple[str, Path]]:
    if _is(folder.is_file):
        yield root.resolve().name, folder
        return
    try:
        with os.scandir(folder) as listed:
            children = list(listed)
    except OSError as error:
        skipped.append(f"{folder}: {error.strerror or 'cannot be read'}")
        return
    name = str(folder.relative_to(root)) if folder != root else root.resolve().name
    if _contains_traces(children, is_trace_by_name):
        yield name, folder
        return
    followed = _folders_to_search(children, roots, skipped, depth=depth)
    runs = [run for child in followed for run in _runs_below(child, root, roots, skipped, depth=depth + 1)]
    yield from runs
    # Without runs below, any JSON file may be a trace, and an archive may have some; a training may also have written
    # only its logs so far.
    has_logs = depth > 0 and any(child.name.endswith(_LOGS) for child in children)
    if not runs and (has_logs or _contains_traces(children, lambda name: may_have_traces(name) or is_snapshot(name))):
        yield name, folder


def _folders_to_search(
    children: Sequence[os.DirEntry[str]], roots: Sequence[str], skipped: list[str], *, depth: int
) -> list[Path]:
    """Return the folders among `children` in which runs may be, in their order; add the others to `skipped`."""
    inner = [Path(child.path) for child in children if not child.name.startswith(".") and _is(child.is_dir)]
    if depth >= MAX_DEPTH:
        skipped += [f"{path}: more than {MAX_DEPTH} folders deep; open the dashboard on it" for path in inner]
        return []
    outside = [path for path in inner if path.is_symlink() and not _may_follow(path, roots)]
    skipped += [f"{path}: a link out of the folders that the dashboard was opened on" for path in outside]
    return sorted(set(inner).difference(outside), key=lambda path: files.natural_key(path.name))


def _contains_traces(children: Sequence[os.DirEntry[str]], is_trace: Callable[[str], bool]) -> bool:
    if any(is_trace(child.name) and _is(child.is_file) for child in children):
        return True
    windows = (sub for sub in children if _WINDOW.fullmatch(sub.name) and _is(sub.is_dir) and not sub.is_symlink())
    return any(is_trace(name) for window in windows for name in _names_in(window.path))


def _is(kind: Callable[[], bool]) -> bool:
    try:
        return kind()
    except OSError:  # a loop of links, or a link into a folder without permission
        return False


def _names_in(folder: str) -> Sequence[str]:
    try:
        return [path.name for path in Path(folder).iterdir()]
    except OSError:
        return ()


def _is_inside(real: Path, roots: Sequence[str]) -> bool:
    return any(real.is_relative_to(root) for root in roots)


def _may_follow(link: Path, roots: Sequence[str]) -> bool:
    """Return whether a linked folder is inside of `roots` and not above the link itself."""
    real = link.resolve()
    return _is_inside(real, roots) and not link.parent.resolve().is_relative_to(real)


def _problem(
    path: Path, state: FileStates | None, roots: Sequence[str], *, has_traces: bool, snapshots: int, is_live: bool
) -> str:
    linked = link_outside(state, roots)
    if linked:
        return (
            f"{path}: {linked} is a link to a path outside of those the dashboard was opened on, so this run is not "
            "read; put the file itself there, or open the dashboard on that path, too"
        )
    if has_traces:
        return ""
    if snapshots:
        return f"{path}: {units.count(snapshots, 'memory snapshot')} and no trace; the page Memory shows this run"
    if is_live:
        return f"{path}: no trace yet; the training is being recorded: wait for its first profiled window"
    return (
        f"{path}: no trace files (*.json, *.json.gz) here or in subfolders; open another folder, or record a run "
        "into it: tracekit record -- COMMAND"
    )


def _stamp(path: Path, state: FileStates | None) -> str:
    text = f"{path}\0{state.stamp if state else ''}"
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _traces_stamp(run_files: Sequence[FileState]) -> str:
    traces = tuple(
        file for file in run_files if may_be_trace(_name_of(file)) or _name_of(file) == conventions.MANIFEST_FILE
    )
    return "" if _changed_within(traces, SETTLED_S) else FileStates(traces).stamp


def _changed_within(run_files: Iterable[FileState], seconds: float) -> bool:
    now_ns = time.time_ns()
    return any(abs(now_ns - file.changed_ns) < seconds * 1e9 for file in run_files)  # a clock may be set back


def _name_of(file: FileState) -> str:
    return file.path.rpartition("/")[2]


def _is_other_json(folder: Path, file: FileState) -> bool:
    """Return whether a JSON file that is not named as a trace does not begin as one, such as a configuration."""
    name = _name_of(file)
    if is_trace_by_name(name) or not name.lower().endswith(".json"):
        return False
    try:
        with regular_files.open_to_read(folder / file.path) as stream:
            return b'"traceEvents"' not in stream.read(_HEAD_BYTES)
    except OSError:
        return False


def _is_pickle(file: FileState) -> bool:
    return _name_of(file).lower().endswith(conventions.PICKLE_SUFFIXES)


def _unique_name(name: str, used_names: Mapping[str, RunEntry]) -> str:
    # A name that is not valid text (bytes in another encoding) cannot be sent to a browser.
    name = name.encode("utf-8", "replace").decode()
    names = itertools.chain([name], (f"{name} ({number})" for number in itertools.count(2)))
    return next(candidate for candidate in names if candidate not in used_names)
