"""The runs behind a URL, listed from object names and manifests: no trace is downloaded.

A run is listed only below a URL that the dashboard was started with; nothing that a browser sends is opened as a URL.
"""

import hashlib
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from dashboard import settings
from dashboard.run_entry import LIVE_S, SETTLED_S, RunEntry, is_trace_by_name
from tracekit import conventions
from tracekit.conventions import object_storage
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import files
from tracekit.ingest.readers import manifest as manifests
from tracekit.ingest.remote import RemoteFile
from tracekit.ingest.remote_listing import MAX_CONCURRENT_REQUESTS
from tracekit.model.manifest import Manifest
from tracekit.rules import report_cache

LISTING_TTL_S = 15.0
"""How long a listing of a URL is valid at least: each one is a request that somebody pays for."""
_WINDOW = re.compile(r"window\d+")


@dataclass(frozen=True)
class _RemoteRun:
    """A run behind a URL: its name, its URL, and its files."""

    name: str
    url: str
    files: tuple[RemoteFile, ...]


def list_runs(url: str) -> list[RunEntry]:
    """Return the runs behind a URL: a run, one trace, a glob, or a folder with runs below it.

    A URL that cannot be listed, or has no run, becomes an entry with a `problem`.
    """
    name = object_storage.shown(url).rstrip("/").rpartition("/")[2] or object_storage.shown(url)
    try:
        listing = files.list_remote(url)
    except InputError as error:
        return [RunEntry(name, url, problem=str(error))]
    if listing.is_single or files.is_glob(url):
        return [_entry(_RemoteRun(name, url, listing.files))]
    runs = list(_runs(url.rstrip("/"), name, listing.files))
    if not runs:
        problem = f"{object_storage.shown(url)}: no trace files there; name the folder of a run, or a folder of runs"
        return [RunEntry(name, url, problem=problem)]
    with ThreadPoolExecutor(MAX_CONCURRENT_REQUESTS) as pool:
        return list(pool.map(_entry, runs))


def _runs(url: str, name: str, listed: Sequence[RemoteFile]) -> Iterator[_RemoteRun]:
    """Yield the folders with traces, each with the files in it and below: a run contains no other run."""
    with_traces = sorted({_run_folder(file) for file in listed if is_trace_by_name(file.name)}, key=files.natural_key)
    roots: list[str] = []
    for folder in with_traces:
        if not any(f"{folder}/".startswith(f"{root}/") for root in roots):
            roots.append(folder)
    for root in roots:
        run_files = tuple(file for file in listed if file.url.startswith(f"{root}/"))
        yield _RemoteRun(root.removeprefix(url).strip("/") or name, root, run_files)


def _run_folder(trace: RemoteFile) -> str:
    """Return the URL of the run that a trace is of: its folder, or of a profiled window the folder above."""
    folder = trace.url.rpartition("/")[0]
    above, _, last = folder.rpartition("/")
    return above if _WINDOW.fullmatch(last) else folder


def _entry(run: _RemoteRun) -> RunEntry:
    traces = [file for file in run.files if is_trace_by_name(file.name)]
    state = report_cache.remote_states(run.files, run.url)
    manifest = _manifest(run)
    return RunEntry(
        run.name,
        run.url,
        stamp=_stamp(run.url, run.files),
        files=len(traces),
        size_bytes=sum(file.size_bytes or 0 for file in traces),
        strategy=manifest.strategy or "",
        model=manifest.model.name,
        world_size=manifest.world_size,
        created_ns=manifest.created_ns or max((file.changed_ns or 0 for file in run.files), default=0) or None,
        is_live=_changed_within(run.files, LIVE_S),
        traces_stamp="" if _changed_within(traces, SETTLED_S) else _stamp(run.url, traces),
        summary=report_cache.summary(run.url, state, settings.read_settings()) if state else None,
    )


def _manifest(run: _RemoteRun) -> Manifest:
    of_run: Mapping[str, RemoteFile] = {file.url: file for file in run.files}
    file = of_run.get(f"{run.url}/{conventions.MANIFEST_FILE}")
    if file is None:
        return Manifest()
    try:
        return Manifest.of(manifests.parse(files.File(file.shown, file.size_bytes or 0, file).text()))
    except (ValueError, OSError, BadTraceError):
        return Manifest()  # loading the run reports the error


def _stamp(url: str, run_files: Sequence[RemoteFile]) -> str:
    """Digest that changes with the files; without versions, with their number and sizes."""
    text = "\0".join([url, *sorted(f"{file.url} {file.size_bytes} {file.version}" for file in run_files)])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:24]


def _changed_within(run_files: Sequence[RemoteFile], seconds: float) -> bool:
    now_ns = time.time_ns()
    return any(file.changed_ns is not None and abs(now_ns - file.changed_ns) < seconds * 1e9 for file in run_files)
