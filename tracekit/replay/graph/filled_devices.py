"""Kernels that fill a device: while one runs, kernels of other streams find no room until its last wave of blocks."""

import heapq
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.columns import flags, ids, rows_by_key
from tracekit.model.sweep_line import Flags, Ints, distinct
from tracekit.replay.graph import contraction
from tracekit.replay.graph.contraction import Contracted, Network, Rows
from tracekit.replay.graph.nodes import EDGE_COLUMNS, WORK, NodeTable, edge_table

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
RESOURCES = "resources"
_LATE_NS = 50_000
_LAUNCH_NS = 10_000
"""From the start of a launching call to the start of its kernel on an idle device."""
LAST_WAVE_RATIO = 0.2
"""The blocks of a kernel that fills the device end in waves: in the last one, other kernels find room."""

_NO_NODES: Ints = np.empty(0, np.int64)


def waits_for_room(late: pl.DataFrame, grid_id: pl.Series) -> pl.DataFrame:
    """Return the kernels that started late while one of another stream ran that fills the device.

    `late` are the items of `late_kernels`, `grid_id` is equal for kernels of one name, grid and block.
    Kernels of one grid_id fill the device if more of them hold others up, which became ready while they ran, until
    their last 20%, than let others start before at once. Columns item, on (items), room_ns (from the start of the one
    to the end of the other), is_found (a replay finds this wait itself); one row per kernel that waited.
    """
    if not late["late"].to_numpy().any():
        return schema.empty(_WAITS_FOR_ROOM)
    is_kernel = flags(late["kind"] == "compute") & ~late["is_wait"].to_numpy()
    kernels = late.with_columns(grid_id.alias("grid_id")).filter(is_kernel)
    devices = kernels.sort("start_ns", "item").partition_by("device", maintain_order=True)
    starts = pl.concat([schema.empty(_CONCURRENT_START), *(_concurrent_starts(device) for device in devices)])
    counts = starts.group_by("grid_id").agg(
        held_up=pl.col("on").filter("late", "in_last_wave", "ran_before").n_unique(),
        shared=pl.col("on").filter(~pl.col("late") & ~pl.col("in_last_wave")).n_unique(),
    )
    fillers = counts.filter(pl.col("grid_id").is_not_null(), pl.col("held_up") > pl.col("shared"))
    waits = starts.filter("late").join(fillers, on="grid_id", how="semi", maintain_order="left")
    return waits.select("item", "on", "room_ns", is_found=pl.col("in_last_wave") & pl.col("ran_before"))


def with_rooms(frame: NodeTable) -> NodeTable:
    """Return the nodes of all ranks with `room_ns` for all kernels that fill their device, not only those that show it.

    Kernels of one grid_id leave room as long before their end on all ranks and in all steps, those that show it as long
    as they did. `shares_with` is the kernel (at) that ran while a kernel found room at once in the recording; -1: none.
    """
    if not (frame["room_ns"] >= 0).any():
        return frame.with_columns(shares_with=pl.lit(_NONE, pl.Int64))
    grids = frame.select("grid_id", "room_ns", dur_ns=pl.col("end_ns") - pl.col("start_ns"))
    in_last_wave = pl.col("room_ns") <= LAST_WAVE_RATIO * pl.col("dur_ns")
    recorded_rooms = grids.filter(pl.col("room_ns") >= 0, in_last_wave)
    usual = recorded_rooms.group_by("grid_id").agg(usual_ns=pl.col("room_ns").median().cast(pl.Int64))
    joined = grids.join(usual, on="grid_id", how="left", maintain_order="left")
    room_ns = pl.max_horizontal("room_ns", "usual_ns")
    fills = pl.col("usual_ns").is_not_null() & (room_ns < pl.col("dur_ns"))
    rooms = frame.with_columns(joined.select(room_ns=pl.when(fills).then(room_ns).otherwise(_NONE)).to_series())
    shares_with = np.full(rooms.height, _NONE, np.int64)
    kernels = rooms.select(
        "at", "rank", "device", "lane", "start_ns", "end_ns", "room_ns", "is_late", kernel=is_of_kernel()
    )
    for device_kernels in kernels.filter("kernel").partition_by(_DEVICE):
        node, on = _shared_starts(device_kernels.sort("start_ns", "at"))
        shares_with[node] = on
    return rooms.with_columns(pl.Series("shares_with", shares_with))


def is_of_kernel() -> pl.Expr:
    """Expression for nodes that need multiprocessors and are not collectives."""
    return (pl.col("what") == WORK) & (pl.col("kind") == "compute")


