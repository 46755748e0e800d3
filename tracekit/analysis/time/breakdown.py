"""Breakdown of step time: compute, exposed communication, exposed copies, idle. The parts sum exactly."""

from typing import Any

import numpy as np
import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.model import columns, intervals, schema
from tracekit.model.fact import run_fact, trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import distinct
from tracekit.model.trace import Trace
from tracekit.sync import alignment

COPY_KINDS = ("memcpy", "memset")

_INT = pl.Int64
TERMS = ("compute_ns", "communication_ns", "copy_ns", "overlapped_ns", "exposed_communication_ns", "exposed_copy_ns")
BREAKDOWN = schema.table(
    "breakdown",
    "step, rank and device: where the time of the step's device window goes",
    schema.column("step", "Training step; null where the trace marks none."),
    schema.column("device", "Device index; null on a CPU run."),
    schema.column("start_ns", "Start of the device window."),
    schema.column("duration_ns", "Its length: compute + exposed communication + exposed copy + idle, exactly."),
    schema.column("compute_ns", "Time in which any lane computes."),
    schema.column("communication_ns", "Time in which any lane communicates."),
    schema.column("copy_ns", "Time in which any lane copies or sets memory."),
    schema.column("overlapped_ns", "Communication while another lane computes."),
    schema.column("exposed_communication_ns", "Communication that no compute hides."),
    schema.column("exposed_copy_ns", "Copies that neither compute nor communication hides."),
    schema.column("idle_ns", "The rest."),
)

COMPUTE, EXPOSED_COMMUNICATION, EXPOSED_COPY = PARTS = ("compute", "exposed_communication", "exposed_copy")
SPAN_COLUMNS = {"device": _INT, "part": pl.String, "start_ns": _INT, "dur_ns": _INT}

_TIMES = ("duration_ns", *TERMS, "idle_ns")
COLUMNS = ("rank", "window", "step", *_TIMES)

EXTENT_COLUMNS = schema.columns("first_ns steps", steps=pl.List(pl.Int64))
RUN_CLOCK = schema.columns("window rank offset_ns drift at_ns zero_ns", drift=pl.Float64)


@trace_fact
def spans(trace: Trace) -> pl.DataFrame:
    """Spans of each part of the breakdown on each device: disjoint, by device, part and start.

    Columns device, part (of PARTS; the rest is idle), start_ns, dur_ns. `by_step` gives their coverage of each step's
    window.
    """
    parts = []
    for device in devices(trace):
        compute, communication, copy = busy(trace, device)
        exposed = intervals.subtract(communication, compute)
        copied = intervals.subtract(copy, intervals.union(compute, communication))
        for part, part_spans in zip(PARTS, (compute, exposed, copied), strict=True):
            parts.append(
                pl.DataFrame(
                    [
                        pl.Series("device", [device], _INT).new_from_index(0, len(part_spans)),
                        pl.Series("part", [part]).new_from_index(0, len(part_spans)),
                        pl.Series("start_ns", part_spans[:, 0]),
                        pl.Series("dur_ns", part_spans[:, 1] - part_spans[:, 0]),
                    ]
                )
            )
    return schema.concat(parts, SPAN_COLUMNS)


@trace_fact(table=BREAKDOWN)
@memoize
def by_step(trace: Trace) -> pl.DataFrame:
    """Breakdown of every step's device window.

    Columns as BREAKDOWN; one row per step and device (device null on a CPU run). Each term is an interval union over
    the device's lanes: compute; exposed communication = communication minus compute; exposed copy = copies and sets
    minus both; idle = the rest. compute + exposed communication + exposed copy + idle = duration, exactly. overlapped =
    communication ∩ compute.
    """
    steps = trace_columns.windows(trace)
    row_devices, windows = steps["device"].to_list(), steps[["start_ns", "end_ns"]].to_numpy()
    terms = np.zeros((len(windows), len(TERMS)), np.int64)
    for device in dict.fromkeys(row_devices):
        on_device = np.array([other == device for other in row_devices], np.bool_)
        terms[on_device] = _split(busy(trace, device), windows[on_device])
    return _table(steps["step"].to_list(), row_devices, windows, terms)


