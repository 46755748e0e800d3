"""Run: all traces of one job, with its manifest and its measured tables."""

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model import escaping, schema, units
from tracekit.model.trace import Fact, LazyTrace, Trace

RunFact: TypeAlias = Callable[["Run"], pl.DataFrame]
"""A measurement that needs several ranks at once: a function of a run's tables to a table. See `Run.across`."""


@dataclass(frozen=True)
class Source:
    """Where one trace of a run comes from, and how to read it again after it was let go."""

    rank: int
    window: int
    path: str
    size_bytes: int
    read: Callable[[], Trace] = field(repr=False)


class Run:
    """All traces of one job, with its manifest. Traces are read when needed and let go, so memory stays flat.

    >>> run = tracekit.load("runs/today")                                     # doctest: +SKIP
    >>> run.table(tracekit.analysis.time.breakdown.breakdown)                      # doctest: +SKIP
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
        self._data_quality = (
            RUN_DATA_QUALITY.empty() if data_quality is None else RUN_DATA_QUALITY.conform(data_quality)
        )
        self._align = align
        self._cache_bytes = cache_bytes
        self._max_concurrent_reads = (
            min(os.cpu_count() or 1, _DEFAULT_CONCURRENT_READS)
            if max_concurrent_reads is None
            else max_concurrent_reads
        )
        self._cached_traces: dict[Source, Trace] = {}
        self._facts: dict[Fact, pl.DataFrame] = {}
        self._run_facts: dict[RunFact, pl.DataFrame] = {}
        self._lookup: Callable[[str], pl.DataFrame | None] = lambda _: None

    @property
    def name(self) -> str:
        """Return the last part of the run's path, '?' for bytes of it that are no text."""
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
        """Return what to add to each trace's times to be on the run's clock, columns as OFFSETS.

        Found when first asked. Without a way to align, every trace keeps its own clock: offset 0, residual null.
        """
        return self.run_table(self._align or _unaligned)

    def trace(self, rank: int, window: int | None = None) -> Trace:
        """Return the trace of one rank, of its first window unless told. Raises KeyError if there is none."""
        for source in self.sources:
            if source.rank == rank and window in (None, source.window):
                return self._open(source)
        raise KeyError(f"no trace of rank {rank}" + ("" if window is None else f" in window {window}"))

    def read(self, source: Source) -> Trace:
        """Return the trace of a source without keeping it: who goes through large traces holds one at a time."""
        return self._cached_traces.get(source) or source.read()

    def traces(self) -> Iterator[Trace]:
        """Yield every trace, by window and rank, one at a time."""
        for source in self.sources:
            try:
                yield self._open(source)
            except BadTraceError as error:
                self._leave_out(source, error)

    def table(self, fact: Fact) -> pl.DataFrame:
        """Return the fact measured on every trace: its columns after window and rank; one measurement, then kept."""
        self.measure((fact,))
        return self._facts[fact]

    def run_table(self, fact: RunFact) -> pl.DataFrame:
        """Return what is measured on the run as a whole, such as its collectives; one measurement, then kept."""
        if fact not in self._run_facts:
            known = self._cached_table(fact)
            self._run_facts[fact] = fact(self) if known is None else known
        return self._run_facts[fact]

    def measure(self, facts: Iterable[Fact], on_progress: Callable[[Source], None] | None = None) -> None:
        """Measure several facts in one pass over the traces, so that `table` answers at once afterwards.

        Some traces are read side by side, never more than `readers`, nor than 256 MiB of files beyond the first.
        Raises BadTraceError if no trace can be read.
        """
        wanted = [fact for fact in dict.fromkeys(facts) if fact not in self._facts]
        known = {fact: table for fact in wanted if (table := self._cached_table(fact)) is not None}
        self._facts |= known
        wanted = [fact for fact in wanted if fact not in known]
        if not wanted:
            return
        parts: dict[Fact, list[pl.DataFrame]] = {fact: [] for fact in wanted}
        for source, measured in self._measured_concurrently(wanted):
            for fact, frame in zip(wanted, measured, strict=False):
                parts[fact].append(frame)
            if on_progress:
                on_progress(source)
        self._facts |= {fact: pl.concat(frames) for fact, frames in parts.items()}

    @property
    def measured_tables(self) -> dict[str, pl.DataFrame]:
        """Return what was measured so far, by the full names of facts and surveys; without what has no such name."""
        both: list[tuple[Fact | RunFact, pl.DataFrame]] = [*self._facts.items(), *self._run_facts.items()]
        return {name: table for measure, table in both if (name := _full_name(measure)) is not None}

    def use_cached_tables(self, lookup: Callable[[str], pl.DataFrame | None]) -> None:
        """From now on ask `known` for a fact or survey by its full name, and measure only what it does not know.

        What it knows must have been measured on these very traces, by the same code.
        """
        self._lookup = lookup

    def cache_traces(self, traces: Mapping[Source, Trace]) -> None:
        """Take traces that were read already, so that they are not read again while they fit in `cache_bytes`."""
        self._cached_traces |= traces
        self._evict()

    def _measured_concurrently(self, facts: list[Fact]) -> Iterator[tuple[Source, list[pl.DataFrame]]]:
        """Yield each source, in order, with its facts; nothing for one that cannot be read."""
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
        self._evict()

    def _evict(self) -> None:
        held = sum(_size_bytes(kept) for kept in self._cached_traces.values())
        while held > self._cache_bytes and len(self._cached_traces) > 1:
            oldest = next(iter(self._cached_traces))
            held -= _size_bytes(self._cached_traces.pop(oldest))

    def __repr__(self) -> str:
        return f"<Run {self.name}: {len(self.ranks)} ranks, {len(self.sources)} traces>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the traces, none of them read for it."""
        shown = self.sources[:_MAX_SHOWN]
        rows = [(str(s.rank), str(s.window), s.path, units.size(s.size_bytes)) for s in shown]
        table = escaping.html_table(("rank", "window", "file", "size"), rows, right=(True, True, False, True))
        more = len(self.sources) - len(shown)
        return f"<b>{escaping.escape(repr(self))}</b>{table}" + (f"<p>and {more:,} more</p>" if more else "")


