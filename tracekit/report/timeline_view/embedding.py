"""A scene as compressed bytes for one HTML page: the levels of detail of the tiles, as many as fit.

The page selects from the same slices and merged runs as `viewport.view`. Where all of them are too large, a cut removes
the shortest: a run whose slices are removed stands for them at every finer level.
"""

import functools
import gzip
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import escaping
from tracekit.model.intervals import Window
from tracekit.model.nesting import Flags, Ints
from tracekit.report import timeline
from tracekit.report.timeline import trace_part, viewport
from tracekit.report.timeline.trace_part import Array, Part
from tracekit.report.timeline_view import message

MAX_BANDS = 20_000
_ITEM_BYTES = 6
"""How many bytes an item takes after compression, as a first estimate."""
_OVERVIEW_PIXELS = 2000
"""Outside of the part in view, slices shorter than half a pixel of the whole run at this width may be removed."""
_ATTEMPTS = 6
_FULL_RATIO, _SAFETY_RATIO = 0.8, 0.95

_Columns: TypeAlias = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Cut:
    """Which levels of detail are embedded: from level `inside` on in `part` (ns, on the run's clock), else `outside`.

    At a level, slices shorter than 2**level / 2 ns are merged into runs. Level 0 contains every slice.
    """

    part: Window
    inside: int = 0
    outside: int = 0

    @property
    def is_whole(self) -> bool:
        """Whether every slice is embedded."""
        return self.outside == 0


@dataclass(frozen=True)
class Embedded:
    """A scene as gzip, the levels that it contains, and the number of its slices and merged runs."""

    data: bytes
    cut: Cut
    items: int


@dataclass(frozen=True)
class PageState:
    """What the page shows first: the part in ns from the scene's start, marks, the parameters of the link."""

    part: Window
    address: str = ""
    marks: Sequence[Mapping[str, Any]] = ()
    finding: str | None = None
    scene: Mapping[str, Any] | None = None
    """The scene as the browser gets it, if it differs from `message.scene`: with its tracks in another order."""
    range_tables: Mapping[str, Any] | None = None


SCRIPTS = (
    "time.js",
    "layout.js",
    "tile.js",
    "paint.js",
    "input.js",
    "range.js",
    "map.js",
    "pair.js",
    "pins.js",
    "panel.js",
    "page.js",
    "timeline.js",
)
"""In the order in which they are joined into one module: there is no build step."""


def embed(scene: timeline.Scene, page: PageState, max_bytes: int) -> Embedded:
    """Return a scene as bytes, at most `max_bytes` of them unless its coarsest level is larger."""
    part = (scene.span[0] + page.part[0], scene.span[0] + page.part[1])
    cuts = _cuts(scene, part)
    limit = max_bytes // _ITEM_BYTES
    best = None
    for _ in range(_ATTEMPTS):
        cut = _finest(scene, cuts, limit)
        columns = [table for part in scene.parts for table in _columns(part, cut)]
        columns = columns or [dict.fromkeys(_ITEM, np.empty(0, np.int64))]
        items = {name: np.concatenate([table[name] for table in columns]) for name in _ITEM}
        data = gzip.compress(_pack(scene, page, cut, items), 6, mtime=0)
        count = len(items["start_ns"])
        embedded = Embedded(data, cut, count)
        if len(data) <= max_bytes and (best is None or count > best.items):
            best = embedded
        is_full = len(data) > _FULL_RATIO * max_bytes
        if (len(data) <= max_bytes and (is_full or cut == cuts[0])) or (len(data) > max_bytes and cut == cuts[-1]):
            break
        # Head and names take bytes of their own, so that the estimate is corrected more than once.
        limit = min(int(count * max_bytes / len(data) * _SAFETY_RATIO), 2 * limit)
    return best or embedded


def script() -> str:
    """Return the module that draws the timeline."""
    return _join_assets(*SCRIPTS)


def embedded_script() -> str:
    """Return the module that draws the timeline of a page that holds its data."""
    return escaping.asset("inflate.js") + _join_assets(*SCRIPTS, "embedded.js")


def html() -> str:
    """Return the elements that the timeline draws in."""
    return escaping.asset("timeline/timeline.html")


def css() -> str:
    """Return the style sheet, which takes colours and fonts from Streamlit's custom properties."""
    return f"{escaping.asset('button.css')}\n{escaping.asset('timeline/timeline.css')}"


