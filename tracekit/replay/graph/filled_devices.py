"""Kernels that fill a device: while one runs, kernels of other streams find no room until its last wave of blocks."""

import heapq
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.lookup import flags
from tracekit.model.sweep_line import Ints
from tracekit.replay.graph import device_sharing
from tracekit.replay.graph.nodes import WORK

_SLACK_NS = 20_000
_BACK = 8
"""How many kernels that started before are searched for one that still runs."""
_DEVICE = ("rank", "device")
_NONE = -1
_CONCURRENT_START = {
    **schema.columns("item on room_ns grid_id", grid_id=pl.UInt64),
    **dict.fromkeys(("late", "ran_before", "in_last_wave"), pl.Boolean),
}
_WAITS_FOR_ROOM = schema.columns("item on room_ns is_found", is_found=pl.Boolean)


def waits_for_room(late: pl.DataFrame, grid_id: pl.Series) -> pl.DataFrame:
    """Return the kernels that started late while one of another stream ran that fills the device.

    `late` are the items of `device_sharing.late_kernels`, `grid_id` is equal for kernels of one name, grid and block.
    Kernels of one grid_id fill the device if more of them hold others up, which became ready while they ran, until
    their last 20%, than let others start before at once. Columns item, on (items), room_ns (from the start of the one
    to the end of the other), is_found (a replay finds this wait itself); one row per kernel that waited.
    """
    if not late["late"].to_numpy().any():
        return pl.DataFrame(schema=_WAITS_FOR_ROOM)
    is_kernel = flags(late["kind"] == "compute") & ~late["is_wait"].to_numpy()
    kernels = late.with_columns(grid_id.alias("grid_id")).filter(is_kernel)
    devices = kernels.sort("start_ns", "item").partition_by("device", maintain_order=True)
    starts = pl.concat([pl.DataFrame(schema=_CONCURRENT_START), *(_concurrent_starts(here) for here in devices)])
    counts = starts.group_by("grid_id").agg(
        held_up=pl.col("on").filter("late", "in_last_wave", "ran_before").n_unique(),
        shared=pl.col("on").filter(~pl.col("late") & ~pl.col("in_last_wave")).n_unique(),
    )
    fillers = counts.filter(pl.col("grid_id").is_not_null(), pl.col("held_up") > pl.col("shared"))
    waits = starts.filter("late").join(fillers, on="grid_id", how="semi", maintain_order="left")
    return waits.select("item", "on", "room_ns", is_found=pl.col("in_last_wave") & pl.col("ran_before"))


def _concurrent_starts(kernels: pl.DataFrame) -> pl.DataFrame:
    """Return the kernels of a device that start while one of another stream runs, the last of several to start.

    `kernels` are sorted by start. Columns _CONCURRENT_START: `ran_before`, whether that ran when the kernel became
    ready.
    """
    start, end, lane, item, ready = (
        kernels[name].to_numpy() for name in ("start_ns", "end_ns", "lane", "item", "ready_ns")
    )
    on = np.full(len(start), _NONE, np.int64)
    for back in range(1, _BACK + 1):
        before = np.maximum(np.arange(len(start)) - back, 0)
        runs = (lane[before] != lane) & (end[before] >= start)
        on = np.where((on < 0) & runs, before, on)
    rows = np.flatnonzero(on >= 0)
    on = on[rows]
    room_ns = end[on] - start[rows]
    in_last_wave = room_ns <= device_sharing.LAST_WAVE_RATIO * (end[on] - start[on])
    ran_before = start[on] <= ready[rows] + _SLACK_NS
    return pl.DataFrame(
        [item[rows], item[on], room_ns, kernels["grid_id"].gather(on), kernels["late"].gather(rows), ran_before,
         in_last_wave],
        schema=_CONCURRENT_START,
    )  # fmt: skip


