"""Trains on gloo ranks, with NVTX ranges for steps and their parts; recorded by nsys."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 4


def main() -> None:
    import nvtx  # not a dependency of the tests

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Linear(256, 64))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        with nvtx.annotate(f"step {step}"):
            with nvtx.annotate("forward"):
                loss = model(torch.randn(32, 64)).square().mean()
            with nvtx.annotate("backward"):
                loss.backward()
            with nvtx.annotate("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
