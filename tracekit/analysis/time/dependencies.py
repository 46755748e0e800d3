"""Dependencies of device work: stream order, launches, CUDA events, communicators; recorded or inferred."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.time import trace_columns
from tracekit.model import schema
from tracekit.model.columns import flags, ids, rows_of, starts_of_groups, where
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import NEVER, Flags, Ints, at, distinct
from tracekit.model.trace import Trace

NEAR_NS = 15_000
"""Work that starts within this time after other work ended may have waited for it."""
_AFTER_WAIT_CALL_NS = 30_000
"""The same for work launched directly after a recorded call that lets its stream wait for an event: such work starts 1
to 5 µs after the awaited work on NVIDIA devices, 10 to 18 µs on AMD's (MI300)."""
_WAIT_CALL = r"^(cuda|hip|cu)StreamWaitEvent"
SLACK_NS = 3_000
_MIN_SWITCHES = 30
_MIN_BEGINS = 4
_BACK = 4
_MOST_LANES = 64
_BROKEN = 0.01
_BINDING = 2
_ALONE_NS = 50_000
"""How late a single start must be: on a busy device, a launch often falls right after the end of some work."""
_LAUNCH_NS = 10_000
"""From the start of a launching call to the start of its kernel on an idle device."""
WAIT_COLUMNS = schema.columns("waiting awaited lag_ns kind inferred", inferred=pl.Boolean)

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
    """Dependencies of each piece of device work, and of the host calls that wait for device work.

    Columns as DEPENDENCIES; one row per wait. Empty on a CPU run. Where a trace has no event waits of streams, they are
    inferred: see `tracekit.analysis.time.dependencies`.
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
    """Items on each device stream in order: activities, and recorded waits for events.

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
    """Activities of devices by lane and start, with is_wait (false), ref and their launch times."""
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
    """Waits between items of different lanes.

    Columns waiting, awaited (items), lag_ns, kind, inferred; one row per wait.
    """
    items = lane_items(trace)
    recorded = schema.empty(WAIT_COLUMNS)
    if trace.syncs.height:
        waits = trace.syncs.filter(pl.col("kind") == "stream_wait")
        waits = waits.drop_nulls(["call_id", "record_id", "awaited_stream"])
        lanes = trace.lanes.select("device", awaited_lane="lane", awaited_stream="stream")
        wait_items = items.filter("is_wait").select("lane", "item", call_id="ref")
        waits = waits.join(wait_items, on="call_id").join(lanes, on=["device", "awaited_stream"])
        row = rows_of(trace.ops["id"].to_numpy(), waits["record_id"].to_numpy())
        waits, row = where(waits, row >= 0), row[row >= 0]
        last = last_before(items, waits["awaited_lane"].to_numpy(), trace.ops["start_ns"].to_numpy()[row])
        awaited = pl.Series("awaited", last, pl.Int64)
        recorded = waits.select(awaited, waiting="item", lag_ns=0, kind=pl.lit(EVENT), inferred=False)
        recorded = recorded.filter(pl.col("awaited") >= 0, pl.col("awaited") != pl.col("waiting"))
    event = recorded if recorded.height else event_waits(trace, items)
    parts = (event, communicator_order(trace, items), start_order(items))
    return pl.concat([schema.select(part, WAIT_COLUMNS) for part in parts])


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
    """Items that each host call (ops.id) waited for, from CUDA's synchronization records."""
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
    """Last item launched on each lane before each time; -1 for none."""
    last_item = np.full(len(lane), -1, np.int64)
    lanes, reach, item = (items[name].to_numpy() for name in ("lane", "launched_reach_ns", "item"))
    for lane_id in distinct(lane):
        rows, item_rows = np.flatnonzero(lane == lane_id), np.flatnonzero(lanes == lane_id)
        if len(item_rows):
            last = np.searchsorted(reach[item_rows], at_ns[rows], side="left") - 1
            last_item[rows] = np.where(last >= 0, item[item_rows[np.maximum(last, 0)]], -1)
    return last_item


