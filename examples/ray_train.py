"""Train on Ray's workers and record the run.

    python examples/ray_train.py --out /shared/runs/ray --workers 2
    tracekit check /shared/runs/ray

Needs ray[train]. The folder is one that all nodes share. Each worker's process creates its Recorder; the process that
calls `fit` trains nothing and creates none.
"""

import argparse
from pathlib import Path

import torch
from ray.train import ScalingConfig
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

from tracekit.capture import Recorder

WIDTH, BATCH = 64, 32


def train(settings: dict) -> None:
    """Train for some steps on this worker."""
    torch.manual_seed(0)
    model = prepare_model(nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Recorder(settings["out"], steps="10:15", manifest={"strategy": "ddp"}) as recorder:
        for step in range(settings["steps"]):
            x = torch.randn(BATCH, WIDTH)
            loss = (model(x) - x.roll(1, dims=1)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            recorder.step({"loss": loss.detach().item}, last=step + 1 == settings["steps"])


def main() -> None:
    """Start the workers and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/ray"), help="folder to write the run to, shared by all nodes"
    )
    parser.add_argument("--workers", type=int, default=2, help="worker processes")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    options = parser.parse_args()
    settings = {"out": str(options.out.resolve()), "steps": options.steps}
    scaling = ScalingConfig(num_workers=options.workers, use_gpu=torch.cuda.is_available())
    TorchTrainer(train, train_loop_config=settings, scaling_config=scaling).fit()


if __name__ == "__main__":
    main()
