"""Facts about a memory snapshot: owners at the peak, allocation churn, fragmentation of free memory."""

import re

import numpy as np
import polars as pl

from tracekit.analysis.memory.allocations import CHURN_COLUMNS, PEAK_COLUMNS
from tracekit.model import schema
from tracekit.model.memory_snapshot import MemorySnapshot
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.playback.recorded_history import ALLOC, REQUEST

FRAGMENTATION_COLUMNS = schema.columns(
    "device pool kind stream segments total_bytes allocated_bytes free_bytes largest_free_bytes", pool=pl.String
)
_STEP = r"ProfilerStep#(\d+)"
_OP = re.compile(r"at::_ops::(\w+)::")
# Of torch's own Python files, and of the interpreter's: nobody asks for memory there.
_NOT_THE_USERS = r"site-packages|dist-packages|/torch/|<frozen|<string>"


def fragmentation(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return how much is free in each pool at the snapshot, and in how large a piece at most.

    Columns device, pool, kind, stream, segments, total_bytes, allocated_bytes, free_bytes, largest_free_bytes; one row
    per pool of free blocks: what is free in one serves no other.
    """
    key = ["device", "pool", "kind", "stream"]
    of_segment = snapshot.segments.select("device", "address", *key[1:], "total_bytes", "allocated_bytes")
    totals = of_segment.group_by(key).agg(
        segments=pl.len(), total_bytes=pl.col("total_bytes").sum(), allocated_bytes=pl.col("allocated_bytes").sum()
    )
    free = snapshot.blocks.filter(pl.col("state") == "inactive").join(
        of_segment, left_on=["device", "segment_address"], right_on=["device", "address"]
    )
    pieces = free.group_by(key).agg(free_bytes=pl.col("bytes").sum(), largest_free_bytes=pl.col("bytes").max())
    wide = totals.join(pieces, on=key, how="left").with_columns(pl.col("free_bytes", "largest_free_bytes").fill_null(0))
    ordered = wide.sort("total_bytes", *key, descending=[True, *[False] * 4])
    return schema.select(ordered, FRAGMENTATION_COLUMNS)


def peak_allocated_bytes(history: History, played: ReplayResult) -> int:
    """Return the peak of allocated bytes."""
    return int(allocated_over_time(history, played).max())


def at_peak(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the owners of memory at the peak: columns and order as `allocations.at_peak`; an owner is a place in code.

    The place is the innermost frame in the program's own Python code, with the op that it called; otherwise the
    innermost known frame. It is null for blocks older than the history that are not in the snapshot. Without a history
    the peak is the moment of the snapshot.
    """
    allocated = allocated_over_time(history, played)
    peak = int(allocated.argmax()) - 1
    blocks = _alive(history, played, peak)
    stacks = snapshot.blocks.filter(pl.col("device") == history.device).select("address", last="stack")
    described = blocks.join(stacks, on="address", how="left").with_columns(
        stack=pl.when("earlier").then("last").otherwise("stack")
    )
    described = described.join(owners(snapshot), on="stack", how="left")
    by = described.group_by("op").agg(count=pl.len(), bytes=pl.col("bytes").sum())
    at_ns = int(history.at_ns[peak]) if peak >= 0 else None
    whole = {
        "phase": None,
        "unit": None,
        "module": None,
        "stack": None,
        "step": None,
        "device": history.device,
        "at_ns": at_ns,
    }
    wide = by.with_columns(
        **{name: pl.lit(value) for name, value in whole.items()}, peak_bytes=pl.lit(int(allocated.max()))
    )
    wide = wide.with_columns(peak_ratio=pl.col("bytes") / pl.col("peak_bytes"))
    ordered = wide.sort("bytes", "op", descending=[True, False])
    return schema.select(ordered, PEAK_COLUMNS)


def churn(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the allocation churn, columns as `allocations.churn`.

    One row per step, where the profiler marked steps in the snapshot, else one for the whole history.
    """
    taken = played.moved_bytes > 0
    events = pl.DataFrame(
        {
            "at_ns": history.at_ns,
            "moved": played.moved_bytes,
            "allocated_bytes": allocated_over_time(history, played)[1:],
        }
    )
    marks = snapshot.annotations.filter(pl.col("stage") == "START", pl.col("device") == history.device)
    marks = marks.with_columns(step=pl.col("name").str.extract(_STEP).cast(pl.Int64)).drop_nulls("step").sort("at_ns")
    step = pl.lit(None, pl.Int64)
    if marks.height:
        place = np.searchsorted(marks["at_ns"].to_numpy(), history.at_ns, side="right") - 1
        known = marks["step"].gather(np.maximum(place, 0).astype(np.uint32))
        step = pl.when(pl.Series(place >= 0)).then(known)
    sums = (
        events.with_columns(step=step, taken=pl.Series(taken))
        .group_by("step")
        .agg(
            count=pl.col("taken").sum(),
            bytes=pl.col("moved").filter("taken").sum(),
            peak_bytes=pl.col("allocated_bytes").max(),
            distinct_sizes=pl.col("moved").filter("taken").n_unique(),
        )
    )
    wide = sums.with_columns(
        device=pl.lit(history.device),
        churn_ratio=pl.when(pl.col("peak_bytes") > 0).then(pl.col("bytes") / pl.col("peak_bytes")),
    )
    return schema.select(wide, CHURN_COLUMNS).sort("step")


def allocated_over_time(history: History, played: ReplayResult) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return the allocated bytes at the start and after each event."""
    begun = sum(block.bytes for segment in history.start for block in segment.blocks if block.state == "allocated")
    allocated_bytes: np.ndarray[tuple[int], np.dtype[np.int64]] = begun + np.concatenate(
        (np.zeros(1, np.int64), np.cumsum(played.moved_bytes))
    )
    return allocated_bytes


def _alive(history: History, played: ReplayResult, peak: int) -> pl.DataFrame:
    """Return the blocks allocated after event `peak`: columns address, bytes, stack, earlier (than the history)."""
    events = pl.DataFrame(
        {"address": history.address, "moved": played.moved_bytes, "code": history.action, "stack": history.stack}
    ).with_row_index("event")
    begun = [
        (block.address, block.bytes) for seg in history.start for block in seg.blocks if block.state == "allocated"
    ]
    earlier = pl.DataFrame(begun, schema={"address": pl.Int64, "bytes": pl.Int64}, orient="row")
    moves = events.filter(pl.col("code").is_in([ALLOC, REQUEST]), pl.col("event") <= peak, pl.col("moved") != 0)
    last = moves.group_by("address").agg(pl.all().sort_by("event").last())
    alive = last.filter(pl.col("code") == ALLOC)
    from_history = alive.select("address", pl.col("moved").alias("bytes"), "stack", earlier=pl.lit(value=False))
    untouched = earlier.join(last, on="address", how="anti").select(
        "address", "bytes", pl.lit(-1, pl.Int64).alias("stack"), earlier=pl.lit(value=True)
    )
    return pl.concat([from_history, untouched])


def owners(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Return the place in code that represents each stack: columns stack, op."""
    frames = snapshot.stacks.join(snapshot.frames, on="frame").sort("stack", "depth")
    python = pl.col("file").str.ends_with(".py")
    own = python & ~pl.col("file").str.contains(_NOT_THE_USERS)
    place = pl.format("{} ({}:{})", "name", pl.col("file").str.split("/").list.last(), "line")
    of_stack = frames.group_by("stack", maintain_order=True).agg(
        place=pl.coalesce(
            place.filter(own).first(),
            place.filter(python).first(),
            pl.col("name")
            .filter(~pl.col("name").str.contains("unwind|CapturedTraceback|gather_with_cpp|CachingAllocator"))
            .first(),
        ),
        op=pl.col("name").str.extract(_OP.pattern).drop_nulls().first(),
    )
    # Stacks have the innermost frame first, so the first op is the one that allocated.
    return of_stack.select(
        "stack",
        op=pl.when(pl.col("op").is_not_null()).then(pl.format("aten::{} in {}", "op", "place")).otherwise("place"),
    )
