"""Trace: one rank in one profiled window. Run: all that a job left behind."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import polars as pl

from tracekit import markup, schema, units

Fact: TypeAlias = Callable[["Trace"], pl.DataFrame]
"""A measurement of one trace: a pure function to a table. `Run.table` maps it over all traces of a run."""


@dataclass(frozen=True, eq=False)
class Trace:
    """One rank in one profiled window, on the clock of its own file (Unix time in ns where the file tells).

    Each table is a Polars frame with the columns that `tracekit.schema` gives under the same name.
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
    >>> run.table(tracekit.analysis.breakdown.breakdown)                      # doctest: +SKIP
    """

    def __init__(
        self,
        path: str,
        sources: Iterable[Source],
        *,
        manifest: Mapping[str, Any] | None = None,
        doubts: pl.DataFrame | None = None,
        keep_bytes: int = 1 << 30,
    ) -> None:
        """Build a run from `sources`; `doubts` are those of the run as a whole (columns rank, path and DOUBTS').

        Traces already read are kept until together they hold more than `keep_bytes`.
        """
        self.path = path
        self.sources = tuple(sorted(sources, key=lambda s: (s.window, s.rank)))
        self.manifest: Mapping[str, Any] = manifest or {}
        self.doubts = RUN_DOUBTS.empty() if doubts is None else RUN_DOUBTS.conform(doubts)
        self._keep_bytes = keep_bytes
        self._kept: dict[Source, Trace] = {}
        self._facts: dict[Fact, pl.DataFrame] = {}

    @property
    def name(self) -> str:
        """Return the last part of the run's path."""
        return self.path.rstrip("/").rsplit("/", 1)[-1] or self.path

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have a trace, in order."""
        return tuple(sorted({source.rank for source in self.sources}))

    def trace(self, rank: int, window: int | None = None) -> Trace:
        """Return the trace of one rank, of its first window unless told. Raises KeyError if there is none."""
        for source in self.sources:
            if source.rank == rank and window in (None, source.window):
                return self._open(source)
        raise KeyError(f"no trace of rank {rank}" + ("" if window is None else f" in window {window}"))

    def traces(self) -> Iterator[Trace]:
        """Yield every trace, by window and rank, one at a time."""
        for source in self.sources:
            yield self._open(source)

    def table(self, fact: Fact) -> pl.DataFrame:
        """Return the fact measured on every trace: its columns after window and rank; one measurement, then kept."""
        self.measure((fact,))
        return self._facts[fact]

    def measure(self, facts: Iterable[Fact], on_progress: Callable[[Source], None] | None = None) -> None:
        """Measure several facts in one pass over the traces, so that `table` answers at once afterwards."""
        wanted = [fact for fact in dict.fromkeys(facts) if fact not in self._facts]
        if not wanted:
            return
        parts: dict[Fact, list[pl.DataFrame]] = {fact: [] for fact in wanted}
        for source in self.sources:
            trace = self._open(source)
            for fact in wanted:
                parts[fact].append(_with_place(fact(trace), trace))
            if on_progress:
                on_progress(source)
        self._facts |= {fact: pl.concat(frames) for fact, frames in parts.items()}

    def keep(self, traces: Mapping[Source, Trace]) -> None:
        """Take traces that were read already, so that they are not read again while they fit in `keep_bytes`."""
        self._kept |= traces
        self._shed()

    def _open(self, source: Source) -> Trace:
        trace = self._kept.pop(source, None) or source.read()
        self._kept[source] = trace  # last in order: the most recently used
        self._shed()
        return trace

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
        table = markup.html_table(("rank", "window", "file", "size"), rows, right=(True, True, False, True))
        more = len(self.sources) - len(shown)
        return f"<b>{markup.escape(repr(self))}</b>{table}" + (f"<p>and {more:,} more</p>" if more else "")


_MAX_SHOWN = 16


RUN_DOUBTS = schema.Table(
    "run_doubts",
    "reason to doubt the run as a whole or a file of it",
    (
        schema.Column("rank", pl.Int64(), "", "Rank it concerns; null for the run."),
        schema.Column("path", pl.String(), "", "File it concerns; null for the run."),
        *schema.DOUBTS.columns,
    ),
)


def _with_place(frame: pl.DataFrame, trace: Trace) -> pl.DataFrame:
    place = (pl.lit(trace.window, pl.Int64).alias("window"), pl.lit(trace.rank, pl.Int64).alias("rank"))
    return frame.select(*place, pl.all().exclude("window", "rank"))


def _size_bytes(trace: Trace) -> int:
    # Of what is in memory: a trace from the cache reads a table when it is asked for.
    return int(sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame)))
