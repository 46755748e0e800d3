"""Facts about the memory snapshots in a run's folder."""

from collections.abc import Callable

import polars as pl

from tracekit.analysis.memory import snapshot_files
from tracekit.analysis.memory.snapshot_files import SnapshotFile
from tracekit.errors import TracekitError
from tracekit.ingest.readers.memory_snapshot import reader
from tracekit.model import schema
from tracekit.model.fact import run_fact
from tracekit.model.memoize import memoize
from tracekit.model.run import RUN_DATA_QUALITY, Run
from tracekit.model.trace import MemorySnapshot
from tracekit.replay.allocator import playback
from tracekit.replay.allocator.facts import out_of_memory, snapshot_facts
from tracekit.replay.allocator.facts.out_of_memory import OutOfMemoryEvent
from tracekit.replay.allocator.settings import SMALL_BYTES

POOL_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, **snapshot_facts.FRAGMENTATION_COLUMNS, "waiting_bytes": pl.Int64,
    "largest_request_bytes": pl.Int64,
}  # fmt: skip
HISTORY_COLUMNS = schema.columns("window rank device events retries device_allocations path")


@run_fact
def pools(run: Run) -> pl.DataFrame:
    """Return the fragmentation of free memory at the end of each memory snapshot of a run.

    Columns window, rank and those of `snapshots.fragmentation`, waiting_bytes (freed, but another stream uses it) and
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


def first_out_of_memory(run: Run) -> tuple[int | None, OutOfMemoryEvent | None]:
    """Return the rank that ran out of memory first and the event, by the same snapshots as `pools`; else None, None."""
    failed = []
    for file in snapshot_files.first_files(run):
        try:
            snapshot = reader.read(file.path)
        except TracekitError:  # `data_quality` reports it
            continue
        for device in snapshot.events.filter(pl.col("action") == reader.OUT_OF_MEMORY)["device"].unique().sort():
            oom = out_of_memory.of_snapshot(snapshot, playback.from_snapshot(snapshot, device))
            if oom is not None:
                failed.append((file.rank, oom))
    return min(failed, key=lambda failure: failure[1].at_ns or 0, default=(None, None))


def data_quality(run: Run) -> pl.DataFrame:
    """Return a row for each memory snapshot of a run that cannot be read: columns as RUN_DATA_QUALITY."""
    return _snapshot_tables(run)[2]


def table(name: str) -> Callable[[Run], pl.DataFrame]:
    """Function that reads one table of all snapshots of a run: columns window, rank and the table's own."""

    def of_run(run: Run) -> pl.DataFrame:
        place = {"window": pl.Int64(), "rank": pl.Int64()}
        parts = [pl.DataFrame(schema=place | dict(schema.SNAPSHOT_TABLES[name].schema))]
        for file in snapshot_files.files(run):
            rows: pl.DataFrame = reader.read(file.path).tables[name]
            where = (
                pl.lit(value, pl.Int64).alias(key) for key, value in (("window", file.window), ("rank", file.rank))
            )
            parts.append(rows.select(*where, pl.all()))
        return pl.concat(parts)

    return of_run


_POOL = ["device", "pool", "kind", "stream"]


@memoize
def _snapshot_tables(run: Run) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return pools, histories and data-quality issues: each snapshot is read once for all."""
    pool_tables: list[pl.DataFrame] = [schema.empty(POOL_COLUMNS)]
    rows: list[tuple[object, ...]] = []
    bad = snapshot_files.unreadable(run)
    for file in snapshot_files.first_files(run):
        try:
            snapshot = reader.read(file.path)
        except TracekitError as error:
            bad.append((file.rank, file.path, "unreadable_snapshot", str(error), 0.0))
            continue
        pool_tables.append(_pools(snapshot, file))
        for device in snapshot.devices:
            history = playback.from_snapshot(snapshot, device)
            counts = (len(history.action), history.retries, len(history.segment_allocations))
            rows.append((file.window, file.rank, device, *counts, file.path))
    histories = pl.DataFrame(rows, schema=HISTORY_COLUMNS, orient="row")
    return pl.concat(pool_tables), histories, pl.DataFrame(bad, schema=RUN_DATA_QUALITY.schema, orient="row")


def _pools(snapshot: MemorySnapshot, place: SnapshotFile) -> pl.DataFrame:
    rows = snapshot_facts.fragmentation(snapshot).join(_waiting(snapshot), on=_POOL, how="left")
    rows = rows.join(_requests(snapshot), on=["device", "stream", "kind"], how="left").with_columns(
        pl.col("waiting_bytes").fill_null(0), window=pl.lit(place.window), rank=pl.lit(place.rank)
    )
    return schema.select(rows, POOL_COLUMNS)


def _waiting(snapshot: MemorySnapshot) -> pl.DataFrame:
    pending = snapshot.blocks.filter(~pl.col("state").is_in(["active_allocated", "inactive"]))
    segments = snapshot.segments.select("device", *_POOL[1:], segment_address="address")
    in_segments = pending.join(segments, on=["device", "segment_address"])
    return in_segments.group_by(_POOL).agg(waiting_bytes=pl.col("bytes").sum())


def _requests(snapshot: MemorySnapshot) -> pl.DataFrame:
    kind = pl.when(pl.col("bytes") <= SMALL_BYTES).then(pl.lit("small")).otherwise(pl.lit("large"))
    requests = snapshot.events.filter(pl.col("action") == "alloc").group_by("device", "stream", kind=kind)
    return requests.agg(largest_request_bytes=pl.col("bytes").max())
