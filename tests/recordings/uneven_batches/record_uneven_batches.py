"""Record two CPU processes (gloo) of which rank 1 has sixteen times as many samples in each batch.

OMP_NUM_THREADS=1 python record_uneven_batches.py OUT
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, schedule

SAMPLES = (32, 512)
WIDTH, LAYERS, STEPS = 768, 3, 5


def train(rank: int, out: Path) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29617"}
    dist.init_process_group("gloo", rank=rank, world_size=len(SAMPLES))
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=2, active=STEPS),
        on_trace_ready=lambda ready: ready.export_chrome_trace(str(out / f"rank{rank:05d}.pt.trace.json.gz")),
        record_shapes=True,
    ) as profiler:
        for _ in range(2 + STEPS):
            loss = model(torch.ones(SAMPLES[rank], WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    multiprocessing.spawn(train, args=(Path(sys.argv[1]),), nprocs=len(SAMPLES))
