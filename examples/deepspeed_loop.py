"""Train with DeepSpeed and record the run.

    deepspeed --num_gpus 2 examples/deepspeed_loop.py --out runs/deepspeed
    tracekit check runs/deepspeed

Needs deepspeed. On CPU ranks, type `DS_ACCELERATOR=cpu torchrun --nproc-per-node 2` for `deepspeed --num_gpus 2`. A
small network learns to shift what it is given; each step takes two micro-batches.
"""

import argparse

import deepspeed
import torch
from torch import nn

from tracekit.capture import Recorder

WIDTH, MICRO_BATCH, MICRO_BATCHES = 64, 8, 2
CONFIG = {
    "train_micro_batch_size_per_gpu": MICRO_BATCH,
    "gradient_accumulation_steps": MICRO_BATCHES,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 2},
}


def main() -> None:
    """Train for some steps on this rank."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default="runs/deepspeed", help="folder to write the run to")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    parser.add_argument("--local_rank", type=int, help="set by the command deepspeed")
    options = parser.parse_args()
    deepspeed.init_distributed()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=CONFIG)
    with Recorder(options.out, steps="10:15", manifest={"strategy": "zero2"}) as recorder:
        while engine.global_steps < options.steps:
            x = torch.randn(MICRO_BATCH, WIDTH, device=engine.device)
            with recorder.span("forward"):
                loss = (engine(x) - x.roll(1, dims=1)).pow(2).mean()
            with recorder.span("backward"):
                engine.backward(loss)
            is_step = engine.is_gradient_accumulation_boundary()  # before step(), which counts the micro-batch
            with recorder.span("optimizer"):
                engine.step()
            if is_step:
                recorder.step({"loss": loss.detach().item}, last=engine.global_steps == options.steps)
    engine.destroy()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
