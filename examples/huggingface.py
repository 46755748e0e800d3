"""Train a Hugging Face model under YaFSDP, and record the run.

    torchrun --nproc-per-node 2 examples/huggingface.py --out runs/huggingface
    tracekit check runs/huggingface

Needs transformers. The model is made from its config, with random weights, on the meta device: no rank ever holds more
than one module of it whole, and nothing is downloaded. It learns to write this very file, byte by byte.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy, fully_shard, materialize
from tracekit.capture import Recorder

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    tie_word_embeddings=True,  # both places of a tied weight must be in one unit: here the root
    use_cache=False,
)
SEQUENCES, TOKENS = 4, 128


def main() -> None:
    """Train for some steps on this rank, one of those that torchrun started."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/huggingface"), help="folder to write the run to")
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps to train for")
    options = parser.parse_args()
    device = start()
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # after sharding and drawing: it steps the shards
    text = torch.tensor(list(Path(__file__).read_bytes()))
    about = {"strategy": "yafsdp", "model": {"name": "LlamaForCausalLM", **CONFIG.to_diff_dict()}}
    with Recorder(options.out, steps="5:10", manifest=about, device=device) as recorder:
        for step in range(options.steps):
            tokens = batch(text, step).to(device)
            with recorder.span("forward"):
                loss = model(input_ids=tokens, labels=tokens).loss
            with recorder.span("backward"):
                loss.backward()
            with recorder.span("clip"):
                model.clip_grad_norm_(1.0)
            with recorder.span("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            recorder.step({"loss": loss.item()}, tokens=tokens.numel() * dist.get_world_size())
            if dist.get_rank() == 0 and step in (0, options.steps - 1):
                print(f"step {step}: loss {loss.item():.3f}", flush=True)  # noqa: T201
    dist.destroy_process_group()


def start() -> str:
    """Join the other ranks and return the kind of device that this one computes on."""
    if not torch.cuda.is_available():
        dist.init_process_group("gloo")
        return "cpu"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl")
    return "cuda"


def build(device: str) -> nn.Module:
    """Return the model, each decoder layer a unit, then the rest, with weights drawn shard by shard."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    lower = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if device == "cuda" else MixedPrecisionPolicy()
    with torch.device("meta"):
        model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        norms = [parameter for parameter in layer.parameters() if parameter.dim() < 2]
        fully_shard(layer, mesh, mp_policy=lower, left_out=norms)
    fully_shard(model, mesh, mp_policy=lower)
    torch.manual_seed(0)  # the same on every rank
    materialize(model, model._init_weights)
    return model


def batch(text: Tensor, step: int) -> Tensor:
    """Return this rank's sequences of a step, drawn from anywhere in the text."""
    generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
    starts = torch.randint(len(text) - TOKENS, (SEQUENCES, 1), generator=generator)
    return text[starts + torch.arange(TOKENS)]


if __name__ == "__main__":
    main()
