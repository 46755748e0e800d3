"""The recorded allocator history of one device, prepared for replay: requests, frees and releases."""

from bisect import insort
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import polars as pl

from tracekit.model.sweep_line import Ints
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator import BlockState, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.playback import initial_state

ALLOC, REQUEST, COMPLETE, RELEASE = range(4)
CODES = {"alloc": ALLOC, "free_requested": REQUEST, "free_completed": COMPLETE}
SEGMENT_ALLOCATIONS = ("segment_alloc", "segment_map")
SEGMENT_FREES = ("segment_free", "segment_unmap")
EMPTY_CACHE, RETRY, SOME = "empty_cache", "retry", "some"
COMMON = "0:0"
_COLUMNS = ("action", "address", "bytes", "stream", "pool", "at_ns", "stack")
_STATES = {"active_allocated": "allocated", "inactive": "free"}


@dataclass(frozen=True, eq=False)
class History:
    """The history of one device. Arrays have one item per request, free or release of memory, in order."""

    device: int
    settings: Settings
    action: Ints
    address: Ints
    bytes: Ints
    stream: Ints
    pool: Ints
    at_ns: Ints
    stack: Ints
    """Call stack number in the snapshot; -1 if there is none."""
    releases: tuple[tuple[str, tuple[int, ...]], ...]
    """Per RELEASE the reason (EMPTY_CACHE, RETRY, or SOME: only the listed segments) and the released addresses."""
    segment_allocations: tuple[SegmentEvent, ...]
    segment_frees: tuple[SegmentEvent, ...]
    peak_reserved_bytes: int
    start: tuple[SegmentState, ...]
    """Segments before the first event; empty if the history begins with the first allocation."""
    final: tuple[SegmentState, ...]
    start_reserved_bytes: int = 0
    """Reserved bytes before the first event, if more than the segments of `start`."""
    static_bytes: int = 0
    """Bytes allocated throughout without any event; 0 with a snapshot."""
    inferred: bool = False
    """Whether the initial state was inferred from addresses that occur later."""
    not_replayable: str | None = None
    """Why the history cannot be replayed; None if it can."""

    @property
    def retries(self) -> int:
        """Return the number of allocation retries in the history (cudaMalloc failed, cache flushed)."""
        return sum(reason == RETRY for reason, _ in self.releases)

    def until(self, count: int) -> "History":
        """Return the history of the first `count` items; its final state is not known, so `final` is empty."""
        columns: dict[str, Any] = {name: getattr(self, name)[:count] for name in _COLUMNS}
        releases = self.releases[: int((columns["action"] == RELEASE).sum())]
        return replace(self, **columns, releases=releases, final=())

    def with_request(self, requested_bytes: int, stream: int) -> "History":
        """Return the history followed by one more request from the common pool."""
        address = int(self.address.max(initial=0)) + (1 << 40)
        at_ns = int(self.at_ns[-1]) if len(self.at_ns) else 0
        item = {
            "action": ALLOC, "address": address, "bytes": requested_bytes, "stream": stream, "pool": 0, "at_ns": at_ns,
            "stack": -1,
        }  # fmt: skip
        columns: dict[str, Any] = {name: np.append(getattr(self, name), item[name]) for name in _COLUMNS}
        return replace(self, **columns)

    def without_events(self) -> "History":
        """Return a history without events, in the final state throughout."""
        columns = {name: getattr(self, name)[:0] for name in _COLUMNS}
        reserved_bytes = sum(segment.bytes for segment in self.final)
        empty = replace(self, **columns, releases=(), segment_allocations=(), segment_frees=(), start=self.final)
        return replace(empty, peak_reserved_bytes=reserved_bytes)


def from_snapshot(snapshot: MemorySnapshot, device: int) -> History:
    """Return the history of one device of a snapshot."""
    settings = Settings.of_snapshot(snapshot.settings)
    events = snapshot.events.filter(pl.col("device") == device).with_row_index("index")
    segments = snapshot.segments.filter(pl.col("device") == device).sort("address")
    blocks = snapshot.blocks.filter(pl.col("device") == device).sort("address")
    pools = {COMMON: 0} | {name: i for i, name in enumerate(segments["pool"].unique().sort(), 1) if name != COMMON}
    final = _final(segments, blocks, pools)
    initial = initial_state.initial_segments(events, final, settings)
    memory = events.filter(pl.col("action").is_in([*SEGMENT_ALLOCATIONS, *SEGMENT_FREES]))
    segment_events = [SegmentEvent(*row) for row in memory.select("action", "address", "bytes", "stream").iter_rows()]
    played, releases = _replay_events(snapshot, events)
    columns: dict[str, Any] = {
        name: played[name].fill_null(0).to_numpy() for name in ("address", "bytes", "stream", "at_ns")
    }
    reserved = sum(segment.bytes for segment in initial)
    change = pl.when(pl.col("action").is_in(SEGMENT_ALLOCATIONS)).then("bytes").otherwise(-pl.col("bytes"))
    grown = memory.select(change.cum_sum().max()).item() or 0
    return History(
        device,
        settings,
        action=played["code"].to_numpy(),
        **columns,
        pool=_pools(events, played, final),
        stack=played["stack"].fill_null(-1).to_numpy(),
        releases=releases,
        segment_allocations=tuple(event for event in segment_events if event.action in SEGMENT_ALLOCATIONS),
        segment_frees=tuple(event for event in segment_events if event.action in SEGMENT_FREES),
        peak_reserved_bytes=reserved + max(grown, 0),
        start=initial,
        final=final,
        not_replayable=_unplayable(played, initial),
    )


