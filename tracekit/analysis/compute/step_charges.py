"""Where the time of each step goes, by operator: every moment is charged once, so the charges of a step sum to it."""

from typing import NamedTuple

import numpy as np
import polars as pl

from tracekit.analysis.compute import call_paths, compute_gap_causes, kernels
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import intervals, nesting, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.intervals import Spans
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

IDLE = "idle"
PARTS = (*breakdown.PARTS, IDLE)
KEYS = ("part", "operator", "kernel", "module", "path", "shapes")
COLUMNS = schema.columns(
    "step device part operator kernel module path shapes chain cause detail order_ns count work_ns dur_ns",
    **dict.fromkeys((*KEYS, "chain", "cause", "detail"), pl.String),
)
_PARAMETERS = "record_param_comms"
"""The profiler's own operator inside that of a collective."""
_PART_OF_KIND = {
    "compute": breakdown.COMPUTE,
    "communication": breakdown.EXPOSED_COMMUNICATION,
    **dict.fromkeys(breakdown.COPY_KINDS, breakdown.EXPOSED_COPY),
}
_PLACE = ("step", "device", *KEYS, "cause", "detail")


@trace_fact
def step_charges(trace: Trace) -> pl.DataFrame:
    """Charge each moment of the device window of each step to a part, operator and kernel.

    Columns COLUMNS; one row per step, device, part (of PARTS), operator, kernel (name of the activity), module, call
    path and shapes. The operator is the innermost one around the launch, of a collective its own and not
    ``record_param_comms``; path, shapes and chain (see `call_paths`) are its own. Idle time has cause and detail as in
    `compute_gap_causes`; its operator to shapes are those of the compute that ends the gap. dur_ns sums to the window
    exactly, and each part to that of `breakdown.by_step`: where several activities run, the part is the breakdown's,
    and the one on the lane with most work of its kind counts. count and work_ns are of the activities that the step
    launched, hidden ones included; order_ns is the time from the start of the window to the first of them.
    """
    op, launch = _operator_rows(trace)
    described = trace.activities.select(
        "id",
        _part().alias("own_part"),
        pl.coalesce(trace.ops["name"].gather(op), "name").alias("operator"),
        pl.col("name").alias("kernel"),
        call_paths.activity_modules(trace),
        call_paths.call_paths(trace).gather(launch).alias("path"),
        trace.ops["shapes"].gather(op).alias("shapes"),
        call_paths.dispatch_chains(trace).gather(op).alias("chain"),
    )
    parts = [schema.empty(COLUMNS)]
    for device in breakdown.devices(trace):
        windows = _windows(trace, device)
        if windows.height:
            # Activities that each step launched: columns step, id, order_ns, count, work_ns.
            begun = windows.select("step", begun_ns="start_ns").unique("step", keep="first")
            work = _activities(trace, device).join(begun, on="step", nulls_equal=True)
            order_ns = (pl.col("start_ns") - pl.col("begun_ns")).alias("order_ns")
            rows = pl.concat(
                [
                    _charge_moments(trace, device, windows),
                    work.select(
                        "step", "id", order_ns, pl.lit(1, pl.Int64).alias("count"), pl.col("dur_ns").alias("work_ns")
                    ),
                ],
                how="diagonal",
            ).join(described, on="id", how="left", maintain_order="left")
            charged = rows.with_columns(pl.lit(device, pl.Int64).alias("device")).with_columns(
                pl.coalesce("part", "own_part").alias("part")
            )
            sums = charged.group_by(_PLACE, maintain_order=True).agg(
                pl.col("order_ns").min(), pl.col("chain").first(), pl.col("count", "work_ns", "dur_ns").sum()
            )
            parts.append(schema.select(sums, COLUMNS).sort("step", "order_ns", nulls_last=True, maintain_order=True))
    return pl.concat(parts)


