"""Messages to the timeline: a scene and a tile of it as plain numbers and text, times in ns from the scene's start.

A message is JSON followed by the columns as little-endian arrays: a tile of 20,000 slices has 0.7 MB, and no number is
parsed from text.
"""

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import polars as pl

from tracekit.model import escaping, kernel_names, schema, units
from tracekit.model.intervals import Window
from tracekit.report import charts, phrases, timeline
from tracekit.report.timeline import lookup
from tracekit.rules.rule import Finding
from tracekit.sync import alignment

MAX_NAME = 300
MAX_VALUE = 2000
MAX_BANDS = 2000
MAX_MARKS = 1500
MAX_MATCHES = 1000
MAX_ROWS = 80
MAX_OPEN_HOSTS = 1  # as in layout.js
MAX_FIRST_TRACKS = 64
MAP_BINS = 400
_MAP_KINDS = ("compute", "communication")
MARGIN_RATIO = 0.3
"""A tile extends beyond the view by this share on each side, so that panning has something to show."""
MIN_STEP_PX, MIN_UNIT_PX = 3, 6
MERGED = -1
MIN_CONTEXT_NS = 2_000
_CONTEXT_RATIO = 0.03
_SMALL_RATIO = 0.5
PATH = "critical-path"
"""The key of the marks of a critical path."""
TYPES = {
    "track": "<u4",
    "row": "<u2",
    "start": "<f8",
    "dur": "<f8",
    "name": "<u4",
    "id": "<i4",
    "kind": "u1",
    "count": "<u4",
    "fill": "u1",
}
_LIKE = {"python": "idle", "checkpoint": "phase", "?": "idle"}
"""Kinds that only the timeline has, with the kind whose colour they use."""
_LABELS = {"python": "Python frame", "checkpoint": "checkpoint", "?": "other"}
_ROLES = {"memcpy": "copy", "cpu_op": "host"} | {kind: kind for kind in ("compute", "communication", "checkpoint")}
_SHOWN_ABOVE = ("rank", "on", "start", "duration")
"""What the panel shows of every slice before the server has answered."""
_INKS = {"evidence": "evidence", "match": "waiting"}


Columns: TypeAlias = dict[str, npt.NDArray[Any]]
_ALIGNED = 8


@dataclass(frozen=True)
class View:
    """The view of a browser: its number, a part of the run in ns from the scene's start, its width, its tracks."""

    seq: int
    start_ns: int
    end_ns: int
    pixels: int
    tracks: tuple[int, ...]


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as bytes: the length of its JSON (4 bytes), the JSON, the columns.

    In the JSON a column is the offset of its array from the end of the JSON, and its length in bytes.
    """
    arrays: list[bytes] = []
    end = 0

    def append(column: npt.NDArray[Any]) -> tuple[int, int]:
        nonlocal end
        data = column.tobytes()
        arrays.append(data + bytes(-len(data) % _ALIGNED))
        end += len(arrays[-1])
        return end - len(arrays[-1]), len(data)

    head = json.dumps(message, default=append).encode()
    return b"".join((len(head).to_bytes(4, "little"), head, *arrays))


def scene(scene: timeline.Scene) -> dict[str, Any]:
    """Constants of a scene while it is shown: its length, tracks, colours."""
    tracks = scene.tracks.select("track", "rank", "group", "label", "role", "rows").to_dicts()
    for track in tracks:
        track |= {"group": escaping.inert(track["group"], MAX_NAME), "label": escaping.inert(track["label"], MAX_NAME)}
        track["rows"] = min(track["rows"], MAX_ROWS)
    units = scene.bands.filter(pl.col("kind") == "unit")
    return {
        "scene": scene.key,
        "span_ns": scene.span[1] - scene.span[0],
        "tracks": tracks,
        "unit_ranks": units["rank"].unique().sort().to_list(),
        "steps": steps_span(scene),
        "overview": _overview(scene),
        "kinds": [kind(name) for name in timeline.KINDS],
        "colours": {ink: charts.COLOURS[kind] for ink, kind in _INKS.items()},
    }


def steps_span(scene: timeline.Scene) -> Window | None:
    """Begin of the first step and end of the last one, in ns from the scene's start; None without steps."""
    steps = scene.bands.filter(pl.col("kind") == "step")
    if steps.is_empty():
        return None
    first_ns, past_ns = steps.select(pl.col("start_ns").min(), pl.col("end_ns").max()).row(0)
    return int(first_ns) - scene.span[0], int(past_ns) - scene.span[0]


