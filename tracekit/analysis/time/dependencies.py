"""Dependencies of device work: stream order, launches, CUDA events, communicators; recorded or inferred."""

import itertools

import numpy as np
import polars as pl

from tracekit.analysis.time import inferred_dependencies, trace_columns
from tracekit.model import schema
from tracekit.model.columns import ids, rows_of, starts_of_groups, where
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import NEVER, Ints, at, distinct
from tracekit.model.trace import Trace

LAUNCH, STREAM, EVENT, SYNC, COMMUNICATOR, START_ORDER = KINDS = (
    "launch",
    "stream",
    "event",
    "sync",
    "communicator",
    "start_order",
)
"""Kernel launch; stream order; event wait of a stream; host synchronization; order on a communicator; and start order:
one queue feeds all streams, so that work starts only after all earlier-launched work has started."""

_INT, _TEXT = pl.Int64(), pl.String()
DEPENDENCIES = schema.table(
    "dependencies",
    "known or inferred wait",
    schema.column("waiting_id", "Waiting work: activities.id, or ops.id of the call for kind = sync."),
    schema.column("awaited_id", "Awaited work: activities.id, or ops.id of the call for kind = launch."),
    schema.column("kind", "launch, stream, event, sync, communicator or start_order.", _TEXT),
    schema.column("inferred", "Whether it is inferred from order and times, not recorded.", pl.Boolean()),
)
ITEM_COLUMNS = schema.columns(
    "item is_wait ref launch_id device lane kind name step phase unit span start_ns end_ns launched_ns "
    "launched_reach_ns previous"
)


@trace_fact
def dependencies(trace: Trace) -> pl.DataFrame:
    """Return the dependencies of each piece of device work, and of the host calls that wait for device work.

    Columns as DEPENDENCIES; one row per wait. Empty on a CPU run. Where a trace has no event waits of streams, they are
    inferred: see `tracekit.analysis.time.inferred_dependencies`.
    """
    items = lane_items(trace)
    if items.is_empty():
        return DEPENDENCIES.empty()
    launched = items.filter(~pl.col("is_wait")).drop_nulls("launch_id")
    launches = launched.select(waiting_id="ref", awaited_id="launch_id", kind=pl.lit(LAUNCH), inferred=False)
    # Activity of each item; for a wait, the activity before it on its lane; -1: none.
    has = ~items["is_wait"].to_numpy()
    work_row = np.where(has, np.arange(len(items)), -1)
    lane = items["lane"].to_numpy()
    last = np.maximum.accumulate(work_row)
    same = (last >= 0) & (lane[np.maximum(last, 0)] == lane)
    work = np.where(same, items["ref"].to_numpy()[np.maximum(last, 0)], -1)
    order = items.filter(pl.col("previous") >= 0).select(
        waiting="item", awaited="previous", kind=pl.lit(STREAM), inferred=False
    )
    waits = item_waits(trace).select("waiting", "awaited", "kind", "inferred")
    between = _between_work(pl.concat([order, waits]), items, work)
    synced = host_waits(trace, items)
    calls = pl.DataFrame(
        [(call, work[item]) for call, awaited in synced.items() for item in awaited],
        schema=schema.columns("waiting_id awaited_id"),
        orient="row",
    )
    host_sync = calls.filter(pl.col("awaited_id") >= 0).with_columns(kind=pl.lit(SYNC), inferred=False)
    all_waits = pl.concat([table.select(DEPENDENCIES.schema.names()) for table in (launches, between, host_sync)])
    return DEPENDENCIES.conform(all_waits.unique(maintain_order=True))


@memoize
def lane_items(trace: Trace) -> pl.DataFrame:
    """Return the items on each device stream in order: activities, and recorded waits for events.

    Columns ITEM_COLUMNS: item is a number, ref activities.id or ops.id of the wait call, end_ns of a wait that of the
    call, launched_ns the start of the launching call (else of the item itself), launched_reach_ns the latest
    launched_ns on the lane so far, previous the item before on the lane (-1: none). Empty on a CPU run.
    """
    work, waits = _launched_work(trace), _stream_waits(trace)
    both = pl.concat([work, waits], how="diagonal_relaxed") if waits.height else work
    keys = ("ref", "start_ns", "is_wait", "launched_reach_ns", "lane")
    ordered = both[np.lexsort([both[name].to_numpy() for name in keys])]
    item = pl.Series("item", np.arange(ordered.height, dtype=np.int64))
    table = pl.DataFrame([item, *ordered.get_columns(), _previous(ordered)])
    return schema.select(table, ITEM_COLUMNS)


