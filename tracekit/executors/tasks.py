"""The task of a worker: measure the facts of one trace. Tables travel as Arrow streams."""

import io
import pickle
from collections.abc import Sequence
from typing import TypeAlias

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model.executor import Measured
from tracekit.model.source import LoadedTraces, Source
from tracekit.model.trace import Fact

Outcome: TypeAlias = list[bytes] | BadTraceError
"""An Arrow stream for each fact, or why the trace cannot be read."""

_loaded = LoadedTraces(64 << 20)


def measure(source: Source, facts: Sequence[Fact]) -> Outcome:
    """Return the facts of a trace. Runs in the worker, which keeps the traces that it used last in memory."""
    try:
        trace = _loaded.open(source)
        return packed([fact(trace) for fact in facts])
    except BadTraceError as error:
        return BadTraceError(str(error))  # without its cause, which may not be picklable


def packed(tables: Sequence[pl.DataFrame]) -> list[bytes]:
    """Return tables as they are sent: an Arrow stream for each."""
    return [_packed(table) for table in tables]


def measured(source: Source, outcome: Outcome) -> Measured:
    """Return the outcome of a task as an executor yields it."""
    if isinstance(outcome, BadTraceError):
        return Measured(source, error=outcome)
    return Measured(source, [pl.read_ipc_stream(io.BytesIO(table)) for table in outcome])


def lost(source: Source, attempts: int) -> Measured:
    """Return the outcome of a task whose workers were lost in each of its attempts."""
    message = (
        f"{source.path}: {attempts} workers that measured it were lost, perhaps for lack of memory; "
        "start fewer workers, or give each more memory"
    )
    return Measured(source, error=BadTraceError(message))


def are_portable(sources: Sequence[Source], facts: Sequence[Fact]) -> bool:
    """Return whether these can be sent to another process: facts that modules define, sources that files back."""
    try:
        pickle.dumps((sources[:1], facts))
    except (pickle.PicklingError, TypeError, AttributeError):
        return False
    return True


def _packed(table: pl.DataFrame) -> bytes:
    stream = io.BytesIO()
    table.write_ipc_stream(stream, compression="lz4")
    return stream.getvalue()