def _overview(scene: timeline.Scene) -> dict[str, Any]:
    """Return the share of time in which the ranks compute and communicate, over the run: 0 to 255 in MAP_BINS bins.

    For the eye only: a rectangle of merged slices counts as evenly busy.
    """
    work = scene.tracks.filter(pl.col("role").is_in(_MAP_KINDS))
    table = timeline.view(scene, scene.span, MAP_BINS, work["track"].to_list())
    edges = np.linspace(0, scene.span[1] - scene.span[0], MAP_BINS + 1)
    ranks = max(work["rank"].n_unique(), 1)
    bars = []
    for kind in _MAP_KINDS:
        rows = table.filter(pl.col("kind") == timeline.KINDS.index(kind))
        start = rows["start_ns"].to_numpy() - scene.span[0]
        end, busy = start + rows["dur_ns"].to_numpy(), rows["busy_ns"].to_numpy().astype(float)
        density = busy / np.maximum(end - start, 1)
        inside = [
            float((np.clip(np.minimum(end, right) - np.maximum(start, begin), 0, None) * density).sum())
            for begin, right in pairwise(edges)
        ]
        shares = np.clip(np.array(inside) / np.maximum(np.diff(edges) * ranks, 1), 0, 1)
        bars.append({"colour": charts.COLOURS[kind], "shares": np.rint(255 * shares).astype(int).tolist()})
    return {"bars": bars}


def initial_tracks(scene: timeline.Scene) -> tuple[int, ...]:
    """Return the tracks that a browser requests first: with several ranks it folds those of the host."""
    tracks = scene.tracks
    visible = tracks.filter(pl.col("role") != "host") if tracks["rank"].n_unique() > MAX_OPEN_HOSTS else tracks
    return tuple(visible["track"].head(MAX_FIRST_TRACKS))


def initial_part(scene: timeline.Scene) -> Window:
    """Return the part to show first, in ns from the scene's start: everything, or the steps.

    The steps are shown if a save or logs long after them would make them small.
    """
    span_ns, steps = scene.span[1] - scene.span[0], steps_span(scene)
    part = around(scene, steps) if steps else (0, span_ns)
    return part if part[1] - part[0] < span_ns * _SMALL_RATIO else (0, span_ns)


def around(scene: timeline.Scene, part: Window) -> Window:
    """Return a part of the scene with some context on both sides, in ns from the scene's start."""
    context_ns = int((part[1] - part[0]) * _CONTEXT_RATIO)
    return max(part[0] - context_ns, 0), min(part[1] + context_ns, scene.span[1] - scene.span[0])


def chosen_finding(by_key: Mapping[str, Finding], finding_name: str) -> str | None:
    """Return the key of the finding that a link names by its key or id; None where there is none."""
    return next((key for key, finding in by_key.items() if finding_name in (key, finding.id)), None)


def tile(scene: timeline.Scene, view: View) -> dict[str, Any]:
    """Return the slices and bands of a view and its margins."""
    span_ns = scene.span[1] - scene.span[0]
    margin_ns = int((view.end_ns - view.start_ns) * MARGIN_RATIO)
    start_ns, end_ns = max(view.start_ns - margin_ns, 0), min(view.end_ns + margin_ns, span_ns)
    pixels = max(round(view.pixels * (end_ns - start_ns) / max(view.end_ns - view.start_ns, 1)), 1)
    part = (scene.span[0] + start_ns, scene.span[0] + end_ns)
    table = timeline.view(scene, part, pixels, view.tracks)
    # From here on NumPy: for such small tables the thread pool of Polars costs more than the work.
    of_table = {name: table[name].to_numpy() for name in table.columns if name != "id"}
    distinct, name = np.unique(of_table["name_id"], return_inverse=True)
    merged = of_table["count"] > 1
    columns = {
        "track": of_table["track"],
        "row": of_table["row"],
        "start": of_table["start_ns"] - scene.span[0],
        "dur": of_table["dur_ns"],
        "name": name,
        "id": np.where(merged, MERGED, np.nan_to_num(table["id"].to_numpy(), nan=MERGED)),
        "kind": of_table["kind"],
        "count": of_table["count"],
        "fill": np.rint(255 * np.clip(of_table["busy_ns"] / np.maximum(of_table["dur_ns"], 1), 0, 1)),
    }
    extent = {"seq": view.seq, "start": start_ns, "end": end_ns, "pixels": pixels, "tracks": view.tracks}
    return extent | {
        **names_and_labels(timeline.names(scene, distinct)),
        "columns": _columns(columns),
        "bands": _bands(scene, part, pixels, view.tracks),
    }


