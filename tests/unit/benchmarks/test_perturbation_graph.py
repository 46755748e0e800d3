"""The graph that changes recordings: replayed unchanged it is the recording; a change costs what it must."""

import sys
from pathlib import Path

import pytest

from benchmarks import injected_faults, perturbation_graph
from benchmarks.perturbation_events import Pause
from benchmarks.perturbation_graph import Job, Rank
from tests.support import recorded_jobs

SHARED = Path(__file__).parents[4] / "shared" / "traces"
FOLDERS = (
    "torchrec_v100_4ranks",
    "megatron_tp8_a100_8ranks",
    *(pytest.param(name, marks=pytest.mark.accuracy) for name in ("nanogpt_h100_8ranks", "merged_ddp_mi300_4ranks")),
)


def event(category, name, at, dur, tid=1, **args):
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": tid, "ts": at, "dur": dur, "args": args}


def recording(late_us=0.0):
    # time µs   0      100       200    300
    # host      launch launch .. sync...
    # stream 7  mm     ..........mm
    # stream 9         nccl......
    return {
        "traceEvents": [
            event("user_annotation", "ProfilerStep#1", 0, 300),
            event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
            event("kernel", "mm", 20, 60 + late_us, tid=7, correlation=1),
            event("cuda_runtime", "cudaLaunchKernelExC", 30, 5, correlation=2),
            event("kernel", "ncclDevKernel_AllReduce", 85 + late_us, 100 - late_us, tid=9, correlation=2),
            event("cuda_runtime", "cudaStreamWaitEvent", 40, 2, correlation=3),
            event("cuda_runtime", "cudaLaunchKernel", 45, 5, correlation=4),
            event("kernel", "mm", 190, 50, tid=7, correlation=4),
            event("cuda_runtime", "cudaDeviceSynchronize", 100, 145, correlation=5),
        ]
    }


def job():
    return Job([Rank(recording(), 0), Rank(recording(late_us=40), 1)])


def spans(document):
    return {e["name"]: (e["ts"], e["ts"] + e["dur"]) for e in document["traceEvents"]}


def test_an_unchanged_recording_is_replayed_as_it_was():
    unchanged = job()
    unchanged.replay()
    for rank, document in zip(unchanged.ranks, unchanged.documents(), strict=True):
        assert document["traceEvents"] == rank.document["traceEvents"]
    assert unchanged.lost_us == 0


def test_a_kernel_that_is_launched_twice_is_two_kernels_in_a_row():
    changed = job()
    kernel = changed.ranks[0].kernels[0]
    kernel.stretch, kernel.twin = 2.0, {"correlation": 9}
    changed.replay()
    events = changed.documents()[0]["traceEvents"]
    twins = [e for e in events if e["cat"] == "kernel" and e["args"]["correlation"] in (1, 9)]
    assert sorted((e["ts"], e["dur"], e["args"]["correlation"]) for e in twins) == [(20, 60, 9), (80, 60, 1)]


def test_a_delayed_kernel_starts_later_than_it_could():
    changed = job()
    changed.ranks[0].kernels[0].delay = 30.0
    changed.replay()
    assert spans(changed.documents()[0])["ncclDevKernel_AllReduce"][0] == 115


def test_a_faster_host_launches_earlier_and_waits_longer():
    changed = job()
    for rank in changed.ranks:
        rank.host_speed = 2.0
    changed.replay()
    events = changed.documents()[0]["traceEvents"]
    launch, wait = (next(e for e in events if e["args"].get("correlation") == number) for number in (2, 5))
    assert (launch["ts"], launch["dur"]) == (15, 2.5)
    # It ends as long after the last kernel as before, and begins after half of the time.
    assert wait["ts"] == 50
    assert wait["ts"] + wait["dur"] == max(e["ts"] + e["dur"] for e in events if e["cat"] == "kernel") + 5


def test_a_file_that_merges_ranks_is_split_by_the_ranks_that_its_events_name(tmp_path):
    merged = [
        {**each, "pid": 100 * rank + each["pid"], "args": {**each["args"], "rank": rank}}
        for rank, document in enumerate((recording(), recording(late_us=40)))
        for each in document["traceEvents"]
    ]
    perturbation_graph.write({"traceEvents": merged}, tmp_path / "merged.json.gz")
    unmerged = perturbation_graph.load([tmp_path / "merged.json.gz"])
    assert [rank.document["distributedInfo"]["rank"] for rank in unmerged.ranks] == [0, 1]
    assert [len(rank.kernels) for rank in unmerged.ranks] == [3, 3]
    unmerged.ranks[1].kernels[0].stretch = 1.5
    unmerged.replay()
    assert unmerged.lost_us == 50  # as of the two files


