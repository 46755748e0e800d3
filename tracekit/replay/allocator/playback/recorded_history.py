"""What a snapshot recorded of one device, made ready to be played: requests, frees, and moments of return."""

from bisect import insort
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model.memory_snapshot import MemorySnapshot
from tracekit.replay.allocator import BlockState, SegmentEvent, SegmentState, Settings
from tracekit.replay.allocator.playback import initial_state

Ints = npt.NDArray[np.int64]

ALLOC, REQUEST, COMPLETE, RELEASE = range(4)
CODES = {"alloc": ALLOC, "free_requested": REQUEST, "free_completed": COMPLETE}
TAKEN = ("segment_alloc", "segment_map")
GIVEN = ("segment_free", "segment_unmap")
EMPTY_CACHE, RETRY, SOME = "empty_cache", "retry", "some"
COMMON = "0:0"
_STATES = {"active_allocated": "allocated", "inactive": "free"}


@dataclass(frozen=True, eq=False)
class History:
    """One device's history. Arrays have one item per request, free or return of memory, in order."""

    device: int
    settings: Settings
    action: Ints
    address: Ints
    bytes: Ints
    stream: Ints
    pool: Ints
    at_ns: Ints
    stack: Ints
    """Call stack of each, as the snapshot numbers them; -1 where there is none."""
    releases: tuple[tuple[str, tuple[int, ...]], ...]
    """For each RELEASE: why (EMPTY_CACHE, RETRY, or SOME: only what is listed), and the addresses given back."""
    taken: tuple[SegmentEvent, ...]
    given: tuple[SegmentEvent, ...]
    peak_reserved_bytes: int
    start: tuple[SegmentState, ...]
    """What was held before the first event; empty where the history begins with the first allocation."""
    final: tuple[SegmentState, ...]
    start_reserved_bytes: int = 0
    """What was reserved before the first event, where that is more than the segments of `start`."""
    unseen_bytes: int = 0
    """What was held throughout, of which no event tells: none where a snapshot shows it."""
    inferred: bool = False
    """Whether what was held and cached at the start was inferred from the addresses that came up later."""
    unplayable: str | None = None
    """Why the history cannot be played; None where it can."""

    @property
    def retries(self) -> int:
        """Return how often the allocator gave back its cache for want of memory, as far as the history shows."""
        return sum(why == RETRY for why, _ in self.releases)

    def without_events(self) -> "History":
        """Return the history in which nothing happens: what is there at the end is there throughout."""
        columns = {
            name: getattr(self, name)[:0] for name in ("action", "address", "bytes", "stream", "pool", "at_ns", "stack")
        }
        reserved_bytes = sum(segment.bytes for segment in self.final)
        empty = replace(self, **columns, releases=(), taken=(), given=(), start=self.final)
        return replace(empty, peak_reserved_bytes=reserved_bytes)


def of(snapshot: MemorySnapshot, device: int) -> History:
    """Return the history of one device of a snapshot."""
    settings = Settings.of_snapshot(snapshot.settings)
    events = snapshot.events.filter(pl.col("device") == device).with_row_index("index")
    segments = snapshot.segments.filter(pl.col("device") == device).sort("address")
    blocks = snapshot.blocks.filter(pl.col("device") == device).sort("address")
    pools = {COMMON: 0} | {name: i for i, name in enumerate(segments["pool"].unique().sort(), 1) if name != COMMON}
    final = _final(segments, blocks, pools)
    begun = initial_state.state(events, final, settings)
    memory = events.filter(pl.col("action").is_in([*TAKEN, *GIVEN]))
    taken, given = (_segment_events(memory.filter(pl.col("action").is_in(kinds))) for kinds in (TAKEN, GIVEN))
    played, releases = _played(snapshot, events)
    reserved = sum(segment.bytes for segment in begun)
    change = pl.when(pl.col("action").is_in(TAKEN)).then("bytes").otherwise(-pl.col("bytes"))
    grown = memory.select(change.cum_sum().max()).item() or 0
    return History(
        device,
        settings,
        action=played["code"].to_numpy(),
        address=played["address"].fill_null(0).to_numpy(),
        bytes=played["bytes"].fill_null(0).to_numpy(),
        stream=played["stream"].fill_null(0).to_numpy(),
        pool=_pools(events, played, final),
        at_ns=played["at_ns"].fill_null(0).to_numpy(),
        stack=played["stack"].fill_null(-1).to_numpy(),
        releases=releases,
        taken=taken,
        given=given,
        peak_reserved_bytes=reserved + max(grown, 0),
        start=begun,
        final=final,
        unplayable=_unplayable(played, begun),
    )


def _unplayable(played: pl.DataFrame, begun: tuple[SegmentState, ...]) -> str | None:
    if played.is_empty():
        return "the snapshot holds no history of this device"
    apart = all(one.address + one.bytes <= other.address for one, other in pairwise(begun))
    whole = all(sum(block.bytes for block in segment.blocks) == segment.bytes for segment in begun)
    return None if apart and whole else "the snapshot's segments and history contradict each other"


