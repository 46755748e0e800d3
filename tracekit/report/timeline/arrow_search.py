"""Arrows between a slice and its causes and effects, on its rank and on others."""

from collections.abc import Iterable

import polars as pl

from tracekit.analysis.time import dependencies
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.timeline import lookup
from tracekit.report.timeline.scene import Scene

ARROWS = schema.columns("from_track from_row from_id from_ns to_track to_row to_id to_ns how", how=pl.String)
LAUNCH, FORWARD, EVENT, SYNC, COLLECTIVE = ARROW_KINDS = ("launch", "forward", "event", "sync", "collective")
"""Host slice to launched work; forward op to its backward op; event to the stream that waits for it; work to the host
call that waits for it; last rank of a collective, or sender, to the ranks that waited."""
MAX_ARROWS = 100

_Pair = tuple[str, int, str, int, str]
"""Source and id of the start, source and id of the end, kind of arrow."""


def arrows(run: Run, scene: Scene, track: int, id: int) -> pl.DataFrame:  # noqa: A002
    """Return the arrows that start or end at a slice, at most MAX_ARROWS on its rank and one per peer.

    Columns ARROWS: track, row and id of both slices, the times at which the arrow starts and ends, on the run's clock,
    and its kind, one of ARROW_KINDS; one row per arrow. Raises KeyError if the scene has no such slice,
    BadTraceError if its trace cannot be read.
    """
    lookup.slice_at(scene, track, id)
    track_row = scene.tracks.row(track, named=True)
    trace = run.trace(track_row["rank"], scene.window)
    pairs: list[_Pair] = []
    if track_row["source"] == "activities":
        work = trace.activities.filter(pl.col("id") == id)
        pairs = [*_launches(trace, work), *_waits(trace, id, "activities")]
    elif track_row["source"] == "ops":
        pairs = [*_launched_by(trace, id), *_gradients(trace, id), *_waits(trace, id, "ops")]
    rows = [_arrows_on_rank(scene, track_row["rank"], pairs[:MAX_ARROWS])]
    if track_row["source"] == "activities":
        rows.append(_collective_arrows(run, scene, track_row["rank"], id))
    return pl.concat(rows)


def _launched_by(trace: Trace, id: int) -> Iterable[_Pair]:  # noqa: A002
    """Return the launches of all work that a slice launched, or slices inside it."""
    op = trace.ops.filter(pl.col("id") == id).row(0, named=True)
    start_ns, end_ns = pl.col("start_ns"), pl.col("start_ns") + pl.col("dur_ns")
    inside = trace.ops.filter(
        pl.col("lane") == op["lane"], start_ns >= op["start_ns"], end_ns <= op["start_ns"] + op["dur_ns"]
    )
    work = trace.activities.join(inside.select(pl.col("id").alias("launch_id")), on="launch_id", how="semi")
    return _launches(trace, work)


def _launches(trace: Trace, work: pl.DataFrame) -> Iterable[_Pair]:
    """Return the launches of work on another lane: on a CPU run most work is the op itself."""
    threads = trace.ops.select(pl.col("id").alias("launch_id"), pl.col("lane").alias("launch_lane"))
    launched = work.join(threads, on="launch_id").filter(pl.col("lane") != pl.col("launch_lane"))
    first = launched.sort("start_ns", "id").head(MAX_ARROWS).select("launch_id", "id")
    return [("ops", launch, "activities", work_id, LAUNCH) for launch, work_id in first.iter_rows()]


def _gradients(trace: Trace, id: int) -> Iterable[_Pair]:  # noqa: A002
    links = trace.ops.select("id", "forward_id").drop_nulls()
    pairs = links.filter((pl.col("id") == id) | (pl.col("forward_id") == id)).head(MAX_ARROWS)
    return [("ops", forward, "ops", backward, FORWARD) for backward, forward in pairs.iter_rows()]


def _waits(trace: Trace, id: int, source: str) -> Iterable[_Pair]:  # noqa: A002
    links = _dependencies(trace)
    is_event, is_sync = pl.col("kind") == EVENT, pl.col("kind") == SYNC
    waits, awaited = pl.col("waiting_id") == id, pl.col("awaited_id") == id
    concerned = (is_event & (waits | awaited)) | (is_sync & awaited) if source == "activities" else is_sync & waits
    rows = links.filter(concerned).head(MAX_ARROWS).select("awaited_id", "waiting_id", "kind").iter_rows()
    return [
        ("activities", awaited, "activities" if how == EVENT else "ops", waits, how) for awaited, waits, how in rows
    ]


_dependencies = memoize(dependencies.dependencies)


def _arrows_on_rank(scene: Scene, rank: int, pairs: list[_Pair]) -> pl.DataFrame:
    """Return the arrows between slices of one rank: a launch starts at its begin, others at their end."""
    places: dict[tuple[str, int], dict[str, int]] = {}
    for source in ("ops", "activities"):
        ids = {slice_id for pair in pairs for pair_source, slice_id in (pair[:2], pair[2:4]) if pair_source == source}
        slices = lookup.slices_of(scene, rank, source, sorted(ids))
        places |= {(source, row["id"]): row for row in slices.iter_rows(named=True)}
    rows = []
    for source, from_id, to_source, other, how in pairs:
        begin, end = places.get((source, from_id)), places.get((to_source, other))
        if begin is not None and end is not None:
            past_ns = begin["start_ns"] + begin["dur_ns"]
            to_ns = end["start_ns"] + end["dur_ns"] if how == SYNC else end["start_ns"]
            rows.append(_arrow(begin, begin["start_ns"] if how == LAUNCH else past_ns, end, to_ns, how))
    return pl.DataFrame(rows, schema=ARROWS, orient="row")


def _collective_arrows(run: Run, scene: Scene, rank: int, id: int) -> pl.DataFrame:  # noqa: A002
    """Return an arrow from the last rank to each other rank, at the time when the collective could begin."""
    peers = lookup.peers(run, scene, rank, id)
    if peers.is_empty():
        return pl.DataFrame(schema=ARROWS)
    last, *earlier = peers.sort("start_ns", "rank", descending=[True, False]).iter_rows(named=True)
    if last["wait_ns"]:
        return pl.DataFrame(schema=ARROWS)  # it waited, too: for a rank that the scene does not draw
    at_ns = last["start_ns"]
    rows = [_arrow(last, at_ns, peer, min(at_ns, peer["start_ns"] + peer["dur_ns"]), COLLECTIVE) for peer in earlier]
    return pl.DataFrame(rows, schema=ARROWS, orient="row")


def _arrow(begin: dict[str, int], from_ns: int, end: dict[str, int], to_ns: int, how: str) -> tuple[int | str, ...]:
    place = ("track", "row", "id")
    return (*(begin[name] for name in place), from_ns, *(end[name] for name in place), to_ns, how)
