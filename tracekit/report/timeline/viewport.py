"""The visible part of a scene: at most a few rectangles per pixel of a row, at any zoom."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.intervals import Window
from tracekit.model.nesting import Flags, Ints
from tracekit.report.timeline import ranges
from tracekit.report.timeline.mapped_file import Array
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import Part

_SHORT_TYPES = {"track": pl.Int32, "row": pl.Int32, "id": pl.Int32, "kind": pl.UInt8}
VIEW = schema.columns(
    "track row start_ns dur_ns name_id id kind count busy_ns", name_id=pl.UInt32, count=pl.UInt32, **_SHORT_TYPES
)
_MERGED = -1  # in place of an id
_FEW = 64


def view(scene: Scene, part: Window, pixels: int, tracks: Sequence[int] | None = None) -> pl.DataFrame:
    """Return the rectangles that touch a part of the scene's time, drawn on `pixels` pixels; of all tracks by default.

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
    return _table(scene, [_rectangles(each, chosen, part, level) for each in _touched(scene, tracks)])


def names(scene: Scene, name_ids: Iterable[int]) -> list[str]:
    """Return what these name_ids stand for, in their order."""
    wanted = np.fromiter(name_ids, np.int64)
    return scene.names["name"].gather(wanted).to_list()


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


_Columns = dict[str, Array]


def _rectangles(part: Part, chosen: Flags, window: Window, level: int) -> _Columns:
    """Return the rectangles of one trace, column by column."""
    at, of_slice = standing_at(part.slices, part.slice_segments, chosen, window, level)
    slices = np.take(part.slices, at)
    at, of_run = standing_at(part.runs, part.run_segments, chosen, window, level)
    made = part.runs["made"][at] <= level  # runs of later levels contain these slices
    runs, of_run = np.take(part.runs, at[made]), of_run[made]
    columns = {name: np.concatenate((slices[name], runs[name])) for name in ("start_ns", "dur_ns", "name")}
    for name in ("track", "row"):
        columns[name] = np.concatenate((part.slice_segments[name][of_slice], part.run_segments[name][of_run]))
    columns["id"] = np.concatenate((slices["id"], np.full(len(runs), _MERGED, np.int32)))
    columns["count"] = np.concatenate((np.ones(len(slices), np.uint32), runs["count"]))
    columns["busy_ns"] = np.concatenate((slices["dur_ns"], runs["busy_ns"]))
    order = _order(columns["track"], columns["row"], columns["start_ns"])
    return {name: values[order] for name, values in columns.items()}


def standing_at(records: Array, segments: Array, chosen: Flags, window: Window, level: int) -> tuple[Ints, Ints]:
    """Return the places of what stands at a level and touches the window, and the segment of each.

    Of `chosen` tracks. Runs that are made at later levels are among them.
    """
    which = np.flatnonzero((segments["ends"] > level) & chosen[segments["track"]])
    first = segments["first"][which]
    past = first + segments["count"][which]
    start_ns, dur_ns = records["start_ns"], records["dur_ns"]
    begin_ns, end_ns = window
    low = ranges.first_true(first, past, lambda at: (start_ns[at] >= begin_ns) | (start_ns[at] + dur_ns[at] > begin_ns))
    near = np.minimum(low + _FEW, past)
    is_near = start_ns[np.minimum(near, len(start_ns) - 1)] >= end_ns  # true for most segments at a high zoom
    high = ranges.first_true(low, np.where(is_near, near, past), lambda at: start_ns[at] >= end_ns)
    counts = high - low
    return ranges.positions(low, counts), np.repeat(which, counts)


def _order(track: Ints, row: Ints, start_ns: Ints) -> Ints:
    """Return the order by track, row and start; no two are the same."""
    if not len(track):
        return np.empty(0, np.int64)
    since = start_ns - start_ns.min()
    rows, length = int(row.max()) + 1, int(since.max()) + 1
    if (int(track.max()) + 1) * rows * length >= 1 << 62:
        return np.lexsort((start_ns, row, track))
    return np.argsort((track.astype(np.int64) * rows + row) * length + since)


def _table(scene: Scene, found: Sequence[_Columns]) -> pl.DataFrame:
    if not found:
        return pl.DataFrame(schema=VIEW)
    columns = {name: np.concatenate([each[name] for each in found]) for name in found[0]}
    named = columns.pop("name")
    id_or_null = pl.when(pl.col("id") != _MERGED).then("id").alias("id")
    table = pl.DataFrame(columns | {"name_id": named, "kind": scene.kinds[named]}).with_columns(id_or_null)
    return schema.select(table, VIEW)
