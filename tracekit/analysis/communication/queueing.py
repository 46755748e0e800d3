"""Kernels delayed by the launch order of other streams, or by another collective of their communicator."""

import re

import numpy as np
import polars as pl

from tracekit.analysis.communication.communication_gap_causes import NEAR_NS
from tracekit.analysis.time import breakdown, launched_work
from tracekit.model import columns, intervals, schema, sweep_line
from tracekit.model.fact import trace_fact
from tracekit.model.memoize import memoize
from tracekit.model.sweep_line import Flags, Ints
from tracekit.model.trace import Trace

ORDER_COLUMNS = schema.columns("device step overtake_chances overtakes delayed delay_ns")
DELAY_COLUMNS = {
    "device": pl.Int64, "step": pl.Int64, "phase": pl.String, "unit": pl.String, "lane": pl.Int64,
    "activity_id": pl.Int64, "name": pl.String, "kind": pl.String, "ready_ns": pl.Int64, "start_ns": pl.Int64,
    "dur_ns": pl.Int64, "delay_ns": pl.Int64, "blocker_id": pl.Int64, "blocker_name": pl.String, "reason": pl.String,
}  # fmt: skip
ORDER, COMMUNICATOR = "launch order", "communicator"
_GATHERS = re.compile("gather|broadcast")


@trace_fact
@memoize
def delayed_kernels(trace: Trace) -> pl.DataFrame:
    """Return the kernels that started late although they were launched and their lane was free.

    Columns DELAY_COLUMNS: ready_ns (launched, and all earlier work of its lane done), reason: `launch order` where it
    starts within 20 µs of the start of earlier-launched work on another lane and overlaps it, `communicator` where a
    collective starts right when another of its group on another lane ends. One row per delayed kernel.
    """
    parts = [schema.empty(DELAY_COLUMNS)]
    for queue in _queues(trace):
        parts += [
            queue.delay_table(*queue.by_order(), ORDER),
            queue.delay_table(*queue.by_communicator(trace), COMMUNICATOR),
        ]
    return pl.concat(parts)


@trace_fact
@memoize
def launch_order(trace: Trace) -> pl.DataFrame:
    """Chances of kernels to overtake kernels launched earlier on other lanes, and the overtakes that happened.

    Columns device, step, overtake_chances (launched kernels with a free lane, while an earlier one on another lane had
    not started), overtakes (those that started more than 20 µs before it), delayed (those that started right with it),
    delay_ns (their delay while no work of their kind ran). One row per device and step.
    """
    parts = [schema.empty(ORDER_COLUMNS)]
    for queue in _queues(trace):
        chances, overtakes = queue.overtakes()
        rows, _ = queue.by_order()
        matter = np.flatnonzero(chances | overtakes)
        frame = queue.work.select("device", "step")[matter].hstack(
            [
                pl.Series("overtake_chances", np.ones(len(matter), np.int64)),
                pl.Series("overtakes", overtakes[matter]),
                pl.Series("delayed", np.isin(matter, rows)),
                pl.Series("delay_ns", queue.idle_ns(rows)[matter]),
            ]
        )
        sums = frame.group_by("device", "step", maintain_order=True).agg(pl.all().sum())
        parts.append(schema.select(sums, ORDER_COLUMNS))
    return pl.concat(parts)


@memoize
def _queues(trace: Trace) -> "list[_Queue]":
    return [_Queue(trace, device) for device in breakdown.lane_devices(trace)]