def _operator_rows(trace: Trace) -> tuple[pl.Series, pl.Series]:
    """Return, for each activity, the row in ops of its operator, and of its launch; null where not known."""
    launch = trace.activities["launch_id"]
    op_row = launch.set(((launch < 0) | (launch >= trace.ops.height)).fill_null(value=True), None)
    if trace.ops.is_empty():
        return op_row, op_row
    is_operator = (trace.ops["kind"] == "cpu_op") & (trace.ops["name"] != _PARAMETERS)
    outer = nesting.nearest(trace_columns.parent_ids(trace), is_operator.to_numpy())
    operator = pl.Series(outer).gather(op_row)
    inner = pl.Series(kernels.innermost_op(trace))
    op = operator.zip_with((operator >= 0).fill_null(value=False), inner)
    return op.set(op < 0, None), op_row


def _windows(trace: Trace, device: int | None) -> pl.DataFrame:
    on_device = pl.col("device").eq_missing(pl.lit(device, pl.Int64))
    return (
        trace.steps.drop_nulls(["start_ns", "end_ns"])
        .filter(on_device, pl.col("end_ns") > pl.col("start_ns"))
        .sort("start_ns")
    )


class _Lane(NamedTuple):
    """The activities of one lane that belong to one part of the breakdown."""

    part: str
    activities: pl.DataFrame
    spans: Spans


def _charge_moments(trace: Trace, device: int | None, windows: pl.DataFrame) -> pl.DataFrame:
    """Charge each moment of the windows: columns step, part, id, cause, detail, dur_ns."""
    lanes = _lanes(trace, device)
    causes = compute_gap_causes.compute_gap_causes(trace).filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64)))
    gaps = intervals.from_table(causes)
    spans = windows.select("start_ns", "end_ns").to_numpy()
    pieces = sweep_line.pieces(spans, *(lane.spans.ravel() for lane in lanes), gaps.ravel())
    owner, part = _owners(lanes, pieces.start_ns)
    rows = pl.DataFrame(
        {
            "step": windows["step"].gather(pieces.span),
            "part": pl.Series(PARTS, dtype=pl.String).gather(part),
            "owner": owner,
            "gap": np.where(owner < 0, sweep_line.running(gaps, pieces.start_ns), -1),
            "dur_ns": pieces.end_ns - pieces.start_ns,
        }
    )
    sums = rows.group_by("step", "part", "owner", "gap", maintain_order=True).agg(pl.col("dur_ns").sum())
    number = pl.int_range(pl.len()).cast(pl.Int64).alias("gap")
    caused = sums.join(causes.select(number, "activity_id", "cause", "detail"), on="gap", how="left")
    activity_id = pl.when(pl.col("owner") >= 0).then("owner").otherwise("activity_id").alias("id")
    return caused.select("step", "part", activity_id, "cause", "detail", "dur_ns")


def _owners(lanes: list[_Lane], at_ns: Ints) -> tuple[Ints, Ints]:
    """Return the activity (its id) that each moment is charged to, -1 for none, and the part as an index of PARTS."""
    owner = np.full(len(at_ns), -1, np.int64)
    part = np.full(len(at_ns), PARTS.index(IDLE), np.int64)
    for lane in lanes:
        free = np.flatnonzero(owner < 0)
        running = sweep_line.running(lane.spans, at_ns[free])
        charged = free[running >= 0]
        owner[charged] = lane.activities["id"].to_numpy()[running[running >= 0]]
        part[charged] = PARTS.index(lane.part)
    return owner, part


def _lanes(trace: Trace, device: int | None) -> list[_Lane]:
    """Return the lanes of a device in the order in which they count: by part, then by time, the longest first."""
    work = _activities(trace, device).filter(pl.col("dur_ns") > 0).with_columns(_part().alias("part"))
    parts = work.partition_by("part", "lane")
    lanes = [_Lane(str(rows["part"][0]), rows, intervals.from_table(rows)) for rows in parts]
    return sorted(lanes, key=lambda lane: (PARTS.index(lane.part), -lane.activities["dur_ns"].sum()))


def _activities(trace: Trace, device: int | None) -> pl.DataFrame:
    lanes = trace.lanes.filter(pl.col("device").eq_missing(pl.lit(device, pl.Int64))).select("lane")
    return trace.activities.join(lanes, on="lane", how="semi", maintain_order="left")


def _part() -> pl.Expr:
    """Return the part of the breakdown that an activity belongs to by its kind."""
    return pl.col("kind").replace_strict(_PART_OF_KIND, return_dtype=pl.String)
