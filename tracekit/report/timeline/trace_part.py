"""One trace's slices and merged runs as laid out and stored in a file, each segment sorted by time."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import schema
from tracekit.model.nesting import Flags, Ints
from tracekit.model.trace import Trace
from tracekit.report import trace_tracks, track_nesting
from tracekit.report.timeline.level_of_detail import NO_LEVEL, group_starts, merge_levels
from tracekit.report.timeline.mapped_file import Array, MappedFile, Writer

TRACKS = schema.columns("group label role source lane rows")
BANDS = schema.columns("rank kind name start_ns end_ns")
STEP, UNIT = "step", "unit"
"""Kinds of bands."""

ToRunClock = Callable[[Ints], Ints]


@dataclass(frozen=True, eq=False)
class TraceLayout:
    """The slices of one trace, sorted by track, row and start, on the clock of the run.

    `tracks` has columns TRACKS, one row per track, from the top; `track` is an index into it. `named` (columns name,
    kind) holds the distinct names, `name` is an index into it. `id` is that of the row of the table `source` (for
    checkpoints its place in the table). `bands` has columns BANDS.
    """

    tracks: pl.DataFrame
    names: pl.DataFrame
    bands: pl.DataFrame
    track: Ints
    row: Ints
    start_ns: Ints
    dur_ns: Ints
    name: Ints
    id: Ints


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


def first_true(low: Ints, high: Ints, condition: Callable[[Ints], Flags]) -> Ints:
    """Return the first position of each range [low, high) from which a condition is true, or its end."""
    low, high = low.copy(), high.copy()
    pending = np.flatnonzero(low < high)
    while len(pending):
        middle = (low[pending] + high[pending]) >> 1
        is_true = condition(middle)
        high[pending[is_true]] = middle[is_true]
        low[pending[~is_true]] = middle[~is_true] + 1
        pending = pending[low[pending] < high[pending]]
    return low


def positions(low: Ints, counts: Ints) -> Ints:
    """Return the positions of all ranges, one after the other.

    >>> positions(np.array([5, 1]), np.array([2, 3])).tolist()
    [5, 6, 1, 2, 3]
    """
    places: Ints = np.arange(counts.sum()) + np.repeat(low - (np.cumsum(counts) - counts), counts)
    return places


def lay_out(trace: Trace, to_run_clock: ToRunClock) -> TraceLayout:
    """Lay out a trace; `to_run_clock` converts times of the trace to the clock of the run and keeps their order."""
    slices = (
        trace_tracks.slices(trace)
        .with_columns(pl.col("name", "kind").fill_null("?"), pl.col("dur_ns").clip(0))
        .drop_nulls(["start_ns", "dur_ns"])
    )
    start_ns = to_run_clock(slices["start_ns"].to_numpy())
    dur_ns = to_run_clock((slices["start_ns"] + slices["dur_ns"]).to_numpy()) - start_ns
    tracks = trace_tracks.tracks(trace, slices)
    names, name = _distinct_names(slices)
    track = np.searchsorted(tracks["track"].to_numpy(), slices["track"].to_numpy())
    ids = slices["id"].to_numpy()
    del slices
    row = track_nesting.rows(track, start_ns, dur_ns)
    rows = np.zeros(tracks.height, np.int64)
    np.maximum.at(rows, track, row + 1)
    sequence = np.lexsort((start_ns, row, track))
    return TraceLayout(
        tracks.with_columns(pl.Series("rows", rows, pl.Int64)).select(list(TRACKS)),
        names,
        pl.concat(
            [
                _bands(trace, STEP, trace_tracks.step_spans(trace), to_run_clock),
                _bands(trace, UNIT, _unit_spans(trace), to_run_clock),
            ]
        ),
        *(values[sequence] for values in (track, row, start_ns, dur_ns, name, ids)),
    )


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


def _distinct_names(slices: pl.DataFrame) -> tuple[pl.DataFrame, Ints]:
    """Return the distinct names with their kinds, in the order in which they come, and which of them each slice has."""
    name, kind = (slices[column].cast(pl.Categorical).to_physical().to_numpy() for column in ("name", "kind"))
    key = name.astype(np.int64) * (int(kind.max(initial=0)) + 1) + kind
    _, first, which = np.unique(key, return_index=True, return_inverse=True)
    order = np.argsort(first)  # codes differ from process to process
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return slices.select("name", "kind")[first[order]], place[which]


# Bands ---------------------------------------------------------------------------------------------------------------


def _unit_spans(trace: Trace) -> pl.DataFrame:
    """Spans in which the compute lane of each device works on one FSDP unit without interruption."""
    compute = trace.activities.filter(pl.col("kind") == "compute").drop_nulls("unit")
    devices = trace.lanes.select("lane", "device")
    busy = compute.group_by("lane").agg(pl.col("dur_ns").sum()).join(devices, on="lane", how="left")
    main = busy.sort("dur_ns", "lane", descending=[True, False]).unique("device", keep="first")
    work = compute.join(main.select("lane"), on="lane", how="semi").sort("lane", "start_ns", "id")
    unit = pl.when(pl.col("unit") == "").then(pl.lit("root")).otherwise("unit")
    name = pl.concat_str(unit, "phase", separator=" · ", ignore_nulls=True)
    stretches = work.group_by(pl.struct("lane", "step", "phase", "unit").rle_id().alias("stretch")).agg(
        name.first().alias("name"),
        pl.col("start_ns").min(),
        (pl.col("start_ns") + pl.col("dur_ns")).max().alias("end_ns"),
    )
    return stretches.sort("stretch")


def _bands(trace: Trace, kind: str, rows: pl.DataFrame, to_run_clock: ToRunClock) -> pl.DataFrame:
    times = [pl.Series(name, to_run_clock(rows[name].to_numpy()), pl.Int64) for name in ("start_ns", "end_ns")]
    spans = rows.with_columns(*times, pl.lit(trace.rank, pl.Int64).alias("rank"), pl.lit(kind).alias("kind"))
    return schema.select(spans, BANDS).sort("start_ns", "end_ns")