def test_a_replay_leaves_the_process_its_recursion_limit():
    before = sys.getrecursionlimit()
    job().replay()
    assert sys.getrecursionlimit() == before


def test_a_slower_kernel_moves_the_collective_of_all_ranks_and_what_waits_for_it():
    slow = job()
    slow.ranks[1].kernels[0].stretch = 1.5  # 100 µs to 150
    slow.replay()
    assert slow.lost_us == 50
    first, second = map(spans, slow.documents())
    assert first["ncclDevKernel_AllReduce"] == (85, 235)  # waits for the other
    assert second["ncclDevKernel_AllReduce"] == (175, 235)
    assert first["mm"] == second["mm"] == (240, 290)
    assert first["cudaDeviceSynchronize"] == (100, 295)


def test_work_after_a_wait_call_waits_for_a_collective_that_ended_up_to_30_us_before():
    # AMD's devices take 10 to 18 µs from the end of the awaited work to the start of the next.
    documents = recording(), recording(late_us=40)
    for document in documents:
        document["traceEvents"][-2]["ts"] = 203  # 18 µs after the collective
    slow = Job([Rank(document, number) for number, document in enumerate(documents)])
    slow.ranks[1].kernels[0].stretch = 1.5
    slow.replay()
    assert [spans(document)["mm"] for document in slow.documents()] == [(253, 303), (253, 303)]


def test_changes_can_be_undone():
    changed = job()
    first, second = changed.ranks
    first.kernels[0].stretch = 1.5
    first.pauses.append(Pause(25, 200))
    first.taken, first.clock_us = [(30.0, 90.0)], 5.0
    changed.ranks.remove(second)
    changed.replay()
    assert changed.lost_us > 0
    changed.undo_changes()
    changed.replay()
    assert changed.documents() == [recording(), recording(late_us=40)]


def test_a_rank_that_is_early_absorbs_a_delay():
    slow = job()
    slow.ranks[0].kernels[0].stretch = 1.5  # 60 µs to 90: still before the other rank
    slow.replay()
    assert slow.lost_us == 0


def test_a_pause_of_the_host_moves_what_is_launched_after_it():
    paused = job()
    paused.ranks[0].pauses.append(Pause(25, 200, slices=(event("user_annotation", "pause", 0, None),)))
    paused.replay()
    document = spans(paused.documents()[0])
    assert document["pause"] == (25, 225)
    assert document["ncclDevKernel_AllReduce"][0] == 239  # 9 µs after its launch at 230, as late as it was
    assert paused.lost_us == 239 - 125  # the other rank's began at 125


def test_a_pause_that_drains_begins_when_the_device_has_done_what_was_launched():
    drained = job()
    drained.ranks[0].pauses.append(Pause(60, 10, drains=True, slices=(event("cpu_op", "aten::item", 0, None),)))
    drained.replay()
    start, end = spans(drained.documents()[0])["aten::item"]
    assert (start, end) == (60, 250)


def crowded():
    # time µs   0       100      200      300
    # host      l lb ...
    # stream 7  a a a a a a a a a a a        fills the device
    # stream 8  ...............b             launched at 30, but starts when a ends
    return {
        "traceEvents": [
            event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
            event("kernel", "a", 20, 200, tid=7, correlation=1),
            event("cuda_runtime", "cudaLaunchKernel", 30, 5, correlation=2),
            event("kernel", "b", 215, 50, tid=8, correlation=2),
        ]
    }


def test_a_kernel_that_waited_for_room_starts_at_once_where_the_device_is_idle():
    full = Job([Rank(crowded(), 0)])
    full.replay()
    assert full.lost_us == 0
    drained = Job([Rank(crowded(), 0)])
    drained.ranks[0].pauses.append(Pause(25, 0, drains=True))  # until 220, when a has ended
    drained.replay()
    assert spans(drained.documents()[0])["b"] == (229, 279)  # 4 µs after its launch at 225


