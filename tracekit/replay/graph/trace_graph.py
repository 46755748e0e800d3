"""One trace as nodes and edges: host calls, device work, and their waits. The input of the replay.

No start times of device work are used: only durations, launch order, host time between calls, and known or inferred
waits.
"""

import numpy as np
import polars as pl

from tracekit.analysis.compute import concurrency, recomputation
from tracekit.analysis.time import breakdown, dependencies, launches
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace
from tracekit.replay.graph import cpu_run, device_sharing, filled_devices, host_time, recorded_stalls
from tracekit.replay.graph.host_time import Calls
from tracekit.replay.graph.nodes import (
    EDGE_COLUMNS,
    HOST,
    WAIT,
    WORK,
    TraceGraph,
    edge_table,
    number_nodes,
)

KERNEL_GAP_NS = 1_000
"""Time between two kernels of a stream: about a microsecond on NVIDIA devices; not from the trace."""
QUEUE_DEPTH = 1024
"""The most launches that may be queued before the host must wait (CUDA's limit)."""


def nodes(trace: Trace) -> pl.DataFrame:
    """Return the nodes of a trace's dependency graph.

    Columns node (its number in the trace), what (HOST, WORK, WAIT), ref (ops.id or activities.id), device, lane, kind,
    name (of an activity), step, phase, unit, span, start_ns, end_ns (as recorded: only used for the window's start,
    host times and order), chain (the previous node of its thread or stream; -1: none), chain_ns (the minimum time
    between them), launch (the host call; -1: unknown), launch_ns (the time after it), own_ns (its duration, without
    waiting where the awaited work is known), host_state (of a host call: index into HOST_STATES; -1), call (its
    name and that of the op around it), recomputed,
    kernel (equal for the same work), grid_id (equal for kernels of one name, grid and block), room_ns (how long before
    its end a kernel that fills the device lets others start; -1), is_late (a kernel that could have started 50 µs or
    more before), stall_ns (by how much a device stall delays its start: part of chain_ns, launch_ns
    and the lag of its waits), paused_ns (for how long it was paused) and slowed_ns (by how much a clock drop slows it:
    both part of own_ns), avoidable_ns and avoidable_by (what a change of the program would save of its time, and the
    cause, see `avoidable_time`; 0), gap_ns (host time before it by state; its sum is in chain_ns); one row per node.
    """
    return build(trace).nodes


def edges(trace: Trace) -> pl.DataFrame:
    """Return the other waits between a trace's nodes.

    Columns waiting, awaited (nodes), lag_ns (the minimum from the end of one to the start of the other), kind (event,
    sync, queue, communicator, start_order, collective, resources), inferred; one row per wait. For `start_order` the
    waiting node starts no earlier than the awaited one starts.
    """
    return build(trace).edges


@memoize
def build(trace: Trace) -> TraceGraph:
    """Return nodes and edges of a trace."""
    return _on_device(trace) if trace.on_device else cpu_run.build(trace)


def windows(trace: Trace) -> pl.DataFrame:
    """Return the device window of each step, with its first node.

    Columns step, device, start_ns, end_ns, first (node); one row per step and device with a first node.
    """
    made = build(trace).nodes.filter(pl.col("kind").is_not_null())
    begins = made.select("device", "start_ns", pl.col("step").alias("of"), pl.col("node").alias("first"))
    found = trace.steps.drop_nulls(["start_ns", "end_ns"]).join(
        begins, on=["device", "start_ns"], how="left", nulls_equal=True, maintain_order="left"
    )
    own = found.filter(pl.col("first").is_not_null() & (pl.col("step").is_null() | (pl.col("of") == pl.col("step"))))
    return own.unique(["step", "device"], keep="first", maintain_order=True).select(
        "step", "device", "start_ns", "end_ns", "first"
    )


def preparation(trace: Trace) -> pl.DataFrame:
    """Return the preparation of collectives on devices, from `launches.preparation`.

    Columns node, collective (node), overlapped_ns, alone_ns, message_bytes; one row per activity.
    """
    parts = [pl.DataFrame(schema=_PREPARATION)]
    made = build(trace).nodes.filter(pl.col("what") == WORK).select("node", "ref")
    for device in breakdown.devices(trace) if trace.on_device else ():
        found = launches.preparation(trace, device)
        placed = found.join(made, left_on="id", right_on="ref", maintain_order="left").join(
            made.rename({"node": "collective"}), left_on="collective_id", right_on="ref", maintain_order="left"
        )
        parts.append(schema.select(placed, _PREPARATION))
    return pl.concat(parts)


_PREPARATION = schema.columns("node collective overlapped_ns alone_ns message_bytes")


# A device ------------------------------------------------------------------------------------------------------------


