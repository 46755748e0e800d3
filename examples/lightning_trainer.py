"""Fit a model with Lightning's Trainer, and record the run by a callback.

    torchrun --nproc-per-node 2 examples/lightning_trainer.py --out runs/lightning
    tracekit check runs/lightning

Needs lightning or pytorch-lightning. A small transformer learns to write this very file, byte by byte. Each step takes
two batches; now and then, the model is validated.
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset

try:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DDPStrategy
except ImportError:
    import pytorch_lightning as pl
    from pytorch_lightning.strategies import DDPStrategy

from tracekit.capture.lightning import TracekitCallback

WORDS, WIDTH, LAYERS, TOKENS, BATCH = 256, 64, 2, 64, 4


class Text(Dataset[dict[str, Tensor]]):
    """This file in pieces, one at every third byte."""

    def __init__(self) -> None:
        self.text = torch.tensor(list(Path(__file__).read_bytes()))

    def __len__(self) -> int:
        return (len(self.text) - TOKENS) // 3

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.text[3 * index : 3 * index + TOKENS]}


class Model(pl.LightningModule):
    """A causal transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, WORDS)

    def loss(self, words: Tensor) -> Tensor:
        """Return the cross-entropy of the model's next-token predictions."""
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1] - 1, device=words.device)
        logits = self.head(self.layers(self.embedding(words[:, :-1]), mask=mask, is_causal=True))
        return cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:  # noqa: ARG002 Lightning's signature
        """Return the loss of a batch."""
        return self.loss(batch["input_ids"])

    def validation_step(self, batch: dict[str, Tensor], index: int) -> None:  # noqa: ARG002 Lightning's signature
        """Log the loss of a batch."""
        self.log("val_loss", self.loss(batch["input_ids"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the one optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main() -> None:
    """Train for some steps on this rank, one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/lightning"), help="folder to write the run to")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    parser.add_argument("--checkpoint", type=Path, default=Path("checkpoints/last.ckpt"), help="file to save to")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint there")
    options = parser.parse_args()
    train(options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    if dist.is_initialized():
        dist.destroy_process_group()


def train(options: argparse.Namespace) -> None:
    """Train as the options say."""
    pl.seed_everything(0)  # the same on every rank
    cuda = torch.cuda.is_available()
    trainer = pl.Trainer(
        accelerator="cuda" if cuda else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="nccl" if cuda else "gloo"),
        max_steps=options.steps,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        val_check_interval=16,
        check_val_every_n_epoch=None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=[TracekitCallback(options.out, steps="10:15")],
    )
    text = Text()
    trainer.fit(
        Model(),
        DataLoader(text, BATCH, shuffle=True),
        DataLoader(Subset(text, range(32)), BATCH),
        ckpt_path=str(options.checkpoint) if options.resume else None,
    )
    trainer.save_checkpoint(options.checkpoint)


if __name__ == "__main__":
    main()
