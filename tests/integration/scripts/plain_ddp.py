"""A training that knows nothing of tracekit: DDP, gradients accumulated as asked, torch.save by rank 0.

torchrun --nproc-per-node 2 plain_ddp.py --steps 16
"""

import argparse
import gc
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

WIDTH, BATCH = 64, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--save-at", type=int, default=8, help="optimizer steps done when saving; 0: never")
    parser.add_argument("--save-to", type=Path, default=Path("checkpoints"))
    parser.add_argument("--kill-at", type=int, help="optimizer steps done when the last rank is killed")
    parser.add_argument("--stop", nargs="*", default=[], metavar="RANK:STEP", help="where ranks stop before that step")
    options = parser.parse_args()
    device = start()
    loss = train(device, options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {dist.get_rank()}: {options.steps} steps, loss {loss!r}\n", end="", flush=True)
    dist.destroy_process_group()


def train(device: torch.device, options: argparse.Namespace) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)).to(device)
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = endless()
    loss = torch.zeros(())
    for step in range(1, options.steps + 1):
        for micro_batch in range(options.accumulate):
            model.require_backward_grad_sync = micro_batch == options.accumulate - 1
            (x,) = next(batches)
            x = x.to(device)
            loss = (model(x) - x.roll(1, dims=1)).pow(2).mean() / options.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if f"{dist.get_rank()}:{step}" in options.stop:
            Path(f"stopped-{dist.get_rank()}").write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)  # until somebody continues it
        optimizer.step()
        optimizer.zero_grad()
        if step == options.kill_at and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == options.save_at and dist.get_rank() == 0:
            options.save_to.mkdir(parents=True, exist_ok=True)
            torch.save({"model": model.module.state_dict(), "step": step}, options.save_to / f"step-{step}.pt")
    return loss.item()


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


def endless():
    rows = TensorDataset(torch.randn(256, WIDTH, generator=torch.Generator().manual_seed(1)))
    sampler = DistributedSampler(rows, shuffle=True, seed=2)
    epoch = 0
    while True:
        sampler.set_epoch(epoch)
        yield from DataLoader(rows, batch_size=BATCH, sampler=sampler)
        epoch += 1


if __name__ == "__main__":
    main()
