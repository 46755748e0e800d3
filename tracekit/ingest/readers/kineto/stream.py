"""One trace file to columns of what tracekit uses of it, with counts of all it holds."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import polars as pl

from tracekit.ingest.readers.kineto import columns, numbers
from tracekit.ingest.readers.kineto.columns import Gather, Spoken
from tracekit.ingest.readers.kineto.header import read_header
from tracekit.ingest.readers.kineto.scan import Damage, Scan

__all__ = ["Events", "counts", "read_events", "read_header", "states_ranks"]


@dataclass(frozen=True)
class Events:
    """What a trace file holds. Times in ns on the file's own zero; frames in the order of the file.

    `host`: kind (index into `gather.HOST_KINDS`), name (into `names`), lane (into `threads`), start_ns, dur_ns,
    external_id, correlation, sequence, forward_thread (0 where absent), shapes (into `shapes`). `device`: kind (index
    into `gather.DEVICE_KINDS`), name, lane, device, stream (null where not told), start_ns, dur_ns, correlation,
    external_id, bytes, grid (into `grids`). `memory`: lane, at_ns, device_type, device_id, address, delta_bytes,
    allocated_bytes, reserved_bytes. `syncs`: name, lane, start_ns, dur_ns, device, stream, awaited_stream, correlation,
    awaited_correlation. Where `several`, each has the `rank` that its arguments tell. A time that is no number is
    `numbers.BAD`.
    """

    header: dict[str, Any]
    host: pl.DataFrame
    device: pl.DataFrame
    memory: pl.DataFrame
    syncs: pl.DataFrame
    names: pl.Series
    shapes: list[bytes]
    grids: list[tuple[bytes, bytes]]
    threads: list[tuple[str | None, str | None]]
    thread_names: dict[tuple[str | None, str | None], str]
    host_spoken: list[Spoken]
    device_spoken: list[Spoken]
    counts: Counter[tuple[str | None, str | None]]
    unknown: int
    unmatched: int
    several: bool
    damage: Damage
    clock: numbers.Clock
    read_bytes: int


def read_events(path: str) -> Events:
    """Read one Kineto JSON file: plain, gzip or zstd, of any layout, whole or not.

    Raises BadTraceError if the file is missing, empty, no trace, or holds not one whole event.
    """
    source = Scan(path)
    gathered = Gather()
    for batch in source:
        if not gathered.add(batch):
            exactly = source.again_exactly()
            gathered.add(batch if exactly is None else exactly)
    gathered.finish()
    host, device, memory, syncs = gathered.frames()
    return Events(
        header=source.header,
        host=host,
        device=device,
        memory=memory,
        syncs=syncs,
        names=gathered.names(),
        shapes=gathered.shapes(),
        grids=gathered.grids(),
        threads=gathered.threads(),
        thread_names=gathered.thread_names,
        host_spoken=gathered.host_spoken,
        device_spoken=gathered.device_spoken,
        counts=gathered.counts,
        unknown=gathered.unknown,
        unmatched=gathered.unmatched,
        several=bool(gathered.several),
        damage=source.damage,
        clock=gathered.clock,
        read_bytes=source.read_bytes,
    )


def counts(path: str) -> Counter[tuple[str | None, str | None]]:
    """Return how many events of each (ph, cat) a file holds, those included that no table needs.

    Raises BadTraceError as `read_events` does.
    """
    found: Counter[tuple[str | None, str | None]] = Counter()
    for batch in Scan(path):
        columns.count(found, batch)
    return found


def states_ranks(path: str) -> bool:
    """Return whether the events of a file name their rank one by one, as in a file merged of several ranks.

    Reads the file's first events only. Raises BadTraceError as `read_events` does.
    """
    return columns.states_ranks(next((batch for batch in Scan(path) if batch), []))
