"""Trains a small model on a GPU with inputs of several lengths, and leaves a trace and a memory snapshot of it.

Started as `gpu_memory.py FOLDER`; prints what the allocator counted, as JSON.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

WARM, PROFILED = (700, 2048, 1100), (900, 2048, 1300, 600, 1700)
COUNTED = ("num_device_alloc", "num_device_free", "num_alloc_retries", "reserved_bytes.all.peak")


def main(folder: Path) -> None:
    # Before the first allocation, so that the history is whole.
    torch.cuda.memory._record_memory_history(max_entries=1_000_000)
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))]
    model = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(tokens: int) -> None:
        model(torch.randn(tokens, 1024, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for tokens in WARM:
        step(tokens)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], profile_memory=True) as profiler:
        for tokens in PROFILED:
            step(tokens)
            profiler.step()
        torch.cuda.synchronize()
    torch.cuda.memory._dump_snapshot(str(folder / "rank00000.memory.pickle"))
    profiler.export_chrome_trace(str(folder / "rank00000.pt.trace.json"))
    counted = torch.cuda.memory_stats()
    sys.stdout.write(json.dumps({name: counted[name] for name in COUNTED}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
