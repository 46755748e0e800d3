"""What ``--dry-run`` says, compared with what trainings sent, saved and would be refused for."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from instrumented_trainers import dry_run
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.model import PRESETS
from tests.support.cli_runner import tracekit

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def config_of(run: Path) -> TrainingConfig:
    manifest = json.loads((run / "run.json").read_text())["arguments"]
    names = {field.name for field in dataclasses.fields(TrainingConfig)} & set(manifest)
    return TrainingConfig(**{name: manifest[name] for name in names})


@pytest.mark.parametrize("name", ["demo-fsdp2", "demo-yafsdp"])
def test_a_rank_sends_what_the_formula_says(name: str) -> None:
    run = SAMPLES / name
    config = config_of(run)
    done = tracekit("summary", run, "--by", "collective", "--format", "json")
    rows = [
        row for row in json.loads(done.stdout) if row["rank"] == 0 and row["op"] in ("all_gather", "reduce_scatter")
    ]
    messages = sum(row["bytes"] for row in rows) / config.profile_active
    assert dry_run.sent_bytes_per_step(config) == pytest.approx(messages / 2, rel=0.01)


def test_it_needs_no_gpus_and_no_folder() -> None:
    said = command("--strategy", "yafsdp", "--model", "70b", "--world-size", "64", "--device", "cuda")
    assert said.returncode == 0, said.stderr
    lines = said.stdout.splitlines()
    assert lines[0].startswith("yafsdp: 70b (68,976.6 M parameters) in fp32 on 64 GPUs")
    sizes = {line.rsplit(maxsplit=1)[0].strip(): line.split()[-1] for line in lines if line.startswith("  ")}
    assert float(sizes["weights"]) == pytest.approx(4 * PRESETS["70b"].parameters / 64 / 2**30, rel=0.01)
    assert "a checkpoint has 827.72 GB" in said.stdout


def test_host_memory_is_listed_apart() -> None:
    said = command("--strategy", "zero1", "--model", "1.3b", "--world-size", "4", "--offload")
    assert "in host memory" in said.stdout
    assert "  optimizer               0.00" in said.stdout


def test_what_a_training_would_be_refused_for_is_refused() -> None:
    said = command("--strategy", "ddp", "--world-size", "4", "--replicate", "2")
    assert said.returncode == 2
    assert said.stderr.startswith("instrumented_trainers: --replicate 2: ddp replicates over all ranks")


def command(*options: str) -> "subprocess.CompletedProcess[str]":
    """Run the trainers' command with ``--dry-run``."""
    words = [sys.executable, "-m", "instrumented_trainers", "--dry-run", *options]
    return subprocess.run(words, capture_output=True, text=True, check=False, timeout=120)
