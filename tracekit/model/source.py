"""Source: the file of one trace of a run. LoadedTraces: the traces that are in memory."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import polars as pl

from tracekit.model.trace import LazyTrace, Trace


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
        self._traces: dict[Source, Trace] = {}
        self._sizes_bytes: dict[Source, int] = {}
        """The size of each trace when it was last used: to add up all tables after each trace takes long."""

    def get(self, source: Source) -> Trace | None:
        """Return the trace of a source if it is in memory."""
        return self._traces.get(source)

    def open(self, source: Source) -> Trace:
        """Return the trace of a source, read if it is not in memory. Raises BadTraceError if it cannot be read."""
        trace = self.get(source) or source.read()
        self.add(source, trace)
        return trace

    def add(self, source: Source, trace: Trace) -> None:
        """Add a trace as the one used last, and evict others as needed."""
        self._traces.pop(source, None)
        self._traces[source] = trace
        self._sizes_bytes[source] = _size_bytes(trace)
        total_bytes = sum(self._sizes_bytes[source] for source in self._traces)
        while total_bytes > self._max_bytes and len(self._traces) > 1:
            least_recent = next(iter(self._traces))
            del self._traces[least_recent]
            total_bytes -= self._sizes_bytes.pop(least_recent)

    def keeps(self, trace: Trace, count: int) -> bool:
        """Return whether `count` traces as large as this one stay in memory together.

        If not, a pass over all of them evicts each one before the next pass needs it.
        """
        return count == 1 or count * _size_bytes(trace) <= self._max_bytes

    def clear(self) -> None:
        """Evict all traces."""
        self._traces.clear()
        self._sizes_bytes.clear()

    def __len__(self) -> int:
        return len(self._traces)


def _size_bytes(trace: Trace) -> int:
    # Tables in memory only: a trace from the disk cache reads each table on first access.
    table_bytes = sum(table.estimated_size() for table in vars(trace).values() if isinstance(table, pl.DataFrame))
    return int(table_bytes) + (trace.deferred_bytes if isinstance(trace, LazyTrace) else 0)