def names_and_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return names of slices as text, and the labels that are drawn instead of names of kernels, by number."""
    labels = {number: short for number, name in enumerate(names) if (short := kernel_names.short(name)) != name}
    return {
        "names": [name_text(name) for name in names],
        "labels": {number: name_text(short) for number, short in labels.items()},
    }


def matches(scene: timeline.Scene, text: str, result: timeline.Matches) -> dict[str, Any]:
    """Return the matches of a search: their number, their total duration, and the first of them by time."""
    table = result.table.head(MAX_MATCHES)
    distinct = table["name"].unique(maintain_order=True)
    name = table["name"].replace_strict(distinct, pl.Series(range(len(distinct))), return_dtype=pl.UInt32)
    columns = {
        "track": table["track"].to_numpy(),
        "row": table["row"].to_numpy(),
        "start": table["start_ns"].to_numpy() - scene.span[0],
        "dur": table["dur_ns"].to_numpy(),
        "name": name.to_numpy(),
        "id": table["id"].to_numpy(),
    }
    names = [escaping.inert(name, MAX_NAME) for name in distinct]
    totals = {"text": text, "total": result.count, "total_ns": result.total_ns}
    return totals | {"names": names, "columns": _columns(columns)}


def findings(scene: timeline.Scene, window: int, by_key: Mapping[str, Finding]) -> list[dict[str, Any]]:
    """Return the longest spans of the findings' evidence in this window, in the order of the findings."""
    marks = [mark for key, finding in by_key.items() for mark in _marks(scene, window, key, finding)]
    longest = sorted(marks, key=lambda mark: mark["start"] - mark["end"])[:MAX_MARKS]
    order = {key: number for number, key in enumerate(by_key)}
    return sorted(longest, key=lambda mark: (order[mark["key"]], mark["start"] - mark["end"]))


def path_marks(scene: timeline.Scene, parts: pl.DataFrame) -> list[dict[str, Any]]:
    """Return the parts of a critical path as marks of one row above the tracks, each in the colour of its kind."""
    bars = charts.path_parts(parts, scene.span[0], max_parts=MAX_MARKS)
    about = {"key": PATH, "finding": "critical path", "severity": ""}
    return [
        about
        | {"rank": row["rank"], "start": row["from_ns"], "end": row["from_ns"] + row["dur_ns"]}
        | {"title": escaping.inert(f"{row['kind']} · {row['name']}", MAX_NAME)}
        | {"colour": charts.PATH_COLOURS[row["kind"]]}
        for row in bars.select("rank", "kind", "name", "from_ns", "dur_ns").iter_rows(named=True)
    ]


def details(scene: timeline.Scene, slice_details: timeline.Details) -> list[dict[str, Any]]:
    """Return the details of a slice as rows of text, each with the slice that it links to, if any."""
    rows = [
        _row(
            fact.label,
            fact.value,
            slice_place(scene, fact.track, fact.id) if fact.track is not None and fact.id is not None else None,
        )
        for fact in slice_details.facts
        if fact.label not in _SHOWN_ABOVE
    ]
    if slice_details.stack:
        rows.append(_row("stack", "\n".join(escaping.inert(name, MAX_NAME) for name in slice_details.stack)))
    for peer in slice_details.peers.iter_rows(named=True):
        time = f"{units.duration(peer['dur_ns'])} from {units.duration(peer['start_ns'] - scene.span[0])}"
        waits = f", waits {units.duration(peer['wait_ns'])}" if peer["wait_ns"] else ""
        rows.append(_row(f"rank {peer['rank']}", time + waits, slice_place(scene, peer["track"], peer["id"])))
    return rows


def arrows(scene: timeline.Scene, table: pl.DataFrame) -> list[dict[str, Any]]:
    """Return arrows with both of their slices."""
    origin_ns = scene.span[0]
    return [
        {
            "how": row["how"],
            **{f"{side}_ns": row[f"{side}_ns"] - origin_ns for side in ("from", "to")},
            **{side: slice_place(scene, row[f"{side}_track"], row[f"{side}_id"]) for side in ("from", "to")},
        }
        for row in table.iter_rows(named=True)
    ]


def _row(label: str, value: str, link: Mapping[str, Any] | None = None) -> dict[str, Any]:
    lines = [escaping.inert(line, MAX_VALUE) for line in value.split("\n")]
    return {"label": escaping.inert(label), "value": "\n".join(lines), "slice": link}


def slice_place(scene: timeline.Scene, track: int, slice_id: int) -> dict[str, Any]:
    """Return a slice as the browser selects it: track, row, id, start, dur, name. Raises KeyError without it."""
    row = lookup.slice_at(scene, track, slice_id)
    position = {"track": track, "row": int(row["row"]), "id": slice_id}
    times = {"start": int(row["start_ns"]) - scene.span[0], "dur": int(row["dur_ns"])}
    return {**position, **times, "name": escaping.inert(timeline.names(scene, [row["name_id"]])[0], MAX_NAME)}


