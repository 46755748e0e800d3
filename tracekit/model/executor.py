"""Executor: maps facts over the traces of a run. Threads of this process here, others in `tracekit.executors`."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model.source import LoadedTraces, Source
from tracekit.model.trace import Trace, TraceFact

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

            def submit(source: Source) -> "Future[tuple[Trace, list[pl.DataFrame]]]":
                return pool.submit(_measure, source, loaded.get(source), facts)

            for source, future in submitted_in_order(sources, submit, tasks=self.workers, max_bytes=_MAX_THREADS_BYTES):
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
        while waiting and _has_room(waiting[0], [source for source, _ in running], tasks, max_bytes):
            source = waiting.popleft()
            running.append((source, submit(source)))
        yield running.popleft()


def _has_room(source: Source, running: Sequence[Source], tasks: int, max_bytes: float) -> bool:
    ahead_bytes = sum(other.size_bytes for other in running)
    return not running or (len(running) < tasks and ahead_bytes + source.size_bytes < max_bytes)


def _measure(source: Source, loaded: Trace | None, facts: Sequence[TraceFact]) -> tuple[Trace, list[pl.DataFrame]]:
    trace = loaded or source.read()
    return trace, [fact(trace) for fact in facts]
