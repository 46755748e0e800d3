"""Memory snapshots next to the traces of a run: free memory of their pools, allocator activity, and their tables."""

from dataclasses import replace

import polars as pl

from tracekit.analysis.memory import snapshot_files
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.ingest.readers import memory_snapshots
from tracekit.model import schema
from tracekit.model.fact import RANK_COLUMNS, Fact, run_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.schema import Table
from tracekit.model.trace import MemorySnapshot

FRAGMENTATION_COLUMNS = schema.columns(
    "device pool kind stream segments total_bytes allocated_bytes free_bytes largest_free_bytes", pool=pl.String
)
POOL_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, **FRAGMENTATION_COLUMNS, "waiting_bytes": pl.Int64,
    "largest_request_bytes": pl.Int64,
}  # fmt: skip
HISTORY_COLUMNS = schema.columns("window rank device events retries device_allocations path")
_POOL = ["device", "pool", "kind", "stream"]


def fragmentation(snapshot: MemorySnapshot) -> pl.DataFrame:
    """Free memory of each pool at the snapshot, and its largest piece.

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


@run_fact
def pools(run: Run) -> pl.DataFrame:
    """Return the fragmentation of free memory at the end of each memory snapshot of a run.

    Columns window, rank and those of `fragmentation`, waiting_bytes (freed, but another stream uses it) and
    largest_request_bytes (of the history, on the pool's stream and of its kind); one row per snapshot and pool. Only
    the first 128 MiB of snapshots are read, and those that cannot be read are left to `data_quality`.
    """
    return _snapshot_tables(run)[0]


@run_fact
def histories(run: Run) -> pl.DataFrame:
    """Return the allocator activity in the history of each memory snapshot of a run.

    Columns window, rank, device, events, retries, device_allocations, path; one row per snapshot and device, of the
    same snapshots as `pools`.
    """
    return _snapshot_tables(run)[1]


def data_quality(run: Run) -> pl.DataFrame:
    """Return a row for each memory snapshot of a run that cannot be read: columns as RUN_DATA_QUALITY."""
    return _snapshot_tables(run)[2]


def _snapshot_table(table: Table) -> Fact[Run]:
    """Fact of one table of all snapshots of a run: columns window, rank and those of `table`."""
    published = replace(table, name=f"snapshot_{table.name}", columns=(*RANK_COLUMNS, *table.columns))

    @run_fact(table=published, is_cached=False)  # a history may have millions of events
    def rows(run: Run) -> pl.DataFrame:
        parts = [published.empty()]
        for file in snapshot_files.files(run):
            part: pl.DataFrame = memory_snapshots.read(file.path).tables[table.name]
            place = (pl.lit(file.window, pl.Int64).alias("window"), pl.lit(file.rank, pl.Int64).alias("rank"))
            parts.append(part.select(*place, pl.all()))
        return pl.concat(parts)

    return rows


@memoize
def _snapshot_tables(run: Run) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return pools, histories and data-quality issues: each snapshot is read once for all."""
    pool_tables: list[pl.DataFrame] = [schema.empty(POOL_COLUMNS)]
    rows: list[tuple[object, ...]] = []
    bad = snapshot_files.unreadable(run)
    for file in snapshot_files.first_files(run):
        try:
            snapshot = memory_snapshots.read(file.path)
        except TracekitError as error:
            bad.append((file.rank, file.path, "unreadable_snapshot", str(error), 0.0))
            continue
        pool_tables.append(_pools(snapshot, file))
        rows += _histories(snapshot, file)
    histories = pl.DataFrame(rows, schema=HISTORY_COLUMNS, orient="row")
    return pl.concat(pool_tables), histories, pl.DataFrame(bad, schema=RUN_DATA_QUALITY.schema, orient="row")


def _histories(snapshot: MemorySnapshot, place: SnapshotFile) -> list[tuple[object, ...]]:
    from tracekit.replay.allocator import recorded_history  # imported here: few runs have snapshots

    rows: list[tuple[object, ...]] = []
    for device in snapshot.devices:
        history = recorded_history.from_snapshot(snapshot, device)
        counts = (len(history.action), history.retries, len(history.segment_allocations))
        rows.append((place.window, place.rank, device, *counts, place.path))
    return rows


def _pools(snapshot: MemorySnapshot, place: SnapshotFile) -> pl.DataFrame:
    from tracekit.replay.allocator.settings import SMALL_BYTES  # imported here: few runs have snapshots

    pending = snapshot.blocks.filter(~pl.col("state").is_in(["active_allocated", "inactive"]))
    segments = snapshot.segments.select("device", *_POOL[1:], segment_address="address")
    in_segments = pending.join(segments, on=["device", "segment_address"])
    waiting = in_segments.group_by(_POOL).agg(waiting_bytes=pl.col("bytes").sum())
    kind = pl.when(pl.col("bytes") <= SMALL_BYTES).then(pl.lit("small")).otherwise(pl.lit("large"))
    requests = snapshot.events.filter(pl.col("action") == "alloc").group_by("device", "stream", kind=kind)
    largest = requests.agg(largest_request_bytes=pl.col("bytes").max())
    rows = fragmentation(snapshot).join(waiting, on=_POOL, how="left")
    rows = rows.join(largest, on=["device", "stream", "kind"], how="left").with_columns(
        pl.col("waiting_bytes").fill_null(0), window=pl.lit(place.window), rank=pl.lit(place.rank)
    )
    return schema.select(rows, POOL_COLUMNS)


TABLES: tuple[Fact[Run], ...] = tuple(map(_snapshot_table, schema.SNAPSHOT_TABLES.values()))
"""The tables of a snapshot, of all snapshots of a run: snapshot_segments, snapshot_blocks, …."""
