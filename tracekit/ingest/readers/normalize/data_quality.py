"""Data-quality issues found while reading a trace."""

from collections.abc import Iterator

import polars as pl

from tracekit.ingest.readers.normalize import consecutive_numbers, range_steps
from tracekit.ingest.readers.normalize.event_categories import HOST_KINDS
from tracekit.ingest.readers.normalize.event_tables import Events
from tracekit.ingest.readers.normalize.odd_slices import OddValues
from tracekit.ingest.readers.normalize.steps import Steps
from tracekit.model import schema, units

Row = tuple[str, str, float | None]

_ENOUGH_TIMES = 64
_LEAST_UNDECIDED = 0.005
_MOST_NAMES, _LONGEST_NAME = 3, 80
_LEAST_OPS = 1000
_MOST_MISSING = 0.5
_LEAST_CALLS, _LEAST_RECORDED = 500, 0.01
"""Of the calls of the device runtime profilers record launches, copies and synchronizations: 7% to 100% of all calls
in complete recordings of PyTorch 1.9 to 2.11, 0.5% in a sampled one."""

_UNIT_OF_SCALE = {1e3: "ms", 1e-3: "ns"}
"""Unit in which durations were, by the factor that converted them to µs."""
_LEAST_UNNUMBERED = 100
"""Ops: fewer are a test or a fragment, which nobody samples."""


def table(events: Events, steps: Steps, *, odd: OddValues, undecided: pl.DataFrame, busy_ns: int) -> pl.DataFrame:
    """Return the data-quality issues that reading raises: one row per kind.

    `undecided` are kernels that only look like communication (columns name, dur_ns), `busy_ns` the time of all work.
    """
    rows = [*_damage(events), *_content(events, steps), *_odd(events, odd), *_undecided_kernels(undecided, busy_ns)]
    return pl.DataFrame(rows, schema=schema.DATA_QUALITY.schema, orient="row")


def _damage(events: Events) -> Iterator[Row]:
    damage, total = events.damage, max(sum(events.counts.values()), 1)
    if damage.truncated:
        why = damage.broken or "the file ends in the middle of its events"
        # A truncated file does not say how much is missing, so the share is unknown.
        yield "truncated", f"Truncated: {why}; {total:,} complete events were read, the rest is lost.", None
    lost = damage.lost_events + damage.non_objects + damage.later_events
    if damage.lost_bytes or damage.non_objects:
        share = min(max(lost / (total + lost), damage.lost_bytes / max(events.read_bytes, 1)), 1.0)
        size = units.size(damage.lost_bytes)
        message = f"{size} are not readable as events; at least {max(lost, 1)} events are lost, {total:,} were read."
        yield "damaged_events", message, share
    if damage.later_events:
        message = f"A second traceEvents array with {damage.later_events:,} events was left out."
        yield "repeated_events", message, damage.later_events / (total + damage.later_events)
    if damage.header:
        yield "damaged_header", "The header (rank, clock, devices) is only partly readable.", 0.0
    if damage.stray_bytes:
        yield "stray_bytes", "Some names or keys contain bytes that are not UTF-8; each was replaced.", 0.0


def _content(events: Events, steps: Steps) -> Iterator[Row]:
    total = max(sum(events.counts.values()), 1)
    is_other = range_steps.is_without_pytorch(events.names, events.header)
    unmarked = "No steps are marked" if is_other else "No ProfilerStep marks"
    if steps.from_optimizer:
        message = "No ProfilerStep marks: steps end where the optimizer steps, counted from 0."
        yield "steps_from_optimizer", message, 0.0
    elif steps.range_name:
        message = (
            f"{unmarked}: the {len(steps.step)} ranges '{steps.range_name[:_LONGEST_NAME]}' are the steps, "
            "counted from 0, because they follow one another and launch nearly all work."
        )
        yield "steps_from_ranges", message, 0.0
    elif steps.alike_ratio is not None:
        message = (
            f"{unmarked}: {len(steps.step)} iterations were found by repetition, counted from 0, "
            f"because {steps.reason}. "
            f"{units.share(steps.alike_ratio)} of the distinct kernels recur in each, and they cover "
            f"{units.share(steps.covered_ratio)} of the main stream's work."
        )
        yield "steps_from_repetition", message, 0.0
    elif steps.layers:
        message = (
            f"{unmarked}: {steps.layers} repetitions of the work are read as layers of one pass, because "
            f"{steps.reason}."
        )
        yield "one_pass", message, 0.0
    elif not len(steps.step):
        call = "" if is_other else "; call profiler.step() in every step"
        message = f"{unmarked}, and no iterations were found in the work: the trace is one window without steps{call}."
        yield "no_steps", message, 0.0
    if steps.between_marks:
        message = (
            f"{units.count(len(steps.between_marks), 'step')} have no mark with a usable time: "
            f"{units.ranges(steps.between_marks)}; each is the time between the steps before and after it."
        )
        yield "unmarked_steps", message, 0.0
    if events.unmatched:
        message = f"{events.unmatched:,} begin or end events lack their counterpart and were ignored."
        yield "unmatched_pairs", message, events.unmatched / total
    if events.unread:
        message = f"{events.unread:,} slices are of an unknown kind and were ignored."
        yield "unknown_kinds", message, events.unread / total
    yield from events.issues
    yield from _sampled_ops(events)
    resolution = _resolution(events)
    if resolution:
        yield "clock_resolution", resolution, 0.0


