"""The same trainings on GPUs."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tracekit import conventions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]
REPOSITORY = Path(__file__).parents[2]


def events(run: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        found: list[dict[str, Any]] = json.load(packed)["traceEvents"]
    return found


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1", "fsdp2", "yafsdp"])
def test_a_run_on_gpus_records_kernels_stream_waits_and_the_allocator(tmp_path: Path, strategy: str) -> None:
    wanted = ["--strategy", strategy, "--out", str(tmp_path), "--device", "cuda", "--precision", "bf16", "--steps", "8"]
    window = ["--profile-wait", "1", "--profile-warmup", "1", "--profile-active", "3", "--checkpoint-every", "4"]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "instrumented_trainers", *wanted, *window]
    subprocess.run(command, env=environment, check=True, timeout=300)
    kinds = {event.get("cat") for event in events(tmp_path, 0)}
    assert {"kernel", "cuda_runtime", "cuda_sync"} <= kinds
    lines = (tmp_path / conventions.rank_file(0, conventions.METRICS_SUFFIX)).read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(8))
    assert all(row[conventions.ALLOCATED_METRIC] > 0 and row[conventions.RESERVED_METRIC] > 0 for row in rows)
    manifest = json.loads((tmp_path / conventions.MANIFEST_FILE).read_text())
    assert manifest["device"] == "cuda"
    assert manifest["versions"]["nccl"]


@pytest.mark.parametrize("strategy", ["fsdp2", "yafsdp"])
def test_two_ranks_share_a_gpu_and_record_their_collectives(tmp_path: Path, strategy: str) -> None:
    wanted = ["--strategy", strategy, "--out", str(tmp_path), "--device", "cuda", "--precision", "bf16", "--steps", "8"]
    window = ["--profile-wait", "2", "--profile-warmup", "1", "--profile-active", "3", "--timeout-s", "120"]
    command = [sys.executable, "-m", "instrumented_trainers", *wanted, *window, "--world-size", "2", "--share-gpus"]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True, timeout=300)
    for rank in range(2):
        kernels = [event for event in events(tmp_path, rank) if event.get("cat") == "kernel"]
        streams = {
            name: {event["args"]["stream"] for event in kernels if event["args"].get("Collective name") == name}
            for name in ("_allgather_base", "_reduce_scatter_base")
        }
        computing = {event["args"]["stream"] for event in kernels if "gemm" in event["name"]}
        for name, of_collective in streams.items():
            assert of_collective, name
            assert not of_collective & computing, name
