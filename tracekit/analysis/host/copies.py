"""Copies between host and device: their exposed time, memory and bandwidth, and the op and code that asked for them."""

import numpy as np
import polars as pl

from tracekit import conventions
from tracekit.analysis.compute import kernels
from tracekit.analysis.memory import owners
from tracekit.analysis.time import breakdown, trace_columns
from tracekit.model import intervals, schema
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


def exposed_copies(trace: Trace) -> pl.DataFrame:
    """Return the copies between host and device that are exposed: no compute and no collective runs meanwhile.

    Columns COLUMNS: op (the outermost aten op around the launch, else the innermost op), stack (the innermost code
    location of the program around it, where stacks were recorded), direction (TO_DEVICE or TO_HOST), memory (of the
    host: PAGEABLE or PINNED; null where not recorded), exposed_ns; one row per copy with exposed time. Copies of saves
    are left out, and so are copies of a CPU run, which has none.
    """
    name = pl.col("name").str
    copies = np.flatnonzero((trace.activities["kind"] == "memcpy").to_numpy())
    if not len(copies):
        return schema.empty(COLUMNS)
    found = (
        trace.activities[copies]
        .with_columns(pl.Series("row", copies))
        .filter(
            name.contains(_TO_DEVICE) | name.contains(_TO_HOST),
            pl.col("phase").ne_missing(conventions.CHECKPOINT),
        )
        .join(trace.lanes.select("lane", "device"), on="lane", maintain_order="left")
    )
    parts = [_with_exposed(trace, device, rows) for (device,), rows in found.group_by("device", maintain_order=True)]
    exposed = pl.concat(parts).filter(pl.col("exposed_ns") > 0) if parts else pl.DataFrame()
    if exposed.is_empty():
        return schema.empty(COLUMNS)
    host = pl.when(name.contains("(?i)pageable")).then(pl.lit(PAGEABLE))
    return (
        exposed.with_columns(
            *_ops_around(trace, exposed["row"].to_numpy().astype(np.int64)),
            pl.when(name.contains(_TO_DEVICE)).then(pl.lit(TO_DEVICE)).otherwise(pl.lit(TO_HOST)).alias("direction"),
            host.when(name.contains("(?i)pinned")).then(pl.lit(PINNED)).alias("memory"),
        )
        .with_columns(pl.coalesce("op_id", "launch_id").alias("op_id"))
        .pipe(lambda rows: rows.join(owners.code_locations(trace, rows["op_id"]), on="op_id", how="left"))
        .sort("start_ns", "row")
        .pipe(schema.select, COLUMNS)
    )


def _with_exposed(trace: Trace, device: object, copies: pl.DataFrame) -> pl.DataFrame:
    compute, communication, _ = breakdown.busy(trace, device if isinstance(device, int) else None)
    hidden_ns = intervals.coverage(intervals.from_table(copies), intervals.union(compute, communication))
    return copies.with_columns((pl.col("dur_ns") - pl.Series(hidden_ns, dtype=pl.Int64)).alias("exposed_ns"))


def _ops_around(trace: Trace, rows: Ints) -> list[pl.Series]:
    """Return op_id and op (its name) of the outermost aten op around each activity, else of the innermost op."""
    ops = trace.ops
    if ops.is_empty():
        unknown = pl.DataFrame({"op_id": [None] * len(rows), "op": [None] * len(rows)})
        return unknown.cast({"op_id": pl.Int64, "op": pl.String}).get_columns()
    row = kernels.innermost_op(trace)[rows]
    above, is_aten = trace_columns.parent_ids(trace), trace_columns.is_named(trace, "^aten::")
    for _ in range(_MAX_CLIMBS):
        up = np.where(row >= 0, above[np.maximum(row, 0)], -1)
        climbs = (up >= 0) & is_aten[np.maximum(up, 0)]
        if not climbs.any():
            break
        row = np.where(climbs, up, row)
    found = ops.select("id", "name")[np.maximum(row, 0)].with_columns(known=pl.Series(row >= 0))
    named = found.select(op_id=pl.when("known").then("id"), op=pl.when("known").then("name"))
    return named.get_columns()
