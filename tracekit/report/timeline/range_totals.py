"""What a range of the timeline contains, exactly: time by rank, by kind, by name and by call path, and rates of work.

A slice that reaches beyond the range counts with the part inside. Busy time is the union of the slices of a rank, so a
moment counts once; the totals of names add up slices, so concurrent ones all count.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.communication import collective_instances
from tracekit.analysis.compute import flops
from tracekit.analysis.host import call_trees
from tracekit.model import intervals
from tracekit.model.intervals import Spans, Window
from tracekit.model.nesting import Ints
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.timeline import trace_part
from tracekit.report.timeline.scene import KINDS, Scene
from tracekit.report.timeline.trace_part import Part
from tracekit.sync import alignment, collective_matching

COMPUTE, COMMUNICATION, COPIES = "compute", "communication", ("memcpy", "memset")
RANK_COLUMNS = {
    "rank": pl.Int64, "group": pl.String, "compute_ns": pl.Int64, "exposed_communication_ns": pl.Int64,
    "exposed_copy_ns": pl.Int64, "idle_ns": pl.Int64, "communication_ns": pl.Int64, "copy_ns": pl.Int64,
}  # fmt: skip
KIND_COLUMNS = {"kind": pl.String, "count": pl.Int64, "busy_ns": pl.Int64, "total_ns": pl.Int64}
NAME_COLUMNS = {"kind": pl.String, "name_id": pl.Int64, "count": pl.Int64, "total_ns": pl.Int64, "ranks": pl.Int64}
RATE_COLUMNS = {"rank": pl.Int64, "bus_bytes": pl.Float64, "copied_bytes": pl.Float64, "flops": pl.Float64}
_WORK, _OPS = "activities", "ops"


@dataclass(frozen=True, eq=False)
class RangeTotals:
    """The content of a range on the run's clock.

    `by_rank` has columns RANK_COLUMNS, one row per rank and device (`group`, such as GPU 0): compute, exposed
    communication (without concurrent compute), exposed copies and idle add up to the range, exactly. `by_kind` has
    KIND_COLUMNS: busy_ns is the sum over ranks and devices, total_ns that of all slices. `by_name` has NAME_COLUMNS, of
    the work of devices (on a CPU run of its work lanes), most time first.
    """

    window: Window
    by_rank: pl.DataFrame
    by_kind: pl.DataFrame
    by_name: pl.DataFrame


def range_totals(scene: Scene, window: Window) -> RangeTotals:
    """Return the content of a range of a scene, of all of its ranks. Raises ValueError for an empty range."""
    if window[1] <= window[0]:
        raise ValueError(f"the range {window} is empty")
    # One trace at a time: the slices of all of them may be gigabytes.
    parts = [_part_totals(scene, part, window) for part in scene.parts]
    by_rank, by_kind, by_name = (pl.concat(tables) for tables in zip(*parts, strict=True))
    kinds = by_kind.group_by("kind").agg(pl.col("count", "busy_ns", "total_ns").sum())
    names = by_name.group_by("kind", "name_id").agg(pl.col("count", "total_ns", "ranks").sum())
    return RangeTotals(
        window,
        by_rank.sort("rank", maintain_order=True),
        kinds.select(*KIND_COLUMNS).sort("busy_ns", "kind", descending=[True, False]),
        names.select(*NAME_COLUMNS).sort("total_ns", "name_id", descending=[True, False]),
    )


def range_rates(run: Run, scene: Scene, window: Window) -> pl.DataFrame:
    """Bytes moved and FLOPs of the work of a range; reads the traces of the scene's ranks.

    Columns RATE_COLUMNS, one row per rank: bus_bytes (message sizes of collectives by nccl-tests' bus factor),
    copied_bytes, flops (of operators whose operations are known). Work that reaches beyond the range counts by the
    share of its duration inside. A value is null where nothing of the range states it.
    """
    rows = []
    for part in scene.parts:
        slices = _slices(scene, part, window)
        shares = {source: group.select("id", "share").unique("id") for (source,), group in slices.group_by("source")}
        if _WORK in shares:
            rows.append((part.rank, *_rates(run.trace(part.rank, scene.window), shares)))
    return pl.DataFrame(rows, schema=RATE_COLUMNS, orient="row")


_SLICE_COLUMNS = {
    "rank": pl.Int64, "group": pl.String, "source": pl.String, "kind": pl.String, "name_id": pl.Int64, "id": pl.Int64,
    "start_ns": pl.Int64, "end_ns": pl.Int64, "share": pl.Float64,
}  # fmt: skip


def call_paths(run: Run, scene: Scene, rank: int, window: Window, lane: int | None = None) -> pl.DataFrame:
    """Host time of a rank in a window on the run's clock by call path; reads the rank's trace.

    Columns `call_trees.WINDOW_TREE`; of one `lane` of the trace, or of all host threads. Raises KeyError if the rank
    has no trace in the scene's window, BadTraceError if it cannot be read.
    """
    edges = pl.DataFrame({"window": [scene.window] * 2, "rank": [rank] * 2, "edge_ns": window})
    begin_ns, end_ns = alignment.on_trace_clock(edges, scene.offsets, ("edge_ns",))["edge_ns"]
    return call_trees.of_window(run.trace(rank, scene.window), (begin_ns, end_ns), lane)


def _slices(scene: Scene, part: Part, window: Window) -> pl.DataFrame:
    """Return the slices of a trace that touch a range, cut at its ends: columns _SLICE_COLUMNS.

    `share` is the part of the duration inside. A slice without duration counts where it starts in the range.
    """
    positions, segment = _touching(part, window)
    records = np.take(part.slices, positions)
    start_ns, end_ns = records["start_ns"], records["start_ns"] + records["dur_ns"]
    inside = np.minimum(end_ns, window[1]) - np.maximum(start_ns, window[0])
    columns = {
        "track": part.slice_segments["track"][segment].astype(np.int64),
        "kind_code": scene.kinds[records["name"]],
        "name_id": records["name"].astype(np.int64),
        "id": records["id"].astype(np.int64),
        "start_ns": np.maximum(start_ns, window[0]),
        "end_ns": np.minimum(end_ns, window[1]),
        "share": np.where(records["dur_ns"] > 0, inside / np.maximum(records["dur_ns"], 1), 1.0),
    }
    tracks = scene.tracks.select("track", "rank", "group", "source")
    kinds = pl.DataFrame({"kind_code": range(len(KINDS)), "kind": KINDS}, schema_overrides={"kind_code": pl.UInt8})
    table = pl.DataFrame(columns).join(tracks, on="track", how="left", maintain_order="left")
    return table.join(kinds, on="kind_code", how="left", maintain_order="left").select(
        pl.col(name).cast(dtype) for name, dtype in _SLICE_COLUMNS.items()
    )


def _touching(part: Part, window: Window) -> tuple[Ints, Ints]:
    """Return the places of the slices that touch a range, and the segment of each."""
    begin_ns, end_ns = window
    segments, slices = part.slice_segments, part.slices
    first = segments["first"].astype(np.int64)
    past = first + segments["count"]
    start_ns, dur_ns = slices["start_ns"], slices["dur_ns"]
    low = trace_part.first_true(first, past, lambda i: (start_ns[i] >= begin_ns) | (start_ns[i] + dur_ns[i] > begin_ns))
    counts = trace_part.first_true(low, past, lambda i: start_ns[i] >= end_ns) - low
    return trace_part.positions(low, counts), np.repeat(np.arange(len(segments)), counts)


def _part_totals(scene: Scene, part: Part, window: Window) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    slices = _slices(scene, part, window)
    return _by_device(scene, part.rank, slices, window), _by_kind(slices), _by_name(slices)


def _by_device(scene: Scene, rank: int, slices: pl.DataFrame, window: Window) -> pl.DataFrame:
    of_rank = scene.tracks.filter(pl.col("source") == _WORK, pl.col("rank") == rank)
    work = slices.filter(pl.col("source") == _WORK)
    rows = [
        (rank, group, *_breakdown(work.filter(pl.col("group") == group), window[1] - window[0]))
        for group in of_rank["group"].unique(maintain_order=True)
    ]
    return pl.DataFrame(rows, schema=RANK_COLUMNS, orient="row")


def _breakdown(slices: pl.DataFrame, length_ns: int) -> tuple[int, ...]:
    compute, communication = (_busy(slices, kind) for kind in ((COMPUTE,), (COMMUNICATION,)))
    copies = _busy(slices, COPIES)
    both = intervals.union(compute, communication)
    exposed_ns = intervals.length(intervals.subtract(communication, compute))
    copied_ns = intervals.length(intervals.subtract(copies, both))
    compute_ns = intervals.length(compute)
    idle_ns = length_ns - compute_ns - exposed_ns - copied_ns
    return (
        compute_ns, exposed_ns, copied_ns, idle_ns, intervals.length(communication), intervals.length(copies)
    )  # fmt: skip


def _busy(slices: pl.DataFrame, kinds: tuple[str, ...]) -> Spans:
    return intervals.union(slices.filter(pl.col("kind").is_in(kinds)).select("start_ns", "end_ns").to_numpy())


def _by_kind(slices: pl.DataFrame) -> pl.DataFrame:
    rows = []
    for (kind,), kind_slices in slices.group_by("kind"):
        spans = kind_slices.select("group", "start_ns", "end_ns").group_by("group")
        busy_ns = sum(intervals.length(group.drop("group").to_numpy()) for _, group in spans)
        rows.append((kind, kind_slices.height, busy_ns, int((kind_slices["end_ns"] - kind_slices["start_ns"]).sum())))
    return pl.DataFrame(rows, schema=KIND_COLUMNS, orient="row")


def _by_name(slices: pl.DataFrame) -> pl.DataFrame:
    work = slices.filter(pl.col("source") == _WORK)
    sums = work.group_by("kind", "name_id").agg(
        pl.len().cast(pl.Int64).alias("count"), (pl.col("end_ns") - pl.col("start_ns")).sum().alias("total_ns")
    )
    return sums.with_columns(pl.lit(1, pl.Int64).alias("ranks")).select(*NAME_COLUMNS)


def _rates(trace: Trace, shares: Mapping[str, pl.DataFrame]) -> Iterator[float | None]:
    """Yield bus bytes, copied bytes and FLOPs of a trace's slices; `shares` has tables of id and share by source."""
    calls = collective_matching.calls(trace).rename({"activity_id": "id"})
    bus_bytes = pl.col("bytes") * collective_instances.bus_factor()
    yield _share_sum(calls.select("id", bus_bytes.alias("value")), shares[_WORK])
    yield _share_sum(trace.activities.filter(pl.col("kind").is_in(COPIES)).select("id", value="bytes"), shares[_WORK])
    if trace.on_device:
        yield _share_sum(_flops(trace), shares[_WORK])
    else:  # the operators themselves are the work
        yield _share_sum(
            flops.counted_calls(trace).select("id", value="flops"), shares.get(_OPS, shares[_WORK].clear())
        )


def _flops(trace: Trace) -> pl.DataFrame:
    """Return the operations of each activity: those of its operator by its part of the operator's time."""
    counted = flops.counted_calls(trace).drop_nulls("flops")
    if counted.is_empty():
        return pl.DataFrame(schema={"id": pl.Int64, "value": pl.Float64})
    owner = flops.counted_op_of_activities(trace, counted["id"])
    activities = (
        trace.activities.select("id", "dur_ns").with_columns(owner=pl.Series(owner)).filter(pl.col("owner") >= 0)
    )
    op = trace.ops["id"].gather(activities["owner"])
    whole_ns = pl.col("dur_ns").sum().over("op")
    part = pl.when(whole_ns > 0).then(pl.col("dur_ns") / whole_ns).otherwise(1 / pl.len().over("op"))
    return (
        activities.with_columns(op=op)
        .join(counted.select("flops", op="id"), on="op")
        .select("id", value=pl.col("flops") * part)
    )


def _share_sum(values: pl.DataFrame, shares: pl.DataFrame) -> float | None:
    rows = values.drop_nulls("value").join(shares, on="id")
    return float((rows["value"] * rows["share"]).sum()) if rows.height else None
