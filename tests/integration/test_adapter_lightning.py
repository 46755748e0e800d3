"""The callback for Lightning's Trainer, in trainings by that Trainer."""

import importlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import polars as pl
import pytest

import tracekit
from tests.integration import framework_scripts, recordings
from tracekit import conventions

pytestmark = pytest.mark.skipif(
    all(importlib.util.find_spec(name) is None for name in ("lightning", "pytorch_lightning")),
    reason="Lightning is not installed: pip install pytorch-lightning",
)


@pytest.fixture(scope="module")
def lightning() -> ModuleType:
    return importlib.import_module("tests.integration.lightning_models")


@pytest.mark.accuracy  # the examples of Accelerate and transformers leave such runs
def test_the_example_on_two_ranks_leaves_a_run_that_can_be_checked(tmp_path: Path) -> None:
    out = tmp_path / "run"
    framework_scripts.run_example(
        "lightning_trainer", "--out", str(out), "--steps", "16", "--checkpoint", str(tmp_path / "last.ckpt")
    )
    run = tracekit.load(out)
    assert recordings.steps(run) == {rank: [10, 11, 12, 13, 14] for rank in (0, 1)}
    for rank in (0, 1):
        assert recordings.spans(run, rank) == {
            step: {"data": 2, "forward": 2, "backward": 2, "optimizer": 1} for step in range(10, 15)
        }
    lines = [recordings.metrics(out, rank) for rank in (0, 1)]
    assert [line["step"] for line in lines[0]] == list(range(16))
    losses = [line[conventions.LOSS_METRIC] for line in lines[0]]
    assert losses[-1] < losses[0]
    assert all(0 < line[conventions.DATA_WAIT_METRIC] < line[conventions.STEP_TIME_METRIC] for line in lines[0])
    assert all(line[conventions.TOKENS_METRIC] > 0 for line in lines[1])
    assert json.loads((out / conventions.MANIFEST_FILE).read_text())["strategy"] == "ddp"
    assert "DATA" not in {
        finding.code[:4] for finding in tracekit.check(run).findings if finding.severity.name == "ERROR"
    }


def test_steps_are_optimizer_steps_and_exclude_validation_time(tmp_path: Path, lightning: ModuleType) -> None:
    # 24 rows, 2 a batch, 2 batches a step: 6 steps an epoch. It is validated after steps 3, 6 and 9.
    model = lightning.Model()
    recording = lightning.TracekitCallback(tmp_path / "run", steps=(2, 9), warmup=1, device="cpu")
    trainer = lightning.fit(tmp_path, model, recording, max_epochs=2, accumulate_grad_batches=2, val_check_interval=6)
    assert trainer.global_step == 12
    run = tracekit.load(tmp_path / "run")
    assert recordings.steps(run) == {0: [2, 3, 4, 5, 6, 7, 8]}
    assert {step for step, spans in recordings.spans(run).items() if "evaluation" in spans} == {3, 6}
    lines = recordings.metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(12))
    means = [(first + second) / 2 for first, second in zip(model.losses[::2], model.losses[1::2], strict=True)]
    assert [line["loss"] for line in lines] == pytest.approx(means)
    assert [line["learning_rate"] for line in lines] == pytest.approx([0.01 * (1 - step / 10) for step in range(12)])
    (trace,) = run.traces()
    for step, evaluation_ns in (
        trace.ops.filter(pl.col("name") == "tracekit::evaluation").select("step", "dur_ns").iter_rows()
    ):
        window = trace.steps.row(by_predicate=pl.col("step") == step, named=True)
        own_ns = lines[step][conventions.STEP_TIME_METRIC]
        assert own_ns + evaluation_ns <= window["host_end_ns"] - window["host_start_ns"]
        assert lines[step][conventions.TOKENS_METRIC] == pytest.approx(
            2 * lightning.BATCH * lightning.WIDTH * 1e9 / own_ns
        )


def test_a_resumed_training_continues_the_step_count(tmp_path: Path, lightning: ModuleType) -> None:
    trainer = lightning.fit(
        tmp_path, lightning.Model(), lightning.TracekitCallback(tmp_path / "run", steps=None), max_steps=3
    )
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    recording = lightning.TracekitCallback(tmp_path / "run", steps="1:2", warmup=1, device="cpu")
    lightning.fit(tmp_path, lightning.Model(), recording, max_steps=6, resume=tmp_path / "last.ckpt")
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(6))
    assert recordings.steps(tracekit.load(tmp_path / "run")) == {0: [4]}


def test_steps_of_several_optimizers_on_one_batch_count_as_one(tmp_path: Path, lightning: ModuleType) -> None:
    recording = lightning.TracekitCallback(tmp_path / "run", steps="2:4", warmup=1, device="cpu")
    trainer = lightning.fit(tmp_path, lightning.Pair(), recording, max_epochs=1)
    assert trainer.global_step == 24
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(12))
    spans = recordings.spans(tracekit.load(tmp_path / "run"))
    assert {step: (spans[step]["backward"], spans[step]["optimizer"]) for step in spans} == {2: (2, 2), 3: (2, 2)}
    # Resumed, it goes on at its own count, not at Lightning's, which has each optimizer's steps.
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    lightning.fit(
        tmp_path,
        lightning.Pair(),
        lightning.TracekitCallback(tmp_path / "run", steps=None),
        max_epochs=2,
        resume=tmp_path / "last.ckpt",
    )
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(24))


def test_an_exception_in_training_propagates_and_the_recording_is_written(
    tmp_path: Path, lightning: ModuleType
) -> None:
    recording = lightning.TracekitCallback(tmp_path / "run", steps="2:8", warmup=1, device="cpu")
    with pytest.raises(RuntimeError, match="deliberate failure"):
        lightning.fit(tmp_path, lightning.Pair(fail_at=5), recording, max_epochs=1)
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(5))
    assert {2, 3, 4} <= set(recordings.steps(tracekit.load(tmp_path / "run"))[0])


def test_a_failure_in_the_callback_stops_only_the_recording(
    tmp_path: Path, lightning: ModuleType, capfd: pytest.CaptureFixture[str]
) -> None:
    recording = lightning.TracekitCallback(tmp_path / "run", tokens=lambda batch: batch["no such column"], steps=None)
    recorded, alone = lightning.Model(), lightning.Model()
    alone.load_state_dict(recorded.state_dict())
    lightning.fit(tmp_path, recorded, recording, max_steps=3)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit: ")]
    assert len(said) == 1
    assert "recording ends" in said[0]
    lightning.fit(tmp_path, alone, max_steps=3)
    assert recorded.losses == alone.losses
    assert len(alone.losses) == 3
