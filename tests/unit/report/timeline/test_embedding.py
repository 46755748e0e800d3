"""An embedded scene against what the server answers from the same scene, whole and cut."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from tests.support import drawn_traces
from tracekit.ingest.loader import load
from tracekit.report import timeline
from tracekit.report.timeline_view import embedding, message
from tracekit.report.timeline_view.embedding import PageState

SAMPLE = Path(__file__).parents[4] / "sample_traces" / "demo-yafsdp"
COLUMNS = ("track", "row", "start_ns", "dur_ns", "name", "count", "fill")
AMPLE = 50_000_000


@pytest.fixture(scope="module")
def scene():
    return timeline.open_scene(load(str(SAMPLE)))


class Decoded:
    """The scene that a page holds, read as the format says and selected from by looking at every item."""

    def __init__(self, data):
        raw = gzip.decompress(data)
        length = int.from_bytes(raw[:4], "little")
        self.head, self.body = json.loads(raw[4 : 4 + length]), raw[4 + length :]
        segments, items = self._table("segments"), self._table("items")
        of = np.repeat(np.arange(len(segments["count"])), segments["count"])
        first = np.cumsum(segments["count"]) - segments["count"]
        distances = items["start"].copy()
        if len(first):
            distances[first] = segments["first_start"]
        ends = np.cumsum(distances)
        before = np.where(first > 0, ends[first - 1], 0) if len(first) else first
        start = ends - before[of]
        self.items = {name: segments[name][of] for name in ("track", "row", "ends")} | items | {"start": start}

    def _table(self, name):
        of = self.head[name]
        return {column: self._numbers(place, of["length"]) for column, place in of["columns"].items()}

    def _numbers(self, place, count):
        at, length = place
        planes = np.frombuffer(self.body[at : at + length], np.uint8).reshape(-1, count) if length else []
        return sum((plane.astype(np.int64) << 8 * n for n, plane in enumerate(planes)), np.zeros(count, np.int64))

    def view(self, part, level):
        """Return what stands at a level and touches a part, in ns from the scene's start, as rows of COLUMNS."""
        items = self.items
        start, end = items["start"], items["start"] + items["dur"]
        touches = (start < part[1]) & ((end > part[0]) | (start >= part[0]))
        found = np.flatnonzero(touches & (items["made"] <= level) & (items["ends"] > level))
        names = np.array(self.head["names"], object)[items["name"][found]]
        columns = [items["track"], items["row"], start, items["dur"]]
        rows = zip(
            *(c[found].tolist() for c in columns), names, items["count"][found], items["fill"][found], strict=True
        )
        return sorted(rows)


def of_server(scene, part, level):
    """Return the same of `timeline.view`, which draws a level at 2**level ns per pixel."""
    origin = scene.span[0]
    pixels = (part[1] - part[0]) / 2**level
    assert pixels == int(pixels)
    table = timeline.view(scene, (origin + part[0], origin + part[1]), int(pixels))
    busy = np.rint(255 * np.clip(table["busy_ns"].to_numpy() / np.maximum(table["dur_ns"].to_numpy(), 1), 0, 1))
    names = [message.name_text(name) for name in timeline.names(scene, table["name_id"])]
    columns = [table["track"], table["row"], table["start_ns"] - origin, table["dur_ns"]]
    return sorted(zip(*(c.to_list() for c in columns), names, table["count"].to_list(), busy.astype(int), strict=True))


def parts_of(scene, level, seed=1):
    span, length = scene.span[1] - scene.span[0], 1024 * 2**level
    starts = np.random.default_rng(seed).integers(0, max(span - length, 1), 5).tolist()
    return [(start, start + length) for start in starts]


@pytest.mark.parametrize("level", [0, 5, 12, 16, 20])
def test_a_whole_scene_answers_as_the_server_does_at_every_level(scene, level):
    embedded = embedding.embed(scene, PageState((0, scene.span[1] - scene.span[0])), AMPLE)
    assert embedded.cut.is_whole
    assert embedded.items == sum(len(part.slices) + len(part.runs) for part in scene.parts)
    decoded = Decoded(embedded.data)
    for part in parts_of(scene, level):
        assert decoded.view(part, level) == of_server(scene, part, level)


def test_a_cut_scene_has_all_slices_of_the_part_and_coarser_ones_elsewhere(scene):
    span = scene.span[1] - scene.span[0]
    first, past = message.steps_span(scene)
    shown = (first + (past - first) // 3, first + (past - first) // 3 + (1 << 24))
    embedded = embedding.embed(scene, PageState(shown), 300_000)
    outside = embedded.cut.outside
    assert len(embedded.data) <= 300_000
    assert embedded.cut.inside == 0
    assert outside > 0
    decoded = Decoded(embedded.data)
    for level in (0, 6, outside - 1):
        inside = (shown[0] + (1 << 22), shown[0] + (3 << 22))
        inside = (inside[0], inside[0] + (inside[1] - inside[0] >> level << level))
        assert decoded.view(inside, level) == of_server(scene, inside, level)
    for level in (outside, outside + 2):
        whole = (0, (span >> level) + 1 << level)
        assert decoded.view(whole, level) == of_server(scene, whole, level)
    # Below it, what is not in the part stands as at the coarser level, and every moment of a row is there once.
    fine, coarse = decoded.view((0, span), 0), decoded.view((0, span), outside)
    assert sum(count for *_, count, _ in fine) == sum(count for *_, count, _ in coarse)
    assert len(coarse) < len(fine)


def test_where_even_the_part_is_too_large_its_short_slices_are_merged(scene):
    first, past = message.steps_span(scene)
    embedded = embedding.embed(scene, PageState((first, past)), 250_000)
    assert len(embedded.data) <= 250_000
    assert embedded.cut.inside > 0
    decoded, level = Decoded(embedded.data), embedded.cut.inside
    part = (first, first + ((past - first) >> level << level))
    assert decoded.view(part, level) == of_server(scene, part, level)
    assert decoded.view(part, 0) == decoded.view(part, level)


def test_a_scene_without_slices_is_embedded():
    scene = timeline.open_scene(drawn_traces.run(drawn_traces.trace("compute a")))
    decoded = Decoded(embedding.embed(scene, PageState((0, 1)), AMPLE).data)
    assert len(decoded.view((0, 1), 0)) <= 1