def _final(segments: pl.DataFrame, blocks: pl.DataFrame, pools: dict[str, int]) -> tuple[SegmentState, ...]:
    told = blocks.select("segment_address", "address", "bytes", "state", pl.col("requested_bytes").fill_null(0))
    held: dict[int, list[BlockState]] = {}
    for segment, address, size, state, requested in told.iter_rows():
        known = _STATES.get(state, "pending")
        held.setdefault(segment, []).append(BlockState(address, size, known, 0 if known == "free" else requested))
    rows = segments.select("address", "total_bytes", "stream", pl.col("kind") == "small", "pool", "expandable")
    return tuple(
        SegmentState(address, size, stream, small, pools[pool], grows, tuple(held.get(address, ())))
        for address, size, stream, small, pool, grows in rows.iter_rows()
    )


def _segment_events(memory: pl.DataFrame) -> tuple[SegmentEvent, ...]:
    return tuple(SegmentEvent(*row) for row in memory.select("action", "address", "bytes", "stream").iter_rows())


def _played(
    snapshot: MemorySnapshot, events: pl.DataFrame
) -> tuple[pl.DataFrame, tuple[tuple[str, tuple[int, ...]], ...]]:
    """Return the events to play, a return of memory being one event, and why and what each return was."""
    given = pl.col("action").is_in(GIVEN)
    first = given & ~given.shift(1, fill_value=False)
    runs = events.with_columns(first.cum_sum().alias("run"), pl.col("action").shift(-1).alias("then"))
    grouped = runs.filter(given).group_by("run", maintain_order=True)
    told = grouped.agg("address", pl.col("stack").first(), pl.col("then").last(), pl.col("index").first())
    why = _causes(snapshot, told)
    code = pl.when(first).then(RELEASE).otherwise(pl.col("action").replace_strict(CODES, default=None))
    played = events.with_columns(code.cast(pl.Int64).alias("code")).drop_nulls("code")
    return played, tuple(zip(why, map(tuple, told["address"].to_list()), strict=True))


def _causes(snapshot: MemorySnapshot, runs: pl.DataFrame) -> list[str]:
    """Return why each run of returns came: by the functions on its stack, or else by what follows it."""
    stacks = snapshot.stacks.filter(pl.col("stack").is_in(runs["stack"].drop_nulls().unique().to_list()))
    names = stacks.join(snapshot.frames, on="frame").group_by("stack").agg(pl.col("name").str.join(" ").alias("names"))
    told = runs.join(names, on="stack", how="left", maintain_order="left")
    by_stack = pl.col("names")
    why = (
        pl.when(by_stack.str.contains("(?i)empty_?cache")).then(pl.lit(EMPTY_CACHE))
        .when(by_stack.str.contains("garbage_collect_cached|release_available_cached")).then(pl.lit(SOME))
        .when(by_stack.str.contains(r"\bmalloc\b|::alloc")).then(pl.lit(RETRY))
        .when(pl.col("then").is_in([*TAKEN, "oom"])).then(pl.lit(RETRY))
        .otherwise(pl.lit(EMPTY_CACHE))
    )  # fmt: skip
    return told.select(why.alias("why"))["why"].to_list()


def _pools(events: pl.DataFrame, played: pl.DataFrame, final: tuple[SegmentState, ...]) -> Ints:
    """Return the private pool of each event played: that of the segment in which its address lies at that time.

    A segment that is gone at the end is taken to be of the common pool.
    """
    found = np.zeros(len(played), np.int64)
    if not any(segment.pool for segment in final):
        return found
    moves = events.filter(pl.col("action").is_in(["segment_alloc", "segment_free"]))
    alive = dict(moves.filter(pl.col("action") == "segment_alloc").select("address", "index").iter_rows())
    bounds = {segment.address: (segment.address + segment.bytes, segment.pool) for segment in final}
    at = {a: bound for a, bound in bounds.items() if a not in alive}
    starts = sorted(at)
    index, address = played["index"].to_numpy(), played["address"].fill_null(0).to_numpy()
    begin = 0
    for number, action, where, size in [
        *moves.select("index", "action", "address", "bytes").iter_rows(),
        (None, "", 0, 0),
    ]:
        end = len(index) if number is None else int(np.searchsorted(index, number))
        if end > begin and starts:
            found[begin:end] = _within(address[begin:end], starts, at)
        begin = end
        if action == "segment_alloc":
            lasting = alive[where] == number and where in bounds
            if where not in at:
                insort(starts, where)
            at[where] = bounds[where] if lasting else (where + size, 0)
        elif where in at:
            starts.remove(where)
            del at[where]
    return found


def _within(address: Ints, starts: list[int], at: dict[int, tuple[int, int]]) -> Ints:
    begins = np.array(starts, np.int64)
    ends, pools = np.array([at[begin] for begin in starts], np.int64).T
    place = np.searchsorted(begins, address, side="right") - 1
    inside = (place >= 0) & (address < ends[np.maximum(place, 0)])
    return np.where(inside, pools[np.maximum(place, 0)], 0)
