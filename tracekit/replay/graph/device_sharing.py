"""Kernels that were ready, but started only in the last wave of blocks of a kernel on another stream."""

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.columns import flags, ids, rows_by_key
from tracekit.model.sweep_line import Flags, Ints
from tracekit.replay.graph.nodes import EDGE_COLUMNS, edge_table

RESOURCES = "resources"
_LATE_NS = 50_000
_LAUNCH_NS = 10_000
"""From the start of a launching call to the start of its kernel on an idle device."""
LAST_WAVE_RATIO = 0.2
"""The blocks of a kernel that fills the device end in waves: in the last one, other kernels find room."""

_NONE = np.empty(0, np.int64)


def resource_waits(
    items: pl.DataFrame,
    first_item: int,
    *,
    launch: Ints,
    launched_ns: Ints,
    host_awaited: Ints = _NONE,
    resolved: Ints = _NONE,
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