def _odd(events: Events, odd: OddValues) -> Iterator[Row]:
    total = max(sum(events.counts.values()), 1)
    reasons = {
        "have no usable time": odd.bad_times,
        "lie far before or after all others": odd.distant,
        "are of a kind of which all lie before or after the rest": odd.shifted,
        "contradict the order in which their stream was given work": odd.out_of_order,
    }
    if count := sum(reasons.values()):
        named = ", ".join(f"{number:,} {what}" for what, number in reasons.items() if number)
        yield "bad_times", f"Events with wrong times were left out: {named}.", count / total
    if odd.instant_work:
        message = (
            f"{odd.instant_work:,} of {odd.untimed_work:,} recorded activities of the device have a duration of 0, so "
            "what it runs at a time is not known: times are of the host."
        )
        yield "device_times", message, 1.0
    elif odd.untimed_work:
        message = (
            f"None of {odd.untimed_work:,} recorded activities of the device has a usable time: they are in another "
            "unit or of another clock than those of the host, so times are of the host."
        )
        yield "device_times", message, 1.0
    scales = {"host slices": odd.host_scale, "device activities": odd.device_scale}
    if converted := [f"of {what} in {_UNIT_OF_SCALE[scale]}" for what, scale in scales.items() if scale != 1]:
        message = f"Durations {' and '.join(converted)}, unlike their times in µs: they were converted."
        yield "duration_unit", message, 0.0
    if odd.call_ns is not None:
        message = (
            f"Operators take {odd.call_ns} ns in the median, which no call does: the file's times are not in µs, as "
            "its format demands, so all times and costs are wrong by one factor."
        )
        yield "time_unit", message, 1.0
    if odd.overlong:
        longest = max(odd.overlong, key=lambda event: event.dur_ns)
        message = (
            f"{units.count(len(odd.overlong), 'event')} with a wrong duration left out: the longest, "
            f"{longest.name[:_LONGEST_NAME]}, would take {units.duration(longest.dur_ns)}, against what follows it."
        )
        yield "bad_durations", message, len(odd.overlong) / total
    if odd.unplaced:
        message = f"{units.count(odd.unplaced, 'allocator event')} state no device and were left out."
        yield "unplaced_allocations", message, odd.unplaced / max(events.memory.height, 1)
    if odd.duplicates:
        message = f"{units.count(odd.duplicates, 'event')} recorded twice; the repetitions were left out."
        yield "duplicate_events", message, odd.duplicates / total


def _sampled_ops(events: Events) -> Iterator[Row]:
    """Recordings that lack most ops: the profiler numbers ops consecutively, each thread in blocks of its own.

    Where ops have no numbers: those that lack most calls of the CUDA runtime, which has its own numbers. Where
    neither shows it, ops may be missing.
    """
    is_op = pl.col("kind").is_in([HOST_KINDS.index("cpu_op"), HOST_KINDS.index("annotation")])
    numbered = _slices_with_numbers(events.host.filter(is_op), "external_id")
    if numbered.is_empty():
        yield from _sampled_calls(events)
        return
    recorded = numbered["number"].n_unique()
    op_count = max(consecutive_numbers.given_count(numbered, block_size=consecutive_numbers.OP_BLOCK_SIZE), recorded)
    missing = 1 - recorded / op_count
    if op_count >= _LEAST_OPS and missing > _MOST_MISSING:
        message = f"The trace has {recorded:,} of {op_count:,} consecutively numbered ops: the others are missing."
        yield "sampled", message, missing


def _sampled_calls(events: Events) -> Iterator[Row]:
    numbered = _slices_with_numbers(events.host.filter(pl.col("kind") == HOST_KINDS.index("runtime")), "correlation")
    numbers = numbered["number"].unique()
    call_count = consecutive_numbers.given_count(numbered) if len(numbers) >= _LEAST_CALLS else 0
    op_count = events.host.filter(pl.col("kind") == HOST_KINDS.index("cpu_op")).height
    if len(numbers) < _LEAST_RECORDED * call_count:
        message = (
            f"The trace has {len(numbers):,} of {call_count:,} consecutively numbered calls of the device runtime, of "
            f"which complete recordings have more than {units.share(_LEAST_RECORDED)}: others are missing."
        )
        yield "sampled", message, 1 - len(numbers) / call_count
    elif op_count >= _LEAST_UNNUMBERED:
        yield "unnumbered_ops", f"{op_count:,} ops have no numbers, which would show whether others are missing.", 0.0


def _slices_with_numbers(slices: pl.DataFrame, column: str) -> pl.DataFrame:
    """Slices with a number, which profilers count from 1: columns number, source and start_ns."""
    numbered = slices.filter(pl.col(column) > 0)
    return numbered.select(pl.col(column).alias("number"), pl.struct("lane", "kind").alias("source"), "start_ns")


def _undecided_kernels(kernels: pl.DataFrame, busy_ns: int) -> Iterator[Row]:
    share = int(kernels["dur_ns"].sum()) / max(busy_ns, 1)
    if share >= _LEAST_UNDECIDED:
        names = kernels.group_by("name").agg(pl.col("dur_ns").sum()).sort("dur_ns", "name", descending=[True, False])
        longest = ", ".join(name[:_LONGEST_NAME] for name in names["name"].head(_MOST_NAMES))
        more = f" and {names.height - _MOST_NAMES} more" if names.height > _MOST_NAMES else ""
        message = (
            f"{kernels.height:,} kernels are named like communication, but nothing shows that they communicate: "
            f"{longest}{more}. They count as compute."
        )
        yield "undecided_communication", message, share


def _resolution(events: Events) -> str | None:
    clock = events.clock
    if clock.times < _ENOUGH_TIMES or clock.thousandths:
        return None
    if not clock.fractions:
        return "All times are whole µs, so shorter durations and gaps are invisible."
    if clock.epoch:
        return "Times are float64 µs since 1970, with a resolution of 0.25 µs."
    return None
