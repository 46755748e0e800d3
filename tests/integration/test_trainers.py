"""Trainings on 2 real gloo processes, most started as a user starts them; what they leave on disk."""

import gzip
import json
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import polars as pl
import pytest

import tracekit
from instrumented_trainers.model_config import PRESETS
from tests.integration import trainings
from tests.integration.launched import train
from tests.support import process_group
from tracekit import conventions
from tracekit.analysis.compute import call_paths
from tracekit.conventions.strategies import STRATEGIES

LEAN = ["--device", "cpu", "--batch", "2", "--tokens", "64", "--log-every", "1"]
ACTIVE = ["--profile-wait", "1", "--profile-warmup", "1", "--profile-active", "2"]


def trace(run: Path, rank: int) -> list[dict[str, Any]]:
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        events: list[dict[str, Any]] = json.load(packed)["traceEvents"]
    return events


def lines(run: Path, rank: int, suffix: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / conventions.rank_file(rank, suffix)).read_text().splitlines()]


def losses(run: Path) -> list[list[float]]:
    """Return each rank's losses, by step."""
    return [[row["loss"] for row in lines(run, rank, conventions.METRICS_SUFFIX)] for rank in range(2)]


@pytest.fixture(scope="module")
def fsdp2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """A run of 12 steps, steps 2 and 3 profiled, checkpoints after 3, 6, 9 and 12 steps, only the last two retained."""
    run = tmp_path_factory.mktemp("runs") / "fsdp2"
    wanted = ["--strategy", "fsdp2", "--out", str(run), "--steps", "12", "--checkpoint-every", "3"]
    code, out, err = train(*wanted, *LEAN, *ACTIVE, "--learning-rate", "3e-3")
    assert code == 0, err
    return run, out, err


def test_a_run_holds_these_files_and_no_half_ones(fsdp2: tuple[Path, str, str]) -> None:
    run, _, _ = fsdp2
    assert {path.name for path in run.iterdir()} == {
        "run.json",
        "attempts.jsonl",
        "checkpoints",
        *(f"rank0000{rank}{suffix}" for rank in (0, 1) for suffix in (".pt.trace.json.gz", ".checkpoint.jsonl")),
        *(f"rank0000{rank}.metrics.jsonl" for rank in (0, 1)),
    }
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-000009", "step-000012"}


def test_the_manifest_describes_the_run(fsdp2: tuple[Path, str, str]) -> None:
    manifest = json.loads((fsdp2[0] / conventions.MANIFEST_FILE).read_text())
    assert (manifest["strategy"], manifest["world_size"], manifest["device"]) == ("fsdp2", 2, "cpu")
    assert manifest["mesh"] == {"axes": ["dp_shard"], "shape": [2]}
    assert manifest["groups"] == {"dp_shard": [[0, 1]]}
    assert manifest["model"]["name"] == "tiny"
    assert manifest["model"]["parameters"] == 3_082_496
    assert manifest["arguments"]["steps"] == 12
    assert manifest["command"][:4] == ["python", "-m", "instrumented_trainers", "--strategy"]
    assert manifest["windows"] == [{"window": 0, "first_step": 2, "steps": 2}]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_trace_shows_steps_phases_collectives_and_memory(fsdp2: tuple[Path, str, str], rank: int) -> None:
    events = trace(fsdp2[0], rank)
    count = Counter(event["name"] for event in events)
    assert (count["ProfilerStep#2"], count["ProfilerStep#3"], count["ProfilerStep#4"]) == (1, 1, 0)
    phases = ("data", "forward", "backward", "clip", "optimizer")
    assert [count[conventions.span_name(phase)] for phase in phases] == [2] * 5
    assert count[conventions.span_name(conventions.CHECKPOINT)] == 1
    assert count["FSDP::all_gather (layers.3)"] == 4
    assert count["c10d::_reduce_scatter_base_"] == 2 * 5
    assert count["gloo:all_gather"] >= 2 * 9
    assert count["[memory]"] > 100
    issued = [event for event in events if event["name"] == "c10d::_reduce_scatter_base_"]
    assert all(
        event["args"]["Input Dims"][1] == [2 * size for size in event["args"]["Input Dims"][0]] for event in issued
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_the_checkpoint_log_agrees_with_the_trace_and_the_folder(fsdp2: tuple[Path, str, str], rank: int) -> None:
    run, _, _ = fsdp2
    rows = lines(run, rank, conventions.CHECKPOINT_LOG_SUFFIX)
    totals = {row["checkpoint"]: row for row in rows if row["stage"] == conventions.TOTAL}
    assert list(totals) == ["step-000003", "step-000006", "step-000009", "step-000012"]
    for name in ("step-000009", "step-000012"):
        folder = run / "checkpoints" / name
        own = [folder / f"__{rank}_0.distcp", *([folder / ".metadata"] if rank == 0 else [])]
        assert totals[name]["bytes"] == sum(path.stat().st_size for path in own)
        stages = {row["stage"] for row in rows if row["checkpoint"] == name}
        absent = set() if rank == 0 else {conventions.FINISH}
        assert stages == set(conventions.SAVE_STAGES) - absent
    # The save after step 3 lies in the profiled window; log and trace share one clock.
    with gzip.open(run / conventions.rank_file(rank, conventions.TRACE_SUFFIX)) as packed:
        recorded = json.load(packed)
    (span,) = [e for e in recorded["traceEvents"] if e["name"] == conventions.span_name(conventions.CHECKPOINT)]
    start_ns = recorded["baseTimeNanoseconds"] + span["ts"] * 1000
    end_ns, total = start_ns + span["dur"] * 1000, totals["step-000003"]
    shared_ns = min(end_ns, total["start_ns"] + total["dur_ns"]) - max(start_ns, total["start_ns"])
    # A busy machine may pause the rank between the beginnings of the two, so one may lie within the other.
    assert shared_ns >= min(end_ns - start_ns, total["dur_ns"]) - 20e6


def test_tokens_per_second_are_those_of_all_ranks_over_the_ranks_time(fsdp2: tuple[Path, str, str]) -> None:
    run, _, _ = fsdp2
    for rank in range(2):
        for row in lines(run, rank, conventions.METRICS_SUFFIX):
            per_second = 2 * 2 * 64 * 1e9 / row["step_time_ns"]  # ranks, sequences, tokens
            assert row["tokens_per_second"] == pytest.approx(per_second)
            assert row["tokens_per_second_per_gpu"] == pytest.approx(per_second / 2)


def test_the_loss_falls_on_real_text(fsdp2: tuple[Path, str, str]) -> None:
    by_step = [sum(both) / 2 for both in zip(*losses(fsdp2[0]), strict=True)]
    assert len(by_step) == 12
    assert sum(by_step[-3:]) / 3 < by_step[0] - 1.5


def test_the_training_says_little_and_its_recorder_nothing(fsdp2: tuple[Path, str, str]) -> None:
    _, out, err = fsdp2
    assert err == ""
    assert out.count("\n") == 2 + 12 + 4
    assert "step   11 of 12" in out


def test_a_resumed_training_is_the_uninterrupted_one_also_under_torchrun(
    fsdp2: tuple[Path, str, str], tmp_path: Path
) -> None:
    run, _, _ = fsdp2
    wanted = ["--strategy", "fsdp2", "--out", str(tmp_path / "on"), "--steps", "12", "--learning-rate", "3e-3"]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "instrumented_trainers")
    resumed = ["--resume", str(run / "checkpoints" / "step-000009")]
    code, out, err = train(*wanted, *LEAN, *ACTIVE, *resumed, program=launcher)
    assert code == 0, err
    assert "from step 9" in out
    assert losses(tmp_path / "on") == [of_rank[9:] for of_rank in losses(run)]


