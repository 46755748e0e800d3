"""A path, list, glob or URL to a Run: find the trace files, tell them apart, read each when it is needed."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import polars as pl

from tracekit import align, conventions, files, listing
from tracekit.cache import cached
from tracekit.files import File, Where
from tracekit.listing import Doubt, Listed
from tracekit.readers import kineto
from tracekit.trace import RUN_DOUBTS, Run, Source, Trace

Progress: TypeAlias = Callable[[int, int], None]


def load(where: Where, *, on_progress: Progress | None = None, cache: bool = True) -> Run:
    """Load a run: a folder of trace files, one trace file, a list or glob of them, or a URL (s3://, gs://, …).

    Only headers are read now; traces are read when a table or fact is asked for. What was left out, missing or guessed
    stands in ``run.doubts``. `on_progress(done, total)` is called after each file. With `cache`, tables parsed before
    come from the user's cache, and new ones go there. Raises InputError if something named does not exist or holds no
    trace, BadTraceError if none can be read.
    """
    found = files.find(where)
    manifests = {file.folder: file for file in found.manifests}
    listed, doubts = listing.tell(found.traces, manifests=manifests, on_progress=on_progress)
    manifest = _manifest(listed, manifests, doubts)
    kept: dict[Source, Trace] = {}
    sources = _merged(listed, kept) or [_source(t, cache) for t in listed]
    if len(sources) == 1 and not kept:
        kept = {sources[0]: sources[0].read()}  # it is read in any case, and its faults are heard of at once
    absent = {doubt.rank for doubt in doubts if doubt.kind == "unreadable"}
    doubts += listing.missing(
        [replace(listed[0], rank=s.rank, window=s.window) for s in sources], manifest.get("world_size"), absent
    )
    run = Run(found.root, sources, manifest=manifest, doubts=_table(doubts), align=align.offsets)
    run.keep(kept)
    return run


def _source(listed: Listed, use_cache: bool) -> Source:
    file = listed.file
    read = partial(_read, file, listed.rank, listed.window)
    source = Source(listed.rank, listed.window, file.path, file.size_bytes, read)
    return cached(source) if use_cache and file.system is None else source


def _read(file: File, rank: int, window: int) -> Trace:
    if file.system is None:
        return kineto.read(file.path, rank=rank, window=window)
    logs = (conventions.CHECKPOINT_LOG_SUFFIX, conventions.METRICS_SUFFIX)
    with file.local(beside=[conventions.rank_file(rank, suffix) for suffix in logs]) as path:
        return replace(kineto.read(path, rank=rank, window=window), path=file.path)


def _merged(listed: Sequence[Listed], kept: dict[Source, Trace]) -> list[Source]:
    """Return a source for each rank of a file that holds several; empty where there is no such file."""
    silent = [t for t in listed if kineto.rank_of(t.header) is None]
    if len(listed) > 1 or not silent or not _is_merged(listed[0].file.path):
        return []
    file = listed[0].file
    for rank, trace in sorted(_read_merged(file.path).items()):
        source = Source(rank, 0, file.path, file.size_bytes, partial(_of_merged, file.path, rank))
        kept[source] = trace
    return list(kept)


def _of_merged(path: str, rank: int) -> Trace:
    return _read_merged(path)[rank]


def _is_merged(path: str) -> bool:
    is_merged: Callable[[str], bool] | None = getattr(kineto, "is_merged", None)
    return is_merged is not None and is_merged(path)


def _read_merged(path: str) -> dict[int, Trace]:
    read_merged: Callable[[str], dict[int, Trace]] = getattr(kineto, "read_merged")  # noqa: B009
    return read_merged(path)


def _manifest(listed: Sequence[Listed], manifests: dict[str, File], doubts: list[Doubt]) -> dict[str, Any]:
    file = manifests.get(str(listed[0].job[0]))
    if file is None:
        return {}
    try:
        manifest = json.loads(file.text())
    except (ValueError, OSError) as error:
        message = f"{file.path}: not readable as JSON ({error}); its facts are left out"
        doubts.append(Doubt("bad_manifest", message, file.path))
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _table(doubts: Sequence[Doubt]) -> pl.DataFrame:
    if not doubts:
        return RUN_DOUBTS.empty()
    return pl.DataFrame([vars(doubt) for doubt in doubts], schema_overrides=RUN_DOUBTS.schema)
