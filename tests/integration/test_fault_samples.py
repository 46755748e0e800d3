"""The recorded samples of faults: each shows its fault by plain reading, its healthy twin does not; nothing leaks."""

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import tracekit
from instrumented_trainers.faults import FAULTS, samples
from tests.integration import fault_signs, trainings
from tests.integration.fault_signs import stage
from tracekit import conventions
from tracekit.analysis.time import breakdown
from tracekit.rules.checkpoint import BlockingCheckpoint
from tracekit.rules.engine import check
from tracekit.rules.registry import RULES
from tracekit.rules.rule import Severity

FAULT_SAMPLES = Path(__file__).parents[2] / "sample_traces" / "faults"
TRUTH: Mapping[str, Mapping[str, Any]] = {
    sample["sample"]: sample for sample in json.loads((FAULT_SAMPLES / samples.TRUTH_FILE).read_text())["samples"]
}
LAYERS, ACTIVE = 2, 2


def share(run: Path, *stages: str) -> float:
    """Return what share of the save the stages take on rank 0."""
    total = stage(run, 0, conventions.TOTAL)["dur_ns"]
    return float(sum(stage(run, 0, name)["dur_ns"] for name in stages) / total)


def slow_rank(faulty: Path, healthy: Path) -> None:
    assert min(fault_signs.extra_compute_ms(faulty, 1)) >= 18
    for run, rank in ((faulty, 0), (healthy, 1), (healthy, 0)):
        assert fault_signs.extra_compute_ms(run, rank) == [0.0] * ACTIVE


def late_launch(faulty: Path, healthy: Path) -> None:
    for gaps in fault_signs.gaps_in_forward_ms(faulty):
        assert min(gaps[:LAYERS]) >= 10
        assert gaps[LAYERS] < 5
    assert max(gaps[0] for gaps in fault_signs.gaps_in_forward_ms(healthy)) < 5


def no_prefetch(faulty: Path, healthy: Path) -> None:
    assert fault_signs.gathered_ahead(healthy) == [True] * ACTIVE
    assert fault_signs.gathered_ahead(faulty) == [False] * ACTIVE


def churn(faulty: Path, healthy: Path) -> None:
    taken = fault_signs.blocks_bytes(faulty, 4 << 20)
    assert len(taken) == LAYERS * ACTIVE
    assert taken == sorted(taken)
    assert taken[0] < taken[-1]
    assert fault_signs.blocks_bytes(healthy, 4 << 20) == []


def host_sync(faulty: Path, healthy: Path) -> None:
    assert fault_signs.reads(faulty) - fault_signs.reads(healthy) == LAYERS * ACTIVE


def dataloader(faulty: Path, healthy: Path) -> None:
    assert min(fault_signs.waits_for_data_ms(faulty)) >= 50
    assert min(fault_signs.waits_for_data_ms(healthy)) < 10


def slow_disk(faulty: Path, healthy: Path) -> None:
    written, quick = (stage(run, 0, conventions.WRITE) for run in (faulty, healthy))
    # The rate is that since the file was opened: what serializing took before is made up for.
    assert 3e6 < written["bytes"] / (written["dur_ns"] / 1e9) < 5e6
    assert quick["bytes"] / (quick["dur_ns"] / 1e9) > 40e6
    assert share(faulty, conventions.WRITE) > 0.5


def slow_fsync(faulty: Path, healthy: Path) -> None:
    synced, quick = (stage(run, 0, conventions.FSYNC) for run in (faulty, healthy))
    assert synced["dur_ns"] >= 500e6 * synced["files"]
    assert quick["dur_ns"] < 500e6
    assert share(faulty, conventions.FSYNC) > 0.5


def small_tensors(faulty: Path, healthy: Path) -> None:
    slow, quick = (stage(run, 0, conventions.SERIALIZE)["dur_ns"] for run in (faulty, healthy))
    assert slow > 3 * quick
    assert share(faulty, conventions.SERIALIZE, conventions.PLAN) > 0.5


def gil_save(faulty: Path, healthy: Path) -> None:
    slow, quick = (stage(run, 0, conventions.TOTAL) for run in (faulty, healthy))
    assert slow["blocking"] is quick["blocking"] is False
    assert slow["dur_ns"] > 3 * quick["dur_ns"]


