"""A training on gloo in which ranks are stopped (SIGSTOP) while they take part in an all-reduce, and continue later.

torchrun --nproc-per-node 3 stopped_in_collective.py --steps 16 --stop 1:9:computing 2:12:waiting --sleep 0:14
"""

import argparse
import os
import signal
import subprocess
import threading
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, BATCH = 768, 8
_SOON_S = 0.003


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--stop", nargs="*", default=[], metavar="RANK:STEP:WHILE", help="WHILE: computing, waiting")
    parser.add_argument(
        "--sleep", nargs="*", default=[], metavar="RANK:STEP", help="which ranks pause before an optimizer step"
    )
    parser.add_argument("--stop-s", type=float, default=3.0, help="for how long")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    other = torch.randn(512, 2048)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    stops = {tuple(map(int, each.split(":")[:2])): each.split(":")[2] for each in options.stop}
    for step in range(1, options.steps + 1):
        x = torch.randn(BATCH, WIDTH)
        (model(x) - x).pow(2).mean().backward()
        reduce(model, other, stops.get((dist.get_rank(), step)), options.stop_s)
        if f"{dist.get_rank()}:{step}" in options.sleep:
            time.sleep(options.stop_s)
        optimizer.step()
        optimizer.zero_grad()
    dist.destroy_process_group()


def reduce(model: nn.Module, other: Tensor, stop_while: str | None, stop_s: float) -> None:
    """Average the gradients in one collective, while something else is computed."""
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([each.flatten() for each in gradients])
    if stop_while:
        wakes = f"read _; sleep {stop_s}; kill -CONT {os.getpid()}"
        shell = subprocess.Popen(
            ["sh", "-c", wakes], stdin=subprocess.PIPE
        )  # before: it takes long on a loaded machine
        stopping = threading.Thread(target=stop, args=(shell,))
    if stop_while == "computing":
        other = torch.cat([other, other])  # the stop must be within its product
    work = dist.all_reduce(flat, async_op=True)
    if stop_while:
        stopping.start()
    if stop_while != "waiting":
        other @ other.T  # one product, in which the GIL is free
    work.wait()
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([each.numel() for each in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))
    if stop_while:
        stopping.join()


def stop(shell: "subprocess.Popen[bytes]") -> None:
    """Stop this process; the shell, which waits for a line, lets it continue."""
    assert shell.stdin is not None
    time.sleep(_SOON_S)
    shell.stdin.write(b"\n")
    shell.stdin.flush()
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    main()
