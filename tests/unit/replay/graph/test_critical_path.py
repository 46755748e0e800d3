"""The critical path of runs that are drawn, recorded and simulated."""

import functools
import random
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from benchmarks import critical_path as bench
from tests.support.kineto_files import slice_, trace, write
from tests.support.path_replay import ends, saved_ns
from tracekit.errors import InputError
from tracekit.ingest.loader import load
from tracekit.replay.graph.critical_path import owners
from tracekit.replay.graph.critical_path.path import chain, critical_path, critical_paths
from tracekit.replay.graph.dependency_graph import replay

ROOT = Path(__file__).parents[4]
SAMPLES = ROOT / "sample_traces"
SHARED = ROOT.parent / "shared" / "traces"
RUNS = [
    SAMPLES / "parallelism" / "pipeline-slow-stage",
    *(SHARED / name for name in ("hta_event_sync", "hta_dlrm_a100")),
]
FURTHER = [
    *(SAMPLES / name for name in ("demo-fsdp2", "demo-yafsdp", "faults/dataloader")),
    *(SHARED / name for name in ("torchrec_v100_4ranks", "hta_nccl_args_a100")),
]
CHECKED = ("slow rank", "pipeline with a slow stage")
"""The kinds of simulated runs that `make test` draws; `make accuracy` draws all."""
every_run = pytest.mark.parametrize(
    "path", [*RUNS, *(pytest.param(path, marks=pytest.mark.accuracy) for path in FURTHER)], ids=lambda path: path.name
)


@functools.cache  # what one test has measured of a run, the next does not measure again
def one(path):
    if not path.exists():
        pytest.skip("the downloaded traces are not in ../shared")
    return load(path)


def kernel(name, launch_us, start_us, dur_us, *, number, stream=7, **more):
    """Return the launch of a kernel, which takes 5 µs, and the kernel."""
    about = {"device": 0, "stream": stream, "correlation": number, **more}
    return [
        slice_("cuda_runtime", "cudaLaunchKernel", launch_us, 5, tid=1, correlation=number),
        slice_("kernel", name, start_us, dur_us, tid=stream, **about),
    ]


def rank_file(folder, rank, events, world_size=2):
    marks = [slice_("user_annotation", f"ProfilerStep#{step}", 1000.0 * step, 1000.0, tid=1) for step in (0, 1)]
    return write(folder / f"rank{rank}.json", trace(rank, world_size, steps=0) | {"traceEvents": [*marks, *events]})


