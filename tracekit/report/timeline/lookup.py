"""Find the position of a slice in a scene by its id, and the same collective on other ranks."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import PLACES
from tracekit.report.timeline.viewport import view
from tracekit.sync import alignment, collective_matching

PEERS = schema.columns("rank track row id start_ns dur_ns wait_ns")
MAX_PEERS = 64
_NEAR_NS = 2  # the drift of a clock may be rounded in two ways


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


def _tracks(scene: Scene, rank: int, source: str) -> list[int]:
    return scene.tracks.filter(pl.col("rank") == rank, pl.col("source") == source)["track"].to_list()
