"""Run: all traces of one job, with its manifest and its measured tables."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias, cast

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model import escaping, schema, units
from tracekit.model.fact import Fact, Scope, run_fact
from tracekit.model.source import Executor, LoadedTraces, Source, Threads
from tracekit.model.table_store import Collector, SavedTables, TableStore
from tracekit.model.trace import Trace, TraceFact

RunFact: TypeAlias = Callable[["Run"], pl.DataFrame]
"""A measurement of all ranks together: a function of a run's tables to a table."""


@dataclass(frozen=True)
class MeasuredTrace:
    """A trace of a run that was just measured: its table for each fact. Without tables it could not be read."""

    source: Source
    tables: Mapping[TraceFact, pl.DataFrame] = field(default_factory=dict)
    sources: Sequence[Source] = ()
    """All traces that are being measured."""


OnTrace: TypeAlias = Callable[[MeasuredTrace], None]
"""Called after each trace of a run, to show progress."""


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
        fact_bytes: int = 64 << 20,
        executor: Executor | None = None,
        role: str = "",
    ) -> None:
        """Build a run from `sources`; `data_quality` has the issues of the run itself, columns as RUN_DATA_QUALITY.

        `align` computes each trace's offset to the run's clock. Traces are cached in memory up to `cache_bytes`, tables
        of facts up to `fact_bytes`, beyond that in temporary files. `executor` measures the facts of traces; by default
        threads of this process: one per processor, at most four. `role` is what its processes do in a job of several
        programs, such as trainer; the loader then sets `roles`, the runs of all roles by name, this one among them.
        """
        self.path = path
        self.role = role
        self.roles: Mapping[str, Run] = {}
        self.sources = tuple(sorted(sources, key=lambda s: (s.window, s.rank)))
        self.manifest: Mapping[str, Any] = manifest or {}
        self._data_quality = RUN_DATA_QUALITY.conform(pl.DataFrame() if data_quality is None else data_quality)
        self._align = align if isinstance(align, Fact) else run_fact(align or _zero_offsets)
        self._executor = executor or Threads()
        self._loaded = LoadedTraces(cache_bytes)
        self._tables = TableStore(fact_bytes)
        self._on_progress: OnTrace | None = None
        self._interrupted: Collector | None = None

    @property
    def name(self) -> str:
        """Return the last part of the run's path, with '?' for bytes that are not text, and the role if it has one."""
        name = self.path.rstrip("/").rsplit("/", 1)[-1] or self.path
        name = name.encode("utf-8", "replace").decode()
        return f"{name} ({self.role})" if self.role not in ("", name) else name

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
        return self.table(self._align)

    def trace(self, rank: int, window: int | None = None) -> Trace:
        """Return the trace of one rank, by default of its first window. Raises KeyError if there is none."""
        for source in self.sources:
            if source.rank == rank and window in (None, source.window):
                return self._loaded.open(source)
        raise KeyError(f"no trace of rank {rank}" + ("" if window is None else f" in window {window}"))

    def read(self, source: Source) -> Trace:
        """Return the trace of a source without caching it, for a caller that needs large traces one at a time."""
        return self._loaded.traces.get(source) or source.read()

    def traces(self) -> Iterator[Trace]:
        """Yield every trace, by window and rank, one at a time."""
        for source in self.sources:
            try:
                yield self._loaded.open(source)
            except BadTraceError as error:
                self._leave_out(source, error)

    def table(self, fact: "Fact[Run] | TraceFact", reads: Sequence[TraceFact] = ()) -> pl.DataFrame:
        """Return the table of a fact. Measured once, then cached, unless the fact says otherwise.

        A fact of a trace is measured of every trace: its table has columns window and rank, then those of the fact. A
        fact of the run, such as its collectives across ranks, may name facts of traces that it `reads`: all of them are
        measured in one pass. A function that is not decorated is taken for one of a trace.
        """
        if not isinstance(fact, Fact) or fact.scope is Scope.TRACE:
            of_trace = cast("TraceFact", fact)
            if not self._tables.take(of_trace):
                self.measure((of_trace,))
            return self._tables.get(of_trace)
        table = self._tables.find(fact) if fact.is_cached else None
        if table is None:
            began_s = time.monotonic()
            self.measure(reads)
            table = fact.measure(self)  # not `fact(self)`: facts read facts, and a stack of them is for people to read
            if fact.table:
                table = fact.table.conform(table)
            if fact.is_cached:
                self._tables.keep(fact, table, time.monotonic() - began_s)
        return table

    def named_table(self, name: str, make: RunFact) -> pl.DataFrame:
        """Return the table of a name that the run's cache has saved, or else what `make` returns, which is saved.

        The name states everything that the table depends on. Without a cache, it is made each time.
        """
        table = self._tables.saved_table(name)
        if table is None:
            began_s = time.monotonic()
            table = make(self)
            self._tables.save(name, table, time.monotonic() - began_s)
        return table

    def measure(self, facts: Iterable[TraceFact], on_progress: OnTrace | None = None) -> None:
        """Measure several facts in one pass over the traces; `table` then returns them from the cache.

        `on_progress` is called after each trace, by default that of `reporting`. What it raises ends the pass, and the
        next pass for the same facts measures the other traces. The run's executor decides how many traces are read at a
        time. Raises BadTraceError if no trace can be read.
        """
        on_progress = on_progress or self._on_progress
        missing = [fact for fact in dict.fromkeys(facts) if not self._tables.take(fact)]
        if not missing:
            return
        began_s = time.monotonic()
        collector, self._interrupted = self._interrupted, None
        if collector is None or collector.facts != missing:
            collector = Collector(self._tables, missing)
        sources = [source for source in self.sources if (source.window, source.rank) not in collector.places]
        for measured in self._executor.measure(sources, missing, self._loaded):
            source = measured.source
            if measured.error is not None:
                self._leave_out(source, measured.error)
            else:
                collector.add((source.window, source.rank), measured.tables)
            if on_progress:
                self._interrupted = collector  # a page that is left raises here; 1,000 traces take a minute
                on_progress(MeasuredTrace(source, dict(zip(missing, measured.tables, strict=False)), sources))
                self._interrupted = None
        collector.finish(time.monotonic() - began_s)

    def scan(self, fact: TraceFact) -> pl.LazyFrame:
        """Return a fact of every trace to select from: as `table`, but not all of it has to fit in memory."""
        self.measure((fact,))
        return self._tables.scan(fact)

    def parts(self, fact: TraceFact) -> tuple[Path, ...]:
        """Return the Parquet files that together have the table of a fact; none if the table is in memory."""
        self.measure((fact,))
        return self._tables.parts.get(fact, ())

    @property
    def measured_tables(self) -> dict[str, pl.DataFrame]:
        """Return the tables measured so far that are in memory, by full name of the fact, where it has one."""
        return self._tables.in_memory()

    def of_ranks(self, ranks: Iterable[int]) -> "Run":
        """Return a run of some ranks, with what was measured of them so far, on the clock of this run.

        It shares traces in memory and the executor. What it measures of all its ranks together is of these ranks alone.
        """
        rank_set = set(ranks)
        is_chosen = pl.col("rank").is_in(list(rank_set))
        offsets = self.offsets.filter(is_chosen)
        part = type(self)(
            self.path,
            [source for source in self.sources if source.rank in rank_set],
            manifest=self.manifest,
            data_quality=self._data_quality,
            align=lambda _: offsets,
            executor=self._executor,
        )
        part._loaded = self._loaded
        part._tables = self._tables.of_rows(is_chosen)
        return part

    def use_cache(self, saved: SavedTables) -> None:
        """Take tables from `saved`, and save there those that it does not have, by full name of the fact.

        Tables that are in Parquet files already are saved now: `measured_tables` does not have them.
        """
        self._tables.use(saved)

    def cache_traces(self, traces: Mapping[Source, Trace]) -> None:
        """Cache traces that were read already, as far as they fit in `cache_bytes`."""
        for source, trace in traces.items():
            self._loaded.add(source, trace)

    def _leave_out(self, source: Source, error: BadTraceError) -> None:
        if len(self.sources) == 1:
            raise error
        row = {"rank": source.rank, "path": source.path, "kind": "unreadable", "message": str(error)}
        row |= {"affected_ratio": 1 / len(self.sources)}
        self._tables.is_complete = False
        self.sources = tuple(other for other in self.sources if other != source)
        self._data_quality = pl.concat([self._data_quality, pl.DataFrame([row], schema=RUN_DATA_QUALITY.schema)])

    def __repr__(self) -> str:
        return f"<Run {self.name}: {len(self.ranks)} ranks, {len(self.sources)} traces>"

    def _repr_html_(self) -> str:
        """Return the HTML that a notebook shows: the list of traces. Reads none of them."""
        sources = self.sources[:_MAX_SHOWN]
        rows = [(str(s.rank), str(s.window), s.path, units.size(s.size_bytes)) for s in sources]
        table = escaping.html_table(("rank", "window", "file", "size"), rows, right=(True, True, False, True))
        more = len(self.sources) - len(sources)
        return f"<b>{escaping.escape(repr(self))}</b>{table}" + (f"<p>and {more:,} more</p>" if more else "")


_MAX_SHOWN = 16


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


@contextmanager
def progress_of(run: Run, on_progress: OnTrace | None) -> Iterator[None]:
    """Call `on_progress` after each trace of a run that is measured within the block, whatever needs it."""
    before, run._on_progress = run._on_progress, on_progress
    try:
        yield
    finally:
        run._on_progress = before


def require_run(run: object) -> None:
    """Raise TypeError if `run` is not a Run, such as a path: only `tracekit.load` reads those."""
    if not isinstance(run, Run):
        raise TypeError(f"a run is needed, as tracekit.load(path) returns it, not {type(run).__name__} {run!r:.80}")


def other_roles(run: Run) -> list[Run]:
    """The runs of the other roles of a job of several programs; none in other jobs."""
    return [role_run for role_run in run.roles.values() if role_run is not run]


def _zero_offsets(run: Run) -> pl.DataFrame:
    rows = [
        {"window": s.window, "rank": s.rank, "offset_ns": 0, "pairs": 0, "clock_domain": domain, "matched_by": "none"}
        for domain, s in enumerate(run.sources)
    ]
    return OFFSETS.conform(pl.DataFrame(rows, infer_schema_length=None)) if rows else OFFSETS.empty()
