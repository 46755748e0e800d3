"""Waits missing from a trace, inferred from order and end times: events between streams, order on a communicator.

A wait is inferred where work on one lane starts right after work on another lane ends, although its launch and its own
lane would have let it start earlier, and where every member of the same class starts no earlier.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.sweep_line import NEVER, Flags, Ints
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
_BROKEN = 0.01
_BINDING = 2
_ALONE_NS = 50_000
"""How late a single start must be: on a busy device, a launch often falls right after the end of some work."""
_LAUNCH_NS = 10_000
"""From the start of a launching call to the start of its kernel on an idle device."""
WAIT_COLUMNS = schema.columns("waiting awaited lag_ns kind inferred", inferred=pl.Boolean)


def event_waits(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    """Return the inferred event waits of streams. Columns waiting, awaited (items), lag_ns, kind, inferred.

    Work is classed by name, lane, phase and the kernel before it on its lane. A class waits for the work on another
    lane that was launched last before it (or up to three earlier) if no member started before that work ended, and at
    least two started right after it although they could have started earlier; then all members wait. A class of
    reductions waits for the compute launched before it if no member started earlier: that compute produces its data.
    Other work that started 50 µs late or more, right after work on another lane, waits for that work alone. Right after
    is up to 15 µs, or 30 µs where the call before the launch on its thread lets a stream wait for an event.
    """
    work = items.filter(~pl.col("is_wait"))
    parts = [pl.DataFrame(schema=WAIT_COLUMNS)]
    for (_,), device_work in work.group_by("device", maintain_order=True):
        if device_work["lane"].n_unique() > 1:
            parts.append(_of_device(trace, device_work.sort("lane", "item")))
    return pl.concat(parts)


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
        """Return how many of `which` each class has."""
        return np.bincount(self.code[which], minlength=self.classes)

    def launched_before(self, lane: int, back: int) -> Ints:
        """Return the last row on a lane launched before each row, or the one `back` rows earlier; -1: none."""
        rows = np.flatnonzero(self.lane == lane)
        reach = np.maximum.accumulate(self.launched[rows])
        at = np.searchsorted(reach, self.launched, side="left") - 1 - back
        return np.where((at >= 0) & (self.lane != lane), rows[np.maximum(at, 0)], -1)


def _of_device(trace: Trace, device_work: pl.DataFrame) -> pl.DataFrame:
    work = _work(trace, device_work)
    main = _main_lane(device_work)
    waiting: list[Ints] = []
    awaited: list[Ints] = []
    explained = np.zeros(len(work.item), bool)
    for lane in np.unique(work.lane).tolist():
        open_ = np.ones(work.classes, bool)
        for back in range(_BACK):
            on = work.launched_before(lane, back)
            known = (on >= 0) & ~(work.carries & work.carries[on])  # order between collectives: see communicator_order
            done = known & (work.end[on] <= work.start + SLACK_NS)
            binds = done & work.late & (work.start - work.end[on] <= work.near)
            count, broken, bound = (work.count(which) for which in (known, known & ~done, binds))
            waits = open_ & (count > 0) & (broken <= _BROKEN * count) & (bound >= _BINDING)
            if lane == main and back == 0:
                waits |= open_ & (work.count(work.reduces & known) > 0) & (broken == 0)
            chosen = np.flatnonzero(done & waits[work.code])
            waiting.append(work.item[chosen])
            awaited.append(work.item[on[chosen]])
            explained |= binds & waits[work.code]
            open_ &= ~waits
    alone, after = _right_after(work, work.late_alone & ~explained)
    return _waits(np.concatenate((*waiting, alone)), np.concatenate((*awaited, after)), "event")


def _work(trace: Trace, device_work: pl.DataFrame) -> _Work:
    before = pl.col("name").shift(1).over("lane").alias("before")
    rank = device_work.select(pl.struct("lane", "phase", "name", before).rank("dense")).to_series()
    code = rank.to_numpy().astype(np.int64) - 1
    start, end, lane = (device_work[name].to_numpy() for name in ("start_ns", "end_ns", "lane"))
    launched = device_work["launched_ns"].to_numpy()
    first = np.append(True, lane[1:] != lane[:-1])
    previous = np.where(first, NEVER, np.append(NEVER, end[:-1]))
    could = np.maximum(np.maximum(previous, launched + _LAUNCH_NS), _others_start(device_work))
    is_launched = device_work["launch_id"].is_not_null().to_numpy()
    reducing = trace.collectives.filter(pl.col("op").is_in(["reduce_scatter", "all_reduce"]))["activity_id"]
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
        device_work["ref"].is_in(reducing.implode()).to_numpy(),
        (device_work["kind"] == "communication").to_numpy(),
        int(code.max()) + 1,
    )


def _follows_wait_call(trace: Trace, device_work: pl.DataFrame) -> Flags:
    """Return which work is the first that its thread launches after a call that lets a stream wait for an event."""
    launched = device_work["launch_id"].drop_nulls().unique()
    is_wait = (pl.col("kind") == "runtime") & pl.col("name").str.contains(_WAIT_CALL)
    calls = trace.ops.select("id", "lane", "start_ns", is_wait=is_wait).filter(
        pl.col("is_wait") | pl.col("id").is_in(launched.implode())
    )
    follows = calls.sort("lane", "start_ns", "id").with_columns(
        pl.col("is_wait").shift(1).over("lane").alias("follows")
    )
    after = follows.filter(~pl.col("is_wait"), "follows")["id"]
    return np.asarray(device_work["launch_id"].is_in(after.implode()).fill_null(value=False).to_numpy())


def _others_start(device_work: pl.DataFrame) -> Ints:
    """Return when all work launched earlier had started, if one queue feeds all lanes; else a time long before."""
    since = np.full(len(device_work), NEVER, np.int64)
    order = start_order(device_work)
    if order.height:
        at = np.zeros(int(device_work["item"].max() or 0) + 1, np.int64)  # type: ignore[arg-type]
        at[device_work["item"].to_numpy()] = np.arange(len(device_work))
        since[at[order["waiting"].to_numpy()]] = device_work["start_ns"].to_numpy()[at[order["awaited"].to_numpy()]]
    return since


def _main_lane(device_work: pl.DataFrame) -> int:
    compute = device_work.filter(pl.col("kind") == "compute")
    busy = compute.group_by("lane").agg((pl.col("end_ns") - pl.col("start_ns")).sum()).sort("end_ns", "lane")
    return int(busy["lane"][-1]) if busy.height else -1


def _right_after(work: _Work, which: Flags) -> tuple[Ints, Ints]:
    """Return late work, and the earlier-launched work on another lane right after whose end it started."""
    order = np.argsort(work.end, kind="stable")
    rows = np.flatnonzero(which)
    found = np.full(len(rows), -1, np.int64)
    for back in range(_BACK):
        at = np.searchsorted(work.end[order], work.start[rows] + SLACK_NS, side="right") - 1 - back
        on = order[np.maximum(at, 0)]
        near = (at >= 0) & (work.start[rows] - work.end[on] <= work.near[rows]) & (work.lane[on] != work.lane[rows])
        near &= ~(work.carries[rows] & work.carries[on])
        found = np.where((found < 0) & near & (work.launched[on] <= work.launched[rows]), on, found)
    has = found >= 0
    return work.item[rows[has]], work.item[found[has]]


def communicator_order(trace: Trace, items: pl.DataFrame) -> pl.DataFrame:
    """Return the waits between collectives of one group on different lanes, in launch order; none if violated."""
    calls = trace.collectives.select(pl.col("activity_id").alias("ref"), "group").drop_nulls().unique("ref")
    calls_in_order = (
        items.filter(~pl.col("is_wait")).join(calls, on="ref").sort("device", "group", "launched_ns", "start_ns")
    )
    key = ["device", "group"]
    pairs = calls_in_order.with_columns(
        pl.col("item").shift(1).over(key).alias("awaited"),
        pl.col("lane").shift(1).over(key).alias("before_lane"),
        pl.col("end_ns").shift(1).over(key).alias("before_ns"),
    ).drop_nulls("awaited")
    across = pairs.filter(pl.col("lane") != pl.col("before_lane"))
    broken = across.filter(pl.col("start_ns") < pl.col("before_ns") - SLACK_NS).select(key).unique()
    in_order = across.join(broken, on=key, how="anti", maintain_order="left")
    return _waits(in_order["item"].to_numpy(), in_order["awaited"].to_numpy(), "communicator")


def start_order(items: pl.DataFrame) -> pl.DataFrame:
    """Return the order of starts over all lanes where one queue feeds them; else none.

    One queue feeds all lanes if starts never leave the launch order, and some work launched long before starts just
    when the work launched before it on another lane starts and still runs: nothing else would delay it until then.
    """
    parts = [pl.DataFrame(schema=WAIT_COLUMNS)]
    for (_,), device_work in items.filter(~pl.col("is_wait")).group_by("device", maintain_order=True):
        ordered = device_work.sort("launched_ns", "start_ns", "item")
        item, lane, start, end, launched = (
            ordered[name].to_numpy() for name in ("item", "lane", "start_ns", "end_ns", "launched_ns")
        )
        switches = (lane[1:] != lane[:-1]) & (start[1:] - launched[1:] > NEAR_NS)
        begins = switches & (start[1:] - start[:-1] <= SLACK_NS) & (end[:-1] - start[1:] > NEAR_NS)
        in_order = len(start) > 0 and not (start[1:] < start[:-1]).any()
        if switches.sum() < _MIN_SWITCHES or not in_order or begins.sum() < _MIN_BEGINS:
            continue
        parts.append(_waits(item[1:], item[:-1], "start_order"))
    return pl.concat(parts)


def _waits(waiting: Ints, awaited: Ints, how: str) -> pl.DataFrame:
    pairs = pl.DataFrame({"waiting": waiting, "awaited": awaited})
    return pairs.with_columns(lag_ns=0, kind=pl.lit(how), inferred=True).pipe(schema.select, WAIT_COLUMNS)
