"""Train a small model by a loop of Accelerate for 20 steps, under YaFSDP if there are several ranks.

    python accelerated.py FILE

Writes the losses of the micro-batches to FILE. Global batches are the same on any number of ranks.
"""

import json
import sys
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from instrumented_trainers.parallelism.yafsdp import fully_shard

BATCH, MICRO_BATCHES, STEPS, WIDTH = 8, 2, 20, 32


def main() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=MICRO_BATCHES)
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
    model = nn.Sequential(nn.Linear(8, WIDTH), *layers, nn.Linear(WIDTH, 1))
    if accelerator.num_processes > 1:
        for layer in layers:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(BATCH * MICRO_BATCHES * STEPS, 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), batch_size=BATCH // accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    if accelerator.is_main_process:
        Path(sys.argv[1]).write_text(json.dumps(losses[::MICRO_BATCHES]), encoding="utf-8")


if __name__ == "__main__":
    main()
