"""Train in a loop of one's own with Accelerate, and record the run.

    torchrun --nproc-per-node 2 examples/accelerate_loop.py --out runs/accelerate
    tracekit check runs/accelerate

Needs accelerate, whose own `accelerate launch` starts it as well. A small network learns to shift what it is given;
each step takes two batches.
"""

import argparse
import gc
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tracekit.capture import Recorder

WIDTH, BATCH = 64, 8


def main() -> None:
    """Train for some steps on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/accelerate"), help="folder to write the run to")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=not torch.cuda.is_available())
    train(accelerator, options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    accelerator.end_training()


def train(accelerator: Accelerator, options: argparse.Namespace) -> None:
    """Train as the options say."""
    torch.manual_seed(0)  # the same on every rank
    model: nn.Module = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = DataLoader(TensorDataset(torch.randn(1024, WIDTH)), batch_size=BATCH, shuffle=True)
    model, optimizer, rows = accelerator.prepare(model, optimizer, rows)
    about = {"strategy": "ddp", "model": {"name": "network"}}
    with Recorder(options.out, steps="10:15", manifest=about) as recorder:
        done, batches = 0, iter(rows)
        while done < options.steps:
            with recorder.span("data"):
                batch = next(batches, None)
            if batch is None:
                batches = iter(rows)
                continue
            with accelerator.accumulate(model):
                with recorder.span("forward"):
                    (x,) = batch
                    loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
                with recorder.span("backward"):
                    accelerator.backward(loss)
                with recorder.span("optimizer"):
                    optimizer.step()
                    optimizer.zero_grad()
            if accelerator.sync_gradients:  # an optimizer step, not only another batch
                done += 1
                recorder.step({"loss": loss.detach().item}, last=done == options.steps)


if __name__ == "__main__":
    main()
