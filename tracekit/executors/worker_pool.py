"""WorkerPool: maps facts over traces in other processes, and repeats the tasks of lost workers."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from tracekit.executors import tasks
from tracekit.model.executor import Measured, Threads, submitted_in_order
from tracekit.model.source import LoadedTraces, Source
from tracekit.model.trace import TraceFact

_ATTEMPTS = 3
_AHEAD = 2
"""Tasks that are submitted for each worker: one runs and one waits, so that no worker waits for this process."""


class TaskFuture(Protocol):
    """A task that was submitted."""

    def result(self) -> tasks.Outcome:
        """Wait for the outcome. Raises one of the pool's `LOST` if the worker was lost."""


class WorkerPool(ABC):
    """An executor with `workers` workers that share no memory with this process."""

    LOST: ClassVar[tuple[type[Exception], ...]]
    """What a future raises whose worker was lost."""
    workers: int

    @abstractmethod
    def submit(self, source: Source, facts: Sequence[TraceFact], share: int) -> TaskFuture:
        """Submit `tasks.measure` of a source; each worker has about `share` of the sources."""

    @abstractmethod
    def restart(self) -> None:
        """Replace lost workers, if the pool does not do so by itself."""

    @abstractmethod
    def close(self) -> None:
        """Stop the workers."""

    def measure(
        self, sources: Sequence[Source], facts: Sequence[TraceFact], loaded: LoadedTraces
    ) -> Iterator[Measured]:
        """Yield the facts of each source. What cannot be sent to a worker is measured by threads of this process.

        If a worker is lost (killed, out of memory), the tasks that were submitted are repeated one at a time, so that
        only the task that causes it fails, after three attempts.
        """
        if not tasks.are_portable(sources, facts):
            yield from Threads(self.workers).measure(sources, facts, loaded)
            return
        waiting, share = list(sources), math.ceil(len(sources) / self.workers)
        while waiting:
            submitted: list[Source] = []
            try:
                for measured in self._measure_in_order(waiting, facts, share, submitted):
                    waiting.remove(measured.source)
                    yield measured
            except self.LOST:
                for source in submitted:
                    waiting.remove(source)
                    yield self._measured_alone(source, facts, share)

    def _measure_in_order(
        self, sources: Sequence[Source], facts: Sequence[TraceFact], share: int, submitted: list[Source]
    ) -> Iterator[Measured]:
        """Yield the facts of each source in order; `submitted` has the sources whose facts are not yielded yet."""

        def submit(source: Source) -> TaskFuture:
            submitted.append(source)
            return self.submit(source, facts, share)

        for source, future in submitted_in_order(sources, submit, tasks=_AHEAD * self.workers):
            measured = tasks.as_measured(source, future.result())
            submitted.remove(source)
            yield measured

    def _measured_alone(self, source: Source, facts: Sequence[TraceFact], share: int) -> Measured:
        for _ in range(1, _ATTEMPTS):
            self.restart()
            try:
                return tasks.as_measured(source, self.submit(source, facts, share).result())
            except self.LOST:
                continue
        self.restart()
        return tasks.lost(source, _ATTEMPTS)