def event_waits(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    """Inferred event waits of streams. Columns waiting, awaited (items), lag_ns, kind, inferred.

    Work is classed by name, lane, phase and the kernel before it on its lane. A class waits for the work on another
    lane that was launched last before it (or up to three earlier) if no member started before that work ended, and at
    least two started right after it although they could have started earlier; then all members wait. A class of
    reductions waits for the compute launched before it if no member started earlier: that compute produces its data.
    Other work that started 50 µs late or more, right after work on another lane, waits for that work alone. Right after
    is up to 15 µs, or 30 µs where the call before the launch on its thread lets a stream wait for an event.
    """
    parts = [schema.empty(WAIT_COLUMNS)]
    for device_work in by_device(items):
        lane = device_work["lane"].to_numpy()
        if (lane[1:] != lane[:-1]).any():
            parts.append(_of_device(trace, device_work))
    return pl.concat(parts)


def by_device(items: pl.DataFrame) -> Iterator[pl.DataFrame]:
    """Yield the work of each device by lane and order, from items (`lane_items`) without waits."""
    item_device, is_work = items["device"].to_numpy(), ~items["is_wait"].to_numpy()
    devices = distinct(item_device[is_work])
    for device in devices:
        which = is_work & (item_device == device)
        yield items if which.all() else items[np.flatnonzero(which)]


@dataclass(frozen=True)
class _Work:
    """The work of one device by lane and order, as arrays.

    `late` is the work that could have started earlier, `late_alone` that which could have by 50 µs. `near` is how long
    after other work it may start if it waited for that.
    """

    item: Ints
    lane: Ints
    start: Ints
    end: Ints
    launched: Ints
    code: Ints
    late: Flags
    late_alone: Flags
    near: Ints
    reduces: Flags
    carries: Flags
    classes: int

    def count(self, which: Flags) -> Ints:
        """Number of rows of `which` in each class."""
        return np.bincount(self.code[which], minlength=self.classes)

    def launched_before(self, lane: int, back: int) -> Ints:
        """Last row on a lane launched before each row, or the one `back` rows earlier; -1: none."""
        rows = np.flatnonzero(self.lane == lane)
        reach = np.maximum.accumulate(self.launched[rows])
        index = np.searchsorted(reach, self.launched, side="left") - 1 - back
        return np.where((index >= 0) & (self.lane != lane), rows[np.maximum(index, 0)], -1)


def _of_device(trace: Trace, device_work: pl.DataFrame) -> pl.DataFrame:
    work = _work(trace, device_work)
    main = _main_lane(device_work)
    waiting: list[Ints] = []
    awaited: list[Ints] = []
    explained = np.zeros(len(work.item), bool)
    # Others may wait for the lanes with most work, as each is compared with all.
    lanes, count = np.unique(work.lane, return_counts=True)
    for lane in sorted(map(int, lanes[np.argsort(-count, kind="stable")[:_MOST_LANES]])):
        open_ = np.ones(work.classes, bool)
        for back in range(_BACK):
            on = work.launched_before(lane, back)
            # Order between collectives: see communicator_order.
            is_pair = (on >= 0) & ~(work.carries & work.carries[on])
            done = is_pair & (work.end[on] <= work.start + SLACK_NS)
            binds = done & work.late & (work.start - work.end[on] <= work.near)
            pair_count, broken, bound = (work.count(which) for which in (is_pair, is_pair & ~done, binds))
            waits = open_ & (pair_count > 0) & (broken <= _BROKEN * pair_count) & (bound >= _BINDING)
            if lane == main and back == 0:
                waits |= open_ & (work.count(work.reduces & is_pair) > 0) & (broken == 0)
            rows = np.flatnonzero(done & waits[work.code])
            waiting.append(work.item[rows])
            awaited.append(work.item[on[rows]])
            explained |= binds & waits[work.code]
            open_ &= ~waits
    late_items, after = _right_after(work, work.late_alone & ~explained)
    return _waits(np.concatenate((*waiting, late_items)), np.concatenate((*awaited, after)), "event")


def _work(trace: Trace, device_work: pl.DataFrame) -> _Work:
    code = _classes(device_work)
    start, end, lane = (device_work[name].to_numpy() for name in ("start_ns", "end_ns", "lane"))
    launched = device_work["launched_ns"].to_numpy()
    first = np.append(True, lane[1:] != lane[:-1])
    previous = np.where(first, NEVER, np.append(NEVER, end[:-1]))
    # Time at which all work launched earlier had started, if one queue feeds all lanes; else a time long before.
    since = np.full(len(device_work), NEVER, np.int64)
    order = start_order(device_work)
    if order.height:
        rows = np.zeros(int(device_work["item"].max() or 0) + 1, np.int64)  # type: ignore[arg-type]
        rows[device_work["item"].to_numpy()] = np.arange(len(device_work))
        since[rows[order["waiting"].to_numpy()]] = device_work["start_ns"].to_numpy()[rows[order["awaited"].to_numpy()]]
    could = np.maximum(np.maximum(previous, launched + _LAUNCH_NS), since)
    is_launched = ids(device_work["launch_id"]) >= 0
    op = trace.collectives["op"]
    reduces = flags(op == "reduce_scatter") | flags(op == "all_reduce")
    reducing = ids(trace.collectives["activity_id"])[reduces]
    return _Work(
        device_work["item"].to_numpy(),
        lane,
        start,
        end,
        launched,
        code,
        is_launched & (start - could > SLACK_NS),
        is_launched & (start - could > _ALONE_NS),
        np.where(_follows_wait_call(trace, device_work), _AFTER_WAIT_CALL_NS, NEAR_NS),
        np.isin(device_work["ref"].to_numpy(), reducing),
        flags(device_work["kind"] == "communication"),
        int(code.max()) + 1,
    )


def _classes(device_work: pl.DataFrame) -> Ints:
    """Number for each piece of work, equal for those of one name, lane, phase and kernel before it."""
    lane = device_work["lane"].to_numpy()
    name, phase = (_codes(device_work[column]) for column in ("name", "phase"))
    before = np.where(np.append(True, lane[1:] != lane[:-1]), -1, np.append(-1, name[:-1]))
    within = (name * (phase.max() + 1) + phase) * (name.max() + 2) + before + 1
    place = np.unique(lane, return_inverse=True)[1]
    return np.asarray(np.unique(place * (within.max() + 1) + within, return_inverse=True)[1], np.int64)


def _codes(column: pl.Series) -> Ints:
    return np.asarray(np.unique(column.hash().to_numpy(), return_inverse=True)[1], np.int64)


def _follows_wait_call(trace: Trace, device_work: pl.DataFrame) -> Flags:
    """Mask of the work that is the first its thread launches after a call that lets a stream wait for an event."""
    ops = trace.ops
    is_wait = trace_columns.is_kind(trace, "runtime") & trace_columns.is_named(trace, _WAIT_CALL)
    launch = rows_of(ops["id"].to_numpy(), ids(device_work["launch_id"]))
    if not is_wait.any():
        return np.zeros(len(launch), np.bool_)
    listed = is_wait.copy()
    listed[launch[launch >= 0]] = True
    rows = np.flatnonzero(listed)
    lane, start, id_ = (ops[name].to_numpy()[rows] for name in ("lane", "start_ns", "id"))
    order = np.lexsort((id_, start, lane))
    rows, lane = rows[order], lane[order]
    follows = np.zeros(ops.height, np.bool_)
    follows[rows[1:]] = is_wait[rows[:-1]] & (lane[1:] == lane[:-1]) & ~is_wait[rows[1:]]
    return np.asarray(np.where(launch >= 0, follows[launch], False), np.bool_)


def _main_lane(device_work: pl.DataFrame) -> int:
    computes = flags(device_work["kind"] == "compute")
    lane, start, end = (device_work[name].to_numpy()[computes] for name in ("lane", "start_ns", "end_ns"))
    lanes, lane_index = np.unique(lane, return_inverse=True)
    busy_ns = np.zeros(len(lanes), np.int64)
    np.add.at(busy_ns, lane_index, end - start)
    return int(lanes[np.lexsort((lanes, busy_ns))[-1]]) if len(lanes) else -1


def _right_after(work: _Work, which: Flags) -> tuple[Ints, Ints]:
    """Return late work, and the earlier-launched work on another lane right after whose end it started."""
    # Of equal ends, which clocks of whole µs have, the last launched counts, whatever number its stream has.
    order = np.lexsort((work.launched, work.start, work.end))
    rows = np.flatnonzero(which)
    awaited = np.full(len(rows), -1, np.int64)
    for back in range(_BACK):
        index = np.searchsorted(work.end[order], work.start[rows] + SLACK_NS, side="right") - 1 - back
        on = order[np.maximum(index, 0)]
        near = (index >= 0) & (work.start[rows] - work.end[on] <= work.near[rows]) & (work.lane[on] != work.lane[rows])
        near &= ~(work.carries[rows] & work.carries[on])
        awaited = np.where((awaited < 0) & near & (work.launched[on] <= work.launched[rows]), on, awaited)
    has = awaited >= 0
    return work.item[rows[has]], work.item[awaited[has]]


def communicator_order(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    """Waits between collectives of one group on different lanes, in launch order. Columns WAIT_COLUMNS.

    A group whose collectives overlap has none.
    """
    if not (lane := items["lane"].to_numpy()).size or lane.min() == lane.max():
        return schema.empty(WAIT_COLUMNS)
    groups = trace.collectives.select("activity_id", "group").drop_nulls()
    call = np.where(items["is_wait"].to_numpy(), -1, rows_of(ids(groups["activity_id"]), items["ref"].to_numpy()))
    rows = np.flatnonzero(call >= 0)
    if not len(rows):
        return schema.empty(WAIT_COLUMNS)
    group = _codes(groups["group"])[call[rows]]
    device, launched, start = (items[name].to_numpy()[rows] for name in ("device", "launched_ns", "start_ns"))
    order = np.lexsort((start, launched, group, device))
    rows, key = rows[order], device[order] * (group.max() + 1) + group[order]
    before, after = rows[:-1], rows[1:]
    across = (key[1:] == key[:-1]) & (lane[before] != lane[after])
    broken = across & (items["start_ns"].to_numpy()[after] < items["end_ns"].to_numpy()[before] - SLACK_NS)
    in_order = across & ~np.isin(key[1:], key[1:][broken])
    item = items["item"].to_numpy()
    return _waits(item[after[in_order]], item[before[in_order]], "communicator")


def start_order(items: pl.DataFrame) -> pl.DataFrame:
    """Order of starts over all lanes where one queue feeds them; else none. Columns WAIT_COLUMNS.

    One queue feeds all lanes if starts never leave the launch order, and some work launched long before starts just
    when the work launched before it on another lane starts and still runs: nothing else would delay it until then.
    """
    parts = [schema.empty(WAIT_COLUMNS)]
    names = ("item", "lane", "start_ns", "end_ns", "launched_ns")
    for device_work in by_device(items):
        columns = [device_work[name].to_numpy() for name in names]
        order = np.lexsort((columns[0], columns[2], columns[4]))
        item, lane, start, end, launched = (column[order] for column in columns)
        switches = (lane[1:] != lane[:-1]) & (start[1:] - launched[1:] > NEAR_NS)
        begins = switches & (start[1:] - start[:-1] <= SLACK_NS) & (end[:-1] - start[1:] > NEAR_NS)
        in_order = len(start) > 0 and not (start[1:] < start[:-1]).any()
        if switches.sum() < _MIN_SWITCHES or not in_order or begins.sum() < _MIN_BEGINS:
            continue
        parts.append(_waits(item[1:], item[:-1], "start_order"))
    return pl.concat(parts)


def _stream_waits(trace: Trace) -> pl.DataFrame:
    if trace.syncs.is_empty():
        return pl.DataFrame()
    waits = trace.syncs.filter(pl.col("kind") == "stream_wait").drop_nulls(["call_id", "stream", "record_id"])
    lanes = trace.lanes.filter(pl.col("device").is_not_null()).select("lane", "device", "stream")
    lane_waits = waits.select("device", "stream", ref="call_id").join(lanes, on=["device", "stream"])
    row = rows_of(trace.ops["id"].to_numpy(), lane_waits["ref"].to_numpy())
    lane_waits, called_ns = where(lane_waits, row >= 0), pl.Series(trace.ops["start_ns"].to_numpy()[row[row >= 0]])
    times = dict.fromkeys(("start_ns", "end_ns", "launched_ns", "launched_reach_ns"), called_ns)
    return lane_waits.select("ref", "lane", "device", **times, is_wait=True)


def _previous(items: pl.DataFrame) -> pl.Series:
    """Previous item on each item's lane; where work overlaps on one lane, the last that had ended."""
    lane, start, end = (items[name].to_numpy() for name in ("lane", "start_ns", "end_ns"))
    is_wait = items["is_wait"].to_numpy()
    count = len(items)
    before = np.arange(count, dtype=np.int64) - 1
    before[1:][lane[1:] != lane[:-1]] = -1
    safe = np.maximum(before, 0)
    overlaps = (before >= 0) & ~is_wait & ~is_wait[safe] & (end[safe] > start + _OVERLAP_SLACK_NS)
    for row in np.flatnonzero(overlaps).tolist():  # rare: parallel branches of a graph, rounded clocks
        earlier = before[row]
        while earlier >= 0 and end[earlier] > start[row] + _OVERLAP_SLACK_NS:
            earlier = before[earlier]
        before[row] = earlier
    return pl.Series("previous", before)


_OVERLAP_SLACK_NS = 1_000


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


def _waits(waiting: Ints, awaited: Ints, how: str) -> pl.DataFrame:
    count = len(waiting)
    columns = {"waiting": waiting, "awaited": awaited, "lag_ns": np.zeros(count, np.int64)}
    return pl.DataFrame([
        *(pl.Series(name, values) for name, values in columns.items()),
        pl.Series("kind", [how], pl.String).new_from_index(0, count),
        pl.Series("inferred", np.ones(count, np.bool_)),
    ])  # fmt: skip
