"""Outlier steps of public recordings, recomputed from the raw files; and recordings that have none."""

import gzip
import json
from pathlib import Path

import pytest

from tests.support.selection import others_in_accuracy
from tracekit.ingest.loader import load
from tracekit.rules.outlier_steps import ColdStart, OutlierStep
from tracekit.rules.rule import Severity

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def folder_of(name):
    if not (TRACES / name).is_dir():
        pytest.skip("the downloaded traces are not in ../shared")
    return TRACES / name


def allocator_calls(path):
    """Return cudaMalloc and cudaFree calls of a file in order: name and duration in µs."""
    with gzip.open(path, "rt", encoding="utf-8", errors="replace") as file:
        events = json.load(file)["traceEvents"]
    calls = [e for e in events if e.get("ph") == "X" and e["name"] in ("cudaMalloc", "cudaFree")]
    return [(e["name"], e["dur"]) for e in sorted(calls, key=lambda e: e["ts"])]


def test_an_allocation_retry_of_all_ranks_is_the_outlier_of_the_torchrec_run():
    # On each rank one cudaMalloc fails, the allocator calls cudaFree 24 times and more, and then cudaMalloc again.
    folder = folder_of("torchrec_v100_4ranks")
    frees_us = [[us for name, us in allocator_calls(path) if name == "cudaFree"] for path in folder.iterdir()]
    (found,) = OutlierStep().check(load(folder))
    assert (found.severity, found.ranks, found.steps) == (Severity.WARNING, (), (4,))
    assert "the host of every rank stalls" in found.message
    assert "an allocation retry" in found.message
    assert all(len(of_rank) > 20 for of_rank in frees_us)
    assert min(map(sum, frees_us)) < 3 * found.cost_ns / 1000 < 1.3 * max(map(sum, frees_us))


def test_the_first_allocations_of_the_torchrec_run_are_warm_up():
    (found,) = ColdStart().check(load(folder_of("torchrec_v100_4ranks")))
    assert (found.severity, found.steps) == (Severity.INFO, (4,))
    assert "while the host allocates device memory" in found.message


ALIKE = (
    "megatron_tp8_a100_8ranks", "hta_ddp_v100_memory", "kineto_resnet_v100_memory", "hta_dlrm_a100",
    "hta_nccl_args_a100", "tracelens_mi300_resnet_ddp", "hta_event_sync", "hta_pair_of_128",
)  # fmt: skip


@pytest.mark.parametrize("name", others_in_accuracy(ALIKE, ALIKE[4:]))
def test_a_run_whose_steps_are_alike_has_no_outlier(name):
    run = load(folder_of(name))
    assert list(OutlierStep().check(run)) == list(ColdStart().check(run)) == []