def filled():
    # time ms   0 1 2 3 4 5 6 7
    # stream 7  aaaa      bbdd     b could start at 2, but c fills the device
    # stream 8  ppcccccccc         all five were launched before 0
    rows = ("p", 8, 0, 1000), ("a", 7, 0, 2000), ("c", 8, 1000, 4000), ("b", 7, 4950, 1000), ("d", 7, 5950, 1000)
    return {
        "traceEvents": [
            *(event("cuda_runtime", "cudaLaunchKernel", -90 + 10 * at, 5, correlation=at) for at in range(5)),
            *(event("kernel", name, at, dur, tid=tid, correlation=i) for i, (name, tid, at, dur) in enumerate(rows)),
        ]
    }


def test_a_kernel_that_left_no_room_leaves_none_when_it_runs_at_another_time():
    slow = Job([Rank(filled(), 0)])
    (first,) = (kernel for kernel in slow.ranks[0].kernels if kernel.event["name"] == "p")
    first.stretch = 3.0  # b runs before c then, from 2 to 3, and d has to wait for the end of c at 7
    slow.replay()
    starts = {kernel.event["name"]: kernel.new_start for kernel in slow.ranks[0].kernels}
    assert starts == {"p": 0, "a": 0, "b": 2000, "c": 3000, "d": 6950}


def two_streams(*, waits):
    # time µs   0       100      200      300
    # host      l  lcw l
    # stream 7  a a a a a a a
    # stream 8  ..bbbbb..cccc        c was launched 150 µs before, and starts 2 µs after a has ended
    calls = [
        event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 30, 5, correlation=2),
        event("cuda_runtime", "cudaLaunchKernel", 50, 5, correlation=3),
    ]
    if waits:  # before b is launched, or before c
        calls.append(event("cuda_runtime", "cudaStreamWaitEvent", waits, 2, correlation=4))
    return {
        "traceEvents": [
            *calls,
            event("kernel", "a", 20, 180, tid=7, correlation=1),
            event("kernel", "b", 36, 154, tid=8, correlation=2),
            event("kernel", "c", 202, 50, tid=8, correlation=3),
        ]
    }


@pytest.mark.parametrize(("waits", "lost_us"), [(40, 90), (20, 40), (None, 90)])
def test_a_kernel_waits_for_another_stream_only_after_a_call_that_says_so(waits, lost_us):
    # Where no such call was recorded at all, as from some devices, the times decide.
    slow = Job([Rank(two_streams(waits=waits), 0)])
    first = slow.ranks[0].kernels[0]
    first.stretch = 1.5  # 90 µs more: it ends at 290, and c would have ended at 252
    slow.replay()
    assert slow.lost_us == pytest.approx(lost_us, abs=2)


def test_a_kernel_that_waits_for_a_collective_does_so_though_it_starts_later_for_want_of_room():
    # The second mm was ready at 80, waits for the collective until 185, and starts 160 µs after it.
    document = recording()
    document["traceEvents"][-2].update(ts=345)
    document["traceEvents"].pop()  # the host's wait, which would return before
    late = Job([Rank(document, 0)])
    late.ranks[0].pauses.append(Pause(25, 300))  # launches the collective 300 µs later
    late.replay()
    assert [kernel.new_start - kernel.start for kernel in late.ranks[0].kernels] == [0, 254, 254]


def test_work_queued_before_a_recording_does_not_wait_for_what_is_launched_in_it():
    # time µs   0      100      200
    # host      l......
    # stream 7  qqqqqqqqqqqqQQQQ      both launched before the recording
    # stream 8      aaaaaaaa          launched at 10, ends 3 µs before Q starts
    document = {
        "traceEvents": [
            event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
            event("kernel", "a", 20, 97, tid=8, correlation=1),
            event("kernel", "q", 0, 115, tid=7),
            event("kernel", "Q", 120, 50, tid=7),
        ]
    }
    paused = Job([Rank(document, 0)])
    paused.ranks[0].pauses.append(Pause(5, 80))
    paused.replay()
    assert {k.event["name"]: k.new_end for k in paused.ranks[0].kernels} == {"q": 115, "Q": 170, "a": 197}


