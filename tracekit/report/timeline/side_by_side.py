"""One rank each of two scenes as one scene, with a moment of both at the same time: two runs aligned by a step."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import polars as pl

from tracekit.model import schema
from tracekit.model.intervals import Window
from tracekit.model.nesting import Ints
from tracekit.report.timeline.scene import Scene
from tracekit.report.timeline.trace_part import Array, Part

LANES = schema.columns("track side own pair group", group=pl.String)
_THREAD_KIND = re.compile(r"\((.+?)(?:_\d+)?\)$")


@dataclass(frozen=True, eq=False)
class Side:
    """One rank of a scene, and the time on the clock of its run at which the other side is aligned with it, in ns."""

    scene: Scene
    rank: int
    at_ns: int

    @property
    def part(self) -> Part:
        """Return the slices of the rank. Raises KeyError if the scene does not draw it."""
        for part in self.scene.parts:
            if part.rank == self.rank:
                return part
        raise KeyError(f"rank {self.rank} is not drawn")

    @property
    def tracks(self) -> pl.DataFrame:
        """Return the tracks of the rank; columns as `Scene.tracks`."""
        return self.scene.tracks.filter(rank=self.rank)


@dataclass(frozen=True, eq=False)
class SideBySide:
    """Two sides as one scene on the clock of the first one's run.

    In `scene`, rank 0 is the first side and rank 1 the second one. `shift_ns` is what was added to the times of the
    second. `lanes` has columns LANES, one row per track of the scene, in the order of drawing: its side, its number in
    that side's scene, the number of its pair (lanes that correspond to each other share one), and the name of the group
    of devices or threads that both belong to.
    """

    scene: Scene
    sides: tuple[Side, Side]
    shift_ns: int
    lanes: pl.DataFrame = field(repr=False)

    def side_of(self, track: int) -> int:
        """Return the side of a track of the scene. Raises KeyError if there is no such track."""
        if not 0 <= track < self.scene.tracks.height:
            raise KeyError(f"no track {track}")
        return int(self.scene.tracks["rank"][track])

    def own_track(self, track: int) -> int:
        """Return the number of a track in the scene of its side."""
        return int(self.lanes.filter(track=track)["own"].item())

    def track_of(self, side: int, scene_track: int) -> int | None:
        """Return the number of a track of a side's scene; None if it is of a rank that is not drawn."""
        numbers = self.lanes.filter(side=side, own=scene_track)["track"]
        return None if numbers.is_empty() else int(numbers[0])

    def to_own_clock(self, side: int, window: Window) -> Window:
        """Return a window of the scene on the clock of a side's run."""
        shift_ns = self.shift_ns if side else 0
        return window[0] - shift_ns, window[1] - shift_ns


def side_by_side(first: Side, second: Side) -> SideBySide:
    """Draw one rank of each of two scenes in one, so that `at_ns` of both is the same moment.

    The times of the first remain. Takes time and memory in proportion to the slices of the second. Raises KeyError if a
    scene does not draw the rank of its side.
    """
    shift_ns = first.at_ns - second.at_ns
    scenes = first.scene, second.scene
    shifted = tuple(edge + shift_ns for edge in second.scene.span)
    span = (min(first.scene.span[0], shifted[0]), max(first.scene.span[1], shifted[1]))
    tracks = pl.concat([first.tracks, second.tracks])
    numbers = pl.int_range(tracks.height, eager=True).alias("track").cast(pl.Int64)
    rank = pl.Series("rank", [0] * first.tracks.height + [1] * second.tracks.height, pl.Int64)
    names = pl.concat([scene.names for scene in scenes])
    text = f"{scenes[0].key} {first.rank} {first.at_ns} {scenes[1].key} {second.rank} {second.at_ns}"
    scene = replace(
        first.scene,
        key=hashlib.sha256(text.encode()).hexdigest(),
        span=span,
        tracks=tracks.with_columns(numbers, rank),
        bands=pl.concat([_bands(first, rank=0, shift_ns=0), _bands(second, rank=1, shift_ns=shift_ns)]),
        parts=(
            _move_part(first.part, rank=0, tracks=_numbers(first, 0), shift_ns=0, first_name=0),
            _move_part(
                second.part,
                rank=1,
                tracks=_numbers(second, first.tracks.height),
                shift_ns=shift_ns,
                first_name=scenes[0].names.height,
            ),
        ),
        names=names,
    )
    return SideBySide(scene, (first, second), shift_ns, _lanes(first, second))


def _numbers(side: Side, first: int) -> Mapping[int, int]:
    return {track: first + place for place, track in enumerate(side.tracks["track"].to_list())}


