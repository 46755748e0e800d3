"""Snapshots of real out-of-memory errors on an H100: the numbers of torch's own error, the cause and the remedy."""

import dataclasses
import gzip
import json
import re
import shutil
from pathlib import Path

import polars as pl
import pytest

from tests.support import cli_runner
from tracekit.ingest.readers import memory_snapshots
from tracekit.replay.allocator import out_of_memory, playback, snapshot_facts
from tracekit.replay.allocator.settings import Settings
from tracekit.report import memory as report

RECORDINGS = Path(__file__).parents[1] / "recordings"
CASES = ("too_large", "fragmented", "leak")
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def unpacked(name: str, folder: Path) -> Path:
    """Return a folder with the snapshot of a recording."""
    folder.mkdir(exist_ok=True)
    packed = RECORDINGS / name / "rank00000.memory.pickle.gz"
    (folder / "rank00000.memory.pickle").write_bytes(gzip.decompress(packed.read_bytes()))
    return folder


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    folder = unpacked(f"out_of_memory/{request.param}", tmp_path_factory.mktemp(request.param))
    snapshot = memory_snapshots.read(folder / "rank00000.memory.pickle")
    oom = out_of_memory.of_snapshot(snapshot, playback.from_snapshot(snapshot, 0))
    return request.param, oom, json.loads((RECORDINGS / "out_of_memory" / request.param / "torch.json").read_text())


def stated(text: str, message: str) -> tuple[float, float]:
    """Return a size in torch's error, and the accuracy of its two digits."""
    number, unit = re.search(text.replace("SIZE", r"([\d.]+) ([KMG]?i?B)"), message).groups()
    return float(number) * UNITS[unit], 0.005 * UNITS[unit]


def test_the_numbers_are_those_of_torchs_own_error(case):
    _, oom, torch = case
    size, digits = stated("Tried to allocate SIZE", torch["message"])
    assert oom.segment_bytes == torch["alloc"] == pytest.approx(size, abs=digits)
    size, digits = stated("SIZE is allocated by PyTorch", torch["message"])
    assert oom.allocated_bytes == pytest.approx(size, abs=digits)
    size, digits = stated("SIZE is reserved by PyTorch but unallocated", torch["message"])
    assert oom.reserved_unallocated_bytes == pytest.approx(size, abs=digits)
    assert oom.free_bytes == torch["device_free"]
    assert oom.reserved_bytes == torch["stats"]["reserved_bytes.all.current"]
    assert oom.peak_reserved_bytes == torch["stats"]["reserved_bytes.all.peak"]


def test_a_limit_of_the_process_is_told_from_a_full_device(case):
    _, oom, torch = case
    assert oom.is_process_limit
    assert oom.peak_reserved_bytes <= torch["device_total"] < oom.reserved_bytes + oom.segment_bytes
    assert any("a limit of this process refused the request" in text for text in report.oom_sentences(oom))


EXPECTED = {
    # is_fragmentation, settings that serve the request, location
    "too_large": (False, [], "the backward pass"),
    "fragmented": (True, ["expandable_segments:True", "max_split_size_mb:128"], "<module> (oom.py:26)"),
    "leak": (True, ["expandable_segments:True", "max_split_size_mb:128"], "the backward pass"),
}


def test_the_cause_and_the_settings_that_serve_the_request(case):
    name, oom, _ = case
    serving = oom.tried.filter("fits")["settings"].to_list()
    assert (oom.is_fragmentation, serving, oom.location) == EXPECTED[name]
    assert oom.tried.height == len(out_of_memory.CANDIDATES)


def test_no_owner_is_a_c_plus_plus_signature(case):
    _, oom, _ = case
    owners = oom.allocated_by["op"].drop_nulls().to_list()
    assert owners
    assert not [owner for owner in owners if "::native::" in owner or len(owner) > 80]