def kind(name: str) -> dict[str, Any]:
    """Return a kind of slices as the browser shows it: label, colour, role."""
    like = _LIKE.get(name, name)
    return {
        "name": name,
        "label": _LABELS.get(name) or charts.KIND_LABELS.get(name, name),
        "colour": charts.COLOURS[like],
        "pale": like in charts.LIGHT_KINDS,
        "role": _ROLES.get(name, ""),
    }


def _columns(columns: Mapping[str, npt.NDArray[Any]]) -> Columns:
    return {name: np.ascontiguousarray(values, TYPES[name]) for name, values in columns.items()}


@functools.lru_cache(maxsize=1 << 16)
def name_text(text: str) -> str:
    """Return a name from a trace as one line of visible characters."""
    return escaping.inert(text, MAX_NAME)


def _bands(scene: timeline.Scene, part: Window, pixels: int, tracks: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the steps and units of the tracks' ranks in a part that are wide enough to draw."""
    ranks, is_step, rank, start_ns, end_ns = _band_arrays(scene)
    least_ns = np.where(is_step, MIN_STEP_PX, MIN_UNIT_PX) * ((part[1] - part[0]) / pixels)
    is_seen = (start_ns < part[1]) & (end_ns > part[0]) & (end_ns - start_ns >= least_ns)
    rows = np.flatnonzero(is_seen & np.isin(rank, ranks[[track for track in tracks if 0 <= track < len(ranks)]]))
    if len(rows) > MAX_BANDS:
        rows = np.sort(rows[np.argsort(start_ns[rows] - end_ns[rows], kind="stable")[:MAX_BANDS]])
    names, kinds = (scene.bands[name].gather(rows).to_list() for name in ("name", "kind"))
    times = zip((start_ns[rows] - scene.span[0]).tolist(), (end_ns[rows] - scene.span[0]).tolist(), strict=True)
    return [
        {"rank": r, "kind": kind, "name": name_text(name), "start": start, "end": end}
        for r, kind, name, (start, end) in zip(rank[rows].tolist(), kinds, names, times, strict=True)
    ]


@functools.lru_cache(maxsize=8)
def _band_arrays(scene: timeline.Scene) -> tuple[npt.NDArray[Any], ...]:
    """Return the rank of each track, and of each band whether it is a step, its rank, start and end."""
    bands = scene.bands
    columns = (bands[name].to_numpy() for name in ("rank", "start_ns", "end_ns"))
    return scene.tracks["rank"].to_numpy(), (bands["kind"] == "step").to_numpy(), *columns


def _marks(scene: timeline.Scene, window: int, key: str, finding: Finding) -> Iterable[dict[str, Any]]:
    rows = evidence_spans(scene, window, finding)
    title = escaping.inert(finding.sentence, MAX_NAME)
    about = {
        "key": key,
        "finding": f"{finding.code} {phrases.rule_name(finding.code)}",
        "severity": finding.severity.label,
        "title": title,
    }
    for rank, start_ns, end_ns in rows.select("rank", "start_ns", "end_ns").iter_rows():
        yield about | {"rank": rank, "start": start_ns - scene.span[0], "end": end_ns - scene.span[0]}


def evidence_spans(scene: timeline.Scene, window: int, finding: Finding) -> pl.DataFrame:
    """Return the evidence in this window on the clock of the run: rank, start_ns, end_ns, lane (null: unknown)."""
    rows = finding.evidence
    if not {"rank", "start_ns", "dur_ns"} <= set(rows.columns):
        return pl.DataFrame(schema=_SPANS)
    return aligned_spans(scene, window, rows.drop_nulls(["rank", "start_ns", "dur_ns"]))


def aligned_spans(scene: timeline.Scene, window: int, rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows (rank, start_ns, dur_ns, maybe window and lane; on their traces' clocks) as `evidence_spans` does."""
    if "window" in rows.columns:
        rows = rows.filter(pl.col("window").fill_null(0) == window)
    elif window:
        return pl.DataFrame(schema=_SPANS)
    lane = pl.col("lane") if "lane" in rows.columns else pl.lit(None)
    times = rows.select(
        pl.lit(window, pl.Int64).alias("window"),
        "rank",
        "start_ns",
        (pl.col("start_ns") + pl.col("dur_ns")).alias("end_ns"),
        lane.cast(pl.Int64).alias("lane"),
    )
    return schema.select(alignment.on_run_clock(times, scene.offsets, ("start_ns", "end_ns")), _SPANS)


_SPANS = schema.columns("rank start_ns end_ns lane")