def is_replayed() -> pl.Expr:
    """Return whether an event of one device, in order, is an item of its history: of a release only the first."""
    is_release = pl.col("action").is_in(SEGMENT_FREES)
    return pl.col("action").is_in(list(CODES)) | (is_release & ~is_release.shift(1, fill_value=False))


def _unplayable(played: pl.DataFrame, initial: tuple[SegmentState, ...]) -> str | None:
    if played.is_empty():
        return "the snapshot holds no history of this device"
    is_disjoint = all(segment.address + segment.bytes <= following.address for segment, following in pairwise(initial))
    is_complete = all(sum(block.bytes for block in segment.blocks) == segment.bytes for segment in initial)
    return None if is_disjoint and is_complete else "the snapshot's segments and history contradict each other"


def _final(segments: pl.DataFrame, blocks: pl.DataFrame, pools: dict[str, int]) -> tuple[SegmentState, ...]:
    described = blocks.select("segment_address", "address", "bytes", "state", pl.col("requested_bytes").fill_null(0))
    blocks_of: dict[int, list[BlockState]] = {}
    for segment, address, size, raw, requested in described.iter_rows():
        state = _STATES.get(raw, "pending")
        blocks_of.setdefault(segment, []).append(BlockState(address, size, state, 0 if state == "free" else requested))
    rows = segments.select("address", "total_bytes", "stream", pl.col("kind") == "small", "pool", "expandable")
    return tuple(
        SegmentState(address, size, stream, small, pools[pool], grows, tuple(blocks_of.get(address, ())))
        for address, size, stream, small, pool, grows in rows.iter_rows()
    )


def _replay_events(
    snapshot: MemorySnapshot, events: pl.DataFrame
) -> tuple[pl.DataFrame, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the events to replay, with each release as one event, and the reason and addresses of each release."""
    is_release = pl.col("action").is_in(SEGMENT_FREES)
    first = is_release & ~is_release.shift(1, fill_value=False)
    runs = events.with_columns(first.cum_sum().alias("run"), pl.col("action").shift(-1).alias("then"))
    grouped = runs.filter(is_release).group_by("run", maintain_order=True)
    rows = grouped.agg("address", pl.col("stack").first(), pl.col("then").last(), pl.col("index").first())
    reasons = _causes(snapshot, rows)
    code = pl.when(first).then(RELEASE).otherwise(pl.col("action").replace_strict(CODES, default=None))
    played = events.with_columns(code.cast(pl.Int64).alias("code")).drop_nulls("code")
    return played, tuple(zip(reasons, map(tuple, rows["address"].to_list()), strict=True))


def _causes(snapshot: MemorySnapshot, runs: pl.DataFrame) -> list[str]:
    """Return the reason of each release: from the functions on its stack, otherwise from the next event."""
    stacks = snapshot.stacks.filter(pl.col("stack").is_in(runs["stack"].drop_nulls().unique().implode()))
    names = stacks.join(snapshot.frames, on="frame").group_by("stack").agg(pl.col("name").str.join(" ").alias("names"))
    rows = runs.join(names, on="stack", how="left", maintain_order="left")
    by_stack = pl.col("names")
    reasons = (
        pl.when(by_stack.str.contains("(?i)empty_?cache")).then(pl.lit(EMPTY_CACHE))
        .when(by_stack.str.contains("garbage_collect_cached|release_available_cached")).then(pl.lit(SOME))
        .when(by_stack.str.contains(r"\bmalloc\b|::alloc")).then(pl.lit(RETRY))
        .when(pl.col("then").is_in([*SEGMENT_ALLOCATIONS, "oom"])).then(pl.lit(RETRY))
        .otherwise(pl.lit(EMPTY_CACHE))
    )  # fmt: skip
    return rows.select(reasons.alias("why"))["why"].to_list()


def _pools(events: pl.DataFrame, played: pl.DataFrame, final: tuple[SegmentState, ...]) -> Ints:
    """Return the private pool of each event: that of the segment that contains its address at that time.

    Segments that no longer exist at the end are assigned to the common pool.
    """
    event_pools = np.zeros(len(played), np.int64)
    if not any(segment.pool for segment in final):
        return event_pools
    moves = events.filter(pl.col("action").is_in(["segment_alloc", "segment_free"]))
    alive = dict(moves.filter(pl.col("action") == "segment_alloc").select("address", "index").iter_rows())
    bounds = {segment.address: (segment.address + segment.bytes, segment.pool) for segment in final}
    segments = {a: bound for a, bound in bounds.items() if a not in alive}
    starts = sorted(segments)
    index, address = played["index"].to_numpy(), played["address"].fill_null(0).to_numpy()
    begin = 0
    last = (int(index[-1]) + 1 if len(index) else 0, "", 0, 0)
    for number, action, where, size in [*moves.select("index", "action", "address", "bytes").iter_rows(), last]:
        end = int(np.searchsorted(index, number))
        if end > begin and starts:
            event_pools[begin:end] = _within(address[begin:end], starts, segments)
        begin = end
        if action == "segment_alloc":
            lasting = alive[where] == number and where in bounds
            if where not in segments:
                insort(starts, where)
            segments[where] = bounds[where] if lasting else (where + size, 0)
        elif where in segments:
            starts.remove(where)
            del segments[where]
    return event_pools


def _within(address: Ints, starts: list[int], segments: dict[int, tuple[int, int]]) -> Ints:
    begins = np.array(starts, np.int64)
    ends, pools = np.array([segments[begin] for begin in starts], np.int64).T
    place = np.searchsorted(begins, address, side="right") - 1
    inside = (place >= 0) & (address < ends[np.maximum(place, 0)])
    return np.where(inside, pools[np.maximum(place, 0)], 0)
