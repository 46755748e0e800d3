"""Records eight steps of a small training on the CPU, one of which evaluates the model."""

from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

WARM_UP, STEPS, EVALUATED = 3, 8, 6


def main() -> None:
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 256))
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(256, 256)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=0, warmup=WARM_UP, active=STEPS, repeat=1)
    ) as profiler:
        for step in range(WARM_UP + STEPS):
            model(batch).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == EVALUATED:
                with torch.no_grad():
                    for _ in range(15):
                        model(torch.randn(2048, 256))
            profiler.step()
    profiler.export_chrome_trace(str(Path(__file__).parent / "rank0.pt.trace.json.gz"))


if __name__ == "__main__":
    main()