def with_rooms(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the nodes of all ranks with `room_ns` for all kernels that fill their device, not only those that show it.

    Kernels of one grid_id leave room as long before their end on all ranks and in all steps, those that show it as long
    as they did. `shares_with` is the kernel (at) that ran while a kernel found room at once in the recording; -1: none.
    """
    if not (frame["room_ns"] >= 0).any():
        return frame.with_columns(shares_with=pl.lit(_NONE, pl.Int64))
    dur_ns = pl.col("end_ns") - pl.col("start_ns")
    shown = frame.filter(pl.col("room_ns") >= 0, pl.col("room_ns") <= device_sharing.LAST_WAVE_RATIO * dur_ns)
    usual = shown.group_by("grid_id").agg(usual_ns=pl.col("room_ns").median().cast(pl.Int64))
    joined = frame.join(usual, on="grid_id", how="left", maintain_order="left")
    room_ns = pl.max_horizontal("room_ns", "usual_ns")
    fills = pl.col("usual_ns").is_not_null() & (room_ns < dur_ns)
    rooms = joined.with_columns(room_ns=pl.when(fills).then(room_ns).otherwise(_NONE)).drop("usual_ns")
    shares_with = np.full(rooms.height, _NONE, np.int64)
    for here in rooms.filter(is_kernel()).partition_by(_DEVICE):
        at, on = _shared(here.sort("start_ns", "at"))
        shares_with[at] = on
    return rooms.with_columns(pl.Series("shares_with", shares_with))


def _shared(kernels: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return the kernels of a device that start at once before the last wave of one that fills it, and that one (at).

    `kernels` are sorted by start.
    """
    start, end, lane, at = (kernels[name].to_numpy() for name in ("start_ns", "end_ns", "lane", "at"))
    fillers = np.flatnonzero(kernels["room_ns"].to_numpy() >= 0)
    last_wave_ns = end - device_sharing.LAST_WAVE_RATIO * (end - start)
    found = np.full(len(start), _NONE, np.int64)
    for back in range(1, _BACK + 1):
        before = np.searchsorted(start[fillers], start, side="right") - back
        on = fillers[np.maximum(before, 0)] if len(fillers) else found
        runs = (before >= 0) & (lane[on] != lane) & (last_wave_ns[on] > start)
        found = np.where((found < 0) & runs, on, found)
    rows = np.flatnonzero((found >= 0) & ~kernels["is_late"].to_numpy())
    return at[rows], at[found[rows]]


def is_kernel() -> pl.Expr:
    """Return which nodes need multiprocessors and are no collectives."""
    return (pl.col("what") == WORK) & (pl.col("kind") == "compute")


@dataclass(frozen=True, eq=False)
class _Devices:
    """Which nodes fill which device: shape (n,) over all nodes; `place` is -1 for nodes that need no room."""

    place: Ints
    lane: Ints
    room_ns: Ints
    shares_with: Ints


@dataclass(frozen=True, eq=False)
class Waits:
    """All waits of a graph: waiting and awaited nodes (-1: the window's start), and the least time between them.

    That is the time from the end of the awaited to the start of the waiting node.
    """

    waiting: Ints
    awaited: Ints
    lag_ns: Ints


def starts(frame: pl.DataFrame, own_ns: Ints, waits: Waits, start_ns: Ints) -> Ints:
    """Return when each node starts where kernels wait for room; `start_ns` if all find room then.

    `frame` has the ranks' nodes, the first ones; `own_ns` the durations of all, `start_ns` their starts without waiting
    for room.
    """
    devices = _devices(frame, len(own_ns))
    return start_ns if devices is None or not _meet(devices, start_ns, own_ns) else _in_time(own_ns, waits, devices)


def _devices(frame: pl.DataFrame, count: int) -> _Devices | None:
    """Return the devices of a graph's kernels; None if no kernel fills one."""
    if "room_ns" not in frame.columns or not (frame["room_ns"] >= 0).any():
        return None
    nodes = frame.select(
        place=pl.when(is_kernel()).then(pl.struct(_DEVICE).rank("dense")).otherwise(_NONE).cast(pl.Int64),
        lane=pl.col("lane").fill_null(_NONE),
        room_ns="room_ns",
        shares_with="shares_with",
    )
    rest = np.full(count - frame.height, _NONE, np.int64)
    return _Devices(*(np.concatenate((nodes[name].to_numpy(), rest)) for name in nodes.columns))


def _meet(devices: _Devices, start_ns: Ints, own_ns: Ints) -> bool:
    """Return whether a kernel starts while one of another stream runs that leaves no room."""
    fillers = np.flatnonzero((devices.room_ns >= 0) & (own_ns > devices.room_ns))
    spans = np.stack((start_ns, start_ns + own_ns - devices.room_ns), axis=1)[fillers]
    on_lane = devices.place[fillers] * _LANES + devices.lane[fillers]
    count = np.zeros(len(fillers), np.int64)
    for place in np.unique(devices.place[fillers]):
        here, at = devices.place[fillers] == place, devices.place == place
        count[here] += _within(start_ns[at], spans[here])
        for lane in np.unique(on_lane[here]):
            own = on_lane == lane
            count[own] -= _within(start_ns[at & (devices.lane == lane - place * _LANES)], spans[own])
    return bool((count > 0).any())


_LANES = 1 << 20


def _within(times: Ints, spans: Ints) -> Ints:
    """Return how many of some times are in each span."""
    ordered = np.sort(times)
    first, last = np.searchsorted(ordered, spans.T, side="left")
    return np.asarray(last - first)


def _in_time(own_ns: Ints, waits: Waits, devices: _Devices) -> Ints:
    """Return when each node starts, found in the order of time: which kernel finds room depends on all before."""
    starts_at, left, following, lags, first = _order(len(own_ns), waits)
    place, lane, room, shares, took = (
        each.tolist() for each in (devices.place, devices.lane, devices.room_ns, devices.shares_with, own_ns)
    )
    running: dict[int, list[tuple[int, int, int]]] = {at: [] for at in set(place)}
    released = [node for node, waits_left in enumerate(left) if not waits_left]
    free = [node for node in released if place[node] < 0]
    events = [(starts_at[node], starts_at[node], node) for node in released if place[node] >= 0]
    heapq.heapify(events)
    while free or events:
        if free:  # what needs no room starts as soon as it may, whatever comes before
            node = free.pop()
            end = starts_at[node] + took[node]
        else:
            now, ready, node = heapq.heappop(events)
            full = running[place[node]] = [each for each in running[place[node]] if each[0] > now]
            others = [until for until, by, of in full if of != lane[node] and by != shares[node]]
            if others:
                heapq.heappush(events, (max(others), ready, node))  # the first that was ready finds room first
                continue
            starts_at[node], end = now, now + took[node]
            if room[node] >= 0 and end - room[node] > now:
                full.append((end - room[node], node, lane[node]))
        for edge in range(first[node], first[node + 1]):
            other, earliest = following[edge], end + lags[edge]
            if earliest > starts_at[other]:
                starts_at[other] = earliest
            left[other] -= 1
            if left[other]:
                continue
            if place[other] < 0:
                free.append(other)
            else:
                heapq.heappush(events, (starts_at[other], starts_at[other], other))
    return np.array(starts_at, np.int64)


def _order(count: int, waits: Waits) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Return when each node may start by its release and how many nodes it waits for; and what waits for each node.

    The latter are the waiting nodes by awaited one, their lags, and the first of each node among them.
    """
    known = waits.awaited >= 0
    released = np.full(count, _EVER)
    released[np.bincount(waits.waiting, minlength=count) == 0] = 0
    np.maximum.at(released, waits.waiting[~known], waits.lag_ns[~known])
    waiting, awaited = waits.waiting[known], waits.awaited[known]
    order = np.argsort(awaited, kind="stable")
    first = np.searchsorted(awaited[order], np.arange(count + 1))
    left = np.bincount(waiting, minlength=count)
    return (
        released.tolist(), left.tolist(), waiting[order].tolist(), waits.lag_ns[known][order].tolist(), first.tolist()
    )  # fmt: skip


_EVER = np.int64(-(1 << 60))