@trace_fact
def by_rank(trace: Trace) -> pl.DataFrame:
    """Breakdown of the whole device window, first activity to last; step is null.

    Columns as in `by_step`; one row per device.
    """
    parts: list[tuple[int | None, Spans, Spans]] = []
    for device in devices(trace):
        sets = busy(trace, device)
        covered = intervals.union(*sets)
        if len(covered):
            window = np.array([[covered[0, 0], covered[-1, 1]]])
            parts.append((device, window, _split(sets, window)))
    if not parts:
        return BREAKDOWN.empty()
    device_of, windows, terms = zip(*parts, strict=True)
    return _table([None] * len(parts), list(device_of), np.concatenate(windows), np.concatenate(terms))


@memoize
def devices(trace: Trace) -> tuple[int | None, ...]:
    """Devices with activity, in order; (None,) on a CPU run, () where nothing ran."""
    device_of = _device_of(trace)
    used = {device_of[lane] for lane in distinct(trace.activities["lane"].to_numpy()).tolist() if lane in device_of}
    return tuple(sorted(used, key=lambda device: -1 if device is None else device))


@memoize
def lane_devices(trace: Trace) -> tuple[int, ...]:
    """Devices that have a stream, in order, also those without activity."""
    return tuple(sorted({device for device in _device_of(trace).values() if device is not None}))


@memoize
def is_on_device(run: Run) -> bool:
    """Return whether any rank of a run did work on a device; False for CPU runs."""
    return bool(run.table(by_step)["device"].is_not_null().any())


def busy(trace: Trace, device: int | None) -> tuple[Spans, Spans, Spans]:
    """Spans of compute, communication and copies on one device's lanes, each sorted and disjoint."""
    lanes = [lane for lane, lane_device in _device_of(trace).items() if lane_device == device]
    activities = trace.activities
    on_device = np.isin(activities["lane"].to_numpy(), lanes)
    spans = intervals.from_table(activities)
    masks = [trace_columns.is_activity_kind(trace, kind) for kind in ("compute", "communication")]
    masks.append(np.logical_or.reduce([trace_columns.is_activity_kind(trace, kind) for kind in COPY_KINDS]))
    compute, communication, copy = (intervals.union(spans[on_device & mask]) for mask in masks)
    return compute, communication, copy


@trace_fact
@memoize
def communication(trace: Trace) -> pl.DataFrame:
    """Communication activities with their device, columns as the activities table and device."""
    calls = columns.where(trace.activities, trace_columns.is_activity_kind(trace, "communication"))
    lane = columns.rows_of(trace.lanes["lane"].to_numpy(), calls["lane"].to_numpy())
    return columns.where(calls, lane >= 0).hstack(trace.lanes[["device"]][lane[lane >= 0]])


def with_exposure(trace: Trace, work: pl.DataFrame) -> pl.DataFrame:
    """Return activities (columns device, start_ns, dur_ns and more) by device, with exposed_ns.

    exposed_ns is the time in which no compute ran on the activity's device.
    """
    row_device, spans = columns.to_ints(work["device"], _NO_DEVICE), intervals.from_table(work)
    rows, exposed_ns = np.empty(0, np.int64), spans[:, 1] - spans[:, 0]
    for device in devices(trace):
        device_rows = np.flatnonzero(row_device == (_NO_DEVICE if device is None else device))
        exposed_ns[device_rows] -= intervals.coverage(spans[device_rows], busy(trace, device)[0])
        rows = np.concatenate((rows, device_rows))
    return work[rows].hstack([pl.Series("exposed_ns", exposed_ns[rows])])


@trace_fact
def ops_by_step(trace: Trace) -> pl.DataFrame:
    """Operators that the host runs in each marked step. Columns step, ops; one row per step with some."""
    cpu_ops = trace.ops.filter(pl.col("kind") == "cpu_op").drop_nulls("step")
    return cpu_ops.group_by("step").agg(pl.len().cast(pl.Int64).alias("ops")).sort("step")