def _launched_work(trace: Trace) -> pl.DataFrame:
    """Return the activities of devices by lane and start, with is_wait (false), ref and their launch times."""
    activities, lanes = trace.activities, trace.lanes
    place = rows_of(lanes["lane"].to_numpy(), activities["lane"].to_numpy())
    device = at(ids(lanes["device"]), place, -1)
    lane, start, ref = (activities[name].to_numpy() for name in ("lane", "start_ns", "id"))
    called = at(trace.ops["start_ns"].to_numpy(), trace_columns.launch_rows(trace), -NEVER)
    launched = np.minimum(start, called)
    order = np.lexsort((ref, start, lane))
    order = order[device[order] >= 0]
    # Latest of the times so far on each lane; rows are sorted by lane.
    times = launched[order]
    bounds = starts_of_groups(lane[order])
    parts = [np.maximum.accumulate(times[first:until]) for first, until in itertools.pairwise(bounds.tolist())]
    new_columns = {
        "device": device[order],
        "launched_ns": launched[order],
        "launched_reach_ns": np.concatenate(parts) if parts else times,
        "end_ns": (start + activities["dur_ns"].to_numpy())[order],
        "ref": ref[order],
        "is_wait": np.zeros(len(order), np.bool_),
    }
    items = activities[[name for name in activities.columns if name in ITEM_COLUMNS]][order]
    return pl.DataFrame([*items.get_columns(), *(pl.Series(name, values) for name, values in new_columns.items())])


@memoize
def item_waits(trace: Trace) -> pl.DataFrame:
    """Return the waits between items of different lanes.

    Columns waiting, awaited (items), lag_ns, kind, inferred; one row per wait.
    """
    items = lane_items(trace)
    recorded = _event_waits(trace, items)
    parts = [recorded] if recorded.height else [inferred_dependencies.event_waits(trace, items)]
    parts += [inferred_dependencies.communicator_order(trace, items), inferred_dependencies.start_order(items)]
    return pl.concat([schema.select(part, inferred_dependencies.WAIT_COLUMNS) for part in parts])


@memoize
def completion_ns(trace: Trace) -> Ints:
    """Completion time of each item: work as recorded, a wait after its event and its lane's earlier work."""
    items = lane_items(trace)
    is_wait, previous = items["is_wait"].to_numpy(), items["previous"].to_numpy()
    end = items["end_ns"].to_numpy()
    if not is_wait.any():
        return end
    end = end.copy()
    waits = item_waits(trace).filter(pl.col("kind") == EVENT)
    on_lane = np.flatnonzero(is_wait & (previous >= 0))
    waiting, awaited = waits["waiting"].to_numpy(), waits["awaited"].to_numpy()
    from_wait = is_wait[waiting]
    waiting = np.concatenate((waiting[from_wait], on_lane))
    awaited = np.concatenate((awaited[from_wait], previous[on_lane]))
    while (late := end[waiting] < end[awaited]).any():  # once per level of chained waits
        np.maximum.at(end, waiting[late], end[awaited[late]])
    return np.asarray(end, np.int64)


def host_waits(trace: Trace, items: pl.DataFrame) -> dict[int, list[int]]:
    """Return the items that each host call (ops.id) waited for, from CUDA's synchronization records."""
    if trace.syncs.is_empty():
        return {}
    syncs = trace.syncs.filter(pl.col("kind").is_in(["event", "stream"])).drop_nulls("call_id")
    at_id = pl.when(pl.col("kind") == "event").then("record_id").otherwise("call_id")
    stream = pl.when(pl.col("kind") == "event").then("awaited_stream").otherwise("stream")
    requests = syncs.with_columns(at_id.alias("at_id"), stream.alias("stream")).drop_nulls("at_id")
    lanes = trace.lanes.select("lane", "device", "stream").drop_nulls()
    lane_requests = requests.join(lanes, on=["device", "stream"])
    row = rows_of(trace.ops["id"].to_numpy(), lane_requests["at_id"].to_numpy())
    lane_requests, row = where(lane_requests, row >= 0), row[row >= 0]
    last_items = last_before(items, lane_requests["lane"].to_numpy(), trace.ops["start_ns"].to_numpy()[row])
    waits: dict[int, list[int]] = {}
    for call, item in zip(lane_requests["call_id"].to_list(), last_items.tolist(), strict=True):
        if item >= 0:
            waits.setdefault(call, []).append(item)
    return waits


def last_before(items: pl.DataFrame, lane: Ints, at_ns: Ints) -> Ints:
    """Return the last item launched on each lane before each time; -1 for none."""
    last_item = np.full(len(lane), -1, np.int64)
    lanes, reach, item = (items[name].to_numpy() for name in ("lane", "launched_reach_ns", "item"))
    for lane_id in distinct(lane):
        rows, item_rows = np.flatnonzero(lane == lane_id), np.flatnonzero(lanes == lane_id)
        if len(item_rows):
            last = np.searchsorted(reach[item_rows], at_ns[rows], side="left") - 1
            last_item[rows] = np.where(last >= 0, item[item_rows[np.maximum(last, 0)]], -1)
    return last_item


