"""Copies between host and device: their exposed time, memory and bandwidth, and the op and code that issued them."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import kernels
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

COLUMNS = schema.columns(
    "step device phase unit op stack direction memory bytes start_ns dur_ns exposed_ns",
    stack=pl.String, direction=pl.String, memory=pl.String,
)  # fmt: skip
TO_DEVICE, TO_HOST = "host to device", "device to host"
PAGEABLE, PINNED = "pageable", "pinned"
# "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pinned)", "CopyHostToDevice"
_TO_DEVICE, _TO_HOST = r"(?i)HtoD|HostToDevice", r"(?i)DtoH|DeviceToHost"
_MAX_CLIMBS = 6


@trace_fact
def exposed_copies(trace: Trace) -> pl.DataFrame:
    """Return the copies between host and device that are exposed: no compute and no collective runs meanwhile.

    Columns COLUMNS: op (the outermost aten op around the launch, else the innermost op), stack (the innermost code
    location of the program around it, where stacks were recorded), direction (TO_DEVICE or TO_HOST), memory (of the
    host: PAGEABLE or PINNED; null where not recorded), exposed_ns; one row per copy with exposed time. Copies of saves
    are left out, and so are copies of a CPU run, which has none.
    """
    is_to_device, is_to_host = (trace_columns.is_activity_named(trace, pattern) for pattern in (_TO_DEVICE, _TO_HOST))
    is_of_save = trace_columns.as_flags(trace.activities["phase"] == conventions.CHECKPOINT)
    is_copy = trace_columns.is_activity_kind(trace, "memcpy") & (is_to_device | is_to_host) & ~is_of_save
    copies = np.flatnonzero(is_copy)
    exposed_ns, device = _exposed_ns(trace, copies)
    copies, exposed_ns, device = (array[exposed_ns > 0] for array in (copies, exposed_ns, device))
    if not len(copies):
        return schema.empty(COLUMNS)
    activities, op = trace.activities[copies], _ops_around(trace, copies)
    op_id = columns.to_ints(columns.values_at(trace.ops["id"], op), -1)
    issuers = columns.with_nulls(np.where(op_id >= 0, op_id, columns.to_ints(activities["launch_id"], -1)), "op_id")
    added = [
        issuers,
        columns.with_nulls(device, "device"),
        columns.values_at(trace.ops["name"], op).alias("op"),
        pl.Series("direction", np.where(is_to_device[copies], TO_DEVICE, TO_HOST).astype(object), pl.String),
        _memory(trace, copies),
        pl.Series("exposed_ns", exposed_ns),
    ]
    located = activities.hstack(added).join(
        allocations.code_locations(trace, issuers), on="op_id", how="left", maintain_order="left"
    )
    return schema.select(located.sort("start_ns", maintain_order=True), COLUMNS)


def _memory(trace: Trace, copies: Ints) -> pl.Series:
    """Kind of host memory that each copy reads or writes; null where its name has none (AMD, managed memory)."""
    kind = pl.lit(None, pl.String)
    for pattern, memory in (("(?i)pinned", PINNED), ("(?i)pageable", PAGEABLE)):
        is_named = pl.Series(trace_columns.is_activity_named(trace, pattern)[copies])
        kind = pl.when(pl.lit(is_named)).then(pl.lit(memory)).otherwise(kind)
    return pl.select(kind.alias("memory")).to_series()


def _exposed_ns(trace: Trace, copies: Ints) -> tuple[Ints, Ints]:
    """Time of each copy without compute and collectives on its device, and the device; -1 for none."""
    spans = intervals.from_table(trace.activities[["start_ns", "dur_ns"]])[copies]
    lane = columns.rows_of(trace.lanes["lane"].to_numpy(), trace.activities["lane"].to_numpy()[copies])
    device = sweep_line.at(columns.to_ints(trace.lanes["device"], -1), lane, -1)
    exposed_ns = np.where(lane >= 0, spans[:, 1] - spans[:, 0], 0)
    for device_number, rows in columns.rows_by_key(device).items():
        compute, communication, _ = breakdown.busy(trace, None if device_number < 0 else device_number)
        exposed_ns[rows] -= intervals.coverage(spans[rows], intervals.union(compute, communication))
    return exposed_ns, device


def _ops_around(trace: Trace, rows: Ints) -> Ints:
    """Return the row of the outermost aten op around each activity, else of the innermost op; -1 for none."""
    row = kernels.innermost_op(trace)[rows]
    if trace.ops.is_empty():
        return row
    above, is_aten = trace_columns.parent_ids(trace), trace_columns.is_named(trace, "^aten::")
    for _ in range(_MAX_CLIMBS):
        up = np.where(row >= 0, above[np.maximum(row, 0)], -1)
        climbs = (up >= 0) & is_aten[np.maximum(up, 0)]
        if not climbs.any():
            break
        row = np.where(climbs, up, row)
    return row
