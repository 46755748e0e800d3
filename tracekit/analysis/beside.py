"""Memory snapshots that lie beside a run's traces: RUN/rank00000.memory.pickle, of further windows one folder below."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import polars as pl

from tracekit import conventions, replay, schema
from tracekit.allocator.settings import SMALL_BYTES
from tracekit.analysis import snapshots
from tracekit.errors import TracekitError
from tracekit.readers import memory_snapshot
from tracekit.snapshot import MemorySnapshot
from tracekit.trace import RUN_DOUBTS, Run

MOST_BYTES = 128 << 20
"""Of all snapshots that are read without being asked for, such as by a rule."""

POOL_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, **snapshots.FRAGMENTATION_COLUMNS, "waiting_bytes": pl.Int64,
    "largest_request_bytes": pl.Int64,
}  # fmt: skip
HISTORY_COLUMNS = {
    "window": pl.Int64, "rank": pl.Int64, "device": pl.Int64, "events": pl.Int64, "retries": pl.Int64,
    "device_allocations": pl.Int64, "path": pl.String,
}  # fmt: skip


@dataclass(frozen=True)
class Beside:
    """A snapshot file of one rank and window."""

    rank: int
    window: int
    path: str
    size_bytes: int
    changed_ns: int = 0
    """When its content was last changed: one of the same size may be another."""


def files(run: Run) -> tuple[Beside, ...]:
    """Return the snapshots beside the traces of a run, by window and rank; none where the run is not a local folder.

    What cannot be looked at, such as a link to nowhere, is left to `doubts`.
    """
    return _found(run)[0]


def small(run: Run) -> tuple[Beside, ...]:
    """Return the first snapshots that together have at most MOST_BYTES."""
    taken, left = [], MOST_BYTES
    for each in files(run):
        left -= each.size_bytes
        if left < 0:
            break
        taken.append(each)
    return tuple(taken)


def pools(run: Run) -> pl.DataFrame:
    """Return how free memory is cut up at the end of each snapshot beside the run's traces.

    Columns window, rank and those of `snapshots.fragmentation`, waiting_bytes (freed, but another stream uses it) and
    largest_request_bytes (of the history, on the pool's stream and of its kind); one row per snapshot and pool. Only
    the first 128 MiB of snapshots are read, and those that cannot be read are left to `doubts`.
    """
    return _looked_at(run)[0]


def histories(run: Run) -> pl.DataFrame:
    """Return what the allocator did in the history of each snapshot beside the run's traces.

    Columns window, rank, device, events, retries, device_allocations, path; one row per snapshot and device, of the
    same snapshots as `pools`.
    """
    return _looked_at(run)[1]


def doubts(run: Run) -> pl.DataFrame:
    """Return a row for each snapshot beside the run's traces that cannot be read: columns as RUN_DOUBTS."""
    return _looked_at(run)[2]


def table(name: str) -> Callable[[Run], pl.DataFrame]:
    """Return what makes, of a run, one of the tables of all its snapshots: columns window, rank and the table's own."""

    def of_run(run: Run) -> pl.DataFrame:
        place = {"window": pl.Int64(), "rank": pl.Int64()}
        parts = [pl.DataFrame(schema=place | dict(schema.SNAPSHOT_TABLES[name].schema))]
        for each in files(run):
            rows: pl.DataFrame = memory_snapshot.read(each.path).tables[name]
            where = (
                pl.lit(value, pl.Int64).alias(key) for key, value in (("window", each.window), ("rank", each.rank))
            )
            parts.append(rows.select(*where, pl.all()))
        return pl.concat(parts)

    return of_run


_POOL = ["device", "pool", "kind", "stream"]
_KNOWN: WeakKeyDictionary[Run, tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]] = WeakKeyDictionary()


def _found(run: Run) -> tuple[tuple[Beside, ...], list[tuple[object, ...]]]:
    """Return the snapshots by window and rank, and a row of RUN_DOUBTS for each that cannot be looked at."""
    folder = Path(run.path)
    places = (folder, *sorted(folder.glob("window[0-9]*"))) if folder.is_dir() else ()
    found: list[Beside] = []
    bad: list[tuple[object, ...]] = []
    for place in places:
        window = re.fullmatch(r"window(\d+)", place.name)
        for file in sorted(place.glob(f"*{conventions.MEMORY_SNAPSHOT_SUFFIX}")):
            rank = re.search(r"rank(\d+)", file.name)
            if rank is None:
                continue
            try:
                known = file.stat()
            except OSError as error:
                message = f"{file}: cannot be read: {error.strerror}"
                bad.append((int(rank[1]), str(file), "unreadable_snapshot", message, 0.0))
                continue
            place_of = int(rank[1]), int(window[1]) if window else 0
            found.append(Beside(*place_of, str(file), known.st_size, known.st_mtime_ns))
    return tuple(sorted(found, key=lambda each: (each.window, each.rank))), bad


def _looked_at(run: Run) -> tuple[pl.DataFrame, pl.DataFrame, pl.DataFrame]:
    """Return pools, histories and doubts: each snapshot is read once for all."""
    if run not in _KNOWN:
        found: list[pl.DataFrame] = [pl.DataFrame(schema=POOL_COLUMNS)]
        told: list[tuple[object, ...]] = []
        bad = _found(run)[1]
        for each in small(run):
            try:
                snapshot = memory_snapshot.read(each.path)
            except TracekitError as error:
                bad.append((each.rank, each.path, "unreadable_snapshot", str(error), 0.0))
                continue
            found.append(_pools(snapshot, each))
            for device in snapshot.devices:
                history = replay.of(snapshot, device)
                counts = (len(history.action), history.retries, len(history.taken))
                told.append((each.window, each.rank, device, *counts, each.path))
        histories = pl.DataFrame(told, schema=HISTORY_COLUMNS, orient="row")
        _KNOWN[run] = pl.concat(found), histories, pl.DataFrame(bad, schema=RUN_DOUBTS.schema, orient="row")
    return _KNOWN[run]


def _pools(snapshot: MemorySnapshot, place: Beside) -> pl.DataFrame:
    told = snapshots.fragmentation(snapshot).join(_waiting(snapshot), on=_POOL, how="left")
    told = told.join(_requests(snapshot), on=["device", "stream", "kind"], how="left").with_columns(
        pl.col("waiting_bytes").fill_null(0), window=pl.lit(place.window), rank=pl.lit(place.rank)
    )
    return told.select(pl.col(name).cast(dtype) for name, dtype in POOL_COLUMNS.items())


def _waiting(snapshot: MemorySnapshot) -> pl.DataFrame:
    pending = snapshot.blocks.filter(~pl.col("state").is_in(["active_allocated", "inactive"]))
    segments = snapshot.segments.select("device", *_POOL[1:], segment_address="address")
    held = pending.join(segments, on=["device", "segment_address"])
    return held.group_by(_POOL).agg(waiting_bytes=pl.col("bytes").sum())


def _requests(snapshot: MemorySnapshot) -> pl.DataFrame:
    kind = pl.when(pl.col("bytes") <= SMALL_BYTES).then(pl.lit("small")).otherwise(pl.lit("large"))
    asked = snapshot.events.filter(pl.col("action") == "alloc").group_by("device", "stream", kind=kind)
    return asked.agg(largest_request_bytes=pl.col("bytes").max())
