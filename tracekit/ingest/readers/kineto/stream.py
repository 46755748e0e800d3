"""One trace file to columns of what tracekit uses, with counts of all events."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.ingest.readers.kineto import numbers
from tracekit.ingest.readers.kineto.columns import CollectiveArgs, ColumnBuilder, OpInputs
from tracekit.ingest.readers.kineto.joined_inputs import JoinedInputs
from tracekit.ingest.readers.kineto.scan import Damage, Scan


@dataclass(frozen=True)
class Events:
    """The content of a trace file. Times are in ns from the file's own zero; frames are in file order.

    `host`: kind (index into HOST_KINDS of `event_categories`), name (into `names`), lane (into `threads`), start_ns,
    dur_ns, external_id, correlation, sequence, forward_thread (0 where absent), inputs (into `inputs`). `device`: kind
    (index into its DEVICE_KINDS), name, lane, device, stream (null if unknown), start_ns, dur_ns, correlation,
    external_id, bytes, grid (into `grids`). `memory`: lane, at_ns, device_type, device_id, address, delta_bytes,
    allocated_bytes, reserved_bytes. `syncs`: name, lane, start_ns, dur_ns, device, stream, awaited_stream, correlation,
    awaited_correlation. With `has_several_ranks`, each has the `rank` in its arguments. An invalid time is
    `numbers.BAD`.
    """

    header: dict[str, Any]
    host: pl.DataFrame
    device: pl.DataFrame
    memory: pl.DataFrame
    syncs: pl.DataFrame
    names: pl.Series
    inputs: list[OpInputs]
    grids: list[tuple[bytes, bytes]]
    threads: list[tuple[str | None, str | None]]
    thread_names: dict[tuple[str | None, str | None], str]
    host_collectives: list[CollectiveArgs]
    device_collectives: list[CollectiveArgs]
    counts: Counter[tuple[str | None, str | None]]
    unknown: int
    unmatched: int
    has_several_ranks: bool
    damage: Damage
    clock: numbers.Clock
    read_bytes: int


def read_events(path: str, joined: JoinedInputs | None = None) -> Events:
    """Read one Kineto JSON file: plain, gzip or zstd, of any layout, complete or not.

    Operators without inputs get those of `joined`. Raises BadTraceError if the file is missing, empty, not a trace, or
    has no complete event.
    """
    source = Scan(path)
    builder = ColumnBuilder()
    for batch in source:
        if joined:
            joined.complete(batch)
        if not builder.add(batch):
            exactly = source.redecode_exactly()
            if joined and exactly is not None:
                joined.complete(exactly)
            builder.add(batch if exactly is None else exactly)
    builder.finish()
    return of_columns(builder, source.header, damage=source.damage, read_bytes=source.read_bytes)


def of_columns(
    builder: ColumnBuilder, header: dict[str, Any], *, damage: Damage | None = None, read_bytes: int = 0
) -> Events:
    """Return the events that a finished builder was given; its parts are let go."""
    host, device, memory, syncs = builder.frames()
    return Events(
        header=header,
        host=host,
        device=device,
        memory=memory,
        syncs=syncs,
        names=builder.names(),
        inputs=builder.inputs(),
        grids=builder.grids(),
        threads=builder.threads(),
        thread_names=builder.thread_names,
        host_collectives=builder.host_collectives,
        device_collectives=builder.device_collectives,
        counts=builder.counts,
        unknown=builder.unknown,
        unmatched=builder.unmatched,
        has_several_ranks=bool(builder.has_several_ranks),
        damage=damage or Damage(),
        clock=builder.clock,
        read_bytes=read_bytes,
    )
