"""Run: all traces of one job, with its manifest and its measured tables."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model import escaping, schema, units
from tracekit.model.trace import Fact, LazyTrace, Trace

RunFact: TypeAlias = Callable[["Run"], pl.DataFrame]
"""A measurement of all ranks together: a function of a run's tables to a table. See `Run.run_table`."""


@dataclass(frozen=True)
class Source:
    """The file of one trace of a run, and how to read it, again if it was evicted from memory."""

    rank: int
    window: int
    path: str
    size_bytes: int
    read: Callable[[], Trace] = field(repr=False)


class Run:
    """All traces of one job, with its manifest. Traces are read when needed and evicted, so memory use stays flat.

    >>> run = tracekit.load("runs/today")  # doctest: +SKIP
    >>> run.table(tracekit.analysis.time.breakdown.by_step)  # doctest: +SKIP
    """

    def __init__(
        self,
        path: str,
        sources: Iterable[Source],
        *,
        manifest: Mapping[str, Any] | None = None,
        data_quality: pl.DataFrame | None = None,
        align: RunFact | None = None,
        cache_bytes: int = 64 << 20,
        max_concurrent_reads: int | None = None,
    ) -> None:
        """Build a run from `sources`; `data_quality` has the issues of the run itself, columns as RUN_DATA_QUALITY.

        `align` computes each trace's offset to the run's clock. Traces are cached in memory up to `cache_bytes`, and
        at most `max_concurrent_reads` are read at a time: by default one per processor, at most four.
        """
        self.path = path
        self.sources = tuple(sorted(sources, key=lambda s: (s.window, s.rank)))
        self.manifest: Mapping[str, Any] = manifest or {}
        self._data_quality = RUN_DATA_QUALITY.conform(pl.DataFrame() if data_quality is None else data_quality)
        self._align = align
        self._cache_bytes = cache_bytes
        self._max_concurrent_reads = max_concurrent_reads or min(os.cpu_count() or 1, _DEFAULT_CONCURRENT_READS)
        self._cached_traces: dict[Source, Trace] = {}
        self._cached_bytes: dict[Source, int] = {}
        """The size of each cached trace when it was last used: to add up all tables after each trace takes long."""
        self._facts: dict[Fact, pl.DataFrame] = {}
        self._run_facts: dict[RunFact, pl.DataFrame] = {}
        self._lookup: Callable[[str], pl.DataFrame | None] = lambda _: None

    @property
    def name(self) -> str:
        """Return the last part of the run's path, with '?' for bytes that are not text."""
        name = self.path.rstrip("/").rsplit("/", 1)[-1] or self.path
        return name.encode("utf-8", "replace").decode()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a trace, in order."""
        return tuple(sorted({source.rank for source in self.sources}))

    @property
    def data_quality(self) -> pl.DataFrame:
        """Return the data-quality issues of the run or of one of its files, columns as RUN_DATA_QUALITY.

        A trace that cannot be read when it is measured is removed from `sources` and becomes an issue here.
        """
        return self._data_quality

    @property
    def offsets(self) -> pl.DataFrame:
        """Return the clock offset of each trace, to be added to its times; columns as OFFSETS.

        Computed on first access. A run without `align` leaves every trace on its own clock: offset 0, residual null.
        """
        return self.run_table(self._align or _unaligned)

    def trace(self, rank: int, window: int | None = None) -> Trace:
        """Return the trace of one rank, by default of its first window. Raises KeyError if there is none."""
        for source in self.sources:
            if source.rank == rank and window in (None, source.window):
                return self._open(source)
        raise KeyError(f"no trace of rank {rank}" + ("" if window is None else f" in window {window}"))

    def read(self, source: Source) -> Trace:
        """Return the trace of a source without caching it, for a caller that needs large traces one at a time."""
        return self._cached_traces.get(source) or source.read()

    def traces(self) -> Iterator[Trace]:
        """Yield every trace, by window and rank, one at a time."""
        for source in self.sources:
            try:
                yield self._open(source)
            except BadTraceError as error:
                self._leave_out(source, error)

    def table(self, fact: Fact) -> pl.DataFrame:
        """Return a fact of every trace: columns window and rank, then those of the fact. Measured once, then cached."""
        self.measure((fact,))
        return self._facts[fact]

    def run_table(self, fact: RunFact) -> pl.DataFrame:
        """Return a fact of the run, such as its collectives across ranks. Measured once, then cached."""
        if fact not in self._run_facts:
            known = self._cached_table(fact)
            self._run_facts[fact] = fact(self) if known is None else known
        return self._run_facts[fact]

    def measure(self, facts: Iterable[Fact], on_progress: Callable[[Source], None] | None = None) -> None:
        """Measure several facts in one pass over the traces; `table` then returns them from the cache.

        Several traces are read concurrently: at most `max_concurrent_reads`, and at most 256 MiB of files at a time.
        Raises BadTraceError if no trace can be read.
        """
        wanted = [fact for fact in dict.fromkeys(facts) if fact not in self._facts]
        known = {fact: table for fact in wanted if (table := self._cached_table(fact)) is not None}
        self._facts |= known
        wanted = [fact for fact in wanted if fact not in known]
        if not wanted:
            return
        parts: dict[Fact, list[pl.DataFrame]] = {fact: [] for fact in wanted}
        places: list[tuple[int, int]] = []
        for source, measured in self._measured_concurrently(wanted):
            if measured:
                places.append((source.window, source.rank))
            for fact, frame in zip(wanted, measured, strict=False):
                parts[fact].append(frame)
            if on_progress:
                on_progress(source)
        self._facts |= {fact: _by_trace(frames, places) for fact, frames in parts.items()}

    @property
    def measured_tables(self) -> dict[str, pl.DataFrame]:
        """Return all tables measured so far, by full name of the fact; facts without a full name are left out."""
        both: list[tuple[Fact | RunFact, pl.DataFrame]] = [*self._facts.items(), *self._run_facts.items()]
        return {name: table for measure, table in both if (name := _full_name(measure)) is not None}

    def use_cached_tables(self, lookup: Callable[[str], pl.DataFrame | None]) -> None:
        """Take tables from `lookup`, by full name of the fact, and measure only those for which it returns None.

        Its tables must be measurements of the same traces by the same code.
        """
        self._lookup = lookup

    def cache_traces(self, traces: Mapping[Source, Trace]) -> None:
        """Cache traces that were read already, as far as they fit in `cache_bytes`."""
        self._cached_traces |= traces
        self._cached_bytes |= {source: _size_bytes(trace) for source, trace in traces.items()}
        self._evict()

    def _measured_concurrently(self, facts: list[Fact]) -> Iterator[tuple[Source, list[pl.DataFrame]]]:
        """Yield each source, in order, with its facts; an unreadable one with none."""
        waiting: deque[Source] = deque(self.sources)
        running: deque[tuple[Source, Future[tuple[Trace, list[pl.DataFrame]]]]] = deque()
        with ThreadPoolExecutor(max_workers=self._max_concurrent_reads) as pool:
            while waiting or running:
                while waiting and self._has_room(waiting[0], [source for source, _ in running]):
                    source = waiting.popleft()
                    running.append((source, pool.submit(_measure, source, self._cached_traces.get(source), facts)))
                source, future = running.popleft()
                try:
                    trace, measured = future.result()
                except BadTraceError as error:
                    self._leave_out(source, error)
                    measured = []
                else:
                    self._cache(source, trace)
                yield source, measured

    def _cached_table(self, measure: Fact | RunFact) -> pl.DataFrame | None:
        name = _full_name(measure)
        return None if name is None else self._lookup(name)

    def _has_room(self, source: Source, running: list[Source]) -> bool:
        ahead_bytes = sum(other.size_bytes for other in running)
        return not running or (
            len(running) < self._max_concurrent_reads and ahead_bytes + source.size_bytes < _MAX_AHEAD_BYTES
        )

    def _leave_out(self, source: Source, error: BadTraceError) -> None:
        if len(self.sources) == 1:
            raise error
        row = {"rank": source.rank, "path": source.path, "kind": "unreadable", "message": str(error)}
        row |= {"affected_ratio": 1 / len(self.sources)}
        self.sources = tuple(other for other in self.sources if other != source)
        self._data_quality = pl.concat([self._data_quality, pl.DataFrame([row], schema=RUN_DATA_QUALITY.schema)])

    def _open(self, source: Source) -> Trace:
        trace = self._cached_traces.get(source) or source.read()
        self._cache(source, trace)
        return trace

    def _cache(self, source: Source, trace: Trace) -> None:
        self._cached_traces.pop(source, None)
        self._cached_traces[source] = trace  # last in order: the most recently used
        self._cached_bytes[source] = _size_bytes(trace)
        self._evict()

    def _evict(self) -> None:
        total_bytes = sum(self._cached_bytes[source] for source in self._cached_traces)
        while total_bytes > self._cache_bytes and len(self._cached_traces) > 1:
            least_recent = next(iter(self._cached_traces))
            del self._cached_traces[least_recent]
            total_bytes -= self._cached_bytes.pop(least_recent)

    def __repr__(self) -> str:
        return f"<Run {self.name}: {len(self.ranks)} ranks, {len(self.sources)} traces>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the list of traces. Reads none of them."""
        shown = self.sources[:_MAX_SHOWN]
        rows = [(str(s.rank), str(s.window), s.path, units.size(s.size_bytes)) for s in shown]
        table = escaping.html_table(("rank", "window", "file", "size"), rows, right=(True, True, False, True))
        more = len(self.sources) - len(shown)
        return f"<b>{escaping.escape(repr(self))}</b>{table}" + (f"<p>and {more:,} more</p>" if more else "")


