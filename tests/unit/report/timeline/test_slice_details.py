"""The details of a slice, and the arrows that start or end at it."""

import dataclasses
from pathlib import Path

import polars as pl
import pytest

import tracekit
from tests.support import drawn_traces
from tests.support.simulated_runs import MS, Job
from tracekit.model import schema
from tracekit.report import timeline

SAMPLES = Path(__file__).parents[4] / "sample_traces"

OPS = [
    # id, parent, lane, name, kind, start, dur, forward
    (0, None, 9, "src/train.py(12): main", "python", 0, 90, None),
    (1, 0, 9, "nn.Module: Block_3", "python", 2, 40, None),
    (2, 1, 9, "aten::linear", "cpu_op", 4, 20, None),
    (3, 2, 9, "aten::mm", "cpu_op", 6, 10, None),
    (4, 3, 9, "cudaLaunchKernel", "runtime", 8, 3, None),
    (5, 0, 9, "MmBackward0", "cpu_op", 50, 10, 3),
]
SHAPES = "[[4, 8], [8, 2]]"


def trace() -> tracekit.Trace:
    # time     0         1         2         3
    # compute  ..............................gggggggggg
    names = ("id", "parent_id", "lane", "name", "kind", "start_ns", "dur_ns", "forward_id")
    ops = pl.DataFrame(OPS, schema=names, orient="row").with_columns(
        pl.when(pl.col("id") == 3).then(pl.lit(SHAPES)).alias("shapes"), step=pl.lit(7)
    )
    work = {"g": {"launch_id": 4, "unit": "layers.3", "phase": "forward", "grid": "16x1x1", "bytes": None}}
    found = drawn_traces.trace("compute " + "." * 30 + "g" * 10, columns=work, ops=ops)
    lanes = pl.DataFrame({"lane": [9], "name": ["main"], "pid": ["41"], "role": ["host"]})
    return dataclasses.replace(found, lanes=pl.concat([found.lanes, schema.LANES.conform(lanes)]))


@pytest.fixture
def run() -> tracekit.Run:
    return drawn_traces.run(trace())


def values(details: timeline.Details) -> dict[str, str]:
    return {each.label: each.value for each in details.facts}


def test_work_has_its_launch_op_module_and_stack(run):
    scene = timeline.open_scene(run)
    found = timeline.details(run, scene, 0, 0)
    assert (found.name, found.kind, found.start_ns, found.dur_ns) == ("g", "compute", 30, 10)
    assert values(found) == {
        "rank": "0",
        "on": "GPU 0 · compute",
        "start": "30 ns",
        "duration": "10 ns",
        "phase": "forward",
        "unit": "layers.3",
        "blocks": "16x1x1",
        "launched by": "cudaLaunchKernel, 22 ns before its start",
        "op": "aten::mm",
        "shapes": SHAPES,
        "module": "Block_3",
    }
    assert found.stack == ("src/train.py(12): main", "nn.Module: Block_3")
    (launch,) = (each for each in found.facts if each.label == "launched by")
    assert (launch.track, launch.id, launch.start_ns, launch.dur_ns) == (1, 4, 8, 3)
    assert found.peers.is_empty()


def test_a_host_slice_names_what_it_launched_and_its_forward_op(run):
    scene = timeline.open_scene(run)
    launch = timeline.details(run, scene, 1, 4)
    assert values(launch)["launched"] == "g, 10 ns"
    assert values(launch)["on"] == "host pid 41 · main"
    assert values(launch)["op"] == "aten::mm"
    backward = timeline.details(run, scene, 1, 5)
    assert values(backward)["gradient of"] == "aten::mm"
    assert backward.row == 1


def ends(table: pl.DataFrame) -> list[tuple]:
    return table.select("from_track", "from_id", "from_ns", "to_track", "to_id", "to_ns", "how").rows()


def test_arrows_go_from_launch_to_work_and_from_forward_to_backward(run):
    scene = timeline.open_scene(run)
    launch = (1, 4, 8, 0, 0, 30, "launch")
    assert ends(timeline.arrows(run, scene, 0, 0)) == [launch]
    assert ends(timeline.arrows(run, scene, 1, 4)) == [launch]
    forward = (1, 3, 16, 1, 5, 50, "forward")
    assert ends(timeline.arrows(run, scene, 1, 3)) == [launch, forward]
    assert ends(timeline.arrows(run, scene, 1, 5)) == [forward]
    assert timeline.arrows(run, scene, 1, 4).schema == pl.Schema(timeline.ARROWS)