@dataclass(frozen=True, eq=False)
class Devices:
    """Which nodes fill which device: shape (n,) over all nodes; `place` is -1 for nodes that need no room.

    `lane` is a number that no lane of another device has. Of kernels that are ready at once, the one with the lowest
    `recorded_order` finds room first: streams have numbers by chance.

    `contended` are the kernels that became ready while another one filled their device, in any replay so far: the next
    one begins with these, which changes nothing but the time that it takes.
    """

    place: Ints
    lane: Rows
    room_ns: Ints
    shares_with: Ints
    recorded_order: Ints
    contended: Flags


def devices(frame: NodeTable, count: int) -> Devices | None:
    """Return the devices of the `count` nodes of a graph, the first ones of which are `frame`.

    None if no kernel fills one.
    """
    if "room_ns" not in frame.columns or not (frame["room_ns"] >= 0).any():
        return None
    nodes = frame.select(
        place=pl.when(is_of_kernel()).then(pl.struct(_DEVICE).rank("dense")).otherwise(_NONE).cast(pl.Int64),
        lane=pl.col("lane").fill_null(_NONE),
        room_ns="room_ns",
        shares_with="shares_with",
    )
    rest = np.full(count - frame.height, _NONE, np.int64)
    place, lane, room_ns, shares_with = (np.concatenate((nodes[name].to_numpy(), rest)) for name in nodes.columns)
    lane = np.unique(place * _LANES + lane, return_inverse=True)[1].astype(np.int32)
    recorded_order = np.arange(count)
    started_first = np.lexsort((frame["launch"].to_numpy(), frame["start_ns"].to_numpy()))
    recorded_order[started_first] = np.arange(frame.height)
    return Devices(place, lane, room_ns, shares_with, recorded_order, contended=np.zeros(count, np.bool_))


def starts(network: Network, devices: Devices | None) -> Ints:
    """Start of each node where kernels wait for room on these devices.

    Only kernels that become ready while another one fills their device have to be visited in the order of time: those
    that the result so far shows, until it shows no more.
    """
    if devices is None:
        return contraction.starts(network)
    fillers = (devices.room_ns >= 0) & (network.own_ns > devices.room_ns)
    in_time = (devices.contended | fillers) & devices.contended.any()
    start_ns = _in_time(network, devices, in_time) if in_time.any() else contraction.starts(network)
    while (more := _contended_kernels(devices, fillers, start_ns, network.own_ns) & ~in_time).any():
        devices.contended[more] = True
        in_time |= more | fillers
        start_ns = _in_time(network, devices, in_time)
    return start_ns


_LANES = 1 << 20


def resource_waits(
    items: pl.DataFrame,
    first_item: int,
    *,
    launch: Ints,
    launched_ns: Ints,
    host_awaited: Ints = _NO_NODES,
    resolved: Ints = _NO_NODES,
) -> pl.DataFrame:
    """Return the waits of kernels for multiprocessors that a kernel of another stream occupied.

    Those of the items in `resolved` are left out: a replay finds them itself.

    `items` are those of `late_kernels`, `first_item` is the node of item 0, `launch` and `launched_ns` are the node of
    each item's launching call and its end. A kernel waited if it started 50 µs or more after its launch and the work
    before it on its stream, in the last 20% of an earlier-launched kernel. If that began after the other was ready, it
    waits for it again in a replay. If it ran already, they met by chance: in a replay, another kernel may run then, so
    that the wait is a delay of the same length after launch or stream. So is a delay of 50 µs or more that nothing
    explains, of a kernel that the host waited for (`host_awaited`, nodes): without it, that call would return earlier
    than in the recording. Edges as `trace_graph.edges`, of kind resources; the lag to the end of the other kernel is
    negative.
    """
    parts = [schema.empty(EDGE_COLUMNS)]
    item, start, end, ready = (items[name].to_numpy() for name in ("item", "start_ns", "end_ns", "ready_ns"))
    is_open = items["late"].to_numpy() & ~np.isin(item, resolved)
    if not is_open.any():
        return pl.concat(parts)
    is_awaited = is_open & np.isin(item + first_item, host_awaited)
    kernels = np.flatnonzero(flags(items["kind"] == "compute"))
    for device_rows in rows_by_key(items["device"].to_numpy()[kernels]).values():
        device_kernels = kernels[device_rows]
        rows, on = _in_last_wave(items, device_kernels, is_open)
        by_chance = start[on] < ready[rows]
        lag = start[rows] - end[on]
        awaited = item[on] + first_item
        awaited[by_chance], lag[by_chance] = _delays(items, rows[by_chance], first_item, launch, launched_ns)
        parts.append(edge_table(item[rows] + first_item, awaited, RESOURCES, inferred=True, lag_ns=lag))
        is_awaited[rows] = False
        delayed = device_kernels[is_awaited[device_kernels]]
        awaited, lag = _delays(items, delayed, first_item, launch, launched_ns)
        parts.append(edge_table(item[delayed] + first_item, awaited, RESOURCES, inferred=True, lag_ns=lag))
    return pl.concat(parts)


