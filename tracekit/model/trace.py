"""Trace: one rank in one profiled window. Run: all that a job left behind."""

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

Fact: TypeAlias = Callable[["Trace"], pl.DataFrame]
"""A measurement of one trace: a pure function to a table. `Run.table` maps it over all traces of a run."""

Survey: TypeAlias = Callable[["Run"], pl.DataFrame]
"""A measurement that needs several ranks at once: a function of a run's tables to a table. See `Run.across`."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank in one profiled window, on the clock of its own file (Unix time in ns where the file tells).

    Each table is a Polars frame with the columns that `tracekit.model.schema` gives under the same name.
    """

    rank: int
    window: int
    path: str
    lanes: pl.DataFrame = field(default_factory=schema.LANES.empty)
    steps: pl.DataFrame = field(default_factory=schema.STEPS.empty)
    ops: pl.DataFrame = field(default_factory=schema.OPS.empty)
    activities: pl.DataFrame = field(default_factory=schema.ACTIVITIES.empty)
    collectives: pl.DataFrame = field(default_factory=schema.COLLECTIVES.empty)
    groups: pl.DataFrame = field(default_factory=schema.GROUPS.empty)
    allocations: pl.DataFrame = field(default_factory=schema.ALLOCATIONS.empty)
    syncs: pl.DataFrame = field(default_factory=schema.SYNCS.empty)
    checkpoints: pl.DataFrame = field(default_factory=schema.CHECKPOINTS.empty)
    metrics: pl.DataFrame = field(default_factory=schema.METRICS.empty)
    doubts: pl.DataFrame = field(default_factory=schema.DOUBTS.empty)
    header: Mapping[str, Any] = field(default_factory=dict)
    """What stands in the file beside its events: deviceProperties, distributedInfo, versions."""

    @property
    def on_device(self) -> bool:
        """Whether the trace has device activity; where it has none, a lane is a host thread."""
        return self.lanes.get_column("device").is_not_null().any()

    @property
    def tables(self) -> dict[str, pl.DataFrame]:
        """Return all tables by name."""
        return {name: getattr(self, name) for name in schema.TABLES}


