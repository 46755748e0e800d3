"""Memory snapshots taken at an out-of-memory: what was requested, what was free, and what would have served it."""

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest

from tests.support import cli_runner
from tests.support.sample_snapshots import MIB, SHARED, Simulation, document, event, frame, recorded, segment, write
from tracekit.analysis.memory import snapshot_files
from tracekit.ingest.readers import memory_snapshots
from tracekit.replay.allocator import out_of_memory, playback
from tracekit.replay.allocator.model import OutOfMemory
from tracekit.replay.allocator.settings import Settings
from tracekit.report import memory as memory_report

RECORDINGS = Path(__file__).parents[1] / "recordings"
STACK = [
    frame("at::_ops::mm::call(at::Tensor const&)") | {"filename": "??"},
    frame("linear", 3) | {"filename": "/env/lib/python3.12/site-packages/torch/nn/functional.py"},
    frame("attend", 42) | {"filename": "/env/lib/python3.12/site-packages/transformers/llama.py"},
    frame("train", 7) | {"filename": "/home/user/train.py"},
]


def fragmented(settings=None, **options):
    """Return a program whose last request fails: 60 MiB are free in blocks of 10, and 20 of the device."""
    made = Simulation(settings, capacity_bytes=500 * MIB, **options)
    blocks = [made.malloc(40 * MIB) for _ in range(12)]
    for block in blocks[::2]:
        made.free(block)
    # A retry would release segments that are free throughout: small blocks keep each of them.
    for _ in range(6):
        made.malloc(30 * MIB)
    return made


def full():
    """Return a program that has all memory but 16 MiB allocated when it requests 64 MiB."""
    made = Simulation(capacity_bytes=400 * MIB)
    for _ in range(6):
        made.malloc(64 * MIB)
    return made


def failing(made, size, stack=STACK):
    with contextlib.suppress(OutOfMemory):
        made.malloc(size)
        pytest.fail("it fits")
    made.events[-1]["frames"] = stack
    return made


def of(path, device=0):
    snapshot = memory_snapshots.read(path)
    return out_of_memory.of_snapshot(snapshot, playback.from_snapshot(snapshot, device))


@pytest.fixture
def fragmentation(tmp_path):
    return write(tmp_path / "oom.pickle", failing(fragmented(), 75 * MIB).document())


