"""One trace as nodes and edges: host calls, device work, and their waits. The input of the replay.

No start times of device work are used: only durations, launch order, host time between calls, and known or inferred
waits.
"""

import numpy as np
import polars as pl

from tracekit.analysis.compute import avoidable_time, contention, device_counters
from tracekit.analysis.time import backward_passes, breakdown, dependencies, device_stalls, launched_work, trace_columns
from tracekit.model import intervals, schema
from tracekit.model.columns import flags, ids, last_rows, rows_of, values_at
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.sweep_line import Flags, Ints, at, distinct
from tracekit.model.trace import Trace
from tracekit.replay.graph import filled_devices, host_time
from tracekit.replay.graph.host_time import Calls
from tracekit.replay.graph.nodes import EDGE_COLUMNS, HOST, WAIT, WORK, NodeTable, edge_table, gap_series, number_nodes

_AWAITED_NS = 1_000
"""Rounded clocks: work that a stalled kernel waited for ended at most this long after the device became idle."""

KERNEL_GAP_NS = 1_000
"""The usual time between two queued kernels of a stream, where a trace has too few to show it."""
_LONGEST_KERNEL_GAP_NS = 20_000
"""Queued kernels start 0 to 4 µs after the one before on MI300, V100, A100 and H100; a longer gap has another cause."""
_FEWEST_GAPS = 20  # the mean of fewer gaps is chance
QUEUE_DEPTH = 1024
"""The most launches that may be queued before the host must wait (CUDA's limit)."""


@trace_fact
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
    cause, see `avoidable_time`; 0), and those of GAP_COLUMNS (host time before it by state; their sum is in chain_ns);
    one row per node.
    """
    return build(trace)[0]


@trace_fact
def edges(trace: Trace) -> pl.DataFrame:
    """Return the other waits between a trace's nodes.

    Columns waiting, awaited (nodes), lag_ns (the minimum from the end of one to the start of the other), kind (event,
    sync, queue, communicator, start_order, collective, resources), inferred; one row per wait. For `start_order` the
    waiting node starts no earlier than the awaited one starts.
    """
    return build(trace)[1]


@memoize
def build(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return nodes and edges of a trace."""
    return _on_device(trace) if trace.on_device else host_time.build(trace)


@trace_fact
def windows(trace: Trace) -> pl.DataFrame:
    """Return the device window of each step, with its first node.

    Columns step, device, start_ns, end_ns, first (node); one row per step and device with a first node. A step that
    takes no time, as a damaged file may state, has none.
    """
    nodes, steps = build(trace)[0], trace_columns.windows(trace).filter(pl.col("end_ns") > pl.col("start_ns"))
    starts = nodes["start_ns"].to_numpy()
    places = nodes[["device", "start_ns", "step", "node", "kind"]]
    near = places[np.flatnonzero(np.isin(starts, steps["start_ns"].to_numpy()))].filter(pl.col("kind").is_not_null())
    begins = near.select("device", "start_ns", pl.col("step").alias("of"), pl.col("node").alias("first"))
    firsts = steps.join(begins, on=["device", "start_ns"], how="left", nulls_equal=True, maintain_order="left")
    rows = firsts.filter(pl.col("first").is_not_null() & (pl.col("step").is_null() | (pl.col("of") == pl.col("step"))))
    return rows.unique(["step", "device"], keep="first", maintain_order=True).select(
        "step", "device", "start_ns", "end_ns", "first"
    )


@trace_fact
def preparation(trace: Trace) -> pl.DataFrame:
    """Return the preparation of collectives on devices, from `launched_work.preparation`.

    Columns node, collective (node), overlapped_ns, alone_ns, message_bytes; one row per activity.
    """
    parts = [schema.empty(_PREPARATION)]
    nodes, _ = build(trace)
    work = np.flatnonzero(nodes["what"].to_numpy() == WORK)
    ref = ids(nodes["ref"][work])
    for device in breakdown.devices(trace) if trace.on_device else ():
        prepared = launched_work.preparation(trace, device)
        if prepared.is_empty():
            continue
        node, collective = (
            values_at(pl.Series(name, work), rows_of(ref, ids(prepared[id_column])))
            for name, id_column in (("node", "id"), ("collective", "collective_id"))
        )
        with_nodes = prepared.with_columns(node, collective)
        parts.append(schema.select(with_nodes, _PREPARATION))
    return pl.concat(parts)


