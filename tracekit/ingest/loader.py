"""A path, list, glob or URL to a Run: find the trace files, tell them apart, read each when it is needed."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import polars as pl

from tracekit import conventions
from tracekit.ingest import discovery, files, untrusted_json
from tracekit.ingest.discovery import QualityIssue, TraceFile
from tracekit.ingest.files import File, Where
from tracekit.ingest.readers.kineto import reader
from tracekit.ingest.trace_cache import cached_source
from tracekit.model.run import RUN_DATA_QUALITY, Run, Source
from tracekit.model.trace import Trace
from tracekit.sync import alignment

Progress: TypeAlias = Callable[[int, int], None]


def load(where: Where, *, on_progress: Progress | None = None, cache: bool = True) -> Run:
    """Load a run: a folder of trace files, one trace file, a list or glob of them, or a URL (s3://, gs://, …).

    Only headers are read now; a trace is read when a table or fact is requested. ``run.data_quality`` lists what is
    missing, guessed or left out. `on_progress(done, total)` is called after each file. With `cache`, parsed tables are
    stored in the user's cache and read from there. Raises InputError if a path does not exist or has no trace,
    BadTraceError if no trace can be read.
    """
    found = files.find(where)
    manifests = {file.folder: file for file in found.manifests}
    listed, issues = discovery.identify(found.traces, manifests=manifests, on_progress=on_progress)
    manifest = _manifest(listed, manifests, issues)
    kept: dict[Source, Trace] = {}
    sources = _merged(listed, kept, issues)
    taken = {(source.window, source.rank) for source in sources}
    sources += [_source(t, cache) for t in listed if not t.is_merged and (t.window, t.rank) not in taken]
    if len(sources) == 1 and not kept:
        kept = {sources[0]: sources[0].read()}  # it is read in any case, and its faults are heard of at once
    absent = {issue.rank for issue in issues if issue.kind == "unreadable"}
    issues += discovery.missing_ranks(
        [replace(listed[0], rank=s.rank, window=s.window) for s in sources], manifest.get("world_size"), absent
    )
    run = Run(found.root, sources, manifest=manifest, data_quality=_table(issues), align=alignment.offsets)
    run.cache_traces(kept)
    return run


def _source(listed: TraceFile, use_cache: bool) -> Source:
    file = listed.file
    read = partial(_read, file, listed.rank, listed.window)
    source = Source(listed.rank, listed.window, file.path, file.size_bytes, read)
    return cached_source(source) if use_cache and file.system is None else source


def _read(file: File, rank: int, window: int) -> Trace:
    if file.system is None:
        return reader.read(file.path, rank=rank, window=window)
    logs = (conventions.CHECKPOINT_LOG_SUFFIX, conventions.METRICS_SUFFIX)
    with file.local(beside=[conventions.rank_file(rank, suffix) for suffix in logs]) as path:
        return replace(reader.read(path, rank=rank, window=window), path=file.path)


def _merged(listed: Sequence[TraceFile], kept: dict[Source, Trace], issues: list[QualityIssue]) -> list[Source]:
    """Return the sources of files that hold several ranks each, which are read into `kept` to know them."""
    found: dict[tuple[int, int], Source] = {}
    for t in (t for t in listed if t.is_merged):
        for rank, trace in sorted(reader.read_merged(t.file.path, window=t.window).items()):
            read = partial(_of_merged, t.file.path, rank, t.window)
            source = Source(rank, t.window, t.file.path, t.file.size_bytes, read)
            if found.setdefault((t.window, rank), source) is source:
                kept[source] = trace
            else:
                message = f"{t.file.path}: a second trace of rank {rank} in window {t.window}, left out"
                issues.append(QualityIssue("duplicate_rank", message, t.file.path, rank))
    return list(found.values())


def _of_merged(path: str, rank: int, window: int) -> Trace:
    return reader.read_merged(path, window=window)[rank]


def _manifest(listed: Sequence[TraceFile], manifests: dict[str, File], issues: list[QualityIssue]) -> dict[str, Any]:
    file = manifests.get(str(listed[0].job[0]))
    if file is None:
        return {}
    try:
        manifest = untrusted_json.parsed(file.text())
    except (ValueError, OSError) as error:
        message = f"{file.path}: not readable as JSON ({error}); its facts are left out"
        issues.append(QualityIssue("bad_manifest", message, file.path))
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _table(issues: Sequence[QualityIssue]) -> pl.DataFrame:
    if not issues:
        return RUN_DATA_QUALITY.empty()
    return pl.DataFrame([vars(issue) for issue in issues], schema_overrides=RUN_DATA_QUALITY.schema)
