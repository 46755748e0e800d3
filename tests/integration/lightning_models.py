"""Models that Lightning's Trainer fits, and the callback that records them. Not a test.

It imports Lightning, which takes seconds: only the worker with these tests imports it.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

from tracekit.capture.lightning import TracekitCallback

try:
    import lightning.pytorch as lit
except ImportError:
    import pytorch_lightning as lit

__all__ = ["BATCH", "WIDTH", "Model", "Pair", "TracekitCallback", "fit"]

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