def _on_device(trace: Trace) -> TraceGraph:
    calls = host_time.calls(trace)
    items = dependencies.lane_items(trace).with_columns(pl.Series("end_ns", dependencies.completion_ns(trace)))
    first_item = len(calls.id)
    launch_of = {call: row for row, call in reversed(list(enumerate(calls.id.tolist())))}  # the first row of a call
    launch = np.array([launch_of.get(each, -1) for each in items["launch_id"].fill_null(-1).to_list()], np.int64)
    last_call = np.searchsorted(calls.start_ns, items["start_ns"].to_numpy(), side="left") - 1
    is_wait, chain = items["is_wait"].to_numpy(), items["previous"].to_numpy().astype(np.int64)
    launch = np.where(is_wait, last_call, launch)
    stall_ns = recorded_stalls.delays(trace, items)
    gap = np.where(is_wait | (chain < 0) | is_wait[np.maximum(chain, 0)], 0, KERNEL_GAP_NS) + stall_ns
    waits = _host_waits(trace, calls, items, first_item)
    own = _own(calls, waits, items, first_item)
    host = pl.DataFrame(
        {
            "what": pl.Series(np.full(first_item, HOST), dtype=pl.Int8),
            "ref": calls.id,
            "step": calls.step,
            "phase": calls.phase,
            "start_ns": calls.start_ns,
            "end_ns": calls.end_ns,
            "chain": np.arange(first_item, dtype=np.int64) - 1,
            "chain_ns": calls.gap_ns.sum(axis=1),
            "own_ns": own,
            "host_state": pl.Series(calls.state, dtype=pl.Int8),
            "call": host_time.call_names(trace, calls),
            "gap_ns": pl.Series(calls.gap_ns, dtype=pl.Array(pl.Int64, host_time.STATE_COUNT)),
        }
    )
    again = recomputation.recomputed_activities(trace)
    is_recomputed = pl.col("ref").is_in(again["id"].implode()) if again.height else pl.lit(value=False)
    work = items.select(
        pl.when("is_wait").then(WAIT).otherwise(WORK).cast(pl.Int8).alias("what"),
        "ref", "device", "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns", "end_ns",
        pl.Series("chain", np.where(chain >= 0, chain + first_item, -1)),
        pl.Series("chain_ns", gap),
        pl.Series("launch", launch),
        pl.Series("launch_ns", stall_ns),
        pl.Series("stall_ns", stall_ns),
        pl.Series("paused_ns", recorded_stalls.pauses(trace, items)),
        pl.Series("slowed_ns", recorded_stalls.slowdowns(trace, items)),
        *(pl.Series(name, values) for name, values in recorded_stalls.avoidable(trace, items).items()),
        pl.when("is_wait").then(0).otherwise(pl.col("end_ns") - pl.col("start_ns")).alias("own_ns"),
        (~pl.col("is_wait") & is_recomputed).alias("recomputed"),
    )  # fmt: skip
    lane_waits = dependencies.item_waits(trace).select(
        pl.col("waiting") + first_item, pl.col("awaited") + first_item, "lag_ns", "kind", "inferred"
    )
    launched_ns = np.where(launch >= 0, np.append(calls.end_ns, 0)[launch], 0)
    grid_id = _grid_ids(trace, items)
    late = device_sharing.late_kernels(items, lane_waits, first_item, launched_ns)
    for_room = filled_devices.waits_for_room(late, grid_id)
    shared = device_sharing.resource_waits(
        items,
        lane_waits,
        first_item,
        launch=launch,
        launched_ns=launched_ns,
        host_awaited=waits["awaited"].to_numpy(),
        resolved=for_room.filter("is_found")["item"].to_numpy(),
    )
    room_ns = np.full(items.height, -1, np.int64)
    np.maximum.at(room_ns, for_room["on"].to_numpy(), for_room["room_ns"].to_numpy())
    work = work.with_columns(grid_id, pl.Series("room_ns", room_ns), late["late"].alias("is_late"))
    node_table = number_nodes(_with_kernels(trace, pl.concat([host, work], how="diagonal_relaxed")))
    between = pl.concat([schema.select(part, EDGE_COLUMNS) for part in (lane_waits, shared)])
    between = recorded_stalls.with_delays(between, items, stall_ns, first_item)
    edge_parts = [waits, between, _queue(calls, items, launch, first_item)]
    return TraceGraph(node_table, schema.select(pl.concat(edge_parts), EDGE_COLUMNS))


def _grid_ids(trace: Trace, items: pl.DataFrame) -> pl.Series:
    """Return an id for each item, equal for kernels of equal name, grid and block; null where the grid is unknown."""
    known = trace.activities.filter(pl.col("grid").is_not_null())
    ids = known.select(ref="id", is_wait=False, grid_id=pl.struct("name", "grid", "block").hash(seed=0))
    return items.join(ids, on=["ref", "is_wait"], how="left", maintain_order="left")["grid_id"]


