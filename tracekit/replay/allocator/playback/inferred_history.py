"""Allocator history inferred from a trace's `[memory]` events, for runs without a memory snapshot."""

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Ints
from tracekit.model.trace import Trace
from tracekit.replay.allocator import BlockState, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.playback.recorded_history import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    RELEASE,
    REQUEST,
    History,
)
from tracekit.replay.allocator.settings import SEGMENT_STEP_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES


def from_trace(trace: Trace) -> History:
    """Return the history of the device with the most memory events in a trace.

    Sizes are block sizes, so they include rounding. All events are on one stream. The cache at the start is assumed to
    be the memory that contains the window's blocks, so that they fit does not validate the model. Segment allocations
    and frees are inferred from changes of the reserved total.
    """
    events = trace.allocations.filter(pl.col("device").is_not_null())
    devices = events["device"].mode().sort().to_list()
    device = devices[0] if devices else -1
    events = events.filter(pl.col("device") == device).with_row_index("index")
    reason = _unplayable(trace, events)
    if reason is not None:
        events = events.clear()
    played = _replay_events(events)
    changes = events.select(pl.col("reserved_bytes").diff().fill_null(0).alias("change"), "address", "index")
    memory = [
        SegmentEvent("segment_alloc" if change > 0 else "segment_free", address, abs(change), 0)
        for change, address, _ in changes.filter(pl.col("change") != 0).iter_rows()
    ]
    start = _start(events)
    initial_total_bytes = sum(block.bytes for segment in start for block in segment.blocks if block.state != "free")
    first = events.select(pl.col("allocated_bytes") - pl.col("delta_bytes"), "reserved_bytes").head(1).fill_null(0)
    allocated_bytes, reserved_bytes = first.row(0) if first.height else (0, 0)
    releases = played.filter(pl.col("code") == RELEASE).height
    columns = {name: played[name].to_numpy() for name in ("address", "bytes", "at_ns")}
    return History(
        device,
        Settings(),
        action=played["code"].to_numpy(),
        **columns,
        stream=np.zeros(len(played), np.int64),
        pool=np.zeros(len(played), np.int64),
        stack=np.full(len(played), -1, np.int64),
        releases=((EMPTY_CACHE, ()),) * releases,
        segment_allocations=tuple(event for event in memory if event.action == "segment_alloc"),
        segment_frees=tuple(event for event in memory if event.action == "segment_free"),
        peak_reserved_bytes=int(str(events["reserved_bytes"].max() or 0)),
        start=start,
        final=(),
        start_reserved_bytes=reserved_bytes,
        static_bytes=max(allocated_bytes - initial_total_bytes, 0),
        inferred=True,
        not_replayable=reason,
    )


def _unplayable(trace: Trace, events: pl.DataFrame) -> str | None:
    if not trace.on_device:
        return "the memory is the host's, which has no caching allocator to replay"
    if events.is_empty():
        return "the trace holds no memory events of a device: record with profile_memory=True, or take a snapshot"
    if events["address"].null_count():
        return "the trace's memory events have no addresses (an old torch): take a memory snapshot"
    return None


def _replay_events(events: pl.DataFrame) -> pl.DataFrame:
    """Return the events to replay: allocations, frees in their two parts, and releases before they become visible."""
    delta_bytes = events["delta_bytes"].to_numpy()
    is_free = delta_bytes < 0
    has_release = (events["reserved_bytes"].diff().fill_null(0) < 0).to_numpy()
    parts = 1 + has_release + is_free
    event = np.repeat(np.arange(len(events)), parts)
    first = np.cumsum(parts) - parts
    code = np.full(len(event), ALLOC)
    code[(first + has_release)[is_free]] = REQUEST
    code[(first + has_release + 1)[is_free]] = COMPLETE
    code[first[has_release]] = RELEASE
    at_event = {name: events[name].to_numpy()[event] for name in ("address", "at_ns")}
    return pl.DataFrame({**at_event, "code": code, "bytes": np.abs(delta_bytes)[event]})


def _start(events: pl.DataFrame) -> tuple[SegmentState, ...]:
    """Return segments that cover all blocks, with the blocks allocated at the start."""
    first = events.group_by("address").agg(pl.col("delta_bytes").first()).filter(pl.col("delta_bytes") < 0)
    sizes = {address: -delta for address, delta in first.iter_rows()}
    blocks = events.select("address", size=pl.col("delta_bytes").abs()).unique()
    # A small block lies in an aligned segment of 2 MiB.
    small = blocks.filter(pl.col("size") <= SMALL_BYTES)["address"].to_numpy() // SMALL_SEGMENT_BYTES
    pages = np.unique(small) * SMALL_SEGMENT_BYTES
    ranges = [(int(page), int(page) + SMALL_SEGMENT_BYTES, True) for page in pages]
    large = blocks.filter(pl.col("size") > SMALL_BYTES).sort("address")
    ranges += [(begin, end, False) for begin, end in _ranges(large["address"].to_numpy(), large["size"].to_numpy())]
    addresses = sorted(sizes)
    return tuple(
        SegmentState(
            begin,
            end - begin,
            0,
            small,
            0,
            expandable=False,
            blocks=tuple(_blocks(begin, end, addresses, sizes)),
        )
        for begin, end, small in sorted(ranges)
    )


def _ranges(address: Ints, size: Ints) -> Iterator[tuple[int, int]]:
    """Yield the contiguous ranges that blocks cover, rounded outwards to multiples of 2 MiB."""
    if not len(address):
        return
    begin = address // SEGMENT_STEP_BYTES * SEGMENT_STEP_BYTES
    end = -(-(address + size) // SEGMENT_STEP_BYTES) * SEGMENT_STEP_BYTES
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], begin[1:] >= reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    yield from zip(begin[first].tolist(), reach[last].tolist(), strict=True)


def _blocks(begin: int, end: int, addresses: list[int], sizes: dict[int, int]) -> Iterator[BlockState]:
    first, past = np.searchsorted(addresses, [begin, end])
    cursor = begin
    for address in addresses[first:past]:
        if address > cursor:
            yield BlockState(cursor, address - cursor, "free")
        yield BlockState(address, sizes[address], "allocated", sizes[address])
        cursor = address + sizes[address]
    if cursor < end:
        yield BlockState(cursor, end - cursor, "free")