def late_kernels(items: pl.DataFrame, waits: pl.DataFrame, first_item: int, launched_ns: Ints) -> pl.DataFrame:
    """Return the items with `ready_ns`, when each could have started, and whether it is a kernel that started `late`.

    `items` are those of `dependencies.lane_items`, `waits` the waits between them, other arguments as of
    `resource_waits`. Late is 50 µs or more after the launch, the work before it and its known waits.
    """
    is_kernel = flags(items["kind"] == "compute") & (ids(items["launch_id"]) >= 0) & ~items["is_wait"].to_numpy()
    ready_ns = _ready_ns(items, waits, first_item, launched_ns)
    late = is_kernel & (items["start_ns"].to_numpy() - ready_ns > _LATE_NS)
    return items.with_columns(ready_ns=ready_ns, late=late)


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
    in_last_wave = room_ns <= LAST_WAVE_RATIO * (end[on] - start[on])
    ran_before = start[on] <= ready[rows] + _SLACK_NS
    return pl.DataFrame(
        [item[rows], item[on], room_ns, kernels["grid_id"].gather(on), kernels["late"].gather(rows), ran_before,
         in_last_wave],
        schema=_CONCURRENT_START,
    )  # fmt: skip


def _shared_starts(kernels: pl.DataFrame) -> tuple[Ints, Ints]:
    """Return the kernels of a device that start at once before the last wave of one that fills it, and that one (at).

    `kernels` are sorted by start.
    """
    start, end, lane, node = (kernels[name].to_numpy() for name in ("start_ns", "end_ns", "lane", "at"))
    fillers = np.flatnonzero(kernels["room_ns"].to_numpy() >= 0)
    last_wave_ns = end - LAST_WAVE_RATIO * (end - start)
    filler = np.full(len(start), _NONE, np.int64)
    for back in range(1, _BACK + 1):
        before = np.searchsorted(start[fillers], start, side="right") - back
        on = fillers[np.maximum(before, 0)] if len(fillers) else filler
        runs = (before >= 0) & (lane[on] != lane) & (last_wave_ns[on] > start)
        filler = np.where((filler < 0) & runs, on, filler)
    rows = np.flatnonzero((filler >= 0) & ~kernels["is_late"].to_numpy())
    return node[rows], node[filler[rows]]


def _contended_kernels(devices: Devices, fillers: Flags, start_ns: Ints, own_ns: Ints) -> Flags:
    """Mark kernels that start while one of another stream runs that leaves no room."""
    rows, kernels = np.flatnonzero(fillers), np.flatnonzero(devices.place >= 0)
    until_ns = start_ns[rows] + own_ns[rows] - devices.room_ns[rows]
    times = distinct(np.concatenate((start_ns[rows], until_ns)))
    count = np.zeros(len(kernels), np.int64)
    start_at, until_at = np.searchsorted(times, start_ns[rows]) + 1, np.searchsorted(times, until_ns) + 1
    kernel_at = np.searchsorted(times, start_ns[kernels], side="right")
    for place, sign in ((devices.place, 1), (devices.lane, -1)):
        base, of_kernel = (place[which].astype(np.int64) * (len(times) + 1) for which in (rows, kernels))
        begin, end, now = base + start_at, base + until_at, of_kernel + kernel_at
        running = np.searchsorted(np.sort(begin), now, side="right") - np.searchsorted(np.sort(end), now, side="right")
        count += sign * running
    is_contended = np.zeros(len(fillers), np.bool_)
    is_contended[kernels[count > 0]] = True
    return is_contended


