"""Find the position of a slice in a scene by its id."""

from collections.abc import Sequence

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import Part
from tracekit.report.timeline.viewport import view

PLACES = schema.columns("track row id start_ns dur_ns name_id")
_NEAR_NS = 2  # the drift of a clock may be rounded in two ways


def slice_at(scene: Scene, track: int, id: int) -> dict[str, int]:  # noqa: A002
    """Return the position of one slice: track, row, id, start_ns, dur_ns, name_id. Raises KeyError if there is none."""
    number = scene.part_of_track.get(track)
    if number is not None:
        part = scene.parts[number]
        own = part.slice_segments[part.slice_segments["track"] == track]
        low, high = int(own["first"][0]), int(own["first"][-1] + own["count"][-1])
        positions = np.flatnonzero(part.slices["id"][low:high] == id) + low
        if len(positions):
            return _table(part, positions).row(0, named=True)
    raise KeyError(f"no slice {id} on track {track}")


def slices_of(scene: Scene, rank: int, source: str, ids: Sequence[int]) -> pl.DataFrame:
    """Return the positions of rows of a rank's table `source`. Columns PLACES; one row per slice positions, by id."""
    tracks = _tracks(scene, rank, source)
    parts = [pl.DataFrame(schema=PLACES)]
    for part in scene.parts:
        if part.rank == rank and len(ids):
            positions = np.flatnonzero(np.isin(part.slices["id"], np.asarray(ids, np.int32)))
            parts.append(_table(part, positions).filter(pl.col("track").is_in(tracks)))
    return pl.concat(parts).sort("id")


def slice_near(scene: Scene, rank: int, source: str, id: int, at_ns: int) -> dict[str, int] | None:  # noqa: A002
    """Return the position of a row of a rank's table that begins at a time, or None.

    Only the part of the scene around that time is read.
    """
    begin_ns, end_ns = at_ns - _NEAR_NS, at_ns + _NEAR_NS + 1
    slices = view(scene, (begin_ns, end_ns), end_ns - begin_ns, _tracks(scene, rank, source)).filter(pl.col("id") == id)
    return None if slices.is_empty() else schema.select(slices, PLACES).row(0, named=True)


def _tracks(scene: Scene, rank: int, source: str) -> list[int]:
    return scene.tracks.filter(pl.col("rank") == rank, pl.col("source") == source)["track"].to_list()


def _table(part: Part, places: Ints) -> pl.DataFrame:
    slices, segments = part.slices[places], part.segments_of(places)
    columns = {name: segments[name] for name in ("track", "row")}
    columns |= {name: slices[name] for name in ("id", "start_ns", "dur_ns")} | {"name_id": slices["name"]}
    return pl.DataFrame(columns).pipe(schema.select, PLACES)
