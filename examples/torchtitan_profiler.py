"""Check each trace that torchtitan's profiler writes, while the training goes on.

    torchrun --nproc-per-node 2 examples/torchtitan_profiler.py --out outputs
    tracekit check outputs/profiling/traces/iteration_20

Needs torchtitan 0.3. A configuration of torchtitan takes the hook as it is; the rest is a small network on CPU ranks
under torchtitan's own profiler, in the place of its Trainer, which needs GPUs.
"""

import argparse
import subprocess
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torchtitan.config import Function
from torchtitan.tools.profiler import Profiler

WIDTH, LAYERS, BATCH = 256, 4, 64


def check_traces(trace_path: str) -> None:
    """Start a check of all ranks' traces of this iteration; called on each rank once its trace is written."""
    dist.barrier()
    if dist.get_rank() == 0:
        folder = Path(trace_path).parent
        command = ["tracekit", "check", folder, "--format", "html", "--out", folder / "report.html"]
        subprocess.Popen(command)  # noqa: S603 in the background: the training goes on


def main() -> None:
    """Train for some steps on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="outputs", help="torchtitan's dump folder")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    config = Profiler.Config(
        enable_profiling=True,
        save_traces_folder="profiling/traces",
        profile_freq=10,
        profiler_active=4,  # several steps: one does not show which are outliers
        trace_post_processor=Function.Config(fn=check_traces),
    )
    with config.build(global_step=0, base_folder=options.out) as profiler:
        for _ in range(options.steps):
            x = torch.randn(BATCH, WIDTH)
            (model(x) - x.roll(1, dims=1)).pow(2).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