def test_a_stream_that_waits_for_an_event_has_an_arrow_from_what_it_waits_for():
    # time     0         1         2
    # main     r w
    # compute  ..aaaaaaaa
    # comm     ............bbbb    stream 1 waits for the event recorded on stream 0
    ops = pl.DataFrame(
        {
            "id": [0, 1, 2, 3],
            "lane": [9] * 4,
            "name": ["cudaLaunchKernel", "cudaEventRecord", "cudaStreamWaitEvent", "cudaLaunchKernel"],
            "kind": ["runtime"] * 4,
            "start_ns": [0, 2, 4, 6],
            "dur_ns": [1] * 4,
        }
    )
    waits = {"call_id": [2], "kind": ["stream_wait"], "start_ns": [4], "dur_ns": [1], "device": [0], "stream": [1]}
    syncs = pl.DataFrame(waits | {"awaited_stream": [0], "record_id": [1]})
    columns = {"a": {"launch_id": 0}, "b": {"launch_id": 3}}
    run = drawn_traces.run(
        drawn_traces.trace(
            "compute ..aaaaaaaa......\ncomm ............bbbb", columns=columns, ops=schema.OPS.conform(ops), syncs=syncs
        )
    )
    scene = timeline.open_scene(run)
    event = (0, 0, 10, 1, 1, 12, "event")
    assert event in ends(timeline.arrows(run, scene, 0, 0))
    assert event in ends(timeline.arrows(run, scene, 1, 1))


@pytest.fixture(scope="module")
def late() -> tuple[tracekit.Run, timeline.Scene, dict[int, int]]:
    """Return a run of which rank 2 comes 3 ms late to each all-reduce, and the clocks of the ranks."""
    clocks = {0: 0, 1: -5 * MS, 2: 9 * MS}
    job = Job({"world": (0, 1, 2)})
    for _ in range(4):
        job.now_ns += 20 * MS
        job.collect("world", "all_reduce", 96, {0: 0, 1: 2 * MS, 2: 3 * MS}, transfer_ns=4 * MS)
    run = drawn_traces.run(*(job.trace(rank, behind_ns=behind) for rank, behind in clocks.items()))
    return run, timeline.open_scene(run), clocks


def test_a_collective_has_its_peers_on_the_clock_of_the_run(late):
    run, scene, _ = late
    found = timeline.details(run, scene, 0, 2)
    assert found.peers["rank"].to_list() == [0, 1, 2]
    assert found.peers["track"].to_list() == [0, 1, 2]
    assert found.peers["id"].to_list() == [2] * 3
    assert (found.peers["start_ns"] - found.start_ns).to_list() == [0, 2 * MS, 3 * MS]
    assert found.peers["dur_ns"].to_list() == [7 * MS, 5 * MS, 4 * MS]
    assert found.peers["wait_ns"].to_list() == [3 * MS, MS, 0]
    facts = values(found)
    assert (facts["collective"], facts["group"], facts["ranks in group"]) == ("all_reduce", "world", "3")


def test_arrows_of_a_collective_leave_the_rank_that_came_last_when_it_came(late):
    run, scene, _ = late
    last_ns = timeline.details(run, scene, 2, 1).start_ns
    for track in range(3):
        assert ends(timeline.arrows(run, scene, track, 1)) == [
            (2, 1, last_ns, 1, 1, last_ns, "collective"),
            (2, 1, last_ns, 0, 1, last_ns, "collective"),
        ]


def test_a_missing_slice_has_no_details(run):
    scene = timeline.open_scene(run)
    for track, number in ((0, 99), (7, 0), (-1, 0)):
        with pytest.raises(KeyError):
            timeline.details(run, scene, track, number)
        with pytest.raises(KeyError):
            timeline.arrows(run, scene, track, number)


def test_every_kind_of_slice_of_a_recorded_cpu_run_has_details():
    run = tracekit.load(SAMPLES / "demo-yafsdp")
    scene = timeline.open_scene(run)
    gathers = timeline.find_by_name(scene, "gloo:", limit=10**6).table
    assert gathers.height > 100
    sources = dict(scene.tracks.select("track", "source").iter_rows())
    seen = {}
    for row in gathers.iter_rows(named=True):
        seen.setdefault(sources[row["track"]], row)
    assert set(seen) == {"activities", "ops"}
    for row in seen.values():
        found = timeline.details(run, scene, row["track"], row["id"])
        assert found.name == row["name"]
        assert "collective" in values(found)
        assert found.peers["rank"].to_list() == [0, 1]
    (stage,) = timeline.find_by_name(scene, "save · write", limit=1).table.iter_rows(named=True)
    assert values(timeline.details(run, scene, stage["track"], stage["id"]))["blocking"] == "True"
    assert timeline.arrows(run, scene, stage["track"], stage["id"]).is_empty()
