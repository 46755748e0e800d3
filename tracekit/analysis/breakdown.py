"""What the time of a step goes into: compute, exposed communication, exposed copies, idle. The parts sum exactly."""

import polars as pl

from tracekit import intervals
from tracekit.intervals import Spans
from tracekit.trace import Trace

COPY_KINDS = ("memcpy", "memset")

_INT = pl.Int64
_WINDOW = {"step": _INT, "device": _INT, "start_ns": _INT, "end_ns": _INT}
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
    steps = trace.steps.drop_nulls(["start_ns", "end_ns"]).with_row_index("order")
    parts = [_split(busy(trace, device), mine) for (device,), mine in steps.group_by("device", maintain_order=True)]
    return pl.concat(parts).sort("order").select(*COLUMNS) if parts else pl.DataFrame(schema=COLUMNS)


def by_rank(trace: Trace) -> pl.DataFrame:
    """Return the breakdown of the whole device window, first activity to last; step is null.

    Columns as in `by_step`; one row per device.
    """
    parts = []
    for device in devices(trace):
        sets = busy(trace, device)
        covered = intervals.union(*sets)
        if len(covered):
            whole = {"step": None, "device": device, "start_ns": int(covered[0, 0]), "end_ns": int(covered[-1, 1])}
            parts.append(_split(sets, pl.DataFrame([whole], schema=_WINDOW)).select(*COLUMNS))
    return pl.concat(parts) if parts else pl.DataFrame(schema=COLUMNS)


def devices(trace: Trace) -> tuple[int | None, ...]:
    """Return the devices that did work, in order; (None,) on a CPU run, () where nothing ran."""
    lanes = trace.activities.select("lane").unique().join(trace.lanes.select("lane", "device"), on="lane")
    return tuple(lanes.get_column("device").unique().sort().to_list())


def busy(trace: Trace, device: int | None) -> tuple[Spans, Spans, Spans]:
    """Return the spans of compute, communication and copies on one device's lanes, each sorted and disjoint."""
    lanes = trace.lanes.filter(pl.col("device").eq_missing(device))["lane"].to_list()
    mine = trace.activities.lazy().filter(pl.col("lane").is_in(lanes)).select("kind", "start_ns", "dur_ns").collect()
    compute, communication, copy = (
        _spans(mine.filter(pl.col("kind").is_in(kinds))) for kinds in (("compute",), ("communication",), COPY_KINDS)
    )
    return compute, communication, copy


def _spans(activities: pl.DataFrame) -> Spans:
    return intervals.union(intervals.from_columns(activities["start_ns"], activities["dur_ns"]))


def _split(sets: tuple[Spans, Spans, Spans], windows: pl.DataFrame) -> pl.DataFrame:
    """Return `windows` (columns start_ns and end_ns among others) with what their time goes into."""
    compute, communication, copy = sets
    terms = {
        "compute_ns": compute,
        "communication_ns": communication,
        "copy_ns": copy,
        "overlapped_ns": intervals.intersect(communication, compute),
        "exposed_communication_ns": intervals.subtract(communication, compute),
        "exposed_copy_ns": intervals.subtract(copy, intervals.union(compute, communication)),
    }
    spans = windows.select("start_ns", "end_ns").to_numpy()
    duration = pl.col("end_ns") - pl.col("start_ns")
    measured = windows.with_columns(
        duration.alias("duration_ns"),
        *(pl.Series(name, intervals.coverage(spans, term), pl.Int64) for name, term in terms.items()),
    )
    busy_ns = pl.sum_horizontal("compute_ns", "exposed_communication_ns", "exposed_copy_ns")
    return measured.with_columns((pl.col("duration_ns") - busy_ns).alias("idle_ns"))
