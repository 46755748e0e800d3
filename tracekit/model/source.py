"""Source: the file of one trace. LoadedTraces: traces in memory. Executor: maps facts over the traces of a run."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model.trace import LazyTrace, Trace, TraceFact


class Origin(Protocol):
    """Where the file of a source is, if it is no local file."""

    @property
    def state(self) -> object:
        """What changes, as JSON, whenever the file or one that belongs to it changes; None if that cannot be known."""

    def sha256(self) -> str:
        """Return the hash of the file's content. Raises BadTraceError if it cannot be read."""


@dataclass(frozen=True)
class Source:
    """The file of one trace of a run, and how to read it, again if it was evicted from memory."""

    rank: int
    window: int
    path: str
    size_bytes: int
    read: Callable[[], Trace] = field(repr=False)
    origin: Origin | None = field(default=None, repr=False, compare=False)
    companions: tuple[str, ...] = ()
    """Paths of local files of other tools that `read` adds to the trace."""


class LoadedTraces:
    """The traces in memory: those used last, up to `max_bytes`, but at least one."""

    def __init__(self, max_bytes: int) -> None:
        """Start without traces."""
        self._max_bytes = max_bytes
        self.traces: dict[Source, Trace] = {}
        self._sizes_bytes: dict[Source, int] = {}
        """The size of each trace when it was last used: to add up all tables after each trace takes long."""

    def open(self, source: Source) -> Trace:
        """Return the trace of a source, read if it is not in memory. Raises BadTraceError if it cannot be read."""
        trace = self.traces.get(source) or source.read()
        self.add(source, trace)
        return trace

    def add(self, source: Source, trace: Trace) -> None:
        """Add a trace as the one used last, and evict others as needed."""
        self.traces.pop(source, None)
        self.traces[source] = trace
        self._sizes_bytes[source] = _size_bytes(trace)
        total_bytes = sum(self._sizes_bytes[source] for source in self.traces)
        while total_bytes > self._max_bytes and len(self.traces) > 1:
            least_recent = next(iter(self.traces))
            del self.traces[least_recent]
            total_bytes -= self._sizes_bytes.pop(least_recent)

    def keeps(self, trace: Trace, count: int) -> bool:
        """Return whether `count` traces as large as this one stay in memory together.

        If not, a pass over all of them evicts each one before the next pass needs it.
        """
        return count == 1 or count * _size_bytes(trace) <= self._max_bytes


def _size_bytes(trace: Trace) -> int:
    # Tables in memory only: a trace from the disk cache reads each table on first access.
    table_bytes = sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame))
    return int(table_bytes) + (trace.deferred_bytes if isinstance(trace, LazyTrace) else 0)


T = TypeVar("T")
_DEFAULT_THREADS = 4
_MAX_THREADS_BYTES = 256 << 20
"""The size of the files that threads read at the same time, so that the memory of this process stays bounded."""


@dataclass(frozen=True)
class Measured:
    """The facts of one trace: a table for each fact, in the order of the facts; none if there is an error."""

    source: Source
    tables: Sequence[pl.DataFrame] = ()
    error: BadTraceError | None = None
    """Why the trace could not be measured: it cannot be read, or its worker was lost."""


class Executor(Protocol):
    """What maps facts over traces. All executors yield the same tables in the same order."""

    def measure(
        self, sources: Sequence[Source], facts: Sequence[TraceFact], loaded: LoadedTraces
    ) -> Iterator[Measured]:
        """Yield the facts of each source, in the order of `sources`.

        A trace that cannot be read is a `Measured` with an error. `loaded` has traces that this process has in memory
        already. An exception in a fact is raised, as it is a bug of that fact.
        """


class Threads:
    """Threads of this process, which share its memory. The default: nothing is started and nothing is copied."""

    def __init__(self, workers: int | None = None) -> None:
        """Read at most `workers` traces at a time; by default one per processor, at most four."""
        self.workers = workers or min(os.cpu_count() or 1, _DEFAULT_THREADS)

    def measure(
        self, sources: Sequence[Source], facts: Sequence[TraceFact], loaded: LoadedTraces
    ) -> Iterator[Measured]:
        """Yield the facts of each source, and add its trace to `loaded` if all of them can stay there."""
        with ThreadPoolExecutor(max_workers=self.workers) as pool:

            def measure_trace(source: Source) -> tuple[Trace, list[pl.DataFrame]]:
                trace = loaded.traces.get(source) or source.read()
                return trace, [fact(trace) for fact in facts]

            futures = submitted_in_order(
                sources,
                lambda source: pool.submit(measure_trace, source),
                tasks=self.workers,
                max_bytes=_MAX_THREADS_BYTES,
            )
            for source, future in futures:
                try:
                    trace, tables = future.result()
                except BadTraceError as error:
                    yield Measured(source, error=error)
                else:
                    if loaded.keeps(trace, len(sources)):
                        loaded.add(source, trace)
                    del trace
                    yield Measured(source, tables)


def submitted_in_order(
    sources: Sequence[Source], submit: Callable[[Source], T], *, tasks: int, max_bytes: float = float("inf")
) -> Iterator[tuple[Source, T]]:
    """Yield each source, in order, with its future, while others are submitted: `tasks` at a time.

    Files of `max_bytes` in total or more are not submitted at the same time.
    """
    waiting = deque(sources)
    running: deque[tuple[Source, T]] = deque()
    while waiting or running:
        running_bytes = sum(source.size_bytes for source, _ in running)
        while waiting and (not running or (len(running) < tasks and running_bytes + waiting[0].size_bytes < max_bytes)):
            source = waiting.popleft()
            running.append((source, submit(source)))
            running_bytes += source.size_bytes
        yield running.popleft()
