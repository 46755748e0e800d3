"""A run's timeline: built once, one trace at a time, then mapped from a file in the user's cache."""

import functools
import hashlib
import json
import secrets
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.analysis.time import breakdown
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import disk_cache, trace_cache
from tracekit.ingest.disk_cache import DiskCache
from tracekit.model.intervals import Window
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.report.export import perfetto
from tracekit.report.export.perfetto import Clock
from tracekit.report.timeline import trace_part
from tracekit.report.timeline.mapped_file import MappedFile, Writer
from tracekit.report.timeline.trace_part import BANDS, Part, TraceLayout, build_part
from tracekit.sync import collective_matching

TRACKS = {"track": pl.Int64, "rank": pl.Int64, "window": pl.Int64, **trace_part.TRACKS}
_CODE = (
    "report/timeline/*.py",
    "report.track_nesting.py",
    "report.trace_tracks.py",
    "report/export/perfetto.py",
    "analysis/time/extents.py",
    "sync/*.py",
)

KINDS = (
    "?", "compute", "communication", "memcpy", "memset", "cpu_op", "annotation", "runtime", "python", "overhead",
    "os_call", "checkpoint",
)  # fmt: skip
"""The kinds of work, by the number in the column kind of a view."""

Progress: TypeAlias = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class Scene:
    """All slices of one `window` of a run on the run's clock.

    `key` changes when the run's files or the code that draws them do. `span` is the time that it shows, in ns.
    `tracks` has columns TRACKS, one row per track, from the top: track (its number), rank, window, group (such as
    GPU 0), label, role (compute, communication, copy, checkpoint, host), source (the table that its slices are rows of:
    activities, checkpoints, ops), lane (of its trace; null for checkpoints) and rows (how deep its slices nest).
    `bands` has columns rank, kind (step, unit), name, start_ns, end_ns. `offsets` are the rows of `Run.offsets` of the
    window: `alignment.on_run_clock` converts other times of a trace, such as a finding's, to the scene's clock.
    """

    key: str
    window: int
    span: Window
    tracks: pl.DataFrame = field(repr=False)
    bands: pl.DataFrame = field(repr=False)
    parts: tuple[Part, ...] = field(repr=False)
    names: pl.DataFrame = field(repr=False)
    """The names of slices and their kinds, by name_id: columns name, kind."""
    offsets: pl.DataFrame = field(repr=False)

    @functools.cached_property
    def kinds(self) -> npt.NDArray[np.uint8]:
        """Return the kind of each name_id, as a number of KINDS."""
        codes = {kind: code for code, kind in enumerate(KINDS)}
        return np.asarray(self.names["kind"].replace_strict(codes, default=0, return_dtype=pl.UInt8))

    @functools.cached_property
    def casefolded_names(self) -> list[str]:
        """Return all names, case-folded, by name_id."""
        return [name.casefold() for name in self.names["name"].to_list()]

    @functools.cached_property
    def part_of_track(self) -> dict[int, int]:
        """Return the index of the part that contains each track."""
        return {track: number for number, part in enumerate(self.parts) for track in part.tracks}


def open_scene(
    run: Run,
    window: int = 0,
    *,
    ranks: Sequence[int] | None = None,
    folder: Path | None = None,
    on_progress: Progress | None = None,
) -> Scene:
    """Return the scene of one window of a run: from its file in the cache, or built and stored there.

    `ranks` are those to draw, from the top; by default all. Building it reads their traces one at a time;
    `on_progress(done, total)` is called after each. `folder` replaces the user's cache. Traces
    without a known version, such as those of some web servers, are laid out each time, in a temporary file.
    Raises InputError if the run has no such window, BadTraceError if no trace of it can be read.
    """
    sources = [source for source in run.sources if source.window == window]
    if not sources:
        windows = sorted({source.window for source in run.sources})
        raise InputError(f"{run.path}: no trace of window {window}; there are {', '.join(map(str, windows))}")
    drawn_sources = _of_ranks(run, window, ranks)
    cache = DiskCache.of_user("timelines")
    cache = cache if folder is None else replace(cache, folder=folder)
    # All traces decide about the clocks.
    key = _key(sources, ranks)
    if key is None:
        return _build_uncached(run, window, drawn_sources, on_progress)
    scene = cache.get(key, lambda file: _scene(MappedFile(file), key, window))
    if scene is not None:
        return scene
    try:
        with cache.writing(key) as file:
            scene = _build(run, window, drawn_sources, file, key=key, on_progress=on_progress)
            if _key(sources, ranks) != key:
                raise OSError("files of the run changed while they were read")
            return scene
    except OSError as error:
        cache.log_unusable(error)
        return _build_uncached(run, window, drawn_sources, on_progress)


def _of_ranks(run: Run, window: int, ranks: Sequence[int] | None) -> list[Source]:
    """Return the traces of some ranks in a window, in their order. Raises InputError if none of them has one."""
    by_rank = {source.rank: source for source in run.sources if source.window == window}
    sources = [by_rank[rank] for rank in (by_rank if ranks is None else dict.fromkeys(ranks)) if rank in by_rank]
    if not sources:
        raise InputError(f"{run.path}: no trace of these ranks in window {window}; choose others")
    return sources


