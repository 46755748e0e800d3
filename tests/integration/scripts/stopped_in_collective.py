"""A training on gloo in which a rank is stopped (SIGSTOP) while it takes part in an all-reduce, and continues later.

torchrun --nproc-per-node 3 stopped_in_collective.py --steps 16 --stop 1:9
"""

import argparse
import os
import subprocess

import torch
import torch.distributed as dist
from torch import nn

WIDTH, BATCH = 1024, 64


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument(
        "--stop", nargs="*", default=[], metavar="RANK:STEP", help="which rank is stopped in which step"
    )
    parser.add_argument("--stop-s", type=float, default=1.5, help="for how long")
    parser.add_argument("--after-s", type=float, default=0.01, help="how long after the collective was called")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in range(1, options.steps + 1):
        x = torch.randn(BATCH, WIDTH)
        (model(x) - x).pow(2).mean().backward()
        stopper = Stopper(options) if f"{dist.get_rank()}:{step}" in options.stop else None
        reduce(model, stopper)
        optimizer.step()
        optimizer.zero_grad()
        if stopper:
            stopper.join()
    dist.destroy_process_group()


def reduce(model: nn.Module, stopper: "Stopper | None") -> None:
    """Average the gradients in one collective."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([each.flatten() for each in gradients])
    if stopper:
        stopper.start()
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


class Stopper:
    """A shell that stops this process and lets it continue: a stopped process cannot do so itself."""

    def __init__(self, options: argparse.Namespace) -> None:
        commands = f"read go; sleep {options.after_s}; kill -STOP {os.getpid()}; sleep {options.stop_s}"
        self._shell = subprocess.Popen(["sh", "-c", f"{commands}; kill -CONT {os.getpid()}"], stdin=subprocess.PIPE)

    def start(self) -> None:
        assert self._shell.stdin is not None
        self._shell.stdin.write(b"go\n")
        self._shell.stdin.flush()

    def join(self) -> None:
        self._shell.wait()


if __name__ == "__main__":
    main()