class _Queue:
    """The kernels of one device in launch order."""

    def __init__(self, trace: Trace, device: int) -> None:
        work = launched_work.work_columns(trace, device)
        rows = np.flatnonzero((work.computes | work.communicates) & (work.launched_ns != sweep_line.NEVER))
        called_ns = sweep_line.at(trace.ops["start_ns"].to_numpy(), work.call[rows], sweep_line.NEVER)
        rows = rows[np.lexsort((work.id[rows], called_ns))]
        self.work = launched_work.work(trace, device)[rows]
        self.lane, self.spans, self.computes = work.lane[rows], work.spans[rows], work.computes[rows]
        self.latest: Ints = _latest_elsewhere(self.spans[:, 0], self.lane)
        """Of the kernels launched earlier on other lanes, the one that began last; -1 for none."""
        before = _before_on_lane(self.spans[:, 1], self.lane)
        self.ready_ns: Ints = np.maximum(work.launched_ns[rows], before)

    @property
    def latest_ns(self) -> Ints:
        """Latest start of the earlier-launched kernels on other lanes."""
        return sweep_line.at(self.spans[:, 0], self.latest, sweep_line.NEVER)

    def overtakes(self) -> tuple[Flags, Flags]:
        """Masks of kernels that could start before an earlier-launched one on another lane, and of those that did."""
        return self.latest_ns > self.ready_ns + NEAR_NS, self.spans[:, 0] < self.latest_ns - NEAR_NS

    def by_order(self) -> tuple[Ints, Ints]:
        """Return the kernels that started together with an earlier-launched one on another lane, and that one."""
        could, _ = self.overtakes()
        after_ns = self.spans[:, 0] - self.latest_ns
        runs_on = sweep_line.at(self.spans[:, 1], self.latest, sweep_line.NEVER) > self.spans[:, 0] + NEAR_NS
        rows = np.flatnonzero(could & (after_ns >= 0) & (after_ns <= NEAR_NS) & runs_on)
        return rows, self.latest[rows]

    def by_communicator(self, trace: Trace) -> tuple[Ints, Ints]:
        """Return the collectives that started right after another of their group on another lane, and that one."""
        rows = np.flatnonzero(~self.computes)
        calls = self._groups_and_ops(trace, rows)
        codes = {name: code for code, name in enumerate(calls["group"].drop_nulls().unique().sort())}
        group = np.array([codes.get(name, -1) for name in calls["group"].to_list()], np.int64)
        grouped = np.flatnonzero(group >= 0)
        grouped = grouped[np.lexsort((self.spans[rows[grouped], 0], group[grouped]))]
        order, same = rows[grouped], group[grouped]
        first, then = order[:-1], order[1:]
        ready_ns = np.maximum(self.ready_ns, self._produced_ns(rows, calls["op"].to_list()))
        waits = (
            (same[:-1] == same[1:])
            & (self.lane[first] != self.lane[then])
            & (self.spans[then, 0] >= self.spans[first, 1])
            & (self.spans[then, 0] - self.spans[first, 1] <= NEAR_NS)
            & (ready_ns[then] + NEAR_NS < self.spans[first, 1])
        )
        return then[waits], first[waits]

    def _groups_and_ops(self, trace: Trace, rows: Ints) -> pl.DataFrame:
        """Return group and op of the collectives in `rows`, null where not known."""
        ids = self.work["id"].to_numpy()[rows]
        row = columns.rows_of(trace.collectives["activity_id"].to_numpy(), ids)
        return columns.rows_or_nulls(trace.collectives.select("group", "op"), row)

    def _produced_ns(self, rows: Ints, ops: list[str | None]) -> Ints:
        """Return the end of the compute launched before each collective in `rows` that reduces, by row of the work."""
        gathers = [op is not None and bool(_GATHERS.search(op)) and "reduce" not in op for op in ops]
        before = _before(np.where(self.computes, self.spans[:, 1], sweep_line.NEVER))
        before[rows[np.array(gathers, np.bool_)]] = sweep_line.NEVER
        return before

    def idle_ns(self, rows: Ints) -> Ints:
        """Return, at each of `rows`, its delay while no work of its kind ran; 0 elsewhere."""
        delays = np.zeros(len(self.lane), np.int64)
        waits = np.stack((self.ready_ns[rows], self.spans[rows, 0]), axis=1)
        for computes in (True, False):
            same_kind = self.computes[rows] == computes
            busy = intervals.coverage(waits[same_kind], self.spans[self.computes == computes])
            delays[rows[same_kind]] = waits[same_kind, 1] - waits[same_kind, 0] - busy
        return delays

    def delay_table(self, rows: Ints, behind: Ints, by: str) -> pl.DataFrame:
        """Return the delayed kernels `rows` with their blockers, as a table."""
        if not len(rows):
            return schema.empty(DELAY_COLUMNS)
        earlier = self.work[behind].select(pl.col("id").alias("blocker_id"), pl.col("name").alias("blocker_name"))
        frame = self.work[rows].rename({"id": "activity_id"})
        return frame.with_columns(
            pl.Series("ready_ns", self.ready_ns[rows]),
            pl.Series("delay_ns", self.spans[rows, 0] - self.ready_ns[rows]),
            *earlier.iter_columns(),
            pl.lit(by).alias("reason"),
        ).pipe(schema.select, DELAY_COLUMNS)


def _before(values: Ints) -> Ints:
    """Return the largest of the values before each."""
    reached = np.maximum.accumulate(np.concatenate((np.array([sweep_line.NEVER]), values)))
    return np.asarray(reached[:-1], np.int64)


def _before_on_lane(values: Ints, lane: Ints) -> Ints:
    """Return the largest of the values before each on its lane."""
    order = np.argsort(lane, kind="stable")
    first = np.append(True, lane[order][1:] != lane[order][:-1])[: len(order)]
    reached = _running_max(np.argsort(np.argsort(values[order])), first)
    before = np.empty(len(values), np.int64)
    before[order] = np.where(first, sweep_line.NEVER, np.roll(np.sort(values)[reached], 1))
    return before


def _latest_elsewhere(values: Ints, lane: Ints) -> Ints:
    """Return the row of the largest value (of equal ones the last) before each on other lanes; -1 for none."""
    if not len(values):
        return values
    by_value = np.lexsort((np.arange(len(values)), values))
    rank = np.empty(len(values), np.int64)
    rank[by_value] = np.arange(len(values))
    largest = np.append(-1, np.maximum.accumulate(rank)[:-1])  # before each row
    largest_lane = np.where(largest >= 0, lane[by_value[largest]], -1)
    # While the largest stays on one lane, the largest elsewhere is that before this stretch, or came since.
    begins = np.append(True, (largest_lane[1:] != largest_lane[:-1]) | (largest[1:] < 0))
    came = np.append(-1, np.where(lane[:-1] == largest_lane[1:], -1, rank[:-1]))
    came = np.where(begins, np.append(-1, largest[:-1]), came)
    elsewhere = np.where(largest_lane == lane, _running_max(came + 1, begins) - 1, largest)
    return np.where(elsewhere >= 0, by_value[elsewhere], -1)


def _running_max(values: Ints, begins: Flags) -> Ints:
    """Return the largest of the values, from 0 to their number, up to each since the last row that begins a part."""
    shift = np.cumsum(begins) * (len(values) + 1)
    return np.asarray(np.maximum.accumulate(values + shift) - shift, np.int64)
