"""tracekit memory as a shell sees it: of runs, of snapshots, and with a replay."""

import json
from pathlib import Path

import pytest

from tests.integration.test_cli import only_line, tracekit
from tests.support.kineto_files import memory_event, slice_, trace
from tests.support.kineto_files import write as write_trace
from tests.support.sample_snapshots import MIB, Simulation, frame, recorded, write

ROOT = Path(__file__).parents[2]
KEYS = ["peak_allocated_bytes", "peak_reserved_bytes", "live_at_peak", "churn", "categories", "oom"]
REPLAY_KEYS = ["segment_allocs", "segment_frees", "peak_reserved_bytes", "device_allocations", "retries"]


def simulated(folder: Path) -> Path:
    """Write the snapshot of a simulated program whose growing requests don't fit the segments before."""
    made = Simulation()
    made.free(made.malloc(30 * MIB))
    retained = made.malloc(50 * MIB)
    made.events[-1]["frames"] = [frame("at::_ops::mm::call(at::Tensor)") | {"filename": "??"}, frame("forward", 12)]
    made.free(made.malloc(70 * MIB))
    assert retained.allocated
    return write(folder / "rank00000.memory.pickle", made.document())


def memory(*arguments: object) -> dict:
    done = tracekit("memory", *arguments, "--format", "json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_snapshot_with_a_replay_in_json_has_these_keys_and_numbers(tmp_path):
    output = memory(simulated(tmp_path), "--replay", "expandable_segments:True")
    assert list(output) == [*KEYS, "recorded", "replayed"]
    assert list(output["recorded"]) == list(output["replayed"]) == REPLAY_KEYS
    assert output["peak_allocated_bytes"] == 120 * MIB
    assert output["peak_reserved_bytes"] == 150 * MIB
    assert output["recorded"] == {
        "segment_allocs": [30 * MIB, 50 * MIB, 70 * MIB],
        "segment_frees": [],
        "peak_reserved_bytes": 150 * MIB,
        "device_allocations": 3,
        "retries": 0,
    }
    assert output["replayed"]["segment_allocs"] == [40 * MIB, 20 * MIB, 60 * MIB]
    assert output["replayed"]["peak_reserved_bytes"] == 120 * MIB
    (churn,) = output["churn"]
    assert (churn["count"], churn["bytes"], churn["peak_bytes"]) == (3, 150 * MIB, 120 * MIB)
    by_stack, without = sorted(output["live_at_peak"], key=lambda row: row["bytes"])
    assert (by_stack["op"], by_stack["bytes"]) == ("aten::mm in forward (simulated.py:12)", 50 * MIB)
    assert (without["op"], without["bytes"]) == (None, 70 * MIB)


def test_a_snapshot_replayed_with_its_own_settings_reproduces_the_record():
    output = memory(recorded("from_empty_init_model_rank1.pickle"), "--replay", "default")
    assert output["replayed"] == output["recorded"]


def test_text_output_has_one_line_for_the_replay_marked_as_prediction(tmp_path):
    done = tracekit("memory", simulated(tmp_path), "--replay", "expandable_segments:True")
    assert done.stdout.splitlines()[:3] == [
        "120 MiB allocated at the peak, 150 MiB reserved",
        "expandable_segments:True: reserved 150 MiB → 120 MiB, 3 → 3 device allocations, 0 → 0 retries",
        "This is a prediction of the allocator model: run with these settings to confirm it.",
    ]
    assert "aten::mm in forward (simulated.py:12)" in done.stdout
    nameless = simulated(tmp_path).rename(tmp_path / "dump")
    as_recorded = tracekit("memory", nameless, "--replay", "default").stdout
    assert "reserves and frees the recorded segments, all of them in order." in as_recorded


def test_a_cpu_run_reports_host_memory_and_that_replay_is_impossible():
    done = tracekit("memory", ROOT / "sample_traces" / "demo-fsdp2", "--format", "json")
    assert done.stderr == "tracekit: Host memory is shown: the traces have no memory events of a device.\n"
    output = json.loads(done.stdout)
    assert list(output) == KEYS
    assert output["peak_reserved_bytes"] is None
    assert {row["rank"] for row in output["churn"]} == {0, 1}
    refused = tracekit("memory", ROOT / "sample_traces" / "demo-fsdp2", "--replay", "default")
    assert refused.returncode == 2
    assert "the host's" in only_line(refused)


def on_device(address: int, delta: int, at: int, total: int, reserved: int = 100 * MIB) -> dict:
    return memory_event(at, address=address, delta=delta, allocated=total, reserved=reserved)


def run_on_a_device(folder: Path) -> Path:
    """Write a simulated trace: 10 MiB allocated throughout, without events; 20 freed in it; 30 allocated and freed."""
    base = 2 << 40
    memory_events = [
        on_device(base, -20 * MIB, 12, 10 * MIB),
        on_device(base + 40 * MIB, 30 * MIB, 14, 40 * MIB),
        on_device(base + 40 * MIB, -30 * MIB, 18, 10 * MIB),
    ]
    events = trace(0, 1, steps=1)["traceEvents"]
    kernel = slice_("kernel", "gemm", 10, 20, tid=7, device=0, stream=7, correlation=1)
    write_trace(folder / "rank0.json", trace(0, 1, steps=0) | {"traceEvents": [*events, kernel, *memory_events]})
    return folder


def test_a_trace_is_replayed_with_inferred_cached_memory_and_reports_so(tmp_path):
    run = run_on_a_device(tmp_path)
    done = tracekit("memory", run, "--replay", "default")
    assert "reserved 100 MiB → 100 MiB, 0 → 0 device allocations" in done.stdout
    assert "inferred from the addresses in the trace" in " ".join(done.stdout.split())
    output = memory(run, "--replay", "expandable_segments:True")
    assert output["peak_allocated_bytes"] == 40 * MIB
    assert output["replayed"]["peak_reserved_bytes"] == 10 * MIB + 40 * MIB  # 10 without events, and 30 in pages of 20


def test_a_run_with_a_snapshot_is_replayed_from_the_snapshot(tmp_path):
    run = run_on_a_device(tmp_path)
    simulated(run)
    output = memory(run, "--replay", "default")
    assert (
        output["recorded"]["segment_allocs"] == output["replayed"]["segment_allocs"] == [30 * MIB, 50 * MIB, 70 * MIB]
    )


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--replay", "max_split_size:30"), "did you mean max_split_size_mb"),
        (("--replay", "unit_buffers:2,expandable_segments:True"), "a snapshot has none"),
        (("--device", 3), "has no data of device 3; it has data of: 0"),
    ],
)
def test_invalid_options_are_rejected_in_one_line(arguments, why, tmp_path):
    done = tracekit("memory", simulated(tmp_path), *arguments)
    assert (done.returncode, why in only_line(done)) == (2, True)