def _with_kernels(trace: Trace, every: pl.DataFrame) -> pl.DataFrame:
    """Return nodes with the kernel id of their work: see `concurrency.DeviceWork`."""
    known = [
        pl.DataFrame({"ref": here.work["id"], "kernel": here.kernel}, schema_overrides={"kernel": pl.UInt64})
        for here in concurrency.device_work(trace)
    ]
    if not known:
        return every
    of_work = pl.concat(known).with_columns(pl.lit(WORK, pl.Int8).alias("what"))
    return every.join(of_work, on=["ref", "what"], how="left", maintain_order="left")


_NEAR_NS = 20_000
_LONG = 10
_LONG_NS = 100_000
_MIN_QUEUED = 100
"""With less work queued, the queue is not full: a call that takes long then does something else, such as to load code.
"""


def _host_waits(trace: Trace, calls: Calls, items: pl.DataFrame, first_item: int) -> pl.DataFrame:
    """Return the work that blocking host calls waited for, as CUDA records it or as end times show."""
    rows = {call: row for row, call in enumerate(calls.id.tolist())}  # the last row of a call: the one that waits
    known = {call: found for call, found in dependencies.host_waits(trace, items).items() if call in rows}
    waiting = np.array([rows[call] for call, found in known.items() for _ in found], np.int64)
    awaited = np.array([item for found in known.values() for item in found], np.int64)
    unknown = np.array([call not in known for call in calls.id.tolist()], bool)
    synced = _synced_op_work(trace, calls, items, unknown)
    unknown[synced["row"].to_numpy()] = False
    return pl.concat([
        edge_table(waiting, awaited + first_item, "sync", inferred=False),
        edge_table(synced["row"].to_numpy(), synced["item"].to_numpy() + first_item, "sync", inferred=True),
        _own_work(calls, items, first_item),
        _drained(calls, items, unknown, first_item),
        _ended_with(calls, items, unknown, first_item),
    ])  # fmt: skip


def _own_work(calls: Calls, items: pl.DataFrame, first_item: int) -> pl.DataFrame:
    """Return the work that calls launched and waited for themselves, such as a copy from pageable memory."""
    rows = pl.DataFrame({"launch_id": calls.id[calls.waits_itself], "row": np.flatnonzero(calls.waits_itself)})
    found = rows.join(items.filter(~pl.col("is_wait")), on="launch_id")
    return edge_table(found["row"].to_numpy(), found["item"].to_numpy() + first_item, "sync", inferred=False)


def _synced_op_work(trace: Trace, calls: Calls, items: pl.DataFrame, unknown: Flags) -> pl.DataFrame:
    """Return the last work that the op of a blocking call launched before it: that is what the call waits for.

    An op such as aten::copy_ launches a copy and waits for its stream; work that ends on another stream meanwhile is a
    coincidence. A copy that is launched directly before is of the same op, though skewed clocks can place it outside. A
    call that returned at once also waits: in a replay, earlier launched work may end later. Columns row (of the call),
    item; one row per such call whose work ended by its end.
    """
    parents = trace.ops.select("id", "parent_id").filter(pl.col("parent_id") >= 0)
    rows = np.flatnonzero(calls.blocks & unknown & ~calls.drains & ~calls.waits_itself)
    before = np.maximum(rows - 1, 0)
    blocking = pl.DataFrame(
        {
            "row": rows,
            "id": calls.id[rows],
            "copy_id": np.where((rows > 0) & calls.launches[before], calls.id[before], -1),
            "called_ns": calls.start_ns[rows],
            "returned_ns": calls.end_ns[rows],
        }
    ).join(parents, on="id", how="left", maintain_order="left")
    work = items.filter(~pl.col("is_wait")).join(parents, left_on="launch_id", right_on="id", how="left")
    of_op = blocking.join(work, on="parent_id")
    directly_before = blocking.join(work.filter(pl.col("kind") == "memcpy"), left_on="copy_id", right_on="launch_id")
    columns = ("row", "called_ns", "returned_ns", "item", "launched_ns", "end_ns")
    return (
        pl.concat([of_op.select(columns), directly_before.select(columns)])
        .filter(pl.col("launched_ns") <= pl.col("called_ns"))
        .sort("row", "launched_ns", "item")
        .unique("row", keep="last", maintain_order=True)
        .filter(pl.col("end_ns") <= pl.col("returned_ns") + _NEAR_NS)
        .select("row", "item")
    )


