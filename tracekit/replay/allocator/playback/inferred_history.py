"""A history from a trace's `[memory]` events, where no snapshot tells the segments: what was cached is inferred."""

from collections.abc import Iterator

import numpy as np
import polars as pl

from tracekit.model.trace import Trace
from tracekit.replay.allocator import BlockState, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.playback.recorded_history import (
    ALLOC,
    COMPLETE,
    EMPTY_CACHE,
    RELEASE,
    REQUEST,
    History,
    Ints,
)
from tracekit.replay.allocator.settings import SEGMENT_STEP_BYTES, SMALL_BYTES, SMALL_SEGMENT_BYTES


def of_trace(trace: Trace) -> History:
    """Return the history of the device that a trace has most memory events of.

    Sizes are those of blocks, so rounding is in them already. All is on one stream. What was cached at the start is the
    memory in which the window's blocks lie; that they fit there is no proof of the model. Memory taken and given back
    is what changed in the reserved total.
    """
    events = trace.allocations.filter(pl.col("device").is_not_null())
    most = events["device"].mode().sort().to_list()
    device = most[0] if most else -1
    events = events.filter(pl.col("device") == device).with_row_index("index")
    why = _unplayable(trace, events)
    if why is not None:
        events = events.clear()
    played = _played(events)
    changes = events.select(pl.col("reserved_bytes").diff().fill_null(0).alias("change"), "address", "index")
    memory = [
        SegmentEvent("segment_alloc" if change > 0 else "segment_free", address, abs(change), 0)
        for change, address, _ in changes.filter(pl.col("change") != 0).iter_rows()
    ]
    start = _start(events)
    held_bytes = sum(block.bytes for segment in start for block in segment.blocks if block.state == "allocated")
    first = events.select(pl.col("allocated_bytes") - pl.col("delta_bytes"), "reserved_bytes").head(1).rows()
    begun, reserved = first[0] if first else (None, None)
    releases = played.filter(pl.col("code") == RELEASE).height
    whole = {name: played[name].to_numpy() for name in ("address", "bytes", "at_ns")}
    return History(
        device,
        Settings(),
        action=played["code"].to_numpy(),
        **whole,
        stream=np.zeros(len(played), np.int64),
        pool=np.zeros(len(played), np.int64),
        stack=np.full(len(played), -1, np.int64),
        releases=((EMPTY_CACHE, ()),) * releases,
        taken=tuple(event for event in memory if event.action == "segment_alloc"),
        given=tuple(event for event in memory if event.action == "segment_free"),
        peak_reserved_bytes=int(str(events["reserved_bytes"].max() or 0)),
        start=start,
        final=(),
        start_reserved_bytes=reserved or 0,
        unseen_bytes=max((begun or 0) - held_bytes, 0),
        inferred=True,
        unplayable=why,
    )


def _unplayable(trace: Trace, events: pl.DataFrame) -> str | None:
    if not trace.on_device:
        return "the memory is the host's, which has no caching allocator to replay"
    if events.is_empty():
        return "the trace holds no memory events of a device: record with profile_memory=True, or take a snapshot"
    if events["address"].null_count():
        return "the trace's memory events have no addresses (an old torch): take a memory snapshot"
    return None


def _played(events: pl.DataFrame) -> pl.DataFrame:
    """Return what is played: allocations, frees in their two parts, and a return of memory before its first sign."""
    delta_bytes = events["delta_bytes"].to_numpy()
    freed = delta_bytes < 0
    given = (events["reserved_bytes"].diff().fill_null(0) < 0).to_numpy()
    parts = 1 + given + freed
    event = np.repeat(np.arange(len(events)), parts)
    first = np.cumsum(parts) - parts
    code = np.full(len(event), ALLOC)
    code[(first + given)[freed]] = REQUEST
    code[(first + given + 1)[freed]] = COMPLETE
    code[first[given]] = RELEASE
    told = {name: events[name].to_numpy()[event] for name in ("address", "at_ns")}
    return pl.DataFrame({**told, "code": code, "bytes": np.abs(delta_bytes)[event]})


def _start(events: pl.DataFrame) -> tuple[SegmentState, ...]:
    """Return the memory in which all blocks lie, as segments, with the blocks held at the start."""
    first = events.group_by("address").agg(pl.col("delta_bytes").first()).filter(pl.col("delta_bytes") < 0)
    held = {address: -delta for address, delta in first.iter_rows()}
    blocks = events.select("address", size=pl.col("delta_bytes").abs()).unique()
    # A small block lies in a segment of 2 MiB at a multiple of that.
    small = blocks.filter(pl.col("size") <= SMALL_BYTES)["address"].to_numpy() // SMALL_SEGMENT_BYTES
    pages = np.unique(small) * SMALL_SEGMENT_BYTES
    ranges = [(int(page), int(page) + SMALL_SEGMENT_BYTES, True) for page in pages]
    large = blocks.filter(pl.col("size") > SMALL_BYTES).sort("address")
    ranges += [(begin, end, False) for begin, end in _joined(large["address"].to_numpy(), large["size"].to_numpy())]
    places = sorted(held)
    return tuple(
        SegmentState(begin, end - begin, 0, small, 0, expandable=False, blocks=tuple(_blocks(begin, end, places, held)))
        for begin, end, small in sorted(ranges)
    )


def _joined(address: Ints, size: Ints) -> Iterator[tuple[int, int]]:
    """Yield the ranges that blocks, by address, cover without a gap, out to multiples of 2 MiB."""
    if not len(address):
        return
    step = SEGMENT_STEP_BYTES
    begin, end = address // step * step, -(-(address + size) // step) * step
    reach = np.maximum.accumulate(end)
    first = np.flatnonzero(np.concatenate(([True], begin[1:] >= reach[:-1])))
    last = np.concatenate((first[1:] - 1, [len(begin) - 1]))
    yield from zip(begin[first].tolist(), reach[last].tolist(), strict=True)


def _blocks(begin: int, end: int, places: list[int], held: dict[int, int]) -> Iterator[BlockState]:
    first, past = np.searchsorted(places, [begin, end])
    at = begin
    for address in places[first:past]:
        if address > at:
            yield BlockState(at, address - at, "free")
        yield BlockState(address, held[address], "allocated", held[address])
        at = address + held[address]
    if at < end:
        yield BlockState(at, end - at, "free")