def created_ns(manifest: Mapping[str, Any]) -> int | None:
    """Return the Unix time in ns at which a manifest says that its run was recorded, None where it names no such time.

    A manifest can say anything: what is no whole number, or not from 1970 until 2100, is none.
    """
    created = manifest.get("created_ns")
    is_time = isinstance(created, int) and not isinstance(created, bool) and 0 < created < _YEAR_2100_NS
    return created if is_time else None


_YEAR_2100_NS = 4_102_444_800 * 10**9
_MAX_SHOWN = 16
_DEFAULT_CONCURRENT_READS = 4
_MAX_AHEAD_BYTES = 256 << 20


RUN_DATA_QUALITY = schema.Table(
    "run_data_quality",
    "data-quality issue of the run or of one of its files",
    (
        schema.Column("rank", pl.Int64(), "", "Rank it concerns; null for the run."),
        schema.Column("path", pl.String(), "", "File it concerns; null for the run."),
        *schema.DATA_QUALITY.columns,
    ),
)


OFFSETS = schema.Table(
    "offsets",
    "trace: rank and window",
    (
        schema.Column("window", pl.Int64(), "", "Window of the trace."),
        schema.Column("rank", pl.Int64(), "", "Rank of the trace."),
        schema.Column("offset_ns", pl.Int64(), "ns", "What to add to the trace's times to be on the run's clock."),
        schema.Column("residual_ns", pl.Int64(), "ns", "Nothing across ranks is told below it; null: not aligned."),
        schema.Column("drift", pl.Float64(), "ratio", "Further ns per ns since at_ns; null for spans under 10 s."),
        schema.Column("at_ns", pl.Int64(), "ns", "Time of the trace at which offset_ns holds; null without drift."),
        schema.Column("pairs", pl.Int64(), "", "Collectives that it shares with others and that it was aligned on."),
        schema.Column("part", pl.Int64(), "", "Traces of a window are on one clock only within a part."),
        schema.Column("how", pl.String(), "", "seq, order: how collectives were matched; none: on its own clock."),
    ),
)


def _full_name(measure: Fact | RunFact) -> str | None:
    """Return the name that leads to a function from anywhere; None for one that was made on the way."""
    module, name = getattr(measure, "__module__", ""), getattr(measure, "__qualname__", "")
    is_reached = getattr(sys.modules.get(module), name, None) is measure
    return f"{module}.{name}" if is_reached else None


def _unaligned(run: Run) -> pl.DataFrame:
    rows = [
        {"window": s.window, "rank": s.rank, "offset_ns": 0, "pairs": 0, "part": part, "how": "none"}
        for part, s in enumerate(run.sources)
    ]
    return OFFSETS.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else OFFSETS.empty()


def _measure(source: Source, cached: Trace | None, facts: list[Fact]) -> tuple[Trace, list[pl.DataFrame]]:
    trace = cached or source.read()
    return trace, [_with_window_and_rank(fact(trace), trace) for fact in facts]


def _with_window_and_rank(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    place = (pl.lit(trace.window, pl.Int64).alias("window"), pl.lit(trace.rank, pl.Int64).alias("rank"))
    return frame.select(*place, pl.all().exclude("window", "rank"))


def _size_bytes(trace: Trace) -> int:
    # Of what is in memory: a trace from the cache reads a table when it is asked for.
    made = sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame))
    return int(made) + (trace.deferred_bytes if isinstance(trace, LazyTrace) else 0)