def test_a_malicious_snapshot_is_rejected_by_name(tmp_path):
    path = tmp_path / "a.pickle"
    path.write_bytes(b"cos\nsystem\n(X\x04\x00\x00\x00truetR.")
    done = tracekit("memory", path)
    assert (done.returncode, "os.system" in only_line(done)) == (2, True)


def test_two_snapshots_differ_by_what_the_memory_is_for_and_by_who_requested_it(tmp_path):
    path = simulated(tmp_path)
    made = Simulation()
    made.malloc(50 * MIB)
    made.events[-1]["frames"] = [frame("at::_ops::mm::call(at::Tensor)") | {"filename": "??"}, frame("forward", 12)]
    other = write(tmp_path / "other.pickle", made.document())
    output = memory(path, "--against", other)
    assert output["against"]["peak_allocated_bytes"] == 50 * MIB
    owners = output["against"]["by_owner"]
    assert [(row["against_bytes"], row["change_bytes"]) for row in owners] == [(0, 70 * MIB)]
    by_category = {row["category"]: row["change_bytes"] for row in output["against"]["by_category"]}
    assert sum(by_category.values()) == output["peak_allocated_bytes"] - 50 * MIB
    assert sum(row["bytes"] for row in output["categories"]) == output["peak_allocated_bytes"]
    same = memory(path, "--against", path)["against"]
    assert (same["by_category"], same["by_owner"]) == ([], [])
    text = tracekit("memory", path, "--against", other).stdout
    assert "That is 70 MiB more than the 50 MiB of the other." in text
