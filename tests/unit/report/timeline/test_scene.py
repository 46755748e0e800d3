"""Scenes in the cache: made once, made again when stale or damaged, whoever else writes there."""

import json
import stat
import subprocess
import sys
import time

import numpy as np
import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces, kineto_files
from tracekit.errors import BadTraceError, InputError
from tracekit.ingest import disk_cache
from tracekit.model import schema
from tracekit.model.run import Run
from tracekit.model.source import Source
from tracekit.report import timeline
from tracekit.report.timeline import level_of_detail
from tracekit.report.timeline import scene as scenes

TINY = {
    "traceEvents": [
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 1, "tid": 1, "ts": 1.0, "dur": 5.5},
        {"ph": "X", "cat": "cpu_op", "name": "aten::add", "pid": 1, "tid": 1, "ts": 8.0, "dur": 2.0},
    ],
    "distributedInfo": {"rank": 0, "world_size": 1},
}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "cache"


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "rank00000.pt.trace.json").write_text(json.dumps(TINY))
    return path


def opened(run, folder, made: list | None = None) -> timeline.Scene:
    """Open the scene of a run of files; what it takes to make it is added to `made`."""
    progress = [] if made is None else made
    return timeline.open_scene(
        tracekit.load(run, cache=False), folder=folder, on_progress=lambda *each: progress.append(each)
    )


def seen(scene: timeline.Scene) -> list[tuple]:
    return timeline.view(scene, scene.span, 10**5).rows()


def files(folder) -> list:
    return sorted(folder.glob("[!.]*"))


