"""The callback for Lightning's Trainer, in trainings by that Trainer."""

import json
import warnings
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from torch.utils.data import DataLoader

import tracekit
from tests.integration import framework_scripts, recordings
from tracekit import conventions

try:
    import lightning.pytorch as lit
except ImportError:
    lit = pytest.importorskip(
        "pytorch_lightning", reason="Lightning is not installed: pip install pytorch-lightning", exc_type=ImportError
    )

from tracekit.capture.lightning import TracekitCallback

WIDTH, ROWS, BATCH = 8, 24, 2


class Model(lit.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(WIDTH, WIDTH)
        self.losses: list[float] = []

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        loss = self.layer(batch["input_ids"].float()).pow(2).mean()
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.layer(batch["input_ids"].float())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Pair(lit.LightningModule):
    """Two networks, each with its optimizer; the first steps with each batch, the second with every other."""

    def __init__(self, *, fail_at: int = -1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.layers = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.fail_at = fail_at

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if index == self.fail_at:
            raise RuntimeError("deliberate failure")
        x = batch["input_ids"].float()
        for layer, optimizer in zip(self.layers, self.optimizers(), strict=True):
            loss = layer(x).pow(2).mean()
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.layers]


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(index, index + WIDTH)}


def fit(folder: Path, model: Any, *callbacks: Any, resume: Path | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "logger": False,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lit.Trainer(
            accelerator="cpu", devices=1, callbacks=list(callbacks), default_root_dir=folder, **quiet, **arguments
        )
        trainer.fit(model, DataLoader(Rows(), BATCH), DataLoader(Rows(), BATCH), ckpt_path=resume)
    return trainer


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


def test_steps_are_optimizer_steps_and_exclude_validation_time(tmp_path: Path) -> None:
    # 24 rows, 2 a batch, 2 batches a step: 6 steps an epoch. It is validated after steps 3, 6 and 9.
    model = Model()
    recording = TracekitCallback(tmp_path / "run", steps=(2, 9), warmup=1, device="cpu")
    trainer = fit(tmp_path, model, recording, max_epochs=2, accumulate_grad_batches=2, val_check_interval=6)
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
        assert lines[step][conventions.TOKENS_METRIC] == pytest.approx(2 * BATCH * WIDTH * 1e9 / own_ns)


def test_a_resumed_training_continues_the_step_count(tmp_path: Path) -> None:
    trainer = fit(tmp_path, Model(), TracekitCallback(tmp_path / "run", steps=None), max_steps=3)
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    recording = TracekitCallback(tmp_path / "run", steps="1:2", warmup=1, device="cpu")
    fit(tmp_path, Model(), recording, max_steps=6, resume=tmp_path / "last.ckpt")
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(6))
    assert recordings.steps(tracekit.load(tmp_path / "run")) == {0: [4]}


def test_steps_of_several_optimizers_on_one_batch_count_as_one(tmp_path: Path) -> None:
    recording = TracekitCallback(tmp_path / "run", steps="2:4", warmup=1, device="cpu")
    trainer = fit(tmp_path, Pair(), recording, max_epochs=1)
    assert trainer.global_step == 24
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(12))
    spans = recordings.spans(tracekit.load(tmp_path / "run"))
    assert {step: (spans[step]["backward"], spans[step]["optimizer"]) for step in spans} == {2: (2, 2), 3: (2, 2)}
    # Resumed, it goes on at its own count, not at Lightning's, which has each optimizer's steps.
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    fit(tmp_path, Pair(), TracekitCallback(tmp_path / "run", steps=None), max_epochs=2, resume=tmp_path / "last.ckpt")
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(24))


def test_an_exception_in_training_propagates_and_the_recording_is_written(tmp_path: Path) -> None:
    recording = TracekitCallback(tmp_path / "run", steps="2:8", warmup=1, device="cpu")
    with pytest.raises(RuntimeError, match="deliberate failure"):
        fit(tmp_path, Pair(fail_at=5), recording, max_epochs=1)
    assert [line["step"] for line in recordings.metrics(tmp_path / "run")] == list(range(5))
    assert {2, 3, 4} <= set(recordings.steps(tracekit.load(tmp_path / "run"))[0])


def test_a_failure_in_the_callback_stops_only_the_recording(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    recording = TracekitCallback(tmp_path / "run", tokens=lambda batch: batch["no such column"], steps=None)
    recorded, alone = Model(), Model()
    alone.load_state_dict(recorded.state_dict())
    fit(tmp_path, recorded, recording, max_steps=3)
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("tracekit: ")]
    assert len(said) == 1
    assert "recording ends" in said[0]
    fit(tmp_path, alone, max_steps=3)
    assert recorded.losses == alone.losses
    assert len(alone.losses) == 3