def delays(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a stall delays the start of each item (`dependencies.lane_items`), shape (n,).

    That is the first work after the stall on each stream, as far as it was queued by then; after a gap, only on the
    stream that has it.
    """
    delay_ns = np.zeros(items.height, np.int64)
    all_stalls = device_stalls.device_stalls(trace)
    if all_stalls.is_empty():
        return delay_ns
    stalls = all_stalls.filter(flags(all_stalls["is_recurring"]) & flags(all_stalls["kind"] != device_stalls.PAUSED))
    if stalls.is_empty():
        return delay_ns
    spans, stalled_device = intervals.from_table(stalls), ids(stalls["device"])
    is_gap, next_lane = flags(stalls["kind"] == device_stalls.GAP), ids(stalls["lane"])
    names = ("start_ns", "launched_ns", "device", "lane", "is_wait")
    start, launched, device, lane, is_wait = (items[name].to_numpy() for name in names)
    for lane_number in distinct(lane[~is_wait]):
        rows = np.flatnonzero((lane == lane_number) & ~is_wait)
        rows = rows[np.argsort(start[rows], kind="stable")]
        begin, end = spans[(stalled_device == device[rows[0]]) & (~is_gap | (next_lane == lane_number))].T
        first = np.searchsorted(start[rows], end, side="left")
        has_work = first < len(rows)
        work = rows[first[has_work]]
        np.maximum.at(delay_ns, work, np.maximum(end[has_work] - np.maximum(begin[has_work], launched[work]), 0))
    return delay_ns


def pauses(trace: Trace, items: pl.DataFrame) -> Ints:
    """Time that each item (`dependencies.lane_items`) was paused while it ran, in ns, shape (n,)."""
    stalls = device_stalls.device_stalls(trace)
    if stalls.is_empty():
        return np.zeros(items.height, np.int64)
    paused = stalls.filter(flags(stalls["kind"] == device_stalls.PAUSED))
    return _of_items(items, paused["activity_id"], paused["dur_ns"])


def pauses_on_other_ranks(run: Run, nodes: NodeTable) -> list[pl.Series]:
    """Return the column paused_ns with the pauses that only the durations on other ranks show; [] without any."""
    paused = run.table(device_stalls.paused_kernels).filter(pl.col("kind") == device_stalls.PAUSED)
    if paused.is_empty():
        return []
    key = ["window", "rank", "ref", "what"]
    of_work = paused.select("window", "rank", ref="activity_id", what=pl.lit(WORK, pl.Int8), ns="dur_ns")
    joined = nodes.select(*key, "paused_ns").join(of_work, on=key, how="left", maintain_order="left")
    return [joined.select(pl.coalesce("ns", "paused_ns").alias("paused_ns")).to_series()]


def refuted_slowdowns(run: Run, nodes: NodeTable) -> list[pl.Series]:
    """Return the column slowed_ns without clock drops that the work of other ranks refutes; [] without any."""
    key = ["window", "rank", "device"]
    drops = run.table(device_counters.clock_drops)
    confirmed = run.table(device_counters.confirmed_drops)
    refuted = drops.join(confirmed, on=key, how="anti", nulls_equal=True).select(*key, refuted=True)
    if refuted.is_empty():
        return []
    joined = nodes.select(*key, "slowed_ns").join(refuted, on=key, how="left", nulls_equal=True, maintain_order="left")
    return [
        joined.select(
            pl.when(pl.col("refuted").is_null()).then("slowed_ns").otherwise(0).alias("slowed_ns")
        ).to_series()
    ]


def slowdowns(trace: Trace, items: pl.DataFrame) -> Ints:
    """Return by how much a clock drop slows each item (`dependencies.lane_items`), shape (n,)."""
    slowed = device_counters.slowed_kernels(trace)
    return _of_items(items, slowed["activity_id"], slowed["excess_ns"])


def avoidable(trace: Trace, items: pl.DataFrame) -> dict[str, Ints]:
    """Return the time of each item (`dependencies.lane_items`) that could be avoided, and its cause; 0 for none."""
    work = avoidable_time.avoidable(trace)
    columns = {"avoidable_ns": "saved_ns", "avoidable_by": "cause"}
    return {name: _of_items(items, work["activity_id"], work[source]) for name, source in columns.items()}


def _of_items(items: pl.DataFrame, activity: pl.Series, values: pl.Series) -> Ints:
    """Return the value of each item's activity; 0 for waits, and where there is none."""
    row = rows_of(ids(activity), items["ref"].to_numpy())
    has_activity = (row >= 0) & ~items["is_wait"].to_numpy()
    by_item = np.zeros(items.height, np.int64)
    filled = values.fill_null(0) if values.null_count() else values
    by_item[has_activity] = filled.to_numpy()[row[has_activity]]
    return by_item


def with_delays(edges: pl.DataFrame, items: pl.DataFrame, delay_ns: Ints, first_item: int) -> pl.DataFrame:
    """Return waits of items (as nodes) with the delay of the waiting one, if the awaited one ended before it.

    The columns are those of `edges`; the delay, in ns, is added to lag_ns. Waits for launching calls stay: their
    lag is the delay after the call.
    """
    if not delay_ns.any():
        return edges
    waiting, awaited = edges["waiting"].to_numpy() - first_item, edges["awaited"].to_numpy() - first_item
    start, end = items["start_ns"].to_numpy(), items["end_ns"].to_numpy()
    lag = delay_ns[waiting]
    before = (awaited >= 0) & (end[np.maximum(awaited, 0)] <= start[waiting] - lag + _AWAITED_NS)
    return edges.with_columns(lag_ns=edges["lag_ns"].to_numpy() + np.where(before, lag, 0))


_PREPARATION = schema.columns("node collective overlapped_ns alone_ns message_bytes")


# A device ------------------------------------------------------------------------------------------------------------


def _on_device(trace: Trace) -> tuple[pl.DataFrame, pl.DataFrame]:
    calls = host_time.calls(trace)
    items = dependencies.lane_items(trace).with_columns(pl.Series("end_ns", dependencies.completion_ns(trace)))
    first_item = len(calls.id)
    # The row of the call that launched each item, the first one of a call; of a wait, the last call before it.
    last_call = np.searchsorted(calls.start_ns, items["start_ns"].to_numpy(), side="left") - 1
    launch = np.where(items["is_wait"].to_numpy(), last_call, rows_of(calls.id, ids(items["launch_id"])))
    launched_ns = np.where(launch >= 0, np.append(calls.end_ns, 0)[launch], 0)
    stall_ns = delays(trace, items)
    waits = _host_waits(trace, calls, items, first_item)
    item_waits = dependencies.item_waits(trace)
    lane_waits = item_waits.with_columns(
        waiting=item_waits["waiting"].to_numpy() + first_item, awaited=item_waits["awaited"].to_numpy() + first_item
    )
    # An id for each item, equal for kernels of equal name, grid and block; null where the grid is unknown.
    grids = trace.activities.select(
        "id", grid_id=pl.when(pl.col("grid").is_not_null()).then(pl.struct("name", "grid", "block").hash(seed=0))
    )
    grid_id = values_at(grids["grid_id"], _rows_of_work(items, grids["id"].to_numpy()))
    late = filled_devices.late_kernels(items, lane_waits, first_item, launched_ns)
    for_room = filled_devices.waits_for_room(late, grid_id)
    shared = filled_devices.resource_waits(
        late,
        first_item,
        launch=launch,
        launched_ns=launched_ns,
        host_awaited=waits["awaited"].to_numpy(),
        resolved=for_room.filter("is_found")["item"].to_numpy(),
    )
    room_ns = np.full(items.height, -1, np.int64)
    np.maximum.at(room_ns, for_room["on"].to_numpy(), for_room["room_ns"].to_numpy())
    gap_ns = _least_gaps(items, late["ready_ns"].to_numpy(), stall_ns)
    work = _device_nodes(trace, items, first_item, launch=launch, stall_ns=stall_ns, gap_ns=gap_ns).with_columns(
        grid_id, _kernels(trace, items), late["late"].alias("is_late"), room_ns=room_ns
    )
    host = _host_nodes(trace, calls, _own(calls, waits, items, first_item))
    nodes = number_nodes(pl.concat([host, work], how="diagonal_relaxed"))
    between = with_delays(pl.concat([lane_waits, shared]), items, stall_ns, first_item)
    return nodes, pl.concat([waits, between, _queue(calls, items, launch, first_item)])


def _host_nodes(trace: Trace, calls: host_time.Calls, own_ns: Ints) -> pl.DataFrame:
    """Return one node per call of the host, each after the call before it on its thread."""
    columns = {
        "what": pl.Series(np.full(len(calls.id), HOST), dtype=pl.Int8),
        "ref": calls.id,
        "step": calls.step,
        "phase": calls.phase,
        "start_ns": calls.start_ns,
        "end_ns": calls.end_ns,
        "chain": np.arange(len(calls.id), dtype=np.int64) - 1,
        "chain_ns": calls.gap_ns.sum(axis=1),
        "own_ns": own_ns,
        "host_state": pl.Series(calls.state, dtype=pl.Int8),
        "call": host_time.call_names(trace, calls),
    }
    return pl.DataFrame(columns).with_columns(gap_series(calls.gap_ns))


def _least_gaps(items: pl.DataFrame, ready_ns: Ints, stall_ns: Ints) -> Ints:
    """The least time from the item before on its lane to each item, without `stall_ns` of device stalls.

    `ready_ns` are those of `filled_devices.late_kernels`. An item that was ready when the one before it ended was
    delayed by the device alone: its gap stays in a replay. The others follow after the mean of these gaps, which does
    not jump between whole µs as their median does.
    """
    is_wait, chain = items["is_wait"].to_numpy(), items["previous"].to_numpy().astype(np.int64)
    is_free = is_wait | (chain < 0) | is_wait[np.maximum(chain, 0)]
    before_ns = items["end_ns"].to_numpy()[chain]
    # Work of a stream that overlaps, as in CUDA graphs, has no gap.
    gap_ns = np.maximum(items["start_ns"].to_numpy() - before_ns - stall_ns, 0)
    is_queued = ~is_free & (ready_ns <= before_ns) & (gap_ns < _LONGEST_KERNEL_GAP_NS)
    usual_ns = round(float(gap_ns[is_queued].mean())) if is_queued.sum() >= _FEWEST_GAPS else KERNEL_GAP_NS
    return np.where(is_free, 0, np.where(is_queued, gap_ns, np.minimum(gap_ns, usual_ns)))


def _device_nodes(
    trace: Trace, items: pl.DataFrame, first_item: int, *, launch: Ints, stall_ns: Ints, gap_ns: Ints
) -> pl.DataFrame:
    """Return one node per item of the device's lanes, an activity or a wait, each after the item before it."""
    is_wait, chain = items["is_wait"].to_numpy(), items["previous"].to_numpy().astype(np.int64)
    duration_ns = items["end_ns"].to_numpy() - items["start_ns"].to_numpy()
    recorded = items.select(
        "ref", "device", "lane", "kind", "name", "step", "phase", "unit", "span", "start_ns", "end_ns"
    )
    columns = {
        "what": np.where(is_wait, WAIT, WORK).astype(np.int8),
        "chain": np.where(chain >= 0, chain + first_item, -1),
        "chain_ns": gap_ns + stall_ns,
        "launch": launch,
        "launch_ns": stall_ns,
        "stall_ns": stall_ns,
        "paused_ns": pauses(trace, items),
        "slowed_ns": slowdowns(trace, items),
        **avoidable(trace, items),
        "own_ns": np.where(is_wait, 0, duration_ns),
        "recomputed": ~is_wait & np.isin(items["ref"].to_numpy(), backward_passes.recomputed_ids(trace)),
    }
    return recorded.with_columns(pl.Series(name, values) for name, values in columns.items())


def _kernels(trace: Trace, items: pl.DataFrame) -> pl.Series:
    """Return the kernel id of each item; null for waits. See `contention.DeviceWork`."""
    devices = contention.device_work(trace)
    kernel = np.concatenate([np.empty(0, np.uint64), *(device.kernel for device in devices)])
    ref = np.concatenate([np.empty(0, np.int64), *(device.work["id"].to_numpy() for device in devices)])
    return values_at(pl.Series("kernel", kernel, pl.UInt64), _rows_of_work(items, ref))


def _rows_of_work(items: pl.DataFrame, activity: Ints) -> Ints:
    """Return in which row each item's activity is; -1 for waits, and where it is in none."""
    return np.where(items["is_wait"].to_numpy(), -1, rows_of(activity, items["ref"].to_numpy()))


_NEAR_NS = 20_000
_LONG = 10
_LONG_NS = 100_000
_MIN_QUEUED = 100
"""With less work queued, the queue is not full: a call that takes long then does something else, such as to load code.
"""


def _host_waits(trace: Trace, calls: Calls, items: pl.DataFrame, first_item: int) -> pl.DataFrame:
    """Return the work that blocking host calls waited for, as CUDA records it or as end times show."""
    waits = dependencies.host_waits(trace, items)
    pairs = np.array([(call, item) for call, awaited in waits.items() for item in awaited], np.int64).reshape(-1, 2)
    row = rows_of(calls.id[::-1], pairs[:, 0])  # of the rows of a call the last one waits
    row, item = len(calls.id) - 1 - row[row >= 0], pairs[row >= 0, 1]
    unknown = ~np.isin(calls.id, pairs[:, 0])
    synced, synced_item = _synced_op_work(trace, calls, items, unknown)
    unknown[synced] = False
    return pl.concat([
        edge_table(row, item + first_item, "sync", inferred=False),
        edge_table(synced, synced_item + first_item, "sync", inferred=True),
        _own_work(calls, items, first_item),
        _drain_waits(calls, items, unknown, first_item),
        _ended_with(calls, items, unknown, first_item),
    ])  # fmt: skip


def _own_work(calls: Calls, items: pl.DataFrame, first_item: int) -> pl.DataFrame:
    """Return the work that calls launched and waited for themselves, such as a copy from pageable memory."""
    waiting = np.flatnonzero(calls.waits_itself)
    row = np.where(items["is_wait"].to_numpy(), -1, rows_of(calls.id[waiting], ids(items["launch_id"])))
    launched = np.flatnonzero(row >= 0)
    launched = launched[np.argsort(row[launched], kind="stable")]
    return edge_table(waiting[row[launched]], launched + first_item, "sync", inferred=False)


def _synced_op_work(trace: Trace, calls: Calls, items: pl.DataFrame, unknown: Flags) -> tuple[Ints, Ints]:
    """Return the last work that the op of a blocking call launched before it: that is what the call waits for.

    An op such as aten::copy_ launches a copy and waits for its stream; work that ends on another stream meanwhile is a
    coincidence. A copy that is launched directly before is of the same op, though skewed clocks can place it outside. A
    call that returned at once also waits: in a replay, earlier launched work may end later. Returns the rows of such
    calls whose work ended by their end, and that work (items).
    """
    rows = np.flatnonzero(calls.blocks & unknown & ~calls.drains & ~calls.waits_itself)
    if not len(rows):
        return rows, rows
    before, called_ns = np.maximum(rows - 1, 0), calls.start_ns[rows]
    parents, launch_id = trace_columns.parent_ids(trace), ids(items["launch_id"])
    is_work = ~items["is_wait"].to_numpy()
    op = np.where(is_work, at(parents, rows_of(trace.ops["id"].to_numpy(), launch_id), -1), -1)
    copied = np.where(is_work & flags(items["kind"] == "memcpy"), launch_id, -1)
    copy_id = np.where((rows > 0) & calls.launches[before], calls.id[before], -1)
    launched, item = items["launched_ns"].to_numpy(), items["item"].to_numpy()
    of_op = last_rows(op, launched, parents[calls.row[rows]], called_ns)
    directly_before = last_rows(copied, launched, copy_id, called_ns)
    is_copy = (directly_before >= 0) & (
        (of_op < 0)
        | (launched[directly_before] > launched[of_op])
        | (launched[directly_before] == launched[of_op]) & (item[directly_before] > item[of_op])
    )
    last = np.where(is_copy, directly_before, of_op)
    ended = (last >= 0) & (items["end_ns"].to_numpy()[last] <= calls.end_ns[rows] + _NEAR_NS)
    return rows[ended], item[last[ended]]


def _drain_waits(calls: Calls, items: pl.DataFrame, unknown: Flags, first_item: int) -> pl.DataFrame:
    """Return the last item of every lane for each call that waits for the whole device, if it ended by then."""
    drains = np.flatnonzero(calls.drains & unknown)
    waiting, awaited = [drains[:0]], [drains[:0]]
    lane, reach, end = (items[name].to_numpy() for name in ("lane", "launched_reach_ns", "end_ns"))
    for lane_number in distinct(lane) if len(drains) else ():
        at_lane = np.flatnonzero(lane == lane_number)
        last = np.searchsorted(reach[at_lane], calls.start_ns[drains], side="left") - 1
        item = at_lane[np.maximum(last, 0)]
        ended = (last >= 0) & (end[item] <= calls.end_ns[drains] + _NEAR_NS)
        waiting.append(drains[ended])
        awaited.append(item[ended])
    return edge_table(np.concatenate(waiting), np.concatenate(awaited) + first_item, "sync", inferred=True)


def _ended_with(calls: Calls, items: pl.DataFrame, unknown: Flags, first_item: int) -> pl.DataFrame:
    """Return the work whose end unblocked a blocking call, or a launch that took as long as with a full queue."""
    usual = int(np.median(calls.end_ns[calls.launches] - calls.start_ns[calls.launches])) if calls.launches.any() else 0
    took = calls.end_ns - calls.start_ns
    is_long = calls.launches & ~calls.waits_itself & (took > max(_LONG * usual, _LONG_NS))
    queue_full = is_long & (_queue_length(items, calls.start_ns) >= _MIN_QUEUED) if is_long.any() else is_long
    which = np.flatnonzero((calls.blocks & unknown & ~calls.drains & ~calls.waits_itself) | queue_full)
    work = np.flatnonzero(~items["is_wait"].to_numpy())
    if not len(work) or not len(which):
        return schema.empty(EDGE_COLUMNS)
    times = [items[name].to_numpy()[work] for name in ("launched_ns", "start_ns", "end_ns")]
    work = work[np.lexsort(times)]  # of equal ends by launch, whatever numbers the streams have
    ends = items["end_ns"].to_numpy()[work]
    last = np.searchsorted(ends, calls.end_ns[which] + _NEAR_NS // 10, side="right") - 1
    near = np.where(queue_full[which], took[which] // 4, _NEAR_NS)
    row = np.maximum(last, 0)
    launched = items["launched_ns"].to_numpy()[work[row]] < calls.start_ns[which]  # not by the call itself
    good = (last >= 0) & (ends[row] >= calls.start_ns[which]) & (calls.end_ns[which] - ends[row] <= near) & launched
    full = queue_full[which][good]
    waits = edge_table(which[good], work[row[good]] + first_item, "sync", inferred=True)
    if not full.any():
        return waits
    return waits.with_columns(pl.Series("kind", np.where(full, "queue", "sync"), pl.String))


def _queue_length(items: pl.DataFrame, at_ns: Ints) -> Ints:
    """Count of pieces of work that have been launched and not ended, at some times."""
    is_work = ~items["is_wait"].to_numpy()
    launched, ended = (np.sort(items[name].to_numpy()[is_work]) for name in ("launched_ns", "end_ns"))
    return np.asarray(np.searchsorted(launched, at_ns, side="right") - np.searchsorted(ended, at_ns, side="right"))


def _own(calls: Calls, waits: pl.DataFrame, items: pl.DataFrame, first_item: int) -> Ints:
    """Return the calls' own time: the rest after the awaited work ended."""
    own_ns = calls.own_ns.copy()
    if waits.height:
        ends = items["end_ns"].to_numpy()
        last = np.full(len(own_ns), np.iinfo(np.int64).min, np.int64)
        np.maximum.at(last, waits["waiting"].to_numpy(), ends[waits["awaited"].to_numpy() - first_item])
        begun = calls.end_ns - own_ns
        own_ns = np.where(last > begun, np.maximum(calls.end_ns - last, 0), own_ns)
    return own_ns


def _queue(calls: Calls, items: pl.DataFrame, launch: Ints, first_item: int) -> pl.DataFrame:
    """Return the waits of launches for queue space: for the launch QUEUE_DEPTH before; none if violated."""
    parts = [schema.empty(EDGE_COLUMNS)]
    is_work = ~items["is_wait"].to_numpy() & (launch >= 0)
    device, end = items["device"].to_numpy(), items["end_ns"].to_numpy()
    for device_number in distinct(device[is_work]) if is_work.sum() > QUEUE_DEPTH else ():
        item = np.flatnonzero(is_work & (device == device_number))
        item = item[np.argsort(launch[item], kind="stable")]
        if len(item) <= QUEUE_DEPTH:
            continue
        awaited, waiting = item[:-QUEUE_DEPTH], launch[item[QUEUE_DEPTH:]]
        if (end[awaited] > calls.end_ns[waiting] + _NEAR_NS).any():
            continue
        parts.append(edge_table(waiting, awaited + first_item, "queue", inferred=True))
    return pl.concat(parts)