def slowest_device_by_step(run: Run) -> pl.DataFrame:
    """Return one row per rank, window and step, in that order. Columns are COLUMNS; see `breakdown`.

    For a rank with several devices, the slowest device counts.
    """
    return slowest_device(run.table(by_step)).select(COLUMNS).sort("rank", "window", "step")


def slowest_device_by_rank(run: Run) -> pl.DataFrame:
    """Return one row per rank over its whole device window, first activity to last; `window` and `step` are null.

    Columns are COLUMNS. Several profiled windows are added up; of several devices the slowest counts.
    """
    windows = slowest_device(run.table(by_rank))
    sums = windows.group_by("rank").agg(pl.col("step").first(), pl.col(_TIMES).sum())
    return sums.with_columns(pl.lit(None, pl.Int64).alias("window")).select(COLUMNS).sort("rank")


def slowest_device_in_steps(run: Run) -> pl.DataFrame:
    """Time of each rank as `slowest_device_by_rank`, over its marked steps; over its windows where none is marked."""
    sums = slowest_device(steps_by_rank(run)).group_by("rank").agg(pl.col("step").first(), pl.col(_TIMES).sum())
    return sums.with_columns(pl.lit(None, pl.Int64).alias("window")).select(COLUMNS).sort("rank")


def steps_by_rank(run: Run) -> pl.DataFrame:
    """Sums of the marked steps of each rank and device; where no trace marks steps, of the whole windows.

    Columns as those of `sums_of_steps`.
    """
    steps = run.table(by_step).drop_nulls("step")
    return run.table(by_rank) if steps.is_empty() else sums_of_steps(steps)


def sums_of_steps(steps: pl.DataFrame) -> pl.DataFrame:
    """Sums of the steps of each rank and device, with the columns of `steps`.

    `steps` has the columns window, rank and those of `breakdown`. In the result step is null, and start_ns is that of
    the first step.
    """
    summed = [name for name in steps.columns if name.endswith("_ns") and name != "start_ns"]
    sums = steps.group_by("window", "rank", "device", maintain_order=True).agg(
        pl.lit(None, pl.Int64).alias("step"), pl.col("start_ns").min(), pl.col(summed).sum()
    )
    return sums.select(steps.columns).sort("window", "rank", "device")


@run_fact
def by_clock(run: Run) -> pl.DataFrame:
    """Clock offset of each trace: the columns of OFFSETS for display, one row per window and rank.

    `clock_domain` is present only where the ranks are on several clocks, `window` where there are several.
    """
    offsets = run.offsets.drop("at_ns")
    return offsets.drop(name for name in ("window", "clock_domain") if offsets[name].n_unique() < 2)


def representative_step(steps: pl.DataFrame) -> dict[str, int | None] | None:
    """Row to look at first: of the slowest rank, the step nearest to its median.

    `steps` is a run's breakdown by step, with the columns of `analysis.breakdown` after window and rank. None where it
    has no rows.
    """
    if steps.is_empty():
        return None
    means = (
        steps.group_by("rank").agg(pl.col("duration_ns").mean()).sort("duration_ns", "rank", descending=[True, False])
    )
    of_rank = steps.filter(pl.col("rank") == means["rank"][0])
    distance_ns = (pl.col("duration_ns") - pl.col("duration_ns").median()).abs()
    return of_rank.sort(distance_ns, "window", "start_ns").row(0, named=True)


def step_time_ns(run: Run) -> float | None:
    """Median over steps of the slowest rank's device window, in ns: all ranks wait for that rank.

    None where no trace marks steps.
    """
    slowest = step_times(run)
    return None if slowest.is_empty() else float(slowest.select(pl.col("duration_ns").median()).item())


def mean_step_ns(run: Run) -> float | None:
    """Mean step in ns: time of each window's slowest rank over the number of steps; savings are shares of it.

    It is below the median of `step_time_ns` where the ranks take turns at being the slowest. None without steps.
    """
    steps = slowest_device_by_step(run).drop_nulls("step")
    if steps.is_empty():
        return None
    totals = steps.group_by("window", "rank").agg(pl.col("duration_ns").sum())
    longest_ns = totals.group_by("window").agg(pl.col("duration_ns").max())["duration_ns"].sum()
    return int(longest_ns) / steps.select("window", "step").n_unique()


