"""The callback for the Hugging Face Trainer, in trainings by that Trainer."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch

import tracekit
from tests.integration import framework_scripts, recordings
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate")),
    reason="transformers or accelerate is not installed: pip install transformers accelerate",
)
WORDS, TOKENS, BATCH, ACCUMULATED = 32, 8, 2, 2
SIZES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "use_cache": False,
}


def tracekit_callback(*arguments: Any, **options: Any) -> Any:
    """Return the callback. Its import is that of transformers: 3 s, which only the worker with these tests needs."""
    from tracekit.capture.huggingface import TracekitCallback

    return TracekitCallback(*arguments, **options)


class Text(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        piece = torch.arange(index, index + TOKENS) % WORDS
        return {"input_ids": piece, "labels": piece}


def stop(after: int) -> Any:
    """Return a callback that ends the training."""
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop |= state.global_step == after

    return Stop()


def fit(folder: Path, *callbacks: Any, resume: bool = False, **arguments: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    torch.manual_seed(0)
    settings = {
        "output_dir": str(folder / "checkpoints"),
        "per_device_train_batch_size": BATCH,
        "gradient_accumulation_steps": ACCUMULATED,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 2,
        "save_strategy": "no",
    }
    trainer = Trainer(
        LlamaForCausalLM(LlamaConfig(**SIZES)),
        TrainingArguments(**{**settings, **arguments}),
        train_dataset=Text(),
        eval_dataset=Text(),
        callbacks=list(callbacks),
    )
    trainer.train(resume_from_checkpoint=resume or None)
    return trainer


def test_the_example_on_two_ranks_leaves_a_run_that_can_be_checked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    framework_scripts.run_example(
        "huggingface_trainer", "--out", str(out), "--steps", "16", "--checkpoints", str(tmp_path / "checkpoints")
    )
    run = tracekit.load(out)
    assert recordings.steps(run) == {rank: [10, 11, 12, 13, 14] for rank in (0, 1)}
    for rank in (0, 1):
        assert recordings.spans(run, rank) == {
            step: {"data": 1, "forward": 2, "backward": 2, "optimizer": 1} for step in range(10, 15)
        }
    lines = [recordings.metrics(out, rank) for rank in (0, 1)]
    assert [line["step"] for line in lines[0]] == list(range(16))
    losses = [[line[conventions.LOSS_METRIC] for line in of_rank] for of_rank in lines]
    assert losses[0] == losses[1]  # the Trainer's own, of all ranks
    assert losses[0][-1] < losses[0][0]
    assert all(0 < line[conventions.DATA_WAIT_METRIC] < line[conventions.STEP_TIME_METRIC] for line in lines[0])
    assert json.loads((out / conventions.MANIFEST_FILE).read_text())["strategy"] == "ddp"
    assert "DATA" not in {
        finding.code[:4] for finding in tracekit.check(run).findings if finding.severity.name == "ERROR"
    }


def test_steps_are_optimizer_steps_and_exclude_evaluation_time(tmp_path: Path) -> None:
    # 24 pieces, 2 a batch, 2 batches a step: 6 steps an epoch. It is evaluated after steps 3 and 6, and stops after 8.
    recording = tracekit_callback(tmp_path / "run", steps=(2, 8), warmup=1, device="cpu")
    trainer = fit(tmp_path, recording, stop(after=8), num_train_epochs=3, eval_strategy="steps", eval_steps=3)
    assert trainer.state.global_step == 8
    run = tracekit.load(tmp_path / "run")
    assert recordings.steps(run) == {0: [2, 3, 4, 5, 6, 7]}
    assert {step for step, spans in recordings.spans(run).items() if "evaluation" in spans} == {3, 6}
    lines = recordings.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(8))
    logged = {row["step"] - 1: row["loss"] for row in trainer.state.log_history if "loss" in row}
    assert {line["step"]: line["loss"] for line in lines if "loss" in line} == logged
    # The optimizer's rate at each step falls by as much: a scheduler has one step for each of ours.
    rates = [line["learning_rate"] for line in lines]
    assert rates == pytest.approx([5e-5 * (1 - step / 18) for step in range(8)])
    (trace,) = run.traces()
    evaluations = trace.ops.filter(pl.col("name") == "tracekit::evaluation")
    for step, evaluation_ns in evaluations.select("step", "dur_ns").iter_rows():
        window = trace.steps.row(by_predicate=pl.col("step") == step, named=True)
        own_ns = lines[step][conventions.STEP_TIME_METRIC]
        assert own_ns + evaluation_ns <= window["host_end_ns"] - window["host_start_ns"]
        speed = lines[step][conventions.TOKENS_METRIC]
        assert speed == pytest.approx(ACCUMULATED * BATCH * TOKENS * 1e9 / own_ns)


def test_a_resumed_training_continues_the_step_count(tmp_path: Path) -> None:
    first = tracekit_callback(tmp_path / "run", steps=None)
    fit(tmp_path, first, max_steps=3, save_strategy="steps", save_steps=3)
    second = tracekit_callback(tmp_path / "run", steps="1:2", warmup=1, device="cpu")
    fit(tmp_path, second, max_steps=6, resume=True)
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(6))
    assert recordings.steps(tracekit.load(tmp_path / "run")) == {0: [4]}


def test_training_continues_when_recording_is_impossible(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").write_text("a file is in the way")
    recorded = fit(tmp_path, tracekit_callback(tmp_path / "run"), max_steps=2)
    alone = fit(tmp_path, max_steps=2)
    for with_callback, without_callback in zip(recorded.model.parameters(), alone.model.parameters(), strict=True):
        assert torch.equal(with_callback, without_callback)
    assert "training continues" in capfd.readouterr().err


def test_a_failure_in_the_callback_stops_only_the_recording(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers import TrainerCallback

    class Strange(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            state.num_input_tokens_seen = None  # no number to take another from

    recording = tracekit_callback(tmp_path / "run", steps=None)
    assert fit(tmp_path, Strange(), recording, max_steps=2).state.global_step == 2
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit: ")]
    assert len(said) == 1
    assert "recording ends" in said[0]
    assert not recording.recorder.recording


def test_invalid_options_are_rejected_before_training() -> None:
    with pytest.raises(TypeError, match="stepz"):
        tracekit_callback("run", stepz="10:15")
    with pytest.raises(ValueError, match="15:10"):
        tracekit_callback("run", steps="15:10")
