"""A training that knows nothing of tracekit: GradScaler, with gradients that overflow now and then.

torchrun --nproc-per-node 2 plain_scaler.py --steps 16

Of `--steps` attempts, those in `SKIPPED` have infinite gradients: the scaler leaves the optimizer's step out.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WIDTH, BATCH = 64, 8
SKIPPED = (3, 4, 9)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="attempts at an optimizer step")
    options = parser.parse_args()
    device = start()
    taken, loss = train(device, options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {dist.get_rank()}: {taken} steps, loss {loss!r}\n", end="", flush=True)
    dist.destroy_process_group()


def train(device: torch.device, options: argparse.Namespace) -> tuple[int, float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, init_scale=2.0**10)
    torch.manual_seed(1 + dist.get_rank())
    loss, taken = torch.zeros(()), 0
    for attempt in range(options.steps):
        x = torch.randn(BATCH, WIDTH).to(device)
        loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
        scaler.scale(loss * torch.inf if attempt in SKIPPED else loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        taken += scaler.get_scale() >= scale
    return taken, loss.item()


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


if __name__ == "__main__":
    main()