SIGNS: Mapping[str, Callable[[Path, Path], None]] = {
    "slow-rank": slow_rank,
    "late-launch": late_launch,
    "no-prefetch": no_prefetch,
    "churn": churn,
    "host-sync": host_sync,
    "dataloader": dataloader,
    "slow-disk": slow_disk,
    "slow-fsync": slow_fsync,
    "small-tensors": small_tensors,
    "gil-save": gil_save,
}


def test_there_is_a_sample_of_every_fault_and_the_list_names_it() -> None:
    assert set(TRUTH) == set(SIGNS) == set(FAULTS)
    listed = (FAULT_SAMPLES.parent / "README.md").read_text()
    for name, truth in TRUTH.items():
        assert f"| {name} | `{truth['fault']}` | {truth['twin']} |" in listed
    folders = {path.name for path in FAULT_SAMPLES.iterdir() if path.is_dir()}
    assert folders == set(TRUTH) | {truth["twin"] for truth in TRUTH.values()}


@pytest.mark.parametrize("name", SIGNS)
def test_a_sample_shows_its_fault_and_its_twin_does_not(name: str) -> None:
    faulty, healthy = FAULT_SAMPLES / name, FAULT_SAMPLES / TRUTH[name]["twin"]
    (made,) = trainings.manifest(faulty)["faults"]
    assert made["name"] == name
    assert trainings.manifest(healthy)["faults"] == []
    same = ("strategy", "world_size", "model")
    assert [trainings.manifest(faulty)[key] for key in same] == [trainings.manifest(healthy)[key] for key in same]
    losses = [[row["loss"] for row in trainings.rows(run, 0, conventions.METRICS_SUFFIX)] for run in (faulty, healthy)]
    assert losses[0] == losses[1]
    SIGNS[name](faulty, healthy)


@pytest.mark.parametrize(
    ("name", "blamed"),
    [("slow-disk", {"write"}), ("slow-fsync", {"fsync"}), ("small-tensors", {"serialize", "plan"})],
)
def test_the_checkpoint_rule_blames_the_stage_at_fault(name: str, blamed: set[str]) -> None:
    (finding,) = BlockingCheckpoint().check(tracekit.load(FAULT_SAMPLES / name))
    assert any(f"longest stage is {stage} on" in finding.message for stage in blamed), finding.message


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("slow-disk", "CKPT004"),
        ("slow-fsync", "CKPT005"),
        ("small-tensors", "CKPT002"),
        ("gil-save", "CKPT009"),
        ("healthy-save", None),
        ("healthy-background-save", None),
    ],
)
def test_a_save_s_stall_is_named_by_its_class_and_a_healthy_save_has_none(name: str, code: str | None) -> None:
    run = tracekit.load(FAULT_SAMPLES / name)
    rules = [rule() for rule in RULES if rule.code.startswith("CKPT")]
    loud = {finding.code for finding in check(run, rules).findings if finding.severity >= Severity.WARNING}
    assert loud - {BlockingCheckpoint.code} == ({code} if code else set())
    # A save that blocks for 126 ms after six steps of 17 ms costs, too, whatever its stages: its interval is short.
    assert (BlockingCheckpoint.code in loud) == (code != "CKPT009" and name != "healthy-background-save")


def test_without_prefetch_no_gather_is_hidden() -> None:
    hidden = {}
    for name in ("no-prefetch", TRUTH["no-prefetch"]["twin"]):
        rows = tracekit.load(FAULT_SAMPLES / name).table(breakdown.by_rank)
        hidden[name] = rows["overlapped_ns"].sum() / rows["communication_ns"].sum()
    assert hidden["no-prefetch"] < 0.05 < hidden[TRUTH["no-prefetch"]["twin"]]


def test_the_samples_are_small_and_name_no_machine() -> None:
    files = [path for path in FAULT_SAMPLES.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 2_000_000
    assert max(path.stat().st_size for path in files) < 150_000
    for path in files:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        assert b"/home/" not in data
        assert b"/tmp/" not in data