def memory(path):
    done = cli_runner.tracekit("memory", path, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


# 12 blocks of 40 MiB, every other freed and used again for 30 MiB:
# device  |40 |30·|40 |30·|40 |30·|40 |30·|40 |30·|40 |30·| 20 free   · = 10 MiB free
def test_an_out_of_memory_by_fragmentation_in_json(fragmentation):
    oom = memory(fragmentation)["oom"]
    assert oom["requested_bytes"] == 75 * MIB
    assert oom["free_bytes"] == 20 * MIB
    assert oom["reserved_bytes"] == 480 * MIB
    assert oom["allocated_bytes"] == (6 * 40 + 6 * 30) * MIB
    assert oom["reserved_unallocated_bytes"] == 60 * MIB
    assert oom["largest_free_block_bytes"] == 10 * MIB
    assert (oom["operator"], oom["location"]) == ("aten::mm", "train (train.py:7)")
    assert (oom["count"], oom["device"]) == (1, 0)
    assert oom["free_blocks"] == [
        {"kind": "large", "stream": 0, "blocks": 6, "free_bytes": 60 * MIB, "largest_free_bytes": 10 * MIB}
    ]
    assert sum(row["bytes"] for row in oom["allocated_by"]) == oom["allocated_bytes"]


def growing(settings=None):
    """Return a program that retains small blocks in what larger blocks left: 250 MiB are free, and 130 in its segments.

    Without expandable segments:  |30|30|40 free| |60|90 free| 250 free
    With them, all free memory but 40 MiB follows the last block.
    """
    made = Simulation(settings, capacity_bytes=500 * MIB)
    for size, retained in ((100, (30,)), (150, (30, 60))):
        made.free(made.malloc(size * MIB))
        for each in retained:
            made.malloc(each * MIB)
    return made


def test_a_setting_that_serves_the_request_is_advised(tmp_path):
    path = write(tmp_path / "oom.pickle", failing(growing(), 280 * MIB).document())
    oom = of(path)
    assert oom.is_fragmentation
    assert (oom.free_bytes, oom.reserved_unallocated_bytes, oom.largest_free_block_bytes) == (
        250 * MIB,
        130 * MIB,
        90 * MIB,
    )
    tried = dict(oom.tried.select("settings", "fits").rows())
    assert tried["expandable_segments:True"] is True
    assert tried["roundup_power2_divisions:4"] is False
    assert "Set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in cli_runner.tracekit("memory", path).stdout


def test_the_advice_is_what_the_program_does_under_that_setting():
    with pytest.raises(OutOfMemory):
        growing().malloc(280 * MIB)
    assert growing(Settings.parse("expandable_segments:True")).malloc(280 * MIB).bytes == 280 * MIB


def test_a_full_device_gets_no_setting(tmp_path):
    path = write(tmp_path / "oom.pickle", failing(full(), 64 * MIB).document())
    oom = of(path)
    assert not oom.is_fragmentation
    assert not oom.tried["fits"].any()
    text = cli_runner.tracekit("memory", path).stdout
    assert text.startswith("Out of memory: aten::mm in train (train.py:7) requested 64 MiB on device 0.")
    assert "384 MiB was allocated: at least 48 MiB less must be. No allocator setting can serve the request" in text


def test_more_than_was_allocated_is_not_asked_to_be_freed(tmp_path):
    oom = event("oom", 0, 5000 * MIB) | {"device_free": 1000}
    snapshot = document([segment(MIB, [(10 * MIB, "inactive")])], [event("free_completed", MIB, 10 * MIB), oom])
    text = cli_runner.tracekit("memory", write(tmp_path / "oom.pickle", snapshot)).stdout
    assert "less must be" not in text
    assert "Make the request smaller" in " ".join(text.split())


def test_devices_that_are_not_shown_are_named_with_their_memory(tmp_path):
    segments = [segment(MIB, [(300 * MIB, "active_allocated")])]
    segments.append(segment(1 << 32, [(50 * MIB, "active_allocated")], device=1))
    history = [event("segment_alloc", 1 << 32, 50 * MIB), event("alloc", 1 << 32, 50 * MIB)]
    path = write(tmp_path / "two.pickle", document(segments, [], history))
    text = " ".join(cli_runner.tracekit("memory", path).stdout.split())
    assert text.startswith("50 MiB allocated at the peak")
    assert "device 0 has 300 MiB allocated and 300 MiB reserved" in text


def test_the_settings_of_the_recording_are_never_advised(fragmentation):
    oom = of(fragmentation)
    assert "default" not in oom.tried["settings"].to_list()
    # The model fails under the recorded settings as the program did, from the same start on the same device.
    snapshot = memory_snapshots.read(fragmentation)
    history = playback.from_snapshot(snapshot, 0)
    again = out_of_memory.of_snapshot(snapshot, history, candidates=("max_non_split_rounding_mb:1024",))
    assert again.tried["fits"].to_list() == [False]


def test_what_happens_after_the_failure_does_not_count(tmp_path):
    made = failing(fragmented(), 75 * MIB)
    at_failure = of(write(tmp_path / "oom.pickle", made.document()))
    for block in list(made.allocator.active.values()):
        made.free(block)
    made.empty_cache()
    later = of(write(tmp_path / "later.pickle", made.document()))
    assert later.reserved_bytes == at_failure.reserved_bytes == 480 * MIB
    assert later.largest_free_block_bytes == 10 * MIB


def test_a_history_that_begins_later_has_the_same_numbers(tmp_path):
    made = failing(fragmented(), 75 * MIB)
    late = of(write(tmp_path / "oom.pickle", made.document(first=30)))
    assert (late.reserved_bytes, late.allocated_bytes, late.largest_free_block_bytes) == (
        480 * MIB,
        420 * MIB,
        10 * MIB,
    )


def test_without_an_out_of_memory_it_is_null(tmp_path):
    assert memory(write(tmp_path / "fine.pickle", fragmented().document()))["oom"] is None


def test_code_of_a_framework_is_the_place_where_there_is_no_code_of_the_user(tmp_path):
    path = write(tmp_path / "oom.pickle", failing(full(), 64 * MIB, STACK[:3]).document())
    assert of(path).location == "attend (llama.py:42)"
    only_torch = write(tmp_path / "torch.pickle", failing(full(), 64 * MIB, STACK[:2]).document())
    assert of(only_torch).location == "linear (functional.py:3)"


def test_an_out_of_memory_without_a_history_of_allocations(tmp_path):
    made = fragmented()
    document = made.document()
    failed = event("oom", 0, 100 * MIB) | {"device_free": 20 * MIB}
    del failed["addr"]
    document["device_traces"] = [[failed]]
    oom = of(write(tmp_path / "oom.pickle", document))
    assert (oom.requested_bytes, oom.free_bytes, oom.reserved_bytes) == (100 * MIB, 20 * MIB, 480 * MIB)
    assert oom.largest_free_block_bytes == 10 * MIB
    assert any("is not known" in note for note in oom.notes)


@pytest.mark.parametrize("broken", [{"size": -1}, {"size": 0}, {"device_free": -5}, {"stream": 1 << 62}])
def test_senseless_numbers_of_an_out_of_memory_end_without_a_crash(tmp_path, broken):
    made = failing(fragmented(), 75 * MIB)
    made.events[-1] |= broken
    done = cli_runner.tracekit("memory", write(tmp_path / "oom.pickle", made.document()), "--format", "json")
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared traces")
def test_recorded_snapshots_without_an_out_of_memory_have_none():
    snapshot = memory_snapshots.read(recorded("from_empty_fwd_bwd_fp32.pickle"))
    assert out_of_memory.of_snapshot(snapshot, playback.from_snapshot(snapshot, 0)) is None


def folder_of_snapshots(folder):
    write(folder / "rank0_memory_snapshot.pickle", fragmented().document())
    write(folder / "rank1_memory_snapshot.pickle", failing(growing(), 280 * MIB).document())
    return folder


def test_a_folder_of_snapshots_has_a_row_for_each_rank_and_the_out_of_memory(tmp_path):
    folder = folder_of_snapshots(tmp_path)
    oom = memory(folder)["oom"]
    assert (oom["rank"], oom["requested_bytes"]) == (1, 280 * MIB)
    text = cli_runner.tracekit("memory", folder).stdout
    assert "280 MiB on device 0 of rank 1" in " ".join(text.split())
    assert text.index("Ranks") < text.index("Free memory at the snapshot")
    replayed = cli_runner.tracekit("memory", folder, "--replay", "default", "--format", "json")
    assert json.loads(replayed.stdout)["recorded"]["peak_reserved_bytes"] == 250 * MIB


def test_a_run_with_snapshots_says_which_rank_ran_out_of_memory(tmp_path):
    shutil.copytree(cli_runner.ROOT / "sample_traces" / "demo-yafsdp", tmp_path / "run")
    write(tmp_path / "run" / "rank00001.memory.pickle", failing(full(), 64 * MIB).document())
    oom = memory(tmp_path / "run")["oom"]
    assert (oom["rank"], oom["requested_bytes"], oom["is_fragmentation"]) == (1, 64 * MIB, False)


def test_the_last_iteration_of_a_rank_counts(tmp_path):
    for iteration in (2, 10):
        (tmp_path / f"iteration_{iteration}").mkdir()
        write(tmp_path / f"iteration_{iteration}" / "rank0_memory_snapshot.pickle", full().document())
    ((rank, path),) = snapshot_files.in_folder(tmp_path)
    assert (rank, path.parent.name) == (0, "iteration_10")


# 75 MiB were requested, in memory that is fragmented.
@pytest.mark.parametrize(("grown_bytes", "cause", "other"), [
    (80 * MIB, "memory grows by 8", "fragmented"), (16 * MIB, "memory is fragmented", "Memory grows by 1.6")
])  # fmt: skip
def test_growth_is_the_cause_if_it_exceeds_the_request_and_nothing_else_is_lost(
    fragmentation, grown_bytes, cause, other
):
    row = {"op": "aten::mm", "steps": 10, "step_bytes": grown_bytes / 10, "bytes": grown_bytes}
    sentences = memory_report.oom_sentences(replace(of(fragmentation), growth=pl.DataFrame([row])))
    assert cause in sentences[0]
    assert sum(other in sentence for sentence in sentences[1:]) == 1


def test_what_grows_has_the_name_that_it_has_at_the_peak():
    """The program calls aten::clone, for which aten::empty_strided allocates."""
    leak = of(RECORDINGS / "out_of_memory" / "leak" / "rank00000.memory.pickle.gz")
    [grown] = leak.growth.iter_rows(named=True)
    at_peak = dict(leak.allocated_by.select("op", "bytes").iter_rows())
    assert grown["op"] == "aten::clone in <module> (oom.py:36)"
    assert at_peak[grown["op"]] >= grown["bytes"]
    assert not any("aten::empty" in op for op in at_peak)
