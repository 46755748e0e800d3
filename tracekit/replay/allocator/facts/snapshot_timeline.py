"""A memory snapshot's history as blocks and as usage over time, in the same columns as a trace, and its segment map."""

import numpy as np
import polars as pl

from tracekit.analysis.memory import allocations, usage
from tracekit.model import schema
from tracekit.model.memory_snapshot import MemorySnapshot
from tracekit.replay.allocator.facts import snapshot_summary
from tracekit.replay.allocator.playback import History, ReplayResult
from tracekit.replay.allocator.playback.recorded_history import CODES, SEGMENT_ALLOCATIONS, SEGMENT_FREES

MAP_COLUMNS = {
    "device": pl.Int64, "pool": pl.String, "kind": pl.String, "stream": pl.Int64, "expandable": pl.Boolean,
    "segment_address": pl.Int64, "segment_bytes": pl.Int64, "address": pl.Int64, "bytes": pl.Int64, "state": pl.String,
    "op": pl.String,
}  # fmt: skip


def over_time(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the memory usage over the history by op with its place in code: columns as `usage.usage_by_owner`.

    Empty if the snapshot has no history, or one without times.
    """
    if not len(history.at_ns) or not history.at_ns.any():
        return pl.DataFrame(schema=usage.OWNER_COLUMNS)
    return usage.usage_by_owner(blocks(snapshot, history, played), live(snapshot, history, played), by=("op",))


def blocks(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return the blocks in the history, columns as `allocations.blocks`."""
    events = pl.DataFrame(
        {"at_ns": history.at_ns, "address": history.address, "delta_bytes": played.moved_bytes, "op_id": history.stack}
    ).with_row_index("event")
    moves = events.filter(pl.col("delta_bytes") != 0).with_columns(
        device=pl.lit(history.device, pl.Int64), step=pl.lit(None, pl.Int64)
    )
    found = allocations.match_blocks(moves).join(
        snapshot_summary.owners(snapshot), left_on="op_id", right_on="stack", how="left"
    )
    absent = [name for name in allocations.BLOCK_COLUMNS if name not in found.columns]
    described = found.with_columns(pl.lit(None).alias(name) for name in absent)
    return schema.select(described, allocations.BLOCK_COLUMNS).sort(
        "start_event", nulls_last=False, maintain_order=True
    )


def live(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return memory usage after each event: columns device, event, at_ns, live_bytes, reserved_bytes."""
    events = snapshot.events.filter(pl.col("device") == history.device)
    action = pl.col("action")
    change = (
        pl.when(action.is_in(SEGMENT_ALLOCATIONS))
        .then("bytes")
        .when(action.is_in(SEGMENT_FREES))
        .then(-pl.col("bytes"))
        .otherwise(0)
    )
    given = action.is_in(SEGMENT_FREES)
    played_too = action.is_in(list(CODES)) | (given & ~given.shift(1, fill_value=False))
    begun = sum(segment.bytes for segment in history.start)
    reserved = events.with_columns(reserved_bytes=change.cum_sum() + begun).filter(played_too)["reserved_bytes"]
    described = pl.DataFrame(
        {"at_ns": history.at_ns, "live_bytes": snapshot_summary.allocated_over_time(history, played)[1:]}
    )
    return described.with_row_index("event").with_columns(
        device=pl.lit(history.device, pl.Int64), reserved_bytes=reserved
    )


def segment_map(snapshot: MemorySnapshot, device: int) -> pl.DataFrame:
    """Return all memory that the allocator holds of a device, block by block.

    Columns device, pool, kind, stream, expandable, segment_address, segment_bytes, address, bytes, state, op (who
    requested it); one row per block, those of one pool together, the largest pools and segments first.
    """
    key = ["pool", "kind", "stream"]
    segments = snapshot.segments.filter(pl.col("device") == device).select(
        "device", *key, "expandable", segment_address="address", segment_bytes="total_bytes"
    )
    listed = snapshot.blocks.filter(pl.col("device") == device).select(
        "segment_address", "address", "bytes", "state", "stack"
    )
    described = listed.join(segments, on="segment_address").join(
        snapshot_summary.owners(snapshot), on="stack", how="left"
    )
    pool_bytes = pl.col("bytes").sum().over(key)
    ordered = described.with_columns(pool_bytes=pool_bytes).sort(
        "pool_bytes", *key, "segment_bytes", "address", descending=[True, False, False, False, True, False]
    )
    return schema.select(ordered, MAP_COLUMNS)


def lifetimes(snapshot: MemorySnapshot, history: History, played: ReplayResult) -> pl.DataFrame:
    """Return block lifetimes by size: columns as `usage.lifetimes`."""
    if not np.any(history.at_ns):
        return pl.DataFrame(schema=usage.LIFETIME_COLUMNS)
    return usage.lifetime_histogram(blocks(snapshot, history, played))