def _device_lanes(trace: Trace) -> pl.DataFrame:
    return trace.lanes.filter(pl.col("device").is_not_null()).select("lane", "device", "stream")


def _stream_waits(trace: Trace) -> pl.DataFrame:
    if trace.syncs.is_empty():
        return pl.DataFrame()
    waits = trace.syncs.filter(pl.col("kind") == "stream_wait").drop_nulls(["call_id", "stream", "record_id"])
    lane_waits = waits.select("device", "stream", pl.col("call_id").alias("ref")).join(
        _device_lanes(trace), on=["device", "stream"]
    )
    row = rows_of(trace.ops["id"].to_numpy(), lane_waits["ref"].to_numpy())
    lane_waits, called_ns = where(lane_waits, row >= 0), pl.Series(trace.ops["start_ns"].to_numpy()[row[row >= 0]])
    times = dict.fromkeys(("start_ns", "end_ns", "launched_ns", "launched_reach_ns"), called_ns)
    return lane_waits.select("ref", "lane", "device", **times, is_wait=True)


def _previous(items: pl.DataFrame) -> pl.Series:
    """Return the previous item on each item's lane; where work overlaps on one lane, the last that had ended."""
    lane, start, end = (items[name].to_numpy() for name in ("lane", "start_ns", "end_ns"))
    is_wait = items["is_wait"].to_numpy()
    count = len(items)
    before = np.arange(count, dtype=np.int64) - 1
    before[1:][lane[1:] != lane[:-1]] = -1
    safe = np.maximum(before, 0)
    overlaps = (before >= 0) & ~is_wait & ~is_wait[safe] & (end[safe] > start + _SLACK_NS)
    for row in np.flatnonzero(overlaps).tolist():  # rare: parallel branches of a graph, rounded clocks
        earlier = before[row]
        while earlier >= 0 and end[earlier] > start[row] + _SLACK_NS:
            earlier = before[earlier]
        before[row] = earlier
    return pl.Series("previous", before)


_SLACK_NS = 1_000


def _event_waits(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    if trace.syncs.is_empty():
        return schema.empty(inferred_dependencies.WAIT_COLUMNS)
    waits = trace.syncs.filter(pl.col("kind") == "stream_wait").drop_nulls(["call_id", "record_id", "awaited_stream"])
    lanes = trace.lanes.select(pl.col("lane").alias("awaited_lane"), "device", pl.col("stream").alias("awaited_stream"))
    wait_items = items.filter("is_wait").select("lane", "item", pl.col("ref").alias("call_id"))
    lane_waits = waits.join(wait_items, on="call_id").join(lanes, on=["device", "awaited_stream"])
    row = rows_of(trace.ops["id"].to_numpy(), lane_waits["record_id"].to_numpy())
    lane_waits, row = where(lane_waits, row >= 0), row[row >= 0]
    awaited = last_before(items, lane_waits["awaited_lane"].to_numpy(), trace.ops["start_ns"].to_numpy()[row])
    waits = lane_waits.select(
        pl.Series("awaited", awaited, pl.Int64), waiting="item", lag_ns=0, kind=pl.lit(EVENT), inferred=False
    )
    return waits.filter(pl.col("awaited") >= 0, pl.col("awaited") != pl.col("waiting"))


def _between_work(waits: pl.DataFrame, items: pl.DataFrame, work: Ints) -> pl.DataFrame:
    """Return waits between items as waits between activities: a waiting stream delays its next activity."""
    is_wait = items["is_wait"].to_numpy()
    ref, lane, count = items["ref"].to_numpy(), items["lane"].to_numpy(), len(items)
    following = np.where(is_wait, count, np.arange(count))
    following = np.minimum.accumulate(following[::-1])[::-1]
    safe = np.minimum(following, count - 1)
    next_work = np.where((following < count) & (lane[safe] == lane), ref[safe], -1)
    waiting, awaited = waits["waiting"].to_numpy(), waits["awaited"].to_numpy()
    return (
        waits.with_columns(
            pl.Series("waiting_id", next_work[waiting], pl.Int64), pl.Series("awaited_id", work[awaited], pl.Int64)
        )
        .filter(pl.col("waiting_id") >= 0, pl.col("awaited_id") >= 0, pl.col("waiting_id") != pl.col("awaited_id"))
        .select("waiting_id", "awaited_id", "kind", "inferred")
    )