def test_only_the_leak_grows_and_the_line_that_keeps_it_is_named(case):
    name, oom, _ = case
    if name != "leak":
        assert oom.growth.is_empty()
        return
    (row,) = oom.growth.iter_rows(named=True)
    assert row == {
        "device": 0,
        "op": "aten::clone in <module> (oom.py:36)",
        "steps": 70,  # the first one began before its mark: an optimizer marks the end of a forward and backward pass
        "count": 70,
        "bytes": 70 << 24,
        "step_bytes": 1 << 24,
    }
    assert report.oom_sentences(oom)[0].startswith("Out of memory: memory grows by 16 MiB a step")


def test_a_leak_needs_marks_of_steps(tmp_path):
    folder = unpacked("out_of_memory/leak", tmp_path / "run")
    snapshot = memory_snapshots.read(folder / "rank00000.memory.pickle")
    history = playback.from_snapshot(snapshot, 0)
    unmarked = dataclasses.replace(snapshot, annotations=snapshot.annotations.clear())
    assert out_of_memory.step_growth(unmarked, history, playback.replay_as_recorded(history)).is_empty()


def test_memory_from_before_the_first_mark_is_of_no_step(tmp_path):
    folder = unpacked("out_of_memory/leak", tmp_path / "run")
    snapshot = memory_snapshots.read(folder / "rank00000.memory.pickle")
    history = playback.from_snapshot(snapshot, 0)
    played = playback.replay_as_recorded(history)
    marks = snapshot.annotations.filter(pl.col("name").str.starts_with("Optimizer.step"), stage="START")
    late = dataclasses.replace(snapshot, annotations=marks.sort("at_ns").tail(20))
    (row,) = out_of_memory.step_growth(late, history, played).iter_rows(named=True)
    # Of the 20 steps, the last two are open.
    assert (row["steps"], row["bytes"], row["step_bytes"]) == (18, 18 << 24, 1 << 24)


def test_a_foreign_file_among_snapshots_is_a_note(tmp_path):
    folder = unpacked("out_of_memory/fragmented", tmp_path / "run")
    shutil.copy(RECORDINGS / "out_of_memory" / "fragmented" / "torch.json", folder)
    done = cli_runner.tracekit("memory", folder)
    assert done.returncode == 0, done.stderr
    said = " ".join(done.stdout.split())
    assert said.startswith("Out of memory: the memory is fragmented")
    assert "by aten::empty_memory_format in <module> (oom.py:26)" in said
    assert "Only memory snapshots were read" in done.stdout
    (folder / "rank00000.memory.pickle").unlink()
    assert cli_runner.tracekit("memory", folder).returncode == 2


@pytest.mark.parametrize(
    ("signature", "name"),
    [
        ("void at::native::f<float, g<float (float, float)>, 4>(at::Tensor&) [clone .isra.0]", "at::native::f"),
        ("at::(anonymous namespace)::wrapper_CUDA_mm(at::Tensor const&)", "at::wrapper_CUDA_mm"),
        ("std::vector<at::Tensor> torch::nn::run<A>(int)", "torch::nn::run"),
        ("__clone", "__clone"),
        ("", ""),
    ],
)
def test_a_c_plus_plus_function_has_its_name_alone(signature, name):
    assert snapshot_facts.function_name(signature) == name


COUNTED = json.loads((RECORDINGS / "allocator_h100" / "counted.json").read_text())


@pytest.mark.parametrize("settings", COUNTED)
def test_the_reserved_memory_of_a_real_training_is_predicted_from_a_run_with_default_settings(settings, tmp_path):
    snapshot = memory_snapshots.read(unpacked("allocator_h100", tmp_path) / "rank00000.memory.pickle")
    history = playback.from_snapshot(snapshot, 0)
    predicted = playback.predict(history, Settings.parse(settings))
    assert predicted.peak_reserved_bytes == COUNTED[settings]["reserved_bytes.all.peak"]
    assert predicted.retries == COUNTED[settings]["num_alloc_retries"]