def _cuts(scene: timeline.Scene, part: Window) -> list[Cut]:
    """Cuts that may be embedded, from all slices to the coarsest levels."""
    coarsest = max(0, math.ceil(math.log2((scene.span[1] - scene.span[0]) / _OVERVIEW_PIXELS)))
    cuts = [Cut(part, 0, outside) for outside in range(coarsest + 1)]
    return cuts + [Cut(part, inside, coarsest) for inside in range(1, coarsest + 1)]


def _finest(scene: timeline.Scene, cuts: Sequence[Cut], limit: int) -> Cut:
    """Return the first cut with at most `limit` items, else the last one."""
    low, high = 0, len(cuts) - 1
    while low < high:
        middle = (low + high) // 2
        if _count(scene, cuts[middle]) <= limit:
            high = middle
        else:
            low = middle + 1
    return cuts[low]


def _count(scene: timeline.Scene, cut: Cut) -> int:
    return sum(int(counts.sum()) for part in scene.parts for _, counts, _ in _select_items(part, cut, _Zone(part, cut)))


def _columns(part: Part, cut: Cut) -> Iterator[_Columns]:
    """Yield the slices, then the runs of a part; a run whose slices are removed is made at level 0."""
    zone = _Zone(part, cut)
    for (records, segments), (low, counts, which) in zip(_tables(part), _select_items(part, cut, zone), strict=True):
        items, numbers = records[trace_part.positions(low, counts)], np.repeat(which, counts)
        start_ns, dur_ns = items["start_ns"], items["dur_ns"]
        is_run = records is part.runs
        made_level = items["made"].astype(np.int64) if is_run else np.zeros(len(items), np.int64)
        begin_ns, past_ns = (edges[numbers] for edges in zone.edges(segments))
        is_inside = (start_ns >= begin_ns) & (start_ns + dur_ns <= past_ns)
        busy_ns = items["busy_ns"] if is_run else dur_ns
        yield {
            **{name: segments[name][numbers] for name in ("track", "row", "ends")},
            "start_ns": start_ns,
            "dur_ns": dur_ns,
            "name": items["name"],
            "made": np.where(made_level <= np.where(is_inside, cut.inside, cut.outside), 0, made_level),
            "count": items["count"] if is_run else np.ones(len(items), np.int64),
            "fill": np.rint(255 * np.clip(busy_ns / np.maximum(dur_ns, 1), 0, 1)),
            "is_first": np.diff(numbers, prepend=-1) != 0,
        }


_ITEM = ("track", "row", "ends", "start_ns", "dur_ns", "name", "made", "count", "fill", "is_first")


def _tables(part: Part) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    return (part.slices, part.slice_segments), (part.runs, part.run_segments)


def _select_items(part: Part, cut: Cut, zone: "_Zone") -> Iterator[tuple[Ints, Ints, Ints]]:
    """Yield what a cut leaves of the slices, then of the runs: first place, how many, and number of each segment."""
    for records, segments in _tables(part):
        which = np.flatnonzero(segments["ends"] > cut.inside)
        low = segments["first"][which]
        high = low + segments["count"][which]
        is_fine = segments["ends"][which] <= cut.outside
        for limits, edges, flags in zip((low, high), zone.edges(segments), (_begins_in, _begins_after), strict=True):
            condition = functools.partial(flags, records, segments, edges)
            limits[is_fine] = trace_part.first_true(low[is_fine], high[is_fine], condition)
        yield low, high - low, which


def _begins_in(records: Array, segments: Array, begin_ns: Ints, positions: Ints) -> Flags:
    """Flag the items that begin at the edge of their segment or later."""
    flags: Flags = records["start_ns"][positions] >= begin_ns[_segment_at(segments, positions)]
    return flags


def _begins_after(records: Array, segments: Array, past_ns: Ints, positions: Ints) -> Flags:
    """Flag the items that begin behind the edge of their segment: an empty one at the edge does not."""
    edge_ns, start_ns = past_ns[_segment_at(segments, positions)], records["start_ns"][positions]
    flags: Flags = (start_ns >= edge_ns) & (start_ns + records["dur_ns"][positions] > edge_ns)
    return flags


def _segment_at(segments: Array, positions: Ints) -> Ints:
    number: Ints = np.searchsorted(segments["first"], positions, side="right") - 1
    return number