def step_times(run: Run) -> pl.DataFrame:
    """Slowest rank's device window of each step. Columns window, step, duration_ns; in order."""
    steps = run.table(by_step).drop_nulls("step")
    return steps.group_by("window", "step").agg(pl.col("duration_ns").max()).sort("window", "step")


def exposed_communication_ratio(run: Run) -> float | None:
    """Exposed communication of all ranks as a share of their time, in steps where there are any.

    None where no time was traced.
    """
    steps = run.table(by_step)
    table = steps if steps.height else run.table(by_rank)
    exposed_ns, whole_ns = table.select(pl.col("exposed_communication_ns", "duration_ns").sum()).row(0)
    return exposed_ns / whole_ns if whole_ns else None


def slowest_device(table: pl.DataFrame) -> pl.DataFrame:
    """Breakdown (columns window, rank and those of `breakdown`) with one device a rank and step: the slowest.

    One row per window, rank and step, in the order of their first rows.
    """
    slowest = pl.col("duration_ns").arg_max()
    return table.group_by("window", "rank", "step", maintain_order=True).agg(pl.all().get(slowest))


@trace_fact
def extent(trace: Trace) -> pl.DataFrame:
    """First time and steps of a trace. Columns first_ns, steps; one row.

    first_ns is the start of its first operation, activity, allocation, step or checkpoint stage; 0 without any.
    """
    starts = [trace.ops["start_ns"].min(), trace.activities["start_ns"].min(), trace.allocations["at_ns"].min()]
    starts += [trace.steps["start_ns"].min(), trace.checkpoints["start_ns"].min()]
    first_ns = min((start for start in starts if isinstance(start, int)), default=0)
    steps = trace.steps["step"].drop_nulls().unique().sort().to_list()
    return pl.DataFrame({"first_ns": [first_ns], "steps": [steps]}, schema=EXTENT_COLUMNS)


@run_fact
def run_clock(run: Run) -> pl.DataFrame:
    """Clock for the display of each trace's times: columns RUN_CLOCK, one row per window and rank.

    offset_ns, drift and at_ns convert a time to the run's clock, as in `Run.offsets`. zero_ns is when the first trace
    of the window begins on that clock. Traces that could not be aligned with others have a zero of their own.
    """
    begins = run.table(extent).select("window", "rank", "first_ns")
    clocks = run.offsets.join(begins, on=["window", "rank"], maintain_order="left")
    aligned = alignment.on_run_clock(clocks.select("window", "rank", "first_ns"), run.offsets, ("first_ns",))
    zero_ns = pl.col("zero_ns").min().over("window", "clock_domain")
    return schema.select(clocks.with_columns(zero_ns=aligned["first_ns"]).with_columns(zero_ns), RUN_CLOCK)


_NO_DEVICE = -1
"""Stands for the device of a CPU run."""


@memoize
def _device_of(trace: Trace) -> dict[int, int | None]:
    return dict(zip(trace.lanes["lane"].to_list(), trace.lanes["device"].to_list(), strict=True))


def _split(sets: tuple[Spans, Spans, Spans], windows: Spans) -> Spans:
    compute, communication, copy = sets
    terms = (
        compute,
        communication,
        copy,
        intervals.intersect(communication, compute),
        intervals.subtract(communication, compute),
        intervals.subtract(copy, intervals.union(compute, communication)),
    )
    return np.stack([intervals.coverage(windows, term) for term in terms], axis=1)


def _table(step: list[int | None], device: list[int | None], windows: Spans, terms: Spans) -> pl.DataFrame:
    part = {name: terms[:, index] for index, name in enumerate(TERMS)}
    duration_ns = windows[:, 1] - windows[:, 0]
    idle_ns = duration_ns - part["compute_ns"] - part["exposed_communication_ns"] - part["exposed_copy_ns"]
    place = {"step": step, "device": device, "start_ns": windows[:, 0], "duration_ns": duration_ns}
    columns: dict[str, Any] = place | part | {"idle_ns": idle_ns}
    return pl.DataFrame([pl.Series(name, columns[name], dtype) for name, dtype in BREAKDOWN.schema.items()])