def test_a_call_on_a_stream_directly_after_a_copy_waits_for_the_copy():
    # time µs   0        100       200
    # host      l   ls..s             the call returns at 70, when the copy m has ended; a ends then, too
    # stream 7  aaaaaa
    # stream 8       mm
    document = {
        "traceEvents": [
            event("cuda_runtime", "cudaLaunchKernel", 10, 5, correlation=1),
            event("cuda_runtime", "cudaMemcpyAsync", 40, 5, correlation=2),
            event("cuda_runtime", "cudaStreamSynchronize", 46, 24, correlation=3),
            event("kernel", "a", 20, 49, tid=7, correlation=1),
            event("gpu_memcpy", "Memcpy HtoD", 50, 15, tid=8, correlation=2),
        ]
    }
    slow = Job([Rank(document, 0)])
    slow.ranks[0].kernels[0].stretch = 4.0
    slow.replay()
    assert spans(slow.documents()[0])["cudaStreamSynchronize"] == (46, 70)


def test_what_is_lost_before_the_steps_is_in_none_but_a_pause_of_the_host_in_a_step_is():
    # The first kernel was launched before the step, which begins with the collective on the device.
    document = recording()
    document["traceEvents"][0].update(ts=25, dur=275)
    slow = Job([Rank(document, 0)])
    first = slow.ranks[0].kernels[0]
    first.stretch = 1.5  # 60 µs to 90: what follows comes 30 µs later
    assert slow.lost_in_steps_us() == 0
    assert slow.lost_us == 30
    first.stretch = 1.0
    slow.ranks[0].pauses.append(Pause(26, 200))
    assert slow.lost_in_steps_us() == 154
    assert slow.lost_us == 154


def test_pauses_of_all_ranks_are_at_the_same_collective():
    ahead = {
        "traceEvents": [
            {**each, "ts": each["ts"] + (200 if each["ts"] > 28 else 0)} for each in recording()["traceEvents"]
        ]
    }
    both = Job([Rank(recording(), 0), Rank(ahead, 1)])
    (_, at), (_, other) = injected_faults._same_place(both, 40)
    assert at == pytest.approx(40)
    assert 230 < other < 445  # after the launch of its collective, too


@pytest.mark.parametrize("folder", FOLDERS)
def test_real_recordings_are_replayed_as_they_were(folder):
    if not (SHARED / folder).is_dir():
        pytest.skip("needs the recordings of others")
    recorded = recorded_jobs.job(SHARED / folder)
    assert len(recorded.instances) > 20
    recorded.replay()
    assert recorded.lost_us == 0
    for rank in recorded.ranks:
        assert all(kernel.new_start == kernel.start and kernel.new_end == kernel.end for kernel in rank.kernels)


def test_a_call_that_loads_code_launches_its_kernel_at_its_end():
    # time µs   0      10  30      210 212
    # host      launch load code......           a launching call of 200 µs
    # stream 7         mm              loaded    2 µs after the end of its call
    document = recording()
    document["traceEvents"] = [
        event("cuda_runtime", "cudaLaunchKernel", 0, 5, correlation=1),
        event("kernel", "mm", 10, 20, tid=7, correlation=1),
        event("cuda_runtime", "cudaLaunchKernel", 10, 200, correlation=2),
        event("kernel", "loaded", 212, 20, tid=7, correlation=2),
    ]
    loads = Job([Rank(document, 0)])
    first, loaded = loads.ranks[0].kernels
    first.stretch = 20.0  # it ends at 410: the other kernel was launched at 210 and starts then
    loads.replay()
    assert first.new_end == 410
    assert loaded.new_start == pytest.approx(410, abs=10)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
@pytest.mark.parametrize("folder", [FOLDERS[1], FOLDERS[3]])
def test_kernels_of_recordings_start_when_the_graph_says_that_they_can(folder):
    job = recorded_jobs.job(SHARED / folder)
    kernels = [(rank, each) for rank in job.ranks for each in rank.kernels if not each.is_collective]
    assert kernels
    assert max(each.start - rank._ready(each) for rank, each in kernels) < 500


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not here")
def test_no_kernel_of_a_changed_recording_ends_before_it_starts():
    # Kernels of two streams hold each other up there: none may wait for one that waits for it.
    job = recorded_jobs.job(SHARED / "torchrec_v100_4ranks")
    for kernel in job.ranks[0].kernels:
        kernel.stretch = 1.0 if kernel.is_collective else 1.36
    job.replay()
    assert all(each.new_start <= each.new_end for rank in job.ranks for each in rank.kernels)
