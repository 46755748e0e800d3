"""The visible part of a scene: at most a few rectangles per pixel of a row, at any zoom."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.intervals import Window
from tracekit.model.nesting import Flags, Ints
from tracekit.report.timeline import trace_part
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import Array, Part

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
    is_drawn = np.full(scene.tracks.height + 1, tracks is None)
    if tracks is not None:
        numbers = np.asarray(tracks, np.int64)
        is_drawn[numbers[(numbers >= 0) & (numbers < scene.tracks.height)]] = True
    return _table(scene, [_rectangles(trace_part, is_drawn, part, level) for trace_part in _parts_of(scene, tracks)])


def names(scene: Scene, name_ids: Iterable[int]) -> list[str]:
    """Names of these name_ids, in their order."""
    ids = np.fromiter(name_ids, np.int64)
    return scene.names["name"].gather(ids).to_list()


def _parts_of(scene: Scene, tracks: Sequence[int] | None) -> Iterable[Part]:
    if tracks is None:
        return scene.parts
    numbers = sorted({scene.part_of_track[track] for track in tracks if track in scene.part_of_track})
    return [scene.parts[number] for number in numbers]


_Columns = dict[str, Array]


def _rectangles(part: Part, is_drawn: Flags, window: Window, level: int) -> _Columns:
    positions, of_slice = records_at(part.slices, part.slice_segments, is_drawn, window, level)
    slices = np.take(part.slices, positions)
    positions, of_run = records_at(part.runs, part.run_segments, is_drawn, window, level)
    is_made = part.runs["made"][positions] <= level  # runs of later levels contain these slices
    runs, of_run = np.take(part.runs, positions[is_made]), of_run[is_made]
    columns = {name: np.concatenate((slices[name], runs[name])) for name in ("start_ns", "dur_ns", "name")}
    for name in ("track", "row"):
        columns[name] = np.concatenate((part.slice_segments[name][of_slice], part.run_segments[name][of_run]))
    columns["id"] = np.concatenate((slices["id"], np.full(len(runs), _MERGED, np.int32)))
    columns["count"] = np.concatenate((np.ones(len(slices), np.uint32), runs["count"]))
    columns["busy_ns"] = np.concatenate((slices["dur_ns"], runs["busy_ns"]))
    order = _order(columns["track"], columns["row"], columns["start_ns"])
    return {name: values[order] for name, values in columns.items()}


def records_at(records: Array, segments: Array, is_drawn: Flags, window: Window, level: int) -> tuple[Ints, Ints]:
    """Positions of the records that exist at a level and touch the window, and the segment of each.

    Of the tracks flagged in `is_drawn`. Runs that are made at later levels are among them.
    """
    which = np.flatnonzero((segments["ends"] > level) & is_drawn[segments["track"]])
    first = segments["first"][which]
    past = first + segments["count"][which]
    start_ns, dur_ns = records["start_ns"], records["dur_ns"]
    begin_ns, end_ns = window
    low = trace_part.first_true(first, past, lambda i: (start_ns[i] >= begin_ns) | (start_ns[i] + dur_ns[i] > begin_ns))
    near = np.minimum(low + _FEW, past)
    is_near = start_ns[np.minimum(near, len(start_ns) - 1)] >= end_ns  # true for most segments at a high zoom
    high = trace_part.first_true(low, np.where(is_near, near, past), lambda i: start_ns[i] >= end_ns)
    counts = high - low
    return trace_part.positions(low, counts), np.repeat(which, counts)


def _order(track: Ints, row: Ints, start_ns: Ints) -> Ints:
    if not len(track):
        return np.empty(0, np.int64)
    since = start_ns - start_ns.min()
    rows, length = int(row.max()) + 1, int(since.max()) + 1
    if (int(track.max()) + 1) * rows * length >= 1 << 62:
        return np.lexsort((start_ns, row, track))
    return np.argsort((track.astype(np.int64) * rows + row) * length + since)


def _table(scene: Scene, parts: Sequence[_Columns]) -> pl.DataFrame:
    if not parts:
        return pl.DataFrame(schema=VIEW)
    columns = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    name_ids = columns.pop("name")
    id_or_null = pl.when(pl.col("id") != _MERGED).then("id").alias("id")
    table = pl.DataFrame(columns | {"name_id": name_ids, "kind": scene.kinds[name_ids]}).with_columns(id_or_null)
    return schema.select(table, VIEW)