_MAX_SHOWN = 16
_DEFAULT_CONCURRENT_READS = 4
_MAX_AHEAD_BYTES = 256 << 20


RUN_DATA_QUALITY = schema.table(
    "run_data_quality",
    "data-quality issue of the run or of one of its files",
    schema.column("rank", "Rank of the issue; null for the run."),
    schema.column("path", "File of the issue; null for the run.", pl.String()),
    *schema.DATA_QUALITY.columns,
)


OFFSETS = schema.table(
    "offsets",
    "trace: rank and window",
    schema.column("window", "Window of the trace."),
    schema.column("rank", "Rank of the trace."),
    schema.column("offset_ns", "Added to a time of the trace, gives the time on the run's clock."),
    schema.column("residual_ns", "Clock error: smaller differences across ranks mean nothing; null: not aligned."),
    schema.Column("drift", pl.Float64(), "ratio", "Added per ns since at_ns; null for spans under 10 s."),
    schema.column("at_ns", "Time of the trace at which offset_ns holds; null without drift."),
    schema.column("pairs", "Collectives shared with other ranks that the alignment is based on."),
    schema.column("clock_domain", "Traces of a window share a clock only within a clock domain."),
    schema.column(
        "matched_by",
        "seq (sequence number) or order: how collectives were matched; messages: aligned by sends; none: own clock.",
        pl.String(),
    ),
)


