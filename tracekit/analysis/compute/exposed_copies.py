"""Exposed copies: copies and memory sets during which a device computes nothing."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import kernels
from tracekit.analysis.memory import allocations
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace

COPY_COLUMNS = schema.columns(
    "activity_id step device phase unit op stack direction memory bytes start_ns dur_ns exposed_ns",
    stack=pl.String, direction=pl.String, memory=pl.String,
)  # fmt: skip
TO_DEVICE, TO_HOST = "host to device", "device to host"
PEER, WITHIN_DEVICE, MANAGED, UNKNOWN = "peer to peer", "within a device", "managed memory", "unknown direction"
MEMORY_SET = "memory set"
OF_HOST = (TO_DEVICE, TO_HOST)
PAGEABLE, PINNED = "pageable", "pinned"
_DIRECTIONS = (
    (TO_DEVICE, r"(?i)Hto[DA]\b|HostTo(Device|Array)|Host to Device|(\b|py|_)[HM]2D"),
    (TO_HOST, r"(?i)\b[DA]toH|(Device|Array)ToHost|Device to Host|(\b|py|_)D2[HM]"),
    (MANAGED, r"(?i)managed|unified|(\b|py|_)([DHMS]2S|S2[DHM])"),
    (PEER, r"(?i)PtoP|P2P|peer"),
    (WITHIN_DEVICE, r"(?i)[DA]to[DA]\b|DeviceToDevice|Device to Device|(\b|py|_)D2D"),
)
"""Directions by what copies are called, the first that fits: "Memcpy HtoD (Pageable -> Device)" and PtoP by CUPTI, also
A for arrays on a device; "CopyHostToDevice" by ROCm; "zeCommandListAppendMemoryCopy(M2D)" by XPUs, where M and H are
the host's memory and S is shared."""
_MAX_CLIMBS = 6


@trace_fact
@memoize
def exposed_copies(trace: Trace) -> pl.DataFrame:
    """Copies and memory sets that are exposed: no compute and no collective runs meanwhile.

    Columns COPY_COLUMNS: op (the outermost aten op around the launch, else the innermost op), stack (the innermost code
    location of the program around it, where stacks were recorded), direction (TO_DEVICE, TO_HOST, PEER, WITHIN_DEVICE,
    MANAGED, MEMORY_SET or UNKNOWN), memory (of the host: PAGEABLE or PINNED; null where not recorded), exposed_ns; one
    row per copy with exposed time. Copies of saves are left out, and so are copies of a CPU run, which has none.
    """
    is_of_save = columns.flags(trace.activities["phase"] == conventions.CHECKPOINT)
    is_set = trace_columns.is_activity_kind(trace, "memset")
    copies = np.flatnonzero((trace_columns.is_activity_kind(trace, "memcpy") | is_set) & ~is_of_save)
    exposed_ns, device = _exposed_ns(trace, copies)
    copies, exposed_ns, device = (array[exposed_ns > 0] for array in (copies, exposed_ns, device))
    if not len(copies):
        return schema.empty(COPY_COLUMNS)
    direction = np.full(len(copies), UNKNOWN, object)
    for name, pattern in reversed(_DIRECTIONS):
        direction[trace_columns.is_activity_named(trace, pattern)[copies]] = name
    direction[is_set[copies]] = MEMORY_SET
    activities, op = trace.activities[copies], _ops_around(trace, copies)
    op_id = columns.to_ints(columns.values_at(trace.ops["id"], op), -1)
    issuers = columns.with_nulls(np.where(op_id >= 0, op_id, columns.to_ints(activities["launch_id"], -1)), "op_id")
    memory = np.full(len(copies), None, object)  # the name may not state it (AMD, managed memory)
    for pattern, kind in (("(?i)pinned", PINNED), ("(?i)pageable", PAGEABLE)):
        memory[trace_columns.is_activity_named(trace, pattern)[copies]] = kind
    added = [
        issuers,
        columns.with_nulls(device, "device"),
        columns.values_at(trace.ops["name"], op).alias("op"),
        pl.Series("direction", direction.tolist(), pl.String),
        pl.Series("memory", memory.tolist(), pl.String),
        pl.Series("exposed_ns", exposed_ns),
    ]
    located = (
        activities.rename({"id": "activity_id"})
        .hstack(added)
        .join(allocations.code_locations(trace, issuers), on="op_id", how="left", maintain_order="left")
    )
    return schema.select(located.sort("start_ns", maintain_order=True), COPY_COLUMNS)


def of_host(trace: Trace) -> pl.DataFrame:
    """Exposed copies between host and device, which save their exposed time: activity_id, saved_ns."""
    return _savings(trace, pl.col("direction").is_in(OF_HOST))


def of_device(trace: Trace) -> pl.DataFrame:
    """Other exposed copies, and memory sets, which save their exposed time: activity_id, saved_ns."""
    return _savings(trace, ~pl.col("direction").is_in(OF_HOST))


def _savings(trace: Trace, are_meant: pl.Expr) -> pl.DataFrame:
    return exposed_copies(trace).filter(are_meant).select("activity_id", saved_ns="exposed_ns")


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
    """Row of the outermost aten op around each activity, else of the innermost op; -1 for none."""
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
