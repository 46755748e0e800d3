"""Recordings that hold only a part of a step, or the first step of a training: cut from public and own traces."""

import gzip
from pathlib import Path

import pytest

from tests.support.kineto_files import read_recording, write_recording
from tests.support.selection import others_in_accuracy
from tracekit.ingest.loader import load
from tracekit.rules.engine import check
from tracekit.rules.rule import Severity

SAMPLES = Path(__file__).parents[2] / "sample_traces"
TRACES = Path(__file__).parents[3] / "shared" / "traces"
DEVICE = {"kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation"}
COLD_US = 15_000
"""How long a first launch takes that loads the kernel's module."""


def trace_of(folder):
    if not folder.is_dir():
        pytest.skip(f"needs {folder.name} in ../shared/traces, which is not part of the project")
    path = min(folder.glob("*.json.gz"))
    return read_recording(path)


def marks(content, name):
    """Return start and end of the host's spans of this name, by start."""
    spans = [e for e in content["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(name)]
    return sorted((float(e["ts"]), float(e["ts"]) + float(e["dur"])) for e in spans if e.get("cat") not in DEVICE)


def cut(content, since_us, until_us):
    """Return the trace with the events between two times, as if the profiler had started and stopped there."""
    kept = [
        event
        for event in content["traceEvents"]
        if event.get("ph") == "M"
        or ("ts" in event and float(event["ts"]) >= since_us
            and float(event["ts"]) + float(event.get("dur") or 0) <= until_us)
    ]  # fmt: skip
    return content | {"traceEvents": kept}


def judged(content, folder):
    """Return the findings on a trace by code; of DATA001 by subject."""
    folder.mkdir(exist_ok=True)
    write_recording(folder / "rank0.json", content)
    return by_code(folder)


def by_code(folder):
    findings = check(load(folder, cache=False)).findings
    return {each.subject if each.code == "DATA001" else each.code: each for each in findings}


def warnings(found):
    return {name for name, each in found.items() if each.severity > Severity.INFO and not each.code.startswith("DATA")}


@pytest.mark.parametrize(
    "name", ["hta_ddp_v100_memory", pytest.param("hta_nccl_args_a100", marks=pytest.mark.accuracy)]
)
def test_a_recording_of_the_optimizer_alone_is_not_judged_as_a_step(name, tmp_path):
    # The recordings are launch-bound. Of hta_ddp_v100_memory, 48% of the reserved memory is unused at the peak.
    content = trace_of(TRACES / name)
    whole = judged(content, tmp_path / "whole")
    assert warnings(whole) == {"HOST001"}
    since, until = marks(content, "Optimizer.step")[0]
    found = judged(cut(content, since, until + 5000), tmp_path / "optimizer")
    assert "has only the optimizer" in found["cut_step"].message
    assert found["cut_step"].severity is Severity.WARNING
    assert warnings(found) == set()
    assert "Only a part of the step was recorded" in found["HOST001"].message
    assert ("MEM005" in whole, "MEM005" in found) == (name == "hta_ddp_v100_memory", False)
    assert "sampled" not in found  # the profiler numbers the ops of each thread in blocks


def test_the_optimizer_of_an_own_recording_is_not_judged_as_a_step(tmp_path):
    content = trace_of(SAMPLES / "faults" / "late-launch")
    since, until = marks(content, "Optimizer.step")[0]
    found = judged(cut(content, since - 1, until + 1), tmp_path / "optimizer")
    assert "has only the optimizer" in found["cut_step"].message
    assert warnings(found) == set()


@pytest.mark.parametrize(
    "name", ["hta_nccl_args_a100", pytest.param("hta_ddp_v100_memory", marks=pytest.mark.accuracy)]
)
def test_a_step_that_began_before_the_recording_is_information(name, tmp_path):
    content = trace_of(TRACES / name)
    (first, first_end), (second, second_end) = marks(content, "ProfilerStep#")[:2]
    since, until = first + 0.3 * (first_end - first), second + 0.6 * (second_end - second)
    found = judged(cut(content, since, until), tmp_path / "cut")
    assert "Step 0 began before the recording" in found["cut_step"].message
    assert warnings(found) == set()


def test_a_first_step_that_is_cut_does_not_hide_the_whole_ones(tmp_path):
    content = trace_of(TRACES / "hta_nccl_args_a100")
    first, first_end = marks(content, "ProfilerStep#")[0]
    unmarked = [event for event in content["traceEvents"] if not str(event.get("name")).startswith("ProfilerStep#")]
    begun = cut(content | {"traceEvents": unmarked}, first + 0.3 * (first_end - first), float("inf"))
    found = judged(begun, tmp_path / "cut")
    assert "Step 0 began before the recording" in found["cut_step"].message
    assert found["HOST001"].severity > Severity.INFO
    assert found["HOST001"].steps == (0, 1, 2)


@pytest.mark.parametrize(
    ("name", "share"),
    # The lost kernels made a stall of 308 ms, one of 431 ms, and a group that is 1.8 times slower than before.
    others_in_accuracy(
        [("hta_ddp_v100_memory", 0.6), ("hta_nccl_args_a100", 0.6), ("nanogpt_h100_8ranks", 0.9)],
        [("hta_ddp_v100_memory", 0.6)],
    ),
)
def test_lost_events_of_a_truncated_file_are_not_idle_time(name, share, tmp_path):
    folder = TRACES / name
    if not folder.is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    path = min(folder.glob("*.json.gz"))
    text = gzip.decompress(path.read_bytes())
    (tmp_path / path.name.removesuffix(".gz")).write_bytes(text[: int(share * len(text))])
    found = by_code(tmp_path)
    assert "truncated" in found
    assert warnings(found) == set()


def test_a_truncated_rank_leaves_the_findings_on_the_others(tmp_path):
    # Rank 0 of a recording waits 140 ms for data in each step, as rank 1 does.
    for path in sorted((SAMPLES / "ci" / "red").glob("rank*.json.gz")):
        text = gzip.decompress(path.read_bytes())
        lost = len(text) // 10 if path.name.startswith("rank00001") else 0
        (tmp_path / path.name.removesuffix(".gz")).write_bytes(text[: len(text) - lost])
    found = by_code(tmp_path)
    assert "The file is truncated" in found["HOST003"].message
    (tmp_path / "rank00001.pt.trace.json").unlink()
    assert by_code(tmp_path)["HOST003"].severity > Severity.INFO


def with_cold_launches(content, until_us):
    """Return the trace up to a time, in which the first launch of each kernel takes COLD_US longer.

    All that comes later is later by as much; what runs on the device takes as long as before.
    """
    events = [e for e in cut(content, float("-inf"), until_us)["traceEvents"] if e.get("ph") != "M"]
    named = {e["args"].get("correlation"): e["name"] for e in events if e.get("cat") == "kernel"}
    launches = sorted(
        (float(e["ts"]), named[e["args"]["correlation"]])
        for e in events
        if e["name"] == "cudaLaunchKernel" and e["args"].get("correlation") in named
    )
    first = {}
    for at, name in launches:
        first.setdefault(name, at)
    times = sorted(first.values())

    def later(at):
        return at + COLD_US * sum(time < at for time in times)

    moved = []
    for event in events:
        if "ts" not in event:
            continue
        since, took = float(event["ts"]), float(event.get("dur") or 0)
        is_host = event.get("cat") not in DEVICE
        end = later(since + took) if is_host and "dur" in event else later(since) + took
        moved.append(event | {"ts": later(since)} | ({"dur": end - later(since)} if "dur" in event else {}))
    return content | {"traceEvents": moved}


def test_a_window_of_one_step_whose_launches_load_kernels_is_warm_up(tmp_path):
    content = trace_of(TRACES / "hta_nccl_args_a100")
    until = marks(content, "ProfilerStep#")[0][1]
    steady = judged(cut(content, float("-inf"), until), tmp_path / "steady")
    assert "CUDA graphs" in steady["HOST001"].fix
    assert steady["HOST001"].severity > Severity.INFO
    found = judged(with_cold_launches(content, until), tmp_path / "cold")["HOST001"]
    assert found.severity is Severity.INFO
    assert "is for kernels that run for the first time" in found.message
    assert found.fix.startswith("Profile later steps")
    assert found.what_if is None
