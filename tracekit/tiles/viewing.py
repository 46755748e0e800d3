"""What is seen of a scene in a part of its time: at most a few rectangles for each pixel of a row, at any zoom."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.intervals import Window
from tracekit.readers.nesting import Flags, Ints
from tracekit.tiles import ranges
from tracekit.tiles.part import Part
from tracekit.tiles.scene import Scene
from tracekit.tiles.stored import Array

VIEW = {
    "track": pl.Int32,
    "row": pl.Int32,
    "start_ns": pl.Int64,
    "dur_ns": pl.Int64,
    "name_id": pl.UInt32,
    "id": pl.Int32,
    "kind": pl.UInt8,
    "count": pl.UInt32,
    "busy_ns": pl.Int64,
}


def view(scene: Scene, part: Window, pixels: int, tracks: Sequence[int] | None = None) -> pl.DataFrame:
    """Return the rectangles that touch a part of the scene's time, drawn on so many pixels, of all tracks unless told.

    Columns VIEW, sorted by track, row and start; times are on the run's clock. A slice of a pixel or more is there as
    it is, with its id (of the table that its track is of) and count 1. Shorter ones may be merged with those before and
    after them in their row: then id is null, the rectangle reaches from the first to the last of `count` slices,
    busy_ns is their time, exactly, and name_id what most of that time is called. A merged rectangle is no wider than
    three pixels; a row has at most five rectangles a pixel. The rectangles of a row don't overlap. A rectangle that
    reaches beyond the part is there whole.
    """
    begin_ns, end_ns = part
    if end_ns <= begin_ns or pixels < 1:
        return pl.DataFrame(schema=VIEW)
    level = max(0, math.ceil(math.log2((end_ns - begin_ns) / pixels)))
    chosen = _chosen(scene, tracks)
    found = [_Found.of(each, chosen, part, level) for each in _touched(scene, tracks)]
    return _table(scene, found)


def names(scene: Scene, name_ids: Iterable[int]) -> list[str]:
    """Return what these name_ids stand for, in their order."""
    wanted = np.fromiter(name_ids, np.int64)
    return scene.named["name"].gather(wanted).to_list()


def _chosen(scene: Scene, tracks: Sequence[int] | None) -> Flags:
    chosen = np.full(scene.tracks.height + 1, tracks is None)
    if tracks is not None:
        known = np.asarray(tracks, np.int64)
        chosen[known[(known >= 0) & (known < scene.tracks.height)]] = True
    return chosen


def _touched(scene: Scene, tracks: Sequence[int] | None) -> Iterable[Part]:
    if tracks is None:
        return scene.parts
    numbers = sorted({scene.part_of_track[track] for track in tracks if track in scene.part_of_track})
    return [scene.parts[number] for number in numbers]


class _Found:
    """Rectangles of one trace, column by column, in no order."""

    def __init__(self, track: Ints, row: Ints, slices: Array, runs: Array) -> None:
        self.track, self.row, self.slices, self.runs = track, row, slices, runs

    @classmethod
    def of(cls, part: Part, chosen: Flags, window: Window, level: int) -> "_Found":
        slices, of_slice = _inside(part.slices, part.slice_segments, chosen, window, level)
        runs, of_run = _inside(part.runs, part.run_segments, chosen, window, level)
        is_made = runs["made"] <= level  # later ones hold those that stand here; there are fewer of them than of these
        runs, of_run = runs[is_made], of_run[is_made]
        segments = np.concatenate((part.slice_segments[of_slice], part.run_segments[of_run]))
        return cls(segments["track"], segments["row"], slices, runs)

    def column(self, name: str) -> Array:
        """Return a column that slices and runs have."""
        return np.concatenate((self.slices[name], self.runs[name]))


def _inside(
    records: Array, segments: Array, chosen: Flags, window: Window, level: int
) -> tuple[Array, npt.NDArray[np.int64]]:
    """Return what stands at a level and touches the window, and the segment of each."""
    which = np.flatnonzero((segments["ends"] > level) & chosen[segments["track"]])
    first = segments["first"][which]
    past = first + segments["count"][which]
    start_ns, dur_ns = records["start_ns"], records["dur_ns"]
    begin_ns, end_ns = window
    low = ranges.first(first, past, lambda at: (start_ns[at] >= begin_ns) | (start_ns[at] + dur_ns[at] > begin_ns))
    high = ranges.first(low, past, lambda at: start_ns[at] >= end_ns)
    counts = high - low
    return records[ranges.places(low, counts)], np.repeat(which, counts)


def _table(scene: Scene, found: Sequence[_Found]) -> pl.DataFrame:
    columns = {name: _concat([each.column(name) for each in found]) for name in ("start_ns", "dur_ns", "name")}
    columns |= {name: _concat([getattr(each, name) for each in found]) for name in ("track", "row")}
    columns["id"] = _concat([np.concatenate((e.slices["id"], np.full(len(e.runs), -1, np.int32))) for e in found])
    columns["count"] = _concat([np.concatenate((np.ones(len(e.slices), np.uint32), e.runs["count"])) for e in found])
    columns["busy_ns"] = _concat([np.concatenate((e.slices["dur_ns"], e.runs["busy_ns"])) for e in found])
    order = np.lexsort((columns["start_ns"], columns["row"], columns["track"]))
    kind = scene.kinds[columns["name"]]
    table = pl.DataFrame({name: values[order] for name, values in columns.items()} | {"kind": kind[order]})
    merged = pl.col("id") < 0
    return table.rename({"name": "name_id"}).with_columns(pl.when(~merged).then("id").alias("id")).select(
        pl.col(name).cast(dtype) for name, dtype in VIEW.items()
    )  # fmt: skip


def _concat(parts: Sequence[Array]) -> Array:
    return np.concatenate(parts) if parts else np.empty(0, np.int64)
