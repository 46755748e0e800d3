"""Find slices in a scene: by id or name, the same collective on other ranks, and what arrows join."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import polars as pl

from tracekit.analysis.time import dependencies
from tracekit.model import schema
from tracekit.model.memoize import memoize
from tracekit.model.nesting import Ints
from tracekit.model.run import Run
from tracekit.model.trace import Trace
from tracekit.report.timeline import trace_part
from tracekit.report.timeline.mapped_file import Array
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import PLACES, Part
from tracekit.report.timeline.viewport import view
from tracekit.sync import alignment, collective_matching

PEERS = schema.columns("rank track row id start_ns dur_ns wait_ns")
MAX_PEERS = 64
_NEAR_NS = 2  # the drift of a clock may be rounded in two ways

MATCHES = schema.columns("track row id start_ns dur_ns name", track=pl.Int32, row=pl.Int32, id=pl.Int32)
_FEW = 16


@dataclass(frozen=True, eq=False)
class Matches:
    """The result of a search: `count` slices, `total_ns` in total, and the first of them in `table`.

    Columns of the table: MATCHES; one row per slice, by time; times are on the run's clock.
    """

    count: int
    total_ns: int
    table: pl.DataFrame


ARROWS = schema.columns("from_track from_row from_id from_ns to_track to_row to_id to_ns how", how=pl.String)
LAUNCH, FORWARD, EVENT, SYNC, COLLECTIVE = ARROW_KINDS = ("launch", "forward", "event", "sync", "collective")
"""Host slice to launched work; forward op to its backward op; event to the stream that waits for it; work to the host
call that waits for it; last rank of a collective, or sender, to the ranks that waited."""
MAX_ARROWS = 100

_Pair = tuple[str, int, str, int, str]
"""Source and id of the start, source and id of the end, kind of arrow."""


def slice_at(scene: Scene, track: int, id: int) -> dict[str, int]:  # noqa: A002
    """Return the position of one slice: track, row, id, start_ns, dur_ns, name_id. Raises KeyError if there is none."""
    number = scene.part_of_track.get(track)
    if number is not None:
        part = scene.parts[number]
        segments = part.slice_segments[part.slice_segments["track"] == track]
        low, high = int(segments["first"][0]), int(segments["first"][-1] + segments["count"][-1])
        positions = np.flatnonzero(part.slices["id"][low:high] == id) + low
        if len(positions):
            return part.table(positions).row(0, named=True)
    raise KeyError(f"no slice {id} on track {track}")


def slices_of(scene: Scene, rank: int, source: str, ids: Sequence[int]) -> pl.DataFrame:
    """Return the positions of rows of a rank's table `source`. Columns PLACES; one row per slice positions, by id."""
    tracks = _tracks(scene, rank, source)
    parts = [pl.DataFrame(schema=PLACES)]
    for part in scene.parts:
        if part.rank == rank and len(ids):
            positions = np.flatnonzero(np.isin(part.slices["id"], np.asarray(ids, np.int32)))
            parts.append(part.table(positions).filter(pl.col("track").is_in(tracks)))
    return pl.concat(parts).sort("id")


def slice_near(scene: Scene, rank: int, source: str, id: int, at_ns: int) -> dict[str, int] | None:  # noqa: A002
    """Return the position of a row of a rank's table that begins at a time, or None.

    Only the part of the scene around that time is read.
    """
    begin_ns, end_ns = at_ns - _NEAR_NS, at_ns + _NEAR_NS + 1
    slices = view(scene, (begin_ns, end_ns), end_ns - begin_ns, _tracks(scene, rank, source)).filter(pl.col("id") == id)
    return None if slices.is_empty() else schema.select(slices, PLACES).row(0, named=True)


def peers(run: Run, scene: Scene, rank: int, activity_id: int) -> pl.DataFrame:
    """Return the activities of all ranks that belong to the same collective as an activity of a rank.

    Columns PEERS, times on the run's clock, by rank; no rows if no other rank is known to take part. wait_ns is from a
    rank's start to the last rank's. Of a large group, the MAX_PEERS last ranks are returned.
    """
    calls = run.table(collective_matching.matched_calls).filter(pl.col("window") == scene.window)
    collective_call = calls.filter(pl.col("rank") == rank, pl.col("activity_id") == activity_id).drop_nulls("instance")
    group_calls = calls.join(collective_call.select("instance"), on="instance", how="semi")
    if group_calls.height < 2:
        return pl.DataFrame(schema=PEERS)
    aligned = alignment.on_run_clock(group_calls, run.offsets, ("start_ns", "end_ns"))
    last_ns = pl.col("start_ns").max()
    timed = aligned.with_columns(pl.min_horizontal(last_ns, "end_ns").alias("until_ns"))
    rows = []
    for call in timed.sort("start_ns", descending=True).head(MAX_PEERS).iter_rows(named=True):
        position = slice_near(scene, call["rank"], "activities", call["activity_id"], call["start_ns"])
        if position is not None:
            rows.append({**position, "rank": call["rank"], "wait_ns": max(0, call["until_ns"] - position["start_ns"])})
    return pl.DataFrame(rows, schema=PEERS).sort("rank")