def described(path, *columns):
    return path.parts.select(*columns, pl.col("dur_ns") // 1000).rows()


def test_a_launch_bound_step_belongs_to_the_host_and_its_operators(tmp_path):
    # host     l a a a a a l . . . l     a: aten::add around the second launch; then Python
    # device   . k k . . . . k k . . k
    add = slice_("cpu_op", "aten::add", 120, 60, tid=1)
    events = [*kernel("k", 100, 105, 20, number=1), add, *kernel("k", 170, 177, 20, number=2)]
    rank_file(tmp_path, 0, [*events, *kernel("k", 1000, 1007, 20, number=3)], world_size=1)
    found = critical_path(load(tmp_path), 0)
    assert found.step_ns == 902_000
    assert described(found, "kind", "name", "operator") == [
        ("host", "Python", None, 15),  # from the start of the first kernel on, as its launch ended
        ("host", "aten::add", "aten::add", 50),
        ("host", "cudaLaunchKernel", "aten::add", 5),
        ("host", "aten::add", "aten::add", 5),
        ("host", "Python", None, 820),
        ("host", "cudaLaunchKernel", None, 5),
        ("idle", owners.LAUNCH_LATENCY, None, 2),
    ]


def late_rank(folder, *, late_us):
    """Write two ranks that compute and all-reduce; the kernel of rank 1 takes longer by `late_us`."""
    name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"
    of_group = {"Collective name": "allreduce", "Group size": 2, "Process Group Name": "0"}
    for rank, more_us in ((0, 0), (1, late_us)):
        events = []
        for step in range(4):
            at = 1000 * step
            left_us = at + 621 + max(late_us, 0)
            arrived = at + 121 + more_us
            events += kernel("gemm", at, at + 20, 100 + more_us, number=10 * step + 1)
            events += kernel(name, at + 6, arrived, left_us - arrived, number=10 * step + 2, **of_group)
        marks = [slice_("user_annotation", f"ProfilerStep#{step}", 1000.0 * step, 1000.0, tid=1) for step in range(4)]
        write(folder / f"rank{rank}.json", trace(rank, 2, steps=0) | {"traceEvents": [*marks, *events]})


def test_a_collective_leads_to_the_rank_that_arrives_last(tmp_path):
    late_rank(tmp_path, late_us=200)
    found = critical_path(load(tmp_path), 3)
    assert found.step_ns == 801_000
    assert described(found, "rank", "kind") == [(1, "compute", 300), (1, "idle", 1), (1, "communication", 500)]
    waiting = found.slack.filter(rank=0, name="gemm")
    assert waiting["slack_ns"].to_list() == [200_000]


def test_parts_have_the_module_around_the_launch_and_on_the_host(tmp_path):
    # host     l . [ l ] . . l     [ ]: a module around the second launch
    # device   . k . . k k k k
    module = slice_("user_annotation", "nn.Module: Net.layers.0", 150, 60, tid=1)
    events = [*kernel("k", 100, 105, 20, number=1), module, *kernel("k", 170, 177, 923, number=2)]
    rank_file(tmp_path, 0, [*events, *kernel("k", 1000, 1101, 20, number=3)], world_size=1)
    run = load(tmp_path)
    found = critical_path(run, 0)
    by_module = dict(found.shares_by("module").select("module", "dur_ns").rows())
    assert by_module["Net.layers.0"] >= 923_000 + 20_000
    assert sum(by_module.values()) == found.step_ns
    table = critical_paths(run)
    assert table.filter(step=0).drop("window", "step", "step_rank").rows() == found.parts.rows()


def test_work_off_the_path_has_its_module(tmp_path):
    module = slice_("user_annotation", "nn.Module: Net.layers.0", 150, 60, tid=1)
    short = kernel("short", 190, 197, 20, number=4, stream=20)
    events = [*kernel("k", 100, 105, 20, number=1), module, *kernel("k", 170, 177, 923, number=2), *short]
    rank_file(tmp_path, 0, [*events, *kernel("k", 1000, 1101, 20, number=3)], world_size=1)
    found = critical_path(load(tmp_path), 0)
    assert found.slack.filter(name="short").select("module", "dur_ns", "count").rows() == [("Net.layers.0", 20_000, 1)]
    assert found.slack["dur_ns"].sum() >= 20_000


@every_run
def test_the_table_has_the_path_of_each_step(path):
    run = one(path)
    table = critical_paths(run)
    for (window, step), parts in table.group_by("window", "step"):
        found = critical_path(run, step)
        if found.window == window:
            assert parts["dur_ns"].sum() == found.step_ns
            assert parts["step_rank"].unique().to_list() == [found.rank]


@every_run
def test_the_parts_tile_the_step_and_the_owners_add_up(path):
    found = critical_path(one(path))
    for parts in (found.parts, found.compact):
        assert parts["start_ns"][0] == found.start_ns
        assert (parts["start_ns"] + parts["dur_ns"]).to_list()[:-1] == parts["start_ns"].to_list()[1:]
        assert parts["dur_ns"].sum() == found.step_ns
        assert (parts["dur_ns"] > 0).all()
    assert found.shares["dur_ns"].sum() == found.step_ns
    assert found.shares["step_ratio"].sum() == pytest.approx(1)
    assert found.parts["name"].null_count() == 0


@every_run
def test_a_replay_of_the_waits_gives_the_recorded_times(path):
    times = chain(one(path)).times
    assert ends(times, times.own_ns).tolist() == times.end_ns.tolist()


@every_run
def test_shortening_what_is_on_the_path_saves_that_and_nothing_else_does(path):
    found = chain(one(path))
    times, draw = found.times, random.Random(3)
    on_path = [node for node in found.on_path.tolist() if times.own_ns[node] > 0]
    whole = 0
    chosen = draw.sample(on_path, min(12, len(on_path)))
    for node in chosen:
        own_ns = int(times.own_ns[node])
        x = max(own_ns // 10, 1)
        most = saved_ns(times, node, own_ns, found.last)
        assert saved_ns(times, node, x, found.last) == min(x, most)
        whole += most >= x
    assert whole >= 0.7 * len(chosen)
    in_step = np.flatnonzero((times.own_ns > 0) & (times.begin_ns >= found.start_ns))
    others = np.setdiff1d(in_step, found.on_path).tolist()
    for node in draw.sample(others, min(6, len(others))):
        assert saved_ns(times, node, int(times.own_ns[node]), found.last) == 0


@pytest.mark.parametrize(
    "kind", ["slow rank", "host-bound", pytest.param("pipeline with a slow stage", marks=pytest.mark.accuracy)]
)
def test_what_if_saves_what_is_taken_from_the_path(kind, tmp_path):
    job, _, _ = bench.simulate_run(random.Random(11), kind, tmp_path)
    found = chain(load(tmp_path, cache=False), job.steps - 2)
    graph, first = found.times.graph, found.step["first"]
    in_step = np.flatnonzero(found.times.begin_ns[: graph.count] >= found.start_ns)
    on_path = sorted(np.intersect1d(in_step, found.on_path).tolist(), key=lambda node: -graph.own_ns[node])[:20]
    part_ns = dict(enumerate((graph.own_ns // 100).tolist()))
    # No second path is as long as the first without a hundredth of this node.
    alone = [node for node in on_path if saved_ns(found.times, node, part_ns[node], found.last) == part_ns[node] > 0]
    longest_off = max(np.setdiff1d(in_step, found.on_path).tolist(), key=part_ns.__getitem__)
    for node, share in ((max(alone, key=part_ns.__getitem__), 1), (longest_off, 0)):
        x = part_ns[node]
        shorter = graph.with_durations(np.array([node]), graph.own_ns[node] - x)
        steps = [each.start_ns[found.last] - each.start_ns[first] for each in (graph.replay, replay(shorter))]
        assert steps[0] == pytest.approx(found.end_ns - found.start_ns, rel=0.001)
        assert steps[0] - steps[1] == pytest.approx(share * x, abs=0.05 * x)


@pytest.mark.parametrize(
    "kind", [kind if kind in CHECKED else pytest.param(kind, marks=pytest.mark.accuracy) for kind in bench.KINDS]
)
def test_paths_of_simulated_runs_have_the_true_owners(kind):
    found = bench.judge_run(random.Random(29), kind)
    assert found.right_ratio >= bench.RIGHT_RATIO
    assert found.inferred_ratio >= 0.8


def test_a_send_ends_with_its_receive_not_when_the_program_waits_for_it():
    found = chain(one(SAMPLES / "parallelism" / "pipeline-slow-stage"))
    graph = found.times.graph
    recorded_ns = graph.column("end_ns") - graph.origin_ns
    latest_ns = np.zeros(len(graph.own_ns), np.int64)
    np.maximum.at(latest_ns, graph.done, recorded_ns)
    sends = latest_ns[graph.count :] - found.times.end_ns[graph.count :]
    assert sends.max() > 1_000_000_000
    on_path = critical_path(one(SAMPLES / "parallelism" / "pipeline-slow-stage"))
    assert on_path.shares_by("kind")["kind"][0] == "compute"


def test_a_run_without_marked_steps_is_explained_as_one_window():
    found = critical_path(one(SHARED / "hta_event_sync"))
    assert found.step is None
    assert any("No steps are marked" in doubt for doubt in found.doubts)


def test_what_the_traces_lack_is_said(tmp_path):
    late_rank(tmp_path, late_us=0)
    (tmp_path / "rank1.json").unlink()
    assert any("1 of 2 ranks have a trace" in doubt for doubt in critical_path(load(tmp_path)).doubts)


def test_ranks_are_missed_also_where_only_the_header_counts_them():
    found = critical_path(one(SHARED / "hta_cpu_gloo"))
    assert any("1 of 300 ranks have a trace: waiting for the others" in doubt for doubt in found.doubts)


def test_idle_time_without_a_reason_has_no_other_owner():
    found = critical_path(one(SHARED / "hta_dlrm_a100"))
    unexplained = found.parts.filter(name=owners.UNEXPLAINED)["dur_ns"].sum()
    assert unexplained > 0.5 * found.step_ns
    assert any("do not explain" in doubt for doubt in found.doubts)


def test_a_step_that_the_run_does_not_have_is_an_error(wording):
    with wording.raises(InputError):
        critical_path(one(SAMPLES / "demo-fsdp2"), 999)


@pytest.mark.parametrize(
    "name",
    [
        *(pytest.param(name, marks=pytest.mark.accuracy) for name in ("pipeline-1f1b", "pipeline-interleaved")),
        "pipeline-slow-stage",
    ],
)
def test_a_path_goes_on_past_collectives_whose_waits_contradict_others(name):
    # Without sequence numbers, some broadcasts of one size from different roots are matched to each other.
    found = critical_path(load(SAMPLES / "parallelism" / name))
    unrecorded_ns = found.parts.filter(pl.col("kind") == "unrecorded")["dur_ns"].sum()
    assert unrecorded_ns < 0.01 * found.step_ns
