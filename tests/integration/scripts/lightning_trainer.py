"""Train a small model with Lightning's Trainer for 20 steps, under YaFSDP if there are several ranks.

    python lightning_trainer.py FOLDER RANKS [file|folder [CHECKPOINT]]

Writes losses to FOLDER/losses.json, and a checkpoint of the kind after each of the two epochs. Resumes from CHECKPOINT.
Global batches are the same on any number of ranks.
"""

import json
import sys
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from instrumented_trainers.parallelism.yafsdp import fully_shard
from instrumented_trainers.parallelism.yafsdp.lightning import YaFSDPStrategy

BATCH, STEPS, EPOCHS, WIDTH = 8, 20, 2, 32


class Regression(pl.LightningModule):
    """A perceptron; its layers become units where Lightning has a mesh."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))
        self.inlet, self.head = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 1)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.device_mesh is None or self.trainer.world_size == 1:
            return
        mesh = self.device_mesh["data_parallel"]
        for layer in self.layers:
            fully_shard(layer, mesh)
        fully_shard(self, mesh)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        ranks, rank = self.trainer.world_size, self.trainer.global_rank
        x = torch.randn(BATCH * STEPS // EPOCHS, 8, generator=torch.Generator().manual_seed(1))[rank::ranks]
        return DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH // ranks)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.inlet(x)))

    def training_step(self, batch: tuple[Tensor, Tensor], _: int) -> Tensor:
        loss = functional.mse_loss(self(batch[0]), batch[1])
        mean = self.trainer.strategy.reduce(loss.detach().clone(), reduce_op="mean")
        self.losses.append(float(mean))
        return loss


def main() -> None:
    folder, ranks, *rest = sys.argv[1:]
    kind, checkpoint = [*rest, "file", None][0], rest[1] if len(rest) > 1 else None
    model = Regression()
    sizes = {"data_parallel_size": int(ranks), "tensor_parallel_size": 1}
    several = {"strategy": YaFSDPStrategy(save_distributed_checkpoint=kind == "folder", **sizes)}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(ranks),
        max_steps=STEPS,
        gradient_clip_val=0.5,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=STEPS // EPOCHS, save_top_k=-1)],
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **(several if int(ranks) > 1 else {}),
    )
    trainer.fit(model, ckpt_path=checkpoint)
    if trainer.is_global_zero:
        (Path(folder) / "losses.json").write_text(json.dumps(model.losses), encoding="utf-8")


if __name__ == "__main__":
    main()
