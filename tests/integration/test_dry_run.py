"""What ``--dry-run`` says, compared with what trainings sent, saved and would be refused for."""

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import NamedTuple

import pytest

from instrumented_trainers import config, dry_run
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.model_config import PRESETS
from tests.support.cli_runner import tracekit

SAMPLES = Path(__file__).parents[2] / "sample_traces"


def settings_of(run: Path) -> TrainingConfig:
    manifest = json.loads((run / "run.json").read_text())["arguments"]
    names = {field.name for field in dataclasses.fields(TrainingConfig)} & set(manifest)
    return TrainingConfig(**{name: manifest[name] for name in names})


@pytest.mark.parametrize("name", ["demo-fsdp2", "demo-yafsdp"])
def test_a_rank_sends_what_the_formula_says(name: str) -> None:
    run = SAMPLES / name
    settings = settings_of(run)
    done = tracekit("summary", run, "--by", "collective", "--format", "json")
    rows = [
        row for row in json.loads(done.stdout) if row["rank"] == 0 and row["op"] in ("all_gather", "reduce_scatter")
    ]
    messages = sum(row["bytes"] for row in rows) / settings.profile_active
    assert dry_run.sent_bytes_per_step(settings) == pytest.approx(messages / 2, rel=0.01)


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


@pytest.mark.parametrize("strategy", ["ddp", "fsdp1"])
def test_offloading_is_refused_where_no_strategy_does_it(strategy: str) -> None:
    said = command("--strategy", strategy, "--offload")
    assert said.returncode == 2
    assert f"--offload: {strategy} cannot; zero1, fsdp2 and yafsdp can" in said.stderr


def test_what_a_training_would_be_refused_for_is_refused() -> None:
    said = command("--strategy", "ddp", "--world-size", "4", "--replicate", "2")
    assert said.returncode == 2
    assert said.stderr.startswith("instrumented_trainers: --replicate 2: ddp replicates over all ranks")


@pytest.mark.parametrize(
    ("optimizer", "state"), [(["sgd", "--momentum", "0"], "0.00"), (["sgd"], "2.51"), (["adam"], "5.01")]
)
def test_state_is_that_of_the_optimizer(optimizer: list[str], state: str) -> None:
    said = command("--strategy", "yafsdp", "--model", "1.3b", "--optimizer", *optimizer)
    (line,) = [line for line in said.stdout.splitlines() if line.startswith("  optimizer")]
    assert line.split()[-1] == state


def test_an_optimizer_without_a_formula_is_refused() -> None:
    said = command("--strategy", "yafsdp", "--optimizer", "muon")
    assert (said.returncode, said.stderr.split(" (")[0]) == (
        2,
        "instrumented_trainers: --dry-run: has no formula for --optimizer muon",
    )


class Said(NamedTuple):
    """What the command printed, and its exit code."""

    stdout: str
    stderr: str
    returncode: int


def command(*options: str) -> Said:
    """Run the trainers' command with ``--dry-run`` in this process."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr), pytest.raises(SystemExit) as ended:
        config.parse(["--dry-run", *options], dry_run=dry_run.report)
    return Said(stdout.getvalue(), stderr.getvalue(), int(ended.value.code or 0))