def _key(sources: Sequence[Source], ranks: Sequence[int] | None) -> str | None:
    """Return the cache key of the scene of these traces; None if one of them has no state that can be compared."""
    drawn_ranks = {source.rank for source in sources} if ranks is None else set(ranks)
    # The traces that are not drawn only influence the clocks, so their content is not compared: that takes long.
    keys = [trace_cache.key_of(source) if source.rank in drawn_ranks else _state(source) for source in sources]
    if None in keys:
        return None
    rank_order = [] if ranks is None else [list(ranks)]
    text = json.dumps([_code(), keys, *rank_order])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


def _state(source: Source) -> str | None:
    """Return size and modification time of a local file; of others the key of the trace."""
    try:
        state = Path(source.path).stat()
    except (OSError, ValueError):
        return trace_cache.key_of(source)
    return f"{source.path} {state.st_size} {state.st_mtime_ns}"


@functools.cache
def _code() -> str:
    return disk_cache.code_hash(Path(__file__).parents[2], _CODE)


def _build_uncached(run: Run, window: int, drawn_sources: Sequence[Source], on_progress: Progress | None) -> Scene:
    with tempfile.TemporaryFile() as file:
        return _build(run, window, drawn_sources, file, key=secrets.token_hex(16), on_progress=on_progress)


def _build(
    run: Run, window: int, drawn_sources: Sequence[Source], file: BinaryIO, *, key: str, on_progress: Progress | None
) -> Scene:
    run.measure((collective_matching.calls, breakdown.extent))
    clocks = perfetto.clocks(run)  # a trace that cannot be read is left out of the run by now
    sources = [source for source in drawn_sources if source in run.sources]
    writer, making = Writer(file), _SceneBuilder()
    for done, source in enumerate(sources, 1):
        moved = clocks.get((source.window, source.rank), Clock()).to_run
        try:
            making.add(writer, trace_part.lay_out(run.read(source), moved), source)
        except BadTraceError:
            if len(sources) == 1:
                raise
        if on_progress:
            on_progress(done, len(sources))
    writer.table("offsets", run.offsets.filter(pl.col("window") == window))
    making.begin(breakdown.run_clock(run).filter(pl.col("window") == window))
    making.finish(writer)
    return _scene(MappedFile(file), key, window)


class _SceneBuilder:
    """The traces laid out so far: tracks, bands, names, time range."""

    def __init__(self) -> None:
        self.tracks: list[pl.DataFrame] = []
        self.bands: list[pl.DataFrame] = []
        self.names: dict[tuple[str, str], int] = {}
        self.edges_ns: list[tuple[int, int]] = []
        self.first_track = 0
        self.ranks: list[int] = []

    def add(self, writer: Writer, laid: TraceLayout, source: Source) -> None:
        """Write the part of one trace."""
        names = np.array([self.names.setdefault(name, len(self.names)) for name in laid.names.iter_rows()], np.int64)
        build_part(laid, source.rank, first_track=self.first_track, names=names).write(writer, len(self.tracks))
        number = pl.int_range(self.first_track, self.first_track + laid.tracks.height, eager=True).alias("track")
        place = (pl.lit(source.rank, pl.Int64).alias("rank"), pl.lit(source.window, pl.Int64).alias("window"))
        self.tracks.append(laid.tracks.select(number.cast(pl.Int64), *place, *trace_part.TRACKS))
        self.bands.append(laid.bands)
        self.ranks.append(source.rank)
        self.first_track += laid.tracks.height
        for start, end in (
            (laid.start_ns, laid.start_ns + laid.dur_ns),
            (laid.bands["start_ns"].to_numpy(), laid.bands["end_ns"].to_numpy()),
        ):
            if len(start):
                self.edges_ns.append((int(start.min()), int(end.max())))

    def begin(self, clock: pl.DataFrame) -> None:
        """Let the scene begin where displayed times begin at 0, also if the first trace is not drawn."""
        zero_ns = clock.filter(pl.col("rank").is_in(self.ranks))["zero_ns"].min()
        if isinstance(zero_ns, int) and self.edges_ns:
            self.edges_ns.append((zero_ns, zero_ns))

    def finish(self, writer: Writer) -> None:
        """Write the tables and the contents."""
        writer.table("tracks", pl.concat([pl.DataFrame(schema=TRACKS), *self.tracks]))
        writer.table("bands", pl.concat([pl.DataFrame(schema=BANDS), *self.bands]))
        name_table = pl.DataFrame(list(self.names), schema={"name": pl.String, "kind": pl.String}, orient="row")
        writer.table("named", name_table)
        starts, ends = zip(*self.edges_ns, strict=True) if self.edges_ns else ((0,), (1,))
        writer.finish({"ranks": self.ranks, "span": (min(starts), max(max(ends), min(starts) + 1))})


def _scene(stored: MappedFile, key: str, window: int) -> Scene:
    parts = tuple(Part.of(stored, number) for number in range(len(stored.metadata["ranks"])))
    start_ns, end_ns = stored.metadata["span"]
    tracks, bands, names, offsets = (stored.table(name) for name in ("tracks", "bands", "named", "offsets"))
    return Scene(key, window, (start_ns, end_ns), tracks, bands, parts, names, offsets)