def _full_name(measure: Fact | RunFact) -> str | None:
    """Return module and name of a function; None if it cannot be imported by them, such as a lambda."""
    module, name = getattr(measure, "__module__", ""), getattr(measure, "__qualname__", "")
    is_reached = getattr(sys.modules.get(module), name, None) is measure
    return f"{module}.{name}" if is_reached else None


def _unaligned(run: Run) -> pl.DataFrame:
    rows = [
        {"window": s.window, "rank": s.rank, "offset_ns": 0, "pairs": 0, "clock_domain": domain, "matched_by": "none"}
        for domain, s in enumerate(run.sources)
    ]
    return OFFSETS.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else OFFSETS.empty()


def _measure(source: Source, cached: Trace | None, facts: list[Fact]) -> tuple[Trace, list[pl.DataFrame]]:
    trace = cached or source.read()
    return trace, [fact(trace) for fact in facts]


def _by_trace(frames: list[pl.DataFrame], places: list[tuple[int, int]]) -> pl.DataFrame:
    """Return the tables of several traces as one, each with the window and rank of its trace as first columns."""
    heights = [frame.height for frame in frames]
    window, rank = (
        pl.Series(name, np.repeat(np.array(values, np.int64), heights))
        for name, values in zip(("window", "rank"), zip(*places, strict=True), strict=True)
    )
    every = pl.concat([_without_place(frame) for frame in frames])
    return pl.DataFrame([window, rank, *every.get_columns()])


def _without_place(frame: pl.DataFrame) -> pl.DataFrame:
    own = {"window", "rank"}.intersection(frame.columns)
    return frame.drop(own) if own else frame


def _size_bytes(trace: Trace) -> int:
    # Tables in memory only: a trace from the disk cache reads each table on first access.
    made = sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame))
    return int(made) + (trace.deferred_bytes if isinstance(trace, LazyTrace) else 0)
