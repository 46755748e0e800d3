"""What the time of a step goes into: compute, exposed communication, exposed copies, idle. The parts sum exactly."""

import polars as pl

from tracekit import intervals
from tracekit.intervals import Spans, Window
from tracekit.trace import Trace

COPY_KINDS = ("memcpy", "memset")

_INT = pl.Int64
COLUMNS = {
    "step": _INT,
    "device": _INT,
    "start_ns": _INT,
    "duration_ns": _INT,
    "compute_ns": _INT,
    "communication_ns": _INT,
    "copy_ns": _INT,
    "overlapped_ns": _INT,
    "exposed_communication_ns": _INT,
    "exposed_copy_ns": _INT,
    "idle_ns": _INT,
}


def by_step(trace: Trace) -> pl.DataFrame:
    """Return the breakdown of every step's device window.

    Columns step, device, start_ns, duration_ns, compute_ns, communication_ns, copy_ns, overlapped_ns,
    exposed_communication_ns, exposed_copy_ns, idle_ns; one row per step and device (device null on a CPU run).
    Each term is an interval union over the device's lanes: compute; exposed communication = communication minus
    compute; exposed copy = copies and sets minus both; idle = the rest. compute + exposed communication + exposed
    copy + idle = duration, exactly. overlapped = communication ∩ compute.
    """
    rows = []
    for step, start, end, device in trace.steps.select("step", "start_ns", "end_ns", "device").iter_rows():
        if start is None or end is None:
            continue
        rows.append((step, device, *_split(busy(trace, device), (start, end))))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def by_rank(trace: Trace) -> pl.DataFrame:
    """Return the breakdown of the whole device window, first activity to last; step is null.

    Columns as in `by_step`; one row per device.
    """
    rows = []
    for device in devices(trace):
        sets = busy(trace, device)
        covered = intervals.union(*sets)
        if len(covered):
            rows.append((None, device, *_split(sets, (int(covered[0, 0]), int(covered[-1, 1])))))
    return pl.DataFrame(rows, schema=COLUMNS, orient="row")


def devices(trace: Trace) -> tuple[int | None, ...]:
    """Return the devices that did work, in order; (None,) on a CPU run, () where nothing ran."""
    lanes = trace.activities.select("lane").unique().join(trace.lanes.select("lane", "device"), on="lane")
    return tuple(lanes.get_column("device").unique().sort().to_list())


def busy(trace: Trace, device: int | None) -> tuple[Spans, Spans, Spans]:
    """Return the spans of compute, communication and copies on one device's lanes, each sorted and disjoint."""
    work = trace.activities.join(trace.lanes.select("lane", "device"), on="lane").filter(
        pl.col("device").eq_missing(device)
    )
    compute, communication, copy = (
        _spans(work.filter(pl.col("kind").is_in(kinds))) for kinds in (("compute",), ("communication",), COPY_KINDS)
    )
    return compute, communication, copy


def _spans(activities: pl.DataFrame) -> Spans:
    return intervals.union(intervals.from_columns(activities["start_ns"], activities["dur_ns"]))


def _split(sets: tuple[Spans, Spans, Spans], window: Window) -> tuple[int, ...]:
    compute, communication, copy = (intervals.clip(spans, window) for spans in sets)
    length = intervals.length
    duration = window[1] - window[0]
    exposed_communication = length(intervals.subtract(communication, compute))
    exposed_copy = length(intervals.subtract(copy, intervals.union(compute, communication)))
    return (
        window[0],
        duration,
        length(compute),
        length(communication),
        length(copy),
        length(intervals.intersect(communication, compute)),
        exposed_communication,
        exposed_copy,
        duration - length(compute) - exposed_communication - exposed_copy,
    )
