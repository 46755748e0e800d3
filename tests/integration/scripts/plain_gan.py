"""A training that knows nothing of tracekit: two networks, each with its optimizer, stepping in turn.

torchrun --nproc-per-node 2 plain_gan.py --steps 16

A step is one of the generator's; before it, the critic takes `--critic-steps` of its own.
"""

import argparse
import gc
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as cross_entropy
from torch.nn.parallel import DistributedDataParallel

WIDTH, NOISE, BATCH = 64, 16, 8


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of the generator")
    parser.add_argument("--critic-steps", type=int, default=1, help="optimizer steps of the critic before each")
    options = parser.parse_args()
    device = start()
    loss = train(device, options)
    gc.collect()  # DDP must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {dist.get_rank()}: {options.steps} steps, loss {loss!r}\n", end="", flush=True)
    dist.destroy_process_group()


def train(device: torch.device, options: argparse.Namespace) -> float:
    torch.manual_seed(0)
    generator = DistributedDataParallel(network(NOISE, WIDTH).to(device))
    critic = DistributedDataParallel(network(WIDTH, 1).to(device))
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3)
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3)
    torch.manual_seed(1 + dist.get_rank())
    real, fake = torch.ones(BATCH, 1, device=device), torch.zeros(BATCH, 1, device=device)
    loss = torch.zeros(())
    for _ in range(options.steps):
        for _ in range(options.critic_steps):
            truth = torch.randn(BATCH, WIDTH).sin().to(device)
            with torch.no_grad():
                forged = generator(torch.randn(BATCH, NOISE).to(device))
            verdict = critic(torch.cat([truth, forged]))
            cross_entropy(verdict, torch.cat([real, fake])).backward()
            critic_optimizer.step()
            critic_optimizer.zero_grad()
        critic.requires_grad_(False)
        loss = cross_entropy(critic.module(generator(torch.randn(BATCH, NOISE).to(device))), real)
        loss.backward()
        critic.requires_grad_(True)
        generator_optimizer.step()
        generator_optimizer.zero_grad()
    return loss.item()


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 2 * WIDTH), nn.LeakyReLU(), nn.Linear(2 * WIDTH, outputs))


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    return torch.device("cuda", torch.cuda.current_device())


if __name__ == "__main__":
    main()