def find_by_name(scene: Scene, text: str, *, ranks: Collection[int] | None = None, limit: int = 1000) -> Matches:
    """Return the slices whose name contains `text`, ignoring case; none for ''.

    `ranks` limits the search to some ranks; the table has the first `limit` slices.
    """
    folded = text.casefold()
    is_match = np.array([bool(folded) and folded in name for name in scene.casefolded_names], bool)
    total, total_ns, parts = 0, 0, [pl.DataFrame(schema=MATCHES)]
    for part in scene.parts:
        if ranks is None or part.rank in ranks:
            index = part.by_name_index[is_match[part.by_name_index["name"]]]
            total += int(index["count"].sum())
            total_ns += int(index["busy_ns"].sum())
            rows = part.table(_earliest(part, index, limit))
            name = scene.names["name"].gather(rows["name_id"]).alias("name")
            parts.append(schema.select(rows.with_columns(name), MATCHES))
    matches = pl.concat(parts).sort("start_ns", "track", "row", "id")
    return Matches(total, total_ns, matches.head(limit))


def arrows(run: Run, scene: Scene, track: int, id: int) -> pl.DataFrame:  # noqa: A002
    """Return the arrows that start or end at a slice, at most MAX_ARROWS on its rank and one per peer.

    Columns ARROWS: track, row and id of both slices, the times at which the arrow starts and ends, on the run's clock,
    and its kind, one of ARROW_KINDS; one row per arrow. Raises KeyError if the scene has no such slice,
    BadTraceError if its trace cannot be read.
    """
    slice_at(scene, track, id)
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


def _tracks(scene: Scene, rank: int, source: str) -> list[int]:
    return scene.tracks.filter(pl.col("rank") == rank, pl.col("source") == source)["track"].to_list()


def _earliest(part: Part, index: Array, limit: int) -> Ints:
    """Return the positions of the first `limit` slices of these names, possibly of some more."""
    first, count = index["first"], index["count"]
    if not len(index) or limit < 1:
        return np.empty(0, np.int64)
    start_ns, share = part.slices["start_ns"], max(_FEW, 4 * limit // len(index))
    while True:
        counts = np.minimum(count, share)
        positions = part.by_name[trace_part.positions(first, counts)]
        if counts.sum() == count.sum():
            return positions.astype(np.int64)
        if counts.sum() >= limit:
            break
        share *= 4
    # At least `limit` slices begin by then, the first ones among them.
    until_ns = np.partition(start_ns[positions], limit - 1)[limit - 1]
    past = trace_part.first_true(first, first + count, lambda i: start_ns[part.by_name[i]] > until_ns)
    return part.by_name[trace_part.positions(first, past - first)].astype(np.int64)


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
        slices = slices_of(scene, rank, source, sorted(ids))
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
    peer_rows = peers(run, scene, rank, id)
    if peer_rows.is_empty():
        return pl.DataFrame(schema=ARROWS)
    last, *earlier = peer_rows.sort("start_ns", "rank", descending=[True, False]).iter_rows(named=True)
    if last["wait_ns"]:
        return pl.DataFrame(schema=ARROWS)  # it waited, too: for a rank that the scene does not draw
    at_ns = last["start_ns"]
    rows = [_arrow(last, at_ns, peer, min(at_ns, peer["start_ns"] + peer["dur_ns"]), COLLECTIVE) for peer in earlier]
    return pl.DataFrame(rows, schema=ARROWS, orient="row")


def _arrow(begin: dict[str, int], from_ns: int, end: dict[str, int], to_ns: int, how: str) -> tuple[int | str, ...]:
    place = ("track", "row", "id")
    return (*(begin[name] for name in place), from_ns, *(end[name] for name in place), to_ns, how)
