"""The events of one trace file as tables of what tracekit uses, with counts of all events."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from tracekit.ingest.readers.normalize import category_units, numbers
from tracekit.ingest.readers.normalize.columns import CollectiveArgs, ColumnBuilder, KernelDetails, OpInputs


@dataclass
class Damage:
    """The parts of a file that could not be read."""

    lost_bytes: int = 0
    lost_events: int = 0
    """Events that start in the lost bytes."""
    non_objects: int = 0
    """Array elements that are not objects."""
    truncated: bool = False
    broken: str | None = None
    """Why decompression stopped before the end."""
    header: bool = False
    """Whether keys outside the event array could not be read."""
    later_events: int = 0
    """Ignored events in a second traceEvents array."""
    stray_bytes: bool = False
    """Whether text contained bytes that are not UTF-8; each was replaced."""


@dataclass(frozen=True)
class Events:
    """The content of a trace file. Times are in ns from the file's own zero; frames are in file order.

    `host`: kind (index into HOST_KINDS of `event_categories`), name (into `names`), lane (into `threads`), start_ns,
    dur_ns, external_id, correlation, sequence, forward_thread (0 where absent), inputs (into `inputs`). `device`: kind
    (index into its DEVICE_KINDS), name, lane, device, stream (null if unknown), start_ns, dur_ns, correlation,
    external_id, bytes, details (into `kernel_details`). `memory`: lane, at_ns, device_type, device_id, address,
    delta_bytes, allocated_bytes, reserved_bytes. `syncs`: name, lane, start_ns, dur_ns, device, stream, awaited_stream,
    correlation, awaited_correlation. `unknown`: slices of categories that no profiler of PyTorch writes, columns as
    `device`. With `has_several_ranks`, each has the `rank` in its arguments. An invalid time is `numbers.BAD`.
    """

    header: dict[str, Any]
    host: pl.DataFrame
    device: pl.DataFrame
    memory: pl.DataFrame
    syncs: pl.DataFrame
    names: pl.Series
    inputs: list[OpInputs]
    kernel_details: list[KernelDetails]
    threads: list[tuple[str | None, str | None]]
    thread_names: dict[tuple[str | None, str | None], str]
    host_collectives: list[CollectiveArgs]
    device_collectives: list[CollectiveArgs]
    counts: Counter[tuple[str | None, str | None]]
    unread: int
    """Slices that were left out because their category is unknown."""
    unmatched: int
    has_several_ranks: bool
    damage: Damage
    clock: numbers.Clock
    read_bytes: int
    unknown: pl.DataFrame = field(default_factory=pl.DataFrame)
    unknown_collectives: list[CollectiveArgs] = field(default_factory=list)
    process_names: dict[str | None, str] = field(default_factory=dict)
    process_labels: dict[str | None, str] = field(default_factory=dict)
    recorded_until_ns: int | None = None
    """When the profiler stopped; None where the file does not say so."""
    issues: tuple[tuple[str, str, float], ...] = ()
    """Further data-quality issues: kind, message and affected share."""


def of_columns(
    builder: ColumnBuilder, header: dict[str, Any], *, damage: Damage | None = None, read_bytes: int = 0
) -> Events:
    """Return the events that a finished builder was given; its parts are let go."""
    host, device, memory, syncs, unknown = builder.frames()
    host, device, issues = category_units.in_one_unit(host, device)
    is_in_range = pl.col("start_ns") < numbers.MOST_NS
    unknown = unknown.with_columns(pl.when(is_in_range).then("start_ns").otherwise(numbers.BAD).alias("start_ns"))
    return Events(
        header=header,
        host=host,
        device=device,
        memory=memory,
        syncs=syncs,
        unknown=unknown,
        names=builder.names(),
        inputs=list(builder.inputs),
        kernel_details=list(builder.kernel_details),
        threads=builder.threads(),
        thread_names=builder.thread_names,
        process_names=builder.process_names,
        process_labels=builder.process_labels,
        host_collectives=builder.host_collectives,
        device_collectives=builder.device_collectives,
        unknown_collectives=builder.unknown_collectives,
        counts=builder.counts,
        unread=builder.unknown,
        unmatched=builder.unmatched,
        has_several_ranks=bool(builder.has_several_ranks),
        damage=damage or Damage(),
        clock=builder.clock,
        read_bytes=read_bytes,
        recorded_until_ns=builder.recorded_until_ns,
        issues=issues,
    )
