"""One trace's slices and merged runs as stored in a file, each segment sorted by time."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import schema
from tracekit.model.nesting import Ints
from tracekit.report.timeline.layout import TraceLayout
from tracekit.report.timeline.level_of_detail import NO_LEVEL, group_starts, merge_levels
from tracekit.report.timeline.mapped_file import Array, MappedFile, Writer

SLICE = np.dtype([("start_ns", "<i8"), ("dur_ns", "<i8"), ("name", "<u4"), ("id", "<i4")])
_RUN_FIELDS = ("start_ns", "dur_ns", "busy_ns", "name", "count", "made", "spare")
RUN = np.dtype({"names": _RUN_FIELDS, "formats": ("<i8",) * 3 + ("<u4",) * 4})
SEGMENT = np.dtype(
    [("first", "<i8"), ("count", "<i8"), ("track", "<i4"), ("row", "<i4"), ("ends", "<i4"), ("s", "<i4")]
)
"""Slices or runs of one row that end at one level: they follow each other in time, one after the other."""
NAME = np.dtype([("first", "<i8"), ("count", "<i8"), ("busy_ns", "<i8"), ("name", "<u4"), ("spare", "<u4")])
"""Where the slices of one name stand in `by_name`, and how much time they have together."""

PLACES = schema.columns("track row id start_ns dur_ns name_id")
_ARRAYS = {
    "slices": SLICE,
    "slice_segments": SEGMENT,
    "runs": RUN,
    "run_segments": SEGMENT,
    "by_name": np.dtype("<u4"),
    "by_name_index": NAME,
}


@dataclass(frozen=True, eq=False)
class Part:
    """One trace. Tracks are numbered as in the scene; `by_name` holds places of slices by name and start."""

    rank: int
    slices: Array
    slice_segments: Array
    runs: Array
    run_segments: Array
    by_name: npt.NDArray[np.uint32]
    by_name_index: Array

    @classmethod
    def of(cls, stored: MappedFile, number: int) -> "Part":
        """Return the part that was written under this number."""
        rank = stored.metadata["ranks"][number]
        return cls(rank, *(stored.array(f"{name}{number}", dtype) for name, dtype in _ARRAYS.items()))

    def write(self, writer: Writer, number: int) -> None:
        """Write the part under a number of its own."""
        for name in _ARRAYS:
            writer.array(f"{name}{number}", getattr(self, name))

    def table(self, positions: Ints) -> pl.DataFrame:
        """Return the slices at these positions. Columns PLACES; one row per slice."""
        slices = self.slices[positions]
        segments = self.slice_segments[np.searchsorted(self.slice_segments["first"], positions, side="right") - 1]
        columns = {name: segments[name] for name in ("track", "row")}
        columns |= {name: slices[name] for name in ("id", "start_ns", "dur_ns")} | {"name_id": slices["name"]}
        return schema.select(pl.DataFrame(columns), PLACES)

    @property
    def tracks(self) -> set[int]:
        """Return the tracks that it has slices on."""
        return set(self.slice_segments["track"].tolist())


def build_part(layout: TraceLayout, rank: int, *, first_track: int, names: Ints) -> Part:
    """Make the part of a rank's trace: its tracks get numbers from `first_track`, its names the ids `names`."""
    rows = np.cumsum(group_starts(layout.track, layout.row)) - 1
    start_ns, name = layout.start_ns, names[layout.name] if len(names) else layout.name
    origin_ns = int(start_ns.min()) if len(start_ns) else 0
    ends, runs = merge_levels(rows, start_ns - origin_ns, layout.dur_ns, name)
    slices = np.zeros(len(rows), SLICE)
    for field, values in (("start_ns", start_ns), ("dur_ns", layout.dur_ns), ("name", name), ("id", layout.id)):
        slices[field] = values
    merged = np.zeros(len(runs.first), RUN)
    merged["start_ns"] = start_ns[runs.first]
    merged["dur_ns"] = (start_ns + layout.dur_ns)[runs.last] - start_ns[runs.first]
    for field in ("busy_ns", "name", "count", "made"):
        merged[field] = getattr(runs, field)
    place = (layout.track + first_track, layout.row)
    sequence, segments = _segments(rows, ends, place)
    run_place = (place[0][runs.first], place[1][runs.first])
    run_sequence, run_segments = _segments(rows[runs.first], runs.ends, run_place)
    slices = slices[sequence]
    return Part(rank, slices, segments, merged[run_sequence], run_segments, *_by_name(slices))


def _segments(row: Ints, ends: Ints, place: tuple[Ints, Ints]) -> tuple[Ints, Array]:
    """Return the order by row, end and start, and the segments of one row and end in that order."""
    # Those of one row and end come in the order of their starts already.
    sequence = np.argsort(row * (NO_LEVEL + 1) + ends, kind="stable")
    row, ends = row[sequence], ends[sequence]
    first = np.flatnonzero(group_starts(row, ends))
    segments = np.zeros(len(first), SEGMENT)
    segments["first"] = first
    segments["count"] = np.diff(np.append(first, len(row)))
    segments["track"], segments["row"] = (column[sequence[first]] for column in place)
    segments["ends"] = ends[first]
    return sequence, segments


def _by_name(slices: Array) -> tuple[npt.NDArray[np.uint32], Array]:
    sequence = np.lexsort((slices["start_ns"], slices["name"]))
    name = slices["name"][sequence]
    first = np.flatnonzero(group_starts(name))
    index = np.zeros(len(first), NAME)
    index["first"] = first
    index["count"] = np.diff(np.append(first, len(name)))
    index["name"] = name[first]
    if len(first):
        index["busy_ns"] = np.add.reduceat(slices["dur_ns"][sequence], first)
    return sequence.astype(np.uint32), index