class _Zone:
    """The time range of each row that is embedded in detail.

    It extends from the first to the last item of the coarser level that overlaps `part`, so that each of these items
    is embedded with all of its slices or with none.
    """

    def __init__(self, part: Part, cut: Cut) -> None:
        tracks = np.ones(max(part.tracks, default=0) + 1, bool)
        zones = []
        for records, segments in _tables(part):
            positions, numbers = viewport.records_at(records, segments, tracks, cut.part, cut.outside)
            if records is part.runs:
                is_made = records["made"][positions] <= cut.outside
                positions, numbers = positions[is_made], numbers[is_made]
            start_ns = records["start_ns"][positions]
            zones.append((_row_key(segments)[numbers], start_ns, start_ns + records["dur_ns"][positions]))
        keys, start_ns, end_ns = (np.concatenate(columns) for columns in zip(*zones, strict=True))
        self._keys, row = np.unique(keys, return_inverse=True)
        self._begin_ns = np.full(len(self._keys) + 1, _NEVER_NS)  # the last: rows without a zone
        self._past_ns = np.full(len(self._keys) + 1, _NEVER_NS)
        self._past_ns[:-1] = -_NEVER_NS
        np.minimum.at(self._begin_ns, row, start_ns)
        np.maximum.at(self._past_ns, row, end_ns)

    def edges(self, segments: Array) -> tuple[Ints, Ints]:
        """Begin and end of the zone of each segment's row, in ns; a row without a zone has an empty one."""
        key = _row_key(segments)
        index = np.searchsorted(self._keys, key)
        keys = np.append(self._keys, -1)
        index = np.where(keys[index] == key, index, len(self._keys))
        return self._begin_ns[index], self._past_ns[index]


_NEVER_NS = np.iinfo(np.int64).max


def _row_key(segments: Array) -> Ints:
    key: Ints = segments["track"].astype(np.int64) << 32 | segments["row"]
    return key


def _pack(scene: timeline.Scene, page: PageState, cut: Cut, items: _Columns) -> bytes:
    """Return the message that embedded.js reads."""
    used, name = np.unique(items["name"], return_inverse=True)
    first = np.flatnonzero(items["is_first"])
    start_ns = items["start_ns"] - scene.span[0]
    distance_ns = np.diff(start_ns, prepend=0)
    distance_ns[first] = 0
    segments = {name: items[name][first] for name in ("track", "row", "ends")}
    segments |= {"count": np.diff(np.append(first, len(start_ns))), "first_start": start_ns[first]}
    columns = {"start": distance_ns, "dur": items["dur_ns"], "name": name}
    columns |= {name: items[name] for name in ("made", "count", "fill")}
    origin_ns = scene.span[0]
    head = {
        "scene": dict(page.scene or message.scene(scene)),
        "view": {"from": page.part[0], "to": page.part[1]},
        "first_tracks": message.initial_tracks(scene),
        "address": page.address,
        "findings": list(page.marks),
        "finding": page.finding,
        "range": page.range_tables,
        "detail": {
            "from": cut.part[0] - origin_ns,
            "to": cut.part[1] - origin_ns,
            "inside": cut.inside,
            "outside": cut.outside,
        },
        **message.names_and_labels(timeline.names(scene, used)),
        "kind_of_name": scene.kinds[used].tolist(),
        "segments": _table(segments),
        "items": _table(columns),
        **_bands(scene),
    }
    return message.pack(head)


def _bands(scene: timeline.Scene) -> dict[str, Any]:
    """Return the longest MAX_BANDS steps and units."""
    bands = scene.bands
    if bands.height > MAX_BANDS:
        bands = bands.top_k(MAX_BANDS, by=pl.col("end_ns") - pl.col("start_ns")).sort("rank", "start_ns")
    names = bands["name"].unique(maintain_order=True)
    numbers = bands["name"].replace_strict(names, pl.Series(range(len(names))), return_dtype=pl.Int64)
    columns = {
        "rank": bands["rank"].to_numpy(),
        "is_step": (bands["kind"] == "step").to_numpy(),
        "name": numbers.to_numpy(),
        "start": bands["start_ns"].to_numpy() - scene.span[0],
        "end": bands["end_ns"].to_numpy() - scene.span[0],
    }
    return {"band_names": [message.name_text(name) for name in names], "bands": _table(columns)}


def _table(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, Any]:
    length = len(next(iter(columns.values())))
    return {"length": length, "columns": {name: _planes(values) for name, values in columns.items()}}


def _planes(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """Return whole numbers, none negative, byte by byte: the lowest byte of all, then the next, as many as needed.

    >>> _planes(np.array([1, 258])).tolist()
    [1, 2, 0, 1]
    """
    width = (int(values.max(initial=0)).bit_length() + 7) // 8
    planes = np.ascontiguousarray(values, "<u8").view(np.uint8).reshape(-1, 8)[:, :width]
    return np.ascontiguousarray(planes.T).reshape(-1)


def _join_assets(*names: str) -> str:
    return "\n".join(escaping.asset(f"timeline/{name}") for name in names)