class LazyTrace(Trace):
    """A trace some of whose tables are made when they are first asked for."""

    @classmethod
    def of(cls, trace: Trace, makers: Mapping[str, Callable[[], pl.DataFrame]], held_bytes: int) -> "LazyTrace":
        """Return `trace` with the tables that `makers` name left to them; until all are made they hold `held_bytes`."""
        lazy = object.__new__(cls)
        kept = {name: value for name, value in vars(trace).items() if name not in makers}
        vars(lazy).update(kept, _makers=dict(makers), _held_bytes=held_bytes)
        return lazy

    def __getattr__(self, name: str) -> pl.DataFrame:
        if name not in schema.TABLES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        makers = vars(self).get("_makers", {})  # none in what dataclasses.replace makes: there all tables are made
        maker = makers.get(name)
        if maker is not None:  # else another thread has just made it
            vars(self).setdefault(name, maker())
            makers.pop(name, None)
        made: pl.DataFrame = vars(self)[name]
        return made

    @property
    def held_bytes(self) -> int:
        """Return what the tables that are not made yet keep in memory."""
        return int(vars(self)["_held_bytes"]) if vars(self).get("_makers") else 0


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
        doubts: pl.DataFrame | None = None,
        align: Survey | None = None,
        keep_bytes: int = 64 << 20,
        readers: int | None = None,
    ) -> None:
        """Build a run from `sources`; `doubts` are those of the run as a whole (columns rank, path and DOUBTS').

        `align` finds each trace's offset to the run's clock. Traces already read are kept until together they hold more
        than `keep_bytes`. `readers` traces are read side by side: as many as there are processors, at most four.
        """
        self.path = path
        self.sources = tuple(sorted(sources, key=lambda s: (s.window, s.rank)))
        self.manifest: Mapping[str, Any] = manifest or {}
        self._doubts = RUN_DOUBTS.empty() if doubts is None else RUN_DOUBTS.conform(doubts)
        self._align = align
        self._keep_bytes = keep_bytes
        self._readers = min(os.cpu_count() or 1, _MAX_READERS) if readers is None else readers
        self._kept: dict[Source, Trace] = {}
        self._facts: dict[Fact, pl.DataFrame] = {}
        self._surveys: dict[Survey, pl.DataFrame] = {}
        self._recall: Callable[[str], pl.DataFrame | None] = lambda _: None

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
    def doubts(self) -> pl.DataFrame:
        """Return the reasons to doubt the run as a whole or a file of it, columns as RUN_DOUBTS.

        A trace that turns out unreadable when it is measured is left out of `sources` and said here from then on.
        """
        return self._doubts

    @property
    def offsets(self) -> pl.DataFrame:
        """Return what to add to each trace's times to be on the run's clock, columns as OFFSETS.

        Found when first asked. Without a way to align, every trace keeps its own clock: offset 0, residual null.
        """
        return self.across(self._align or _unaligned)

    def trace(self, rank: int, window: int | None = None) -> Trace:
        """Return the trace of one rank, of its first window unless told. Raises KeyError if there is none."""
        for source in self.sources:
            if source.rank == rank and window in (None, source.window):
                return self._open(source)
        raise KeyError(f"no trace of rank {rank}" + ("" if window is None else f" in window {window}"))

    def once(self, source: Source) -> Trace:
        """Return the trace of a source without keeping it: who goes through large traces holds one at a time."""
        return self._kept.get(source) or source.read()

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

    def across(self, survey: Survey) -> pl.DataFrame:
        """Return what is measured on the run as a whole, such as its collectives; one measurement, then kept."""
        if survey not in self._surveys:
            known = self._recalled(survey)
            self._surveys[survey] = survey(self) if known is None else known
        return self._surveys[survey]

    def measure(self, facts: Iterable[Fact], on_progress: Callable[[Source], None] | None = None) -> None:
        """Measure several facts in one pass over the traces, so that `table` answers at once afterwards.

        Some traces are read side by side, never more than `readers`, nor than 256 MiB of files beyond the first.
        Raises BadTraceError if no trace can be read.
        """
        wanted = [fact for fact in dict.fromkeys(facts) if fact not in self._facts]
        known = {fact: table for fact in wanted if (table := self._recalled(fact)) is not None}
        self._facts |= known
        wanted = [fact for fact in wanted if fact not in known]
        if not wanted:
            return
        parts: dict[Fact, list[pl.DataFrame]] = {fact: [] for fact in wanted}
        for source, measured in self._side_by_side(wanted):
            for fact, frame in zip(wanted, measured, strict=False):
                parts[fact].append(frame)
            if on_progress:
                on_progress(source)
        self._facts |= {fact: pl.concat(frames) for fact, frames in parts.items()}

    @property
    def measured(self) -> dict[str, pl.DataFrame]:
        """Return what was measured so far, by the full names of facts and surveys; without what has no such name."""
        both: list[tuple[Fact | Survey, pl.DataFrame]] = [*self._facts.items(), *self._surveys.items()]
        return {name: table for measure, table in both if (name := _full_name(measure)) is not None}

    def recall(self, known: Callable[[str], pl.DataFrame | None]) -> None:
        """From now on ask `known` for a fact or survey by its full name, and measure only what it does not know.

        What it knows must have been measured on these very traces, by the same code.
        """
        self._recall = known

    def keep(self, traces: Mapping[Source, Trace]) -> None:
        """Take traces that were read already, so that they are not read again while they fit in `keep_bytes`."""
        self._kept |= traces
        self._shed()

    def _side_by_side(self, facts: list[Fact]) -> Iterator[tuple[Source, list[pl.DataFrame]]]:
        """Yield each source, in order, with its facts; nothing for one that cannot be read."""
        waiting: deque[Source] = deque(self.sources)
        running: deque[tuple[Source, Future[tuple[Trace, list[pl.DataFrame]]]]] = deque()
        with ThreadPoolExecutor(max_workers=self._readers) as pool:
            while waiting or running:
                while waiting and self._has_room(waiting[0], [source for source, _ in running]):
                    source = waiting.popleft()
                    running.append((source, pool.submit(_measured, source, self._kept.get(source), facts)))
                source, future = running.popleft()
                try:
                    trace, measured = future.result()
                except BadTraceError as error:
                    self._leave_out(source, error)
                    measured = []
                else:
                    self._take(source, trace)
                yield source, measured

    def _recalled(self, measure: Fact | Survey) -> pl.DataFrame | None:
        name = _full_name(measure)
        return None if name is None else self._recall(name)

    def _has_room(self, source: Source, running: list[Source]) -> bool:
        ahead_bytes = sum(other.size_bytes for other in running)
        return not running or (len(running) < self._readers and ahead_bytes + source.size_bytes < _MAX_AHEAD_BYTES)

    def _leave_out(self, source: Source, error: BadTraceError) -> None:
        if len(self.sources) == 1:
            raise error
        row = {"rank": source.rank, "path": source.path, "kind": "unreadable", "message": str(error)}
        row |= {"doubtful_ratio": 1 / len(self.sources)}
        self.sources = tuple(other for other in self.sources if other != source)
        self._doubts = pl.concat([self._doubts, pl.DataFrame([row], schema=RUN_DOUBTS.schema)])

    def _open(self, source: Source) -> Trace:
        trace = self._kept.get(source) or source.read()
        self._take(source, trace)
        return trace

    def _take(self, source: Source, trace: Trace) -> None:
        self._kept.pop(source, None)
        self._kept[source] = trace  # last in order: the most recently used
        self._shed()

    def _shed(self) -> None:
        held = sum(_size_bytes(kept) for kept in self._kept.values())
        while held > self._keep_bytes and len(self._kept) > 1:
            oldest = next(iter(self._kept))
            held -= _size_bytes(self._kept.pop(oldest))

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
    told = manifest.get("created_ns")
    is_time = isinstance(told, int) and not isinstance(told, bool) and 0 < told < _YEAR_2100_NS
    return told if is_time else None


_YEAR_2100_NS = 4_102_444_800 * 10**9
_MAX_SHOWN = 16
_MAX_READERS = 4
_MAX_AHEAD_BYTES = 256 << 20


RUN_DOUBTS = schema.Table(
    "run_doubts",
    "reason to doubt the run as a whole or a file of it",
    (
        schema.Column("rank", pl.Int64(), "", "Rank it concerns; null for the run."),
        schema.Column("path", pl.String(), "", "File it concerns; null for the run."),
        *schema.DOUBTS.columns,
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


def _full_name(measure: Fact | Survey) -> str | None:
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


def _measured(source: Source, kept: Trace | None, facts: list[Fact]) -> tuple[Trace, list[pl.DataFrame]]:
    trace = kept or source.read()
    return trace, [_with_place(fact(trace), trace) for fact in facts]


def _with_place(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    place = (pl.lit(trace.window, pl.Int64).alias("window"), pl.lit(trace.rank, pl.Int64).alias("rank"))
    return frame.select(*place, pl.all().exclude("window", "rank"))


def _size_bytes(trace: Trace) -> int:
    # Of what is in memory: a trace from the cache reads a table when it is asked for.
    made = sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame))
    return int(made) + (trace.held_bytes if isinstance(trace, LazyTrace) else 0)
