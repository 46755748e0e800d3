"""One rank each of two runs in one scene: every slice of both is there, at its time from the aligned moment."""

from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tracekit.report import step_pair, timeline
from tracekit.sync import alignment

SAMPLES = Path(__file__).parents[4] / "sample_traces"
PICTURE = """
    step     000001111122222
    compute  aab..aabb.aab..
    comm     ..xx...xxx..xx.
"""
OTHER = """
    step     ...111112222
    comm     ....xx...xxx
    compute  ...ab..aabb.
"""


def scene_of(*traces):
    return timeline.open_scene(drawn_traces.run(*traces))


def every_slice(scene, ranks=None):
    """Each slice of the scene, at the highest zoom: (track, row, start, dur, name, id)."""
    begin, end = scene.span
    view = timeline.view(scene, (begin, end + 1), max(end - begin + 1, 1) * 2)
    assert (view["count"] == 1).all()
    names = timeline.names(scene, view["name_id"])
    rank = dict(scene.tracks.select("track", "rank").iter_rows())
    rows = zip(*(view[name] for name in ("track", "row", "start_ns", "dur_ns", "id")), names, strict=True)
    return {row for row in rows if ranks is None or rank[row[0]] in ranks}


def assert_has_both(pair):
    expected = set()
    for number, side in enumerate(pair.sides):
        shift = pair.shift_ns if number else 0
        for track, row, start, dur, slice_id, name in every_slice(side.scene, {side.rank}):
            expected.add((pair.track_of(number, track), row, start + shift, dur, slice_id, name))
    assert every_slice(pair.scene) == expected


def test_each_side_keeps_its_slices_and_both_begin_at_the_aligned_moment():
    first = scene_of(drawn_traces.trace(PICTURE, rank=0), drawn_traces.trace(PICTURE, rank=1))
    second = scene_of(drawn_traces.trace(OTHER, start_ns=1000))
    pair = timeline.side_by_side(timeline.Side(first, 1, 5), timeline.Side(second, 0, 1003))
    assert pair.shift_ns == 5 - 1003
    assert_has_both(pair)
    steps = pair.scene.bands.filter(kind="step").select("rank", "name", "start_ns").rows()
    assert (0, "step 1", 5) in steps
    assert (1, "step 1", 5) in steps
    assert pair.scene.tracks["track"].to_list() == list(range(4))
    assert pair.scene.tracks["rank"].to_list() == [0, 0, 1, 1]
    assert pair.to_own_clock(1, (5, 9)) == (1003, 1007)
    assert pair.to_own_clock(0, (5, 9)) == (5, 9)
    with pytest.raises(KeyError, match="rank 7"):
        timeline.side_by_side(timeline.Side(first, 7, 5), timeline.Side(second, 0, 1003))


def test_lanes_of_the_same_kind_of_work_are_pairs_whatever_their_numbers():
    first = scene_of(drawn_traces.trace("compute aaa...\ncomm ..xx..\ncompute2 .b...."))
    second = scene_of(drawn_traces.trace("comm x.....\ncompute3 a.....\ncompute4 bbbb..\ncopy ....m."))
    pair = timeline.side_by_side(timeline.Side(first, 0, 0), timeline.Side(second, 0, 0))
    labels = pair.scene.tracks["label"].to_list()
    by_pair = pair.lanes.group_by("pair", maintain_order=True).agg(pl.col("track"))
    assert [[labels[track] for track in tracks] for tracks in by_pair["track"]] == [
        ["compute", "compute4"],  # the busiest of each
        ["compute2", "compute3"],
        ["comm", "comm"],
        ["copy"],
    ]
    assert pair.lanes["group"].unique().to_list() == ["GPU 0"]


def test_totals_and_matches_are_those_of_both_runs():
    scenes = [scene_of(drawn_traces.trace(PICTURE)), scene_of(drawn_traces.trace(OTHER, start_ns=50))]
    pair = timeline.side_by_side(timeline.Side(scenes[0], 0, 5), timeline.Side(scenes[1], 0, 53))
    totals = timeline.range_totals(pair.scene, (5, 10))
    for number, scene in enumerate(scenes):
        alone = timeline.range_totals(scene, pair.to_own_clock(number, (5, 10)))
        assert totals.by_rank.filter(rank=number).drop("rank").rows() == alone.by_rank.drop("rank").rows()
    matches = timeline.find_by_name(pair.scene, "x")
    assert matches.count == sum(timeline.find_by_name(scene, "x").count for scene in scenes)
    assert set(matches.table["name"]) == {"x"}


@pytest.fixture(scope="module")
def runs():
    return [tracekit.load(SAMPLES / name) for name in ("demo-fsdp2", "demo-yafsdp")]


def test_recorded_runs_are_aligned_by_their_typical_steps(runs):
    sides, rows = [], []
    for run in runs:
        marked = step_pair.marked_steps(run)
        row = marked.row(marked.rank, marked.step)
        rows.append(row)
        scene = timeline.open_scene(run)
        start = alignment.on_run_clock(pl.DataFrame([row]), run.offsets, ("start_ns",))["start_ns"].item()
        sides.append(timeline.Side(scene, marked.rank, start))
    pair = timeline.side_by_side(*sides)
    bands = pair.scene.bands.filter(kind="step")
    for number, row in enumerate(rows):
        band = bands.filter(rank=number, name=f"step {row['step']}").row(0, named=True)
        assert band["start_ns"] == sides[0].at_ns
        assert band["end_ns"] - band["start_ns"] == row["duration_ns"]
        own = timeline.range_totals(pair.scene, (band["start_ns"], band["end_ns"])).by_rank.filter(rank=number)
        # The step's part of the breakdown, which another room measures from the tables of the trace.
        assert own.select(step_pair.PARTS).row(0) == tuple(row[part] for part in step_pair.PARTS)
    for number, side in enumerate(sides):
        part = (sides[0].at_ns, sides[0].at_ns + 200_000)
        here = timeline.view(pair.scene, part, 200_000 * 2).filter(pl.col("count") == 1)
        there = timeline.view(side.scene, pair.to_own_clock(number, part), 200_000 * 2).filter(pl.col("count") == 1)
        tracks = side.tracks["track"].to_list()
        expected = sorted(there.filter(pl.col("track").is_in(tracks))["id"].to_list())
        assert sorted(here.filter(pl.col("track").is_in(_tracks(pair, number)))["id"].to_list()) == expected


def _tracks(pair, number):
    return pair.lanes.filter(side=number)["track"].to_list()
