"""A training that knows nothing of tracekit: a small transformer under FSDP2, saved by torch.distributed.checkpoint.

torchrun --nproc-per-node 2 plain_fsdp2.py --steps 16 --accumulate 2
"""

import argparse
import gc
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

WORDS, WIDTH, LAYERS, SEQUENCES, TOKENS = 64, 64, 2, 4, 32


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words, next_words):
        x = self.embedding(words)
        mask = nn.Transformer.generate_square_subsequent_mask(words.shape[1], device=words.device)
        for layer in self.layers:
            x = layer(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), next_words.flatten())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--accumulate", type=int, default=1, help="batches per optimizer step")
    parser.add_argument("--save-at", type=int, default=8, help="optimizer steps done when saving; 0: never")
    parser.add_argument("--save-to", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    device = start()
    loss = train(device, options)
    gc.collect()  # the model must go before its process group: torch 2.13 may hang where it goes after
    # In one write: otherwise the lines of ranks may mix.
    print(f"rank {dist.get_rank()}: {options.steps} steps, loss {loss!r}\n", end="", flush=True)
    dist.destroy_process_group()


def train(device: torch.device, options: argparse.Namespace) -> float:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)
    model = Model().to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    words = torch.Generator().manual_seed(1 + dist.get_rank())
    loss = torch.zeros(())
    for step in range(1, options.steps + 1):
        for micro_batch in range(options.accumulate):
            model.set_requires_gradient_sync(micro_batch == options.accumulate - 1)
            starts = torch.randint(WORDS, (SEQUENCES, 1), generator=words)
            batch = ((starts + torch.arange(TOKENS + 1)) % WORDS).to(device)
            loss = model(batch[:, :-1], batch[:, 1:]) / options.accumulate
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step == options.save_at:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=options.save_to / f"step-{step}")
    return loss.item()


def start() -> torch.device:
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return torch.device("cuda", torch.cuda.current_device())


if __name__ == "__main__":
    main()