def test_a_scene_is_made_once_and_then_mapped(run, folder):
    made: list = []
    first, second = opened(run, folder, made), opened(run, folder, made)
    assert made == [(1, 1)]
    assert first.key == second.key
    assert first.span == second.span
    assert first.tracks.equals(second.tracks)
    assert first.bands.equals(second.bands)
    assert len(seen(first)) == 4  # two ops, which on a CPU run are its work, too
    assert seen(first) == seen(second)
    (file,) = files(folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_a_scene_is_made_again_when_a_file_of_the_run_changes(run, folder):
    made: list = []
    before = opened(run, folder, made)
    trace = run / "rank00000.pt.trace.json"
    trace.write_text(trace.read_text().replace("aten::mm", "aten::bmm"))
    after = opened(run, folder, made)
    assert made == [(1, 1), (1, 1)]
    assert before.key != after.key
    assert timeline.find_by_name(after, "bmm").count == 2


def test_a_scene_is_made_again_when_the_code_that_draws_it_changes(run, folder, monkeypatch):
    made: list = []
    opened(run, folder, made)
    monkeypatch.setattr(scenes, "_code", lambda: "the next version")
    opened(run, folder, made)
    assert made == [(1, 1), (1, 1)]


def cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def flipped(data: bytes) -> bytes:
    middle = len(data) // 3
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize(
    "damage", [cut, flipped, lambda data: b"", lambda data: bytes(len(data)), lambda data: data + b"more"],
    ids=["cut", "one bit", "empty", "zeros", "longer"],
)  # fmt: skip
def test_a_damaged_scene_is_made_again(run, folder, damage):
    made: list = []
    before = seen(opened(run, folder, made))
    (file,) = files(folder)
    whole = file.read_bytes()
    file.write_bytes(damage(whole))
    assert seen(opened(run, folder, made)) == before
    assert made == [(1, 1), (1, 1)]
    assert file.read_bytes() == whole
    opened(run, folder, made)
    assert made == [(1, 1), (1, 1)]


def test_a_link_in_the_place_of_a_scene_is_not_followed(run, folder, tmp_path):
    made: list = []
    opened(run, folder, made)
    (file,) = files(folder)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    opened(run, folder, made)
    assert made == [(1, 1), (1, 1)]
    assert not file.is_symlink()


def test_a_scene_that_is_open_outlives_its_file(run, folder):
    scene = opened(run, folder)
    before = seen(scene)
    (file,) = files(folder)
    file.unlink()
    assert seen(scene) == before


def test_a_cache_that_is_no_folder_costs_the_file_only(run, folder):
    folder.write_text("in the way")
    assert len(seen(opened(run, folder))) == 4


def test_a_cache_that_may_hold_nothing_costs_the_file_only(run, folder, monkeypatch):
    monkeypatch.setenv(disk_cache.DIRECTORY_VARIABLE, str(folder))
    monkeypatch.setenv(disk_cache.MAX_BYTES_VARIABLE, "0")
    assert len(seen(timeline.open_scene(tracekit.load(run)))) == 4
    assert files(folder / "store") == []


def test_scenes_are_part_of_the_cache_that_a_user_can_size_and_clear(run, folder):
    opened(run, folder)
    (file,) = files(folder)
    cache = disk_cache.DiskCache(folder, ".tiles", disk_cache.DEFAULT_MAX_BYTES)
    assert cache.size_bytes() == file.stat().st_size == cache.clear()
    made: list = []
    opened(run, folder, made)
    assert made == [(1, 1)]


def test_the_scene_used_least_goes_first_where_the_cache_is_full(run, folder):
    opened(run, folder)
    (old,) = files(folder)
    with disk_cache.DiskCache(folder, ".tiles", old.stat().st_size).writing("new") as file:
        file.write(b"x")
    assert [each.name for each in files(folder)] == ["new.tiles"]


def test_a_run_without_files_is_laid_out_each_time(folder):
    run = drawn_traces.run(drawn_traces.trace("compute aa.b"), drawn_traces.trace("compute aa.b", rank=1))
    first, second = (timeline.open_scene(run, folder=folder) for _ in range(2))
    assert seen(first) == seen(second)
    assert first.key != second.key
    assert not folder.exists()


_OPENING = """
import sys, time
from pathlib import Path
import tracekit
from tracekit.report import timeline as tiles
run, folder, ready, go = sys.argv[1:]
Path(ready).touch()
while not Path(go).exists():
    time.sleep(0.01)
scene = tiles.open_scene(tracekit.load(run, cache=False), folder=Path(folder))
print(tiles.view(scene, scene.span, 100_000).height)
"""


def test_processes_side_by_side_all_get_the_scene(run, folder, tmp_path):
    go, ready = tmp_path / "go", [tmp_path / "ready 0", tmp_path / "ready 1"]
    others = [
        subprocess.Popen([sys.executable, "-c", _OPENING, run, folder, signal, go], stdout=subprocess.PIPE, text=True)
        for signal in ready
    ]
    while not all(signal.exists() for signal in ready):
        assert all(other.poll() is None for other in others)
        time.sleep(0.01)
    go.touch()
    scene = opened(run, folder)
    assert [int(other.communicate(timeout=300)[0]) for other in others] == [
        timeline.view(scene, scene.span, 100_000).height
    ] * 2
    assert len(files(folder)) == 1


def _unreadable() -> None:
    raise BadTraceError("rank1: cut")


def test_a_rank_that_cannot_be_read_is_left_out():
    good = drawn_traces.trace("compute aa")
    run = Run("run", [Source(0, 0, "a", 0, lambda: good), Source(1, 0, "b", 0, _unreadable)])
    scene = timeline.open_scene(run)
    assert scene.tracks["rank"].to_list() == [0]
    with pytest.raises(BadTraceError):
        timeline.open_scene(Run("run", [Source(1, 0, "b", 0, _unreadable)]))


def test_a_window_is_a_scene_of_its_own_and_one_that_is_not_there_is_said(wording):
    run = drawn_traces.run(drawn_traces.trace("compute aa"), drawn_traces.trace("compute bbb", window=1, start_ns=500))
    assert timeline.open_scene(run).span == (0, 2)
    assert timeline.open_scene(run, 1).span == (500, 503)
    with wording.raises(InputError):
        timeline.open_scene(run, 2)


def test_progress_is_reported_rank_by_rank():
    progress = []
    run = drawn_traces.run(*(drawn_traces.trace("compute aa", rank=rank) for rank in range(3)))
    timeline.open_scene(run, on_progress=lambda done, total: progress.append((done, total)))
    assert progress == [(1, 3), (2, 3), (3, 3)]


def test_steps_and_units_are_bands_on_the_clock_of_the_run():
    # time     0 1 2 3 4 5 6 7 8 9
    # step     0 0 0 0 0 1 1 1 1 1
    # compute  a a b b . a a . c c    a: layers.0, b: layers.1, c: no unit
    columns = {"a": {"unit": "layers.0", "phase": "forward"}, "b": {"unit": "", "phase": None}}
    trace = drawn_traces.trace("step 0000011111\ncompute aabb.aa.cc", columns=columns, rank=3)
    bands = timeline.open_scene(drawn_traces.run(trace)).bands
    assert bands.rows() == [
        (3, "step", "step 0", 0, 5),
        (3, "step", "step 1", 5, 10),
        (3, "unit", "layers.0 · forward", 0, 2),
        (3, "unit", "root", 2, 4),
        (3, "unit", "layers.0 · forward", 5, 7),
    ]


def test_tracks_stand_by_role_and_then_the_host_threads():
    ops = pl.DataFrame({"id": [0, 1], "lane": [9, 8], "name": ["x", "y"], "kind": ["cpu_op"] * 2})
    ops = schema.OPS.conform(ops.with_columns(start_ns=pl.lit(0), dur_ns=pl.lit(1)))
    trace = drawn_traces.trace("copy m.\ncomm .c\ncompute aa", ops=ops)
    tracks = timeline.open_scene(drawn_traces.run(trace)).tracks
    assert tracks["role"].to_list() == ["compute", "communication", "copy", "host", "host"]
    assert tracks["label"].to_list() == ["compute", "comm", "copy", "lane 8", "lane 9"]
    assert tracks["source"].to_list() == ["activities"] * 3 + ["ops"] * 2
    assert tracks["rows"].to_list() == [1] * 5
    assert tracks["lane"].to_list() == [2, 1, 0, 8, 9]


def test_the_overhead_of_the_profiler_has_a_group_of_its_own(tmp_path):
    document = kineto_files.trace()
    overhead = {"ph": "X", "cat": "overhead", "name": "Buffer Flush", "pid": -1, "tid": 0, "ts": 200, "dur": 20}
    document["traceEvents"].append(overhead)
    kineto_files.write(tmp_path / "rank0.json", document)
    tracks = timeline.open_scene(tracekit.load(tmp_path, cache=False), folder=tmp_path).tracks
    assert tracks["group"].to_list()[-1] == "profiler"
    assert "host pid 1" in tracks["group"].to_list()


def test_runs_of_slices_are_no_more_than_the_slices():
    draw = np.random.default_rng(1)
    start = np.sort(draw.integers(0, 10**6, 3000)) * 20
    ends, runs = level_of_detail.merge_levels(np.zeros(3000, np.int64), start, draw.integers(0, 20, 3000), start % 7)
    assert len(runs.first) < 3000
    assert (runs.made < runs.ends).all()
    assert (runs.count >= 2).all()
    assert (ends > 0).all()