def test_an_error_on_one_rank_is_shown_once(tmp_path: Path) -> None:
    run = tmp_path / "run"
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
            import sys
            from pathlib import Path
            import torch.distributed as dist
            from instrumented_trainers import launch
            from instrumented_trainers.checkpoints import storage
            from instrumented_trainers.config import TrainingConfig

            save = storage.Save.run

            def broken(self, recorder):
                if dist.get_rank() == 1:
                    raise ZeroDivisionError("broken on purpose")
                save(self, recorder)

            storage.Save.run = broken

            if __name__ == "__main__":
                config = TrainingConfig("ddp", Path({str(run)!r}), model="micro", steps=3, batch=1, tokens=16,
                                        checkpoint_every=1)
                sys.exit(launch.run(config, ["train.py"]))
        """)
    )
    code, _, err = train(program=(str(script),))
    assert code == 1
    assert err.startswith("instrumented_trainers: rank 1")
    assert err.count("in _serve") == 1
    assert err.count("ZeroDivisionError: broken on purpose") == 1


REPLICATED = ("ddp", "zero1")


@pytest.fixture(scope="module")
def replicated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of 4 steps of the strategies that replicate the model, in folders of their names."""
    runs = tmp_path_factory.mktemp("replicated")
    cases = {name: trainings.case(trainings.micro(name, runs / name, steps=4)) for name in REPLICATED}
    for outcome in process_group.run_cases(2, cases).values():
        outcome.results()
    return runs


@pytest.mark.parametrize("strategy", REPLICATED)
def test_a_step_of_a_replicated_model_moves_what_the_strategy_says(replicated: Path, strategy: str) -> None:
    recorded = tracekit.load(str(replicated / strategy), cache=False).trace(0)
    calls = recorded.collectives.join(recorded.activities, left_on="activity_id", right_on="id")
    message_bytes = dict(calls.filter(pl.col("step") == 3).group_by("op").agg(pl.sum("sent_bytes")).rows())
    assert message_bytes == {
        collective.op: 4 * PRESETS["micro"].parameters for collective in STRATEGIES[strategy].collectives
    }


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2", "yafsdp"])
def test_modules_have_the_names_of_the_model_under_each_wrapper(strategy: str, tmp_path: Path) -> None:
    config = trainings.micro(strategy, tmp_path / strategy, steps=4, modules=True)
    process_group.run_cases(2, {strategy: trainings.case(config)})[strategy].results()
    run = tracekit.load(config.out, cache=False)
    names = ["Llama", *(f"Llama.layers.{n}" for n in range(PRESETS["micro"].layers)), "Llama.layers.0.attention"]
    for trace in (run.trace(rank) for rank in range(2)):
        calls = dict(call_paths.module_calls(trace).iter_rows())
        assert [calls.get(name) for name in names] == [config.profile_active] * len(names), calls
