"""Why a trace cannot be trusted whole, as far as reading it shows."""

from collections.abc import Iterator

import polars as pl

from tracekit.ingest.readers.kineto.steps import Steps
from tracekit.ingest.readers.kineto.stream import Events
from tracekit.model import schema, units

Row = tuple[str, str, float | None]

_ENOUGH_TIMES = 64


def table(events: Events, steps: Steps, *, bad_times: int) -> pl.DataFrame:
    """Return the data-quality issues that reading raises: one row per kind."""
    rows = [*_damage(events), *_content(events, steps, bad_times)]
    return pl.DataFrame(rows, schema=schema.DATA_QUALITY.schema, orient="row")


def _damage(events: Events) -> Iterator[Row]:
    damage, total = events.damage, max(sum(events.counts.values()), 1)
    if damage.truncated:
        why = damage.broken or "the file ends in the middle of its events"
        # How much is missing no cut file tells, so the share stays unknown.
        yield "truncated", f"Cut: {why}; {total:,} whole events before that were read, what followed is lost.", None
    lost = damage.lost_events + damage.not_events + damage.later_events
    if damage.lost_bytes or damage.not_events:
        share = min(max(lost / (total + lost), damage.lost_bytes / max(events.read_bytes, 1)), 1.0)
        size = units.size(damage.lost_bytes)
        message = f"{size} are not readable as events, {max(lost, 1)} or more events are lost; {total:,} were read."
        yield "damaged_events", message, share
    if damage.later_events:
        message = f"A second traceEvents array with {damage.later_events:,} events was left out."
        yield "repeated_events", message, damage.later_events / (total + damage.later_events)
    if damage.header:
        yield "damaged_header", "What stands beside the events (rank, clock, devices) is not wholly readable.", 0.0
    if damage.stray_bytes:
        yield "stray_bytes", "Some names hold bytes that are not UTF-8; each was replaced by a mark.", 0.0


def _content(events: Events, steps: Steps, bad_times: int) -> Iterator[Row]:
    total = max(sum(events.counts.values()), 1)
    if steps.from_optimizer:
        message = "No ProfilerStep marks: a step is taken to end where the optimizer's step does, counted from 0."
        yield "steps_from_optimizer", message, 0.0
    elif not len(steps.step):
        message = "No ProfilerStep marks: the trace is one window without steps; call profiler.step() once a step."
        yield "no_steps", message, 0.0
    if bad_times:
        yield "bad_times", f"{bad_times:,} events have no usable time and were left out.", bad_times / total
    if events.unmatched:
        message = f"{events.unmatched:,} events begin or end a slice whose other end is missing; they were left out."
        yield "unmatched_pairs", message, events.unmatched / total
    if events.unknown:
        message = f"{events.unknown:,} slices are of no kind that tracekit knows and were left out."
        yield "unknown_kinds", message, events.unknown / total
    resolution = _resolution(events)
    if resolution:
        yield "clock_resolution", resolution, 0.0


def _resolution(events: Events) -> str | None:
    clock = events.clock
    if clock.times < _ENOUGH_TIMES or clock.thousandths:
        return None
    if not clock.fractions:
        return "All times are whole µs, so shorter durations and gaps are not told."
    if clock.epoch:
        return "Times are µs since 1970 that went through a double, so they resolve only 0.25 µs."
    return None
