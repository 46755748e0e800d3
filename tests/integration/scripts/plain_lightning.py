"""A training that knows nothing of tracekit: Lightning's Trainer under DDP, saving at the end.

torchrun --nproc-per-node 2 plain_lightning.py --steps 16
"""

import argparse
import gc
import logging
import os
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

WIDTH, BATCH = 64, 8


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.last_loss = float("nan")

    def training_step(self, batch, index):
        (x,) = batch
        loss = (self.layers(x) - x.roll(1, dims=1)).pow(2).mean()
        self.last_loss = loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--save-to", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    rank, steps, loss = train(options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {rank}: {steps} steps, loss {loss!r}\n", end="", flush=True)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def train(options: argparse.Namespace) -> tuple[int, int, float]:
    warnings.filterwarnings("ignore", module="lightning")
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    for name in ("lightning.pytorch", "pytorch_lightning"):
        logging.getLogger(name).setLevel(logging.WARNING)
    pl.seed_everything(0, verbose=False)
    cuda = torch.cuda.is_available()
    trainer = pl.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="nccl" if cuda else "gloo"),
        max_steps=options.steps,
        accumulate_grad_batches=options.accumulate,
        gradient_clip_val=1.0,
        default_root_dir=options.save_to,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
    )
    model = Model()
    rows = TensorDataset(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)))
    trainer.fit(model, DataLoader(rows, batch_size=BATCH, shuffle=True))
    trainer.save_checkpoint(options.save_to / f"step-{trainer.global_step}.ckpt")
    return trainer.global_rank, trainer.global_step, model.last_loss


if __name__ == "__main__":
    main()
