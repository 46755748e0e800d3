"""A path to a Run: find the trace files, tell ranks apart, read each once."""

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import polars as pl

from tracekit import conventions
from tracekit.cache import cached
from tracekit.errors import BadTraceError, InputError
from tracekit.readers import kineto, stream
from tracekit.trace import RUN_DOUBTS, Run, Source, Trace

_RANK_IN_NAME = (re.compile(r"rank[-_]?(\d+)", re.I), re.compile(r"(?:^|[_-])(\d+)(?:[._-]|$)"))
_NOT_TRACES = (conventions.MANIFEST_FILE,)

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Doubt:
    kind: str
    message: str
    path: str | None = None
    rank: int | None = None
    doubtful_ratio: float = 0.0


def load(path: str | Path, *, on_progress: Progress | None = None, cache: bool = True) -> Run:
    """Load a run folder, a folder of trace files, or one trace file.

    A file that cannot be read while others can becomes a row of ``run.doubts``. `on_progress(done, total)` is called
    after each file. With `cache`, tables parsed before come from the user's cache, and new ones go there. Raises
    InputError if the path is missing or holds no trace, BadTraceError if none can be read.
    """
    root = Path(path)
    files = list(_find(root))
    if not files:
        raise InputError(
            f"{root}: no trace files (*.json, *.json.gz) in this folder; name a run's folder or a trace file"
        )
    doubts: list[_Doubt] = []
    placed = _place(files, doubts)
    if cache:
        placed = [cached(source) for source in placed]
    kept: dict[Source, Trace] = {}
    for done, source in enumerate(placed, 1):
        try:
            kept[source] = source.read()
        except BadTraceError as error:
            if len(files) == 1:
                raise
            doubts.append(_Doubt("unreadable", str(error), source.path, source.rank, 1 / len(files)))
        if on_progress:
            on_progress(done, len(placed))
    if not kept:
        raise BadTraceError(doubts[0].message)
    manifest = _manifest(root if root.is_dir() else root.parent, doubts)
    doubts += _missing_ranks(kept, manifest, doubts)
    run = Run(str(root), kept, manifest=manifest, doubts=_table(doubts))
    run.keep(kept)
    return run


def _find(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield the trace files of a run with the number of their window."""
    if root.is_file():
        yield root, 0
        return
    if not root.exists():
        raise InputError(f"{root}: no such file or folder; check the path")
    own = sorted(p for p in root.iterdir() if _looks_like_trace(p))
    for path in own:
        yield path, 0
    folders = sorted(p for p in root.iterdir() if p.is_dir() and p.name.startswith("window"))
    for window, folder in enumerate(folders, 1):
        for path in sorted(p for p in folder.iterdir() if _looks_like_trace(p)):
            yield path, window


def _looks_like_trace(path: Path) -> bool:
    return path.is_file() and path.name.endswith((".json", ".json.gz")) and path.name not in _NOT_TRACES


def _place(files: list[tuple[Path, int]], doubts: list[_Doubt]) -> list[Source]:
    """Tell which rank each file is: by its header, else its name, else its order."""
    sources: list[Source] = []
    taken: set[tuple[int, int]] = set()
    for order, (path, window) in enumerate(files):
        try:
            header = stream.read_header(str(path))
        except BadTraceError as error:
            if len(files) == 1:
                raise
            doubts.append(_Doubt("unreadable", str(error), str(path), _rank_in_name(path), 1 / len(files)))
            continue
        if header is None and len(files) > 1 and not path.name.endswith(".gz") and path.stat().st_size < 1 << 20:
            message = f"{path}: not a profiler trace, left out"
            doubts.append(_Doubt("not_a_trace", message, str(path)))
            continue
        rank = kineto.rank_of(header or {})
        if rank is None:
            rank, message = _guess_rank(path, order)
            if len(files) > 1:
                doubts.append(_Doubt("rank_guessed", message, str(path), rank))
        if (window, rank) in taken:
            doubts.append(_Doubt("duplicate_rank", f"{path}: a second trace of rank {rank}, left out", str(path), rank))
            continue
        taken.add((window, rank))
        read = partial(kineto.read, str(path), rank=rank, window=window)
        sources.append(Source(rank, window, str(path), path.stat().st_size, read))
    if not sources:
        raise BadTraceError(doubts[0].message if doubts else f"{files[0][0]}: no trace")
    return sources


def _rank_in_name(path: Path) -> int | None:
    return next((int(found[1]) for pattern in _RANK_IN_NAME if (found := pattern.search(path.name))), None)


def _guess_rank(path: Path, order: int) -> tuple[int, str]:
    named = _rank_in_name(path)
    if named is not None and named < 1 << 20:
        return named, f"{path}: the trace doesn't state its rank; taken as rank {named} from its name"
    return order, f"{path}: neither trace nor name state a rank; taken as rank {order} from the order of files"


def _manifest(folder: Path, doubts: list[_Doubt]) -> dict[str, Any]:
    path = folder / conventions.MANIFEST_FILE
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        doubts.append(
            _Doubt("bad_manifest", f"{path}: not readable as JSON ({error}); its facts are left out", str(path))
        )
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _missing_ranks(kept: dict[Source, Trace], manifest: dict[str, Any], doubts: list[_Doubt]) -> list[_Doubt]:
    told = [manifest.get("world_size")]
    for trace in kept.values():
        info = trace.header.get("distributedInfo")
        told.append(info.get("world_size") if isinstance(info, dict) else None)
    world_size = max((size for size in told if isinstance(size, int)), default=0)
    unreadable = {doubt.rank for doubt in doubts if doubt.kind == "unreadable"}  # said already
    have = len({source.rank for source in kept} | unreadable)
    if have >= world_size:
        return []
    message = f"{have} of {world_size} ranks have a trace; what the others did is not known."
    return [_Doubt("missing_ranks", message, doubtful_ratio=1 - have / world_size)]


def _table(doubts: list[_Doubt]) -> pl.DataFrame:
    return (
        pl.DataFrame([vars(doubt) for doubt in doubts], schema_overrides=RUN_DOUBTS.schema)
        if doubts
        else RUN_DOUBTS.empty()
    )
