"""WorkerPool: maps facts over traces in other processes, and repeats lost tasks. Tables travel as Arrow streams."""

import io
import math
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import ClassVar, Protocol, TypeAlias

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model.source import LoadedTraces, Measured, Source, Threads, submitted_in_order
from tracekit.model.trace import TraceFact

Outcome: TypeAlias = list[bytes] | BadTraceError
"""An Arrow stream for each fact, or why the trace cannot be read."""

_loaded = LoadedTraces(64 << 20)
_SMALL_BYTES = 8 << 10
"""Arrow streams up to this size are read once: half of the tables of a trace are empty, and alike for all traces."""

_ATTEMPTS = 3
_AHEAD = 2
"""Tasks that are submitted for each worker: one runs and one waits, so that no worker waits for this process."""


class TaskFuture(Protocol):
    """A task that was submitted."""

    def result(self) -> Outcome:
        """Wait for the outcome. Raises one of the pool's `LOST` if the worker was lost."""


class WorkerPool(ABC):
    """An executor with `workers` workers that share no memory with this process."""

    LOST: ClassVar[tuple[type[Exception], ...]]
    """What a future raises whose worker was lost."""
    workers: int

    @abstractmethod
    def submit(self, source: Source, facts: Sequence[TraceFact], share: int) -> TaskFuture:
        """Submit `measure` of a source; each worker has about `share` of the sources."""

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
        if not are_portable(sources, facts):
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
            measured = as_measured(source, future.result())
            submitted.remove(source)
            yield measured

    def _measured_alone(self, source: Source, facts: Sequence[TraceFact], share: int) -> Measured:
        for _ in range(1, _ATTEMPTS):
            self.restart()
            try:
                return as_measured(source, self.submit(source, facts, share).result())
            except self.LOST:
                continue
        self.restart()
        return lost(source, _ATTEMPTS)


def measure(source: Source, facts: Sequence[TraceFact], share: int) -> Outcome:
    """Return the facts of a trace. Runs in the worker, whose share of all sources is about `share` of them.

    The worker keeps the traces in memory if its share fits there; otherwise none would stay until it is needed again.
    """
    try:
        trace = _loaded.traces.get(source) or source.read()
        tables = pack([fact(trace) for fact in facts])
    except BadTraceError as error:
        return BadTraceError(str(error))  # without its cause, which may not be picklable
    if _loaded.keeps(trace, share):
        _loaded.add(source, trace)
    return tables


def pack(tables: Sequence[pl.DataFrame]) -> list[bytes]:
    """Return tables as they are sent: an Arrow stream for each."""
    return [_pack_table(table) for table in tables]


def as_measured(source: Source, outcome: Outcome) -> Measured:
    """Return the outcome of a task as an executor yields it."""
    if isinstance(outcome, BadTraceError):
        return Measured(source, error=outcome)
    return Measured(source, [_unpack(table) for table in outcome])


def lost(source: Source, attempts: int) -> Measured:
    """Return the outcome of a task whose workers were lost in each of its attempts."""
    message = (
        f"{source.path}: {attempts} workers that measured it were lost, perhaps for lack of memory; "
        "start fewer workers, or give each more memory"
    )
    return Measured(source, error=BadTraceError(message))


def are_portable(sources: Sequence[Source], facts: Sequence[TraceFact]) -> bool:
    """Return whether these can be sent to another process: facts that modules define, sources that files back."""
    try:
        pickle.dumps((sources[:1], facts))
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _pack_table(table: pl.DataFrame) -> bytes:
    return _ipc_stream(table) if table.height else _empty(tuple(table.schema.items()))


@lru_cache(maxsize=256)
def _empty(columns: tuple[tuple[str, pl.DataType], ...]) -> bytes:
    return _ipc_stream(pl.DataFrame(schema=dict(columns)))


def _ipc_stream(table: pl.DataFrame) -> bytes:
    stream = io.BytesIO()
    table.write_ipc_stream(stream, compression="lz4")
    return stream.getvalue()


def _unpack(stream: bytes) -> pl.DataFrame:
    return _small(stream).clone() if len(stream) <= _SMALL_BYTES else pl.read_ipc_stream(stream)


@lru_cache(maxsize=256)
def _small(stream: bytes) -> pl.DataFrame:
    return pl.read_ipc_stream(stream)