def _in_time(network: Network, devices: Devices, in_time: Flags) -> Ints:
    """Start of each node, found in the order of time: which kernel finds room depends on all before.

    Kernels that are not `in_time` find room at once.
    """
    net = contraction.contract(network, in_time)
    starts_at, waits_left, following, lags, first = _order(net)
    place = np.where(in_time, devices.place, -1)[net.node].tolist()
    lane, room, took = devices.lane[net.node].tolist(), devices.room_ns[net.node].tolist(), net.own_ns.tolist()
    shares = net.rows(devices.shares_with[net.node]).tolist()
    recorded = devices.recorded_order[net.node].tolist()
    running: dict[int, list[tuple[int, int, int]]] = {device: [] for device in set(place)}
    released = [node for node, waits in enumerate(waits_left) if not waits]
    free = [node for node in released if place[node] < 0]
    events = [(starts_at[node], starts_at[node], recorded[node], node) for node in released if place[node] >= 0]
    heapq.heapify(events)
    while free or events:
        if free:  # what needs no room starts as soon as it may, whatever comes before
            node = free.pop()
            end = starts_at[node] + took[node]
        else:
            now, ready, _, node = heapq.heappop(events)
            full = running[place[node]] = [run for run in running[place[node]] if run[0] > now]
            ends = [until for until, by, on_lane in full if on_lane != lane[node] and by != shares[node]]
            if ends:
                # The first that was ready finds room first.
                heapq.heappush(events, (max(ends), ready, recorded[node], node))
                continue
            starts_at[node], end = now, now + took[node]
            if room[node] >= 0 and end - room[node] > now:
                full.append((end - room[node], node, lane[node]))
        for edge in range(first[node], first[node + 1]):
            other, earliest = following[edge], end + lags[edge]
            if earliest > starts_at[other]:
                starts_at[other] = earliest
            waits_left[other] -= 1
            if waits_left[other]:
                continue
            if place[other] < 0:
                free.append(other)
            else:
                heapq.heappush(events, (starts_at[other], starts_at[other], recorded[other], other))
    return net.all_starts(np.array(starts_at, np.int64))


def _order(net: Contracted) -> tuple[list[int], list[int], list[int], list[int], list[int]]:
    """Earliest start of each row by its release, the count of rows that it waits for, and what waits for each row.

    The latter are the waiting rows by awaited one, their lags, and the first of each row among them.
    """
    count, edge = len(net.node), np.flatnonzero(net.awaited >= 0)
    waiting, awaited = net.waiting[edge], net.awaited[edge]
    order = np.argsort(awaited, kind="stable")
    first = np.searchsorted(awaited[order], np.arange(count + 1))
    waits_left = np.bincount(waiting, minlength=count)
    return (
        net.earliest().tolist(), waits_left.tolist(), waiting[order].tolist(), net.lag_ns[edge][order].tolist(),
        first.tolist(),
    )  # fmt: skip


def _delays(items: pl.DataFrame, kernels: Ints, first_item: int, launch: Ints, launched_ns: Ints) -> tuple[Ints, Ints]:
    """Node that each kernel (a row) could have started after, its launching call or the work before it; the delay."""
    previous, called_ns = items["previous"].to_numpy()[kernels], launched_ns[kernels]
    before_ns = np.where(previous < 0, 0, items["end_ns"].to_numpy()[np.maximum(previous, 0)])
    awaited = np.where(before_ns > called_ns, previous + first_item, launch[kernels])
    return awaited, items["start_ns"].to_numpy()[kernels] - np.maximum(before_ns, called_ns)


def _ready_ns(items: pl.DataFrame, waits: pl.DataFrame, first_item: int, launched_ns: Ints) -> Ints:
    """Earliest start of each item by its launch, its stream and its known waits.

    A launch can take long, such as at a kernel's first use; its kernel then starts when the call ends.
    """
    start, end, previous = (items[name].to_numpy() for name in ("start_ns", "end_ns", "previous"))
    before = np.where(previous < 0, 0, end[np.maximum(previous, 0)])
    ready_ns = np.maximum.reduce([before, items["launched_ns"].to_numpy() + _LAUNCH_NS, launched_ns])
    on = waits["awaited"].to_numpy() - first_item
    awaited_ns = np.where(flags(waits["kind"] == "start_order"), start[on], end[on])
    np.maximum.at(ready_ns, waits["waiting"].to_numpy() - first_item, awaited_ns + waits["lag_ns"].to_numpy())
    return np.asarray(ready_ns)


def _in_last_wave(items: pl.DataFrame, kernels: Ints, late: Flags) -> tuple[Ints, Ints]:
    """Return the late ones of a device's kernels, and that of another lane in whose last wave each began (rows)."""
    start, end, lane, launched = (items[name].to_numpy() for name in ("start_ns", "end_ns", "lane", "launched_ns"))
    order = kernels[np.lexsort((launched[kernels], start[kernels], end[kernels]))]
    rows = kernels[late[kernels]]
    filler = np.full(len(rows), -1, np.int64)
    for after in range(4):
        place = np.searchsorted(end[order], start[rows], side="right") + after
        on = order[np.minimum(place, len(order) - 1)]
        left_ns = end[on] - start[rows]
        in_wave = (place < len(order)) & (left_ns > 0) & (left_ns <= LAST_WAVE_RATIO * (end[on] - start[on]))
        in_wave &= (lane[on] != lane[rows]) & (launched[on] <= launched[rows])
        filler = np.where((filler < 0) & in_wave, on, filler)
    has = filler >= 0
    return rows[has], filler[has]