def _drained(calls: Calls, items: pl.DataFrame, unknown: Flags, first_item: int) -> pl.DataFrame:
    """Return the last item of every lane for each call that waits for the whole device, if it ended by then."""
    drains = np.flatnonzero(calls.drains & unknown)
    waiting, awaited = [], []
    for (_,), lane_items in items.group_by("lane", maintain_order=True):
        at = lane_items["item"].to_numpy()
        last = np.searchsorted(lane_items["launched_reach_ns"].to_numpy(), calls.start_ns[drains], side="left") - 1
        has = last >= 0
        ended = lane_items["end_ns"].to_numpy()[np.maximum(last, 0)] <= calls.end_ns[drains] + _NEAR_NS
        waiting.append(drains[has & ended])
        awaited.append(at[np.maximum(last, 0)][has & ended])
    if not waiting:
        return pl.DataFrame(schema=EDGE_COLUMNS)
    return edge_table(np.concatenate(waiting), np.concatenate(awaited) + first_item, "sync", inferred=True)


def _ended_with(calls: Calls, items: pl.DataFrame, unknown: Flags, first_item: int) -> pl.DataFrame:
    """Return the work whose end unblocked a blocking call, or a launch that took as long as with a full queue."""
    usual = int(np.median(calls.end_ns[calls.launches] - calls.start_ns[calls.launches])) if calls.launches.any() else 0
    took = calls.end_ns - calls.start_ns
    is_long = calls.launches & ~calls.waits_itself & (took > max(_LONG * usual, _LONG_NS))
    queue_full = is_long & (_queued(items, calls.start_ns) >= _MIN_QUEUED)
    which = np.flatnonzero((calls.blocks & unknown & ~calls.drains & ~calls.waits_itself) | queue_full)
    work = items.filter(~pl.col("is_wait")).sort("end_ns")
    if work.is_empty() or not len(which):
        return pl.DataFrame(schema=EDGE_COLUMNS)
    ends = work["end_ns"].to_numpy()
    at = np.searchsorted(ends, calls.end_ns[which] + _NEAR_NS // 10, side="right") - 1
    near = np.where(queue_full[which], took[which] // 4, _NEAR_NS)
    row = np.maximum(at, 0)
    launched = work["launched_ns"].to_numpy()[row] < calls.start_ns[which]  # not by the call itself
    good = (at >= 0) & (ends[row] >= calls.start_ns[which]) & (calls.end_ns[which] - ends[row] <= near) & launched
    how = np.where(queue_full[which][good], "queue", "sync")
    found = edge_table(which[good], work["item"].to_numpy()[row[good]] + first_item, "sync", inferred=True)
    return found.with_columns(pl.Series("kind", how, pl.String))


def _queued(items: pl.DataFrame, at_ns: Ints) -> Ints:
    """Return how many pieces of work have been launched and not ended, at some times."""
    work = items.filter(~pl.col("is_wait"))
    launched, ended = (np.sort(work[name].drop_nulls().to_numpy()) for name in ("launched_ns", "end_ns"))
    return np.asarray(np.searchsorted(launched, at_ns, side="right") - np.searchsorted(ended, at_ns, side="right"))


def _own(calls: Calls, waits: pl.DataFrame, items: pl.DataFrame, first_item: int) -> Ints:
    """Return the calls' own time: the rest after the awaited work ended."""
    own = calls.own_ns.copy()
    if waits.height:
        ends = items["end_ns"].to_numpy()
        last = np.full(len(own), np.iinfo(np.int64).min, np.int64)
        np.maximum.at(last, waits["waiting"].to_numpy(), ends[waits["awaited"].to_numpy() - first_item])
        begun = calls.end_ns - own
        own = np.where(last > begun, np.maximum(calls.end_ns - last, 0), own)
    return own


def _queue(calls: Calls, items: pl.DataFrame, launch: Ints, first_item: int) -> pl.DataFrame:
    """Return the waits of launches for queue space: for the launch QUEUE_DEPTH before; none if violated."""
    parts = [pl.DataFrame(schema=EDGE_COLUMNS)]
    work = items.with_columns(pl.Series("call", launch)).filter(~pl.col("is_wait") & (pl.col("call") >= 0))
    for (_,), device_work in work.group_by("device", maintain_order=True):
        ordered = device_work.sort("call", "item")
        item, call = ordered["item"].to_numpy(), ordered["call"].to_numpy()
        if len(item) <= QUEUE_DEPTH:
            continue
        awaited, waiting = item[:-QUEUE_DEPTH], call[QUEUE_DEPTH:]
        ends = ordered["end_ns"].to_numpy()[:-QUEUE_DEPTH]
        if (ends > calls.end_ns[waiting] + _NEAR_NS).any():
            continue
        parts.append(edge_table(waiting, awaited + first_item, "queue", inferred=True))
    return pl.concat(parts)
