"""Train torchtitan's Llama with YaFSDP in the place of FSDP2, beneath it torchtitan's tensor parallelism.

    torchrun --nproc-per-node 4 examples/torchtitan_llama.py --tensor-parallel 2
    torchrun --nproc-per-node 4 examples/torchtitan_llama.py --tensor-parallel 2 --engine fsdp2

Needs torchtitan 0.1.0 and tiktoken. torchtitan's own functions divide and shard the model; YaFSDP takes one line, which
puts its `fully_shard` where they look for FSDP2's. Both print the same losses.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional
from torchtitan.models.llama3 import Transformer, TransformerModelArgs
from torchtitan.models.llama3.infra import parallelize

from instrumented_trainers.parallelism import yafsdp

MODEL = TransformerModelArgs(dim=64, n_layers=4, n_heads=4, vocab_size=256, max_seq_len=64)
SEQUENCES, TOKENS = 4, 32


def main() -> None:
    """Train for some steps on this rank, one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("yafsdp", "fsdp2"), default="yafsdp", help="what shards the model")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="ranks that matrices are divided over")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps to train for")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    if options.engine == "yafsdp":
        parallelize.fully_shard = yafsdp.fully_shard  # the one line
    torch.manual_seed(0)
    model = Transformer(MODEL)
    model.init_weights()
    shape = (dist.get_world_size() // options.tensor_parallel, options.tensor_parallel)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp"))
    if options.tensor_parallel > 1:
        parallelize.apply_tp(
            model, mesh["tp"], loss_parallel=False, enable_float8_tensorwise_tp=False, enable_async_tp=False
        )
    parallelize.apply_fsdp(model, mesh["dp"], param_dtype=torch.float32, reduce_dtype=torch.float32, pp_enabled=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)  # FSDP2's shards are on two meshes
    for step in range(options.steps):
        generator = torch.Generator().manual_seed(100 * step + mesh.get_local_rank("dp"))
        tokens = torch.randint(MODEL.vocab_size, (SEQUENCES, TOKENS + 1), generator=generator)
        loss = functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(f"step {step}: loss {mean.item() / dist.get_world_size():.6f}")  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
