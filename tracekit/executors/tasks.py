"""The task of a worker: measure the facts of one trace. Tables travel as Arrow streams."""

import io
import pickle
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

import polars as pl

from tracekit.errors import BadTraceError
from tracekit.model.executor import Measured
from tracekit.model.source import LoadedTraces, Source
from tracekit.model.trace import TraceFact

Outcome: TypeAlias = list[bytes] | BadTraceError
"""An Arrow stream for each fact, or why the trace cannot be read."""

_loaded = LoadedTraces(64 << 20)
_SMALL_BYTES = 8 << 10
"""Arrow streams up to this size are read once: half of the tables of a trace are empty, and alike for all traces."""


def measure(source: Source, facts: Sequence[TraceFact], share: int) -> Outcome:
    """Return the facts of a trace. Runs in the worker, whose share of all sources is about `share` of them.

    The worker keeps the traces in memory if its share fits there; otherwise none would stay until it is needed again.
    """
    try:
        trace = _loaded.get(source) or source.read()
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