def _bands(side: Side, *, rank: int, shift_ns: int) -> pl.DataFrame:
    moved = [(pl.col(name) + shift_ns).alias(name) for name in ("start_ns", "end_ns")]
    return side.scene.bands.filter(rank=side.rank).with_columns(*moved, pl.lit(rank, pl.Int64).alias("rank"))


def _move_part(part: Part, *, rank: int, tracks: Mapping[int, int], shift_ns: int, first_name: int) -> Part:
    """Return a part with other times, and with other numbers of its rank, tracks and names."""
    number = np.zeros(max(tracks, default=0) + 1, np.int32)
    number[list(tracks)] = list(tracks.values())

    def segments(old: Array) -> Array:
        new = old.copy()
        new["track"] = number[old["track"]]
        return new

    def records(old: Array) -> Array:
        if not shift_ns and not first_name:
            return old
        new = old.copy()
        new["start_ns"] += shift_ns
        new["name"] += first_name
        return new

    index = part.by_name_index.copy()
    index["name"] += first_name
    return Part(
        rank,
        records(part.slices),
        segments(part.slice_segments),
        records(part.runs),
        segments(part.run_segments),
        part.by_name,
        index,
    )


# Lanes that correspond to each other ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Lane:
    """A track of a side: `like` is what the lanes share that may correspond to it."""

    side: int
    track: int
    group: str
    like: tuple[str, int, str, str]
    busy_ns: int


def _lanes(first: Side, second: Side) -> pl.DataFrame:
    """Pair the lanes of both sides: of the same kind in the same device or process, the busiest with the busiest.

    Numbers of devices, streams, processes and threads differ between runs, so they decide nothing.
    """
    numbers = (_numbers(first, 0), _numbers(second, first.tracks.height))
    sides = [_lanes_of(side, number) for number, side in enumerate((first, second))]
    by_kind: dict[tuple[str, int, str, str], list[list[_Lane]]] = defaultdict(lambda: [[], []])
    for lane in sorted((lane for lanes in sides for lane in lanes), key=lambda lane: -lane.busy_ns):
        by_kind[lane.like][lane.side].append(lane)
    pairs = [pair for a, b in by_kind.values() for pair in _pair_lanes(a, b)]
    groups = list(dict.fromkeys(lane.like[:2] for lanes in sides for lane in lanes))
    pairs.sort(key=lambda pair: (groups.index(pair[0].like[:2]), pair[0].side, pair[0].track))
    names = {place: _group_name(pairs, place) for place in groups}
    rows = [
        (numbers[lane.side][lane.track], lane.side, lane.track, number, names[lane.like[:2]])
        for number, pair in enumerate(pairs)
        for lane in pair
    ]
    return pl.DataFrame(rows, schema=LANES, orient="row")


def _lanes_of(side: Side, number: int) -> list[_Lane]:
    # The time of the outermost slices of each track of a part.
    part = side.part
    outer = part.slice_segments[part.slice_segments["row"] == 0]
    busy: dict[int, int] = defaultdict(int)
    for segment in outer:
        first = int(segment["first"])
        durations: Ints = part.slices["dur_ns"]
        busy[int(segment["track"])] += int(durations[first : first + int(segment["count"])].sum())
    place: dict[str, int] = {}
    seen: dict[str, int] = defaultdict(int)
    lanes = []
    for row in side.tracks.iter_rows(named=True):
        kind = re.sub(r"\d+", "", row["group"]).strip()
        if row["group"] not in place:
            place[row["group"]] = seen[kind]
            seen[kind] += 1
        thread = _THREAD_KIND.search(row["label"])
        like = (kind, place[row["group"]], row["role"], thread[1] if thread else "")
        lanes.append(_Lane(number, row["track"], row["group"], like, busy.get(row["track"], 0)))
    return lanes


def _pair_lanes(a: list[_Lane], b: list[_Lane]) -> Iterable[tuple[_Lane, ...]]:
    """Yield the lanes of both in pairs, then those that are left of one."""
    yield from zip(a, b, strict=False)
    both = min(len(a), len(b))
    yield from ((lane,) for lane in (*a[both:], *b[both:]))


def _group_name(pairs: list[tuple[_Lane, ...]], place: tuple[str, int]) -> str:
    """Name of the device or process: as in both runs, or in one and in the other."""
    lanes = [lane for pair in pairs for lane in pair if lane.like[:2] == place]
    lanes.sort(key=lambda lane: (lane.side, lane.track))
    return " | ".join(dict.fromkeys(lane.group for lane in lanes))
