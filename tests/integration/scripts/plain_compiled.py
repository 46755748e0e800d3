"""A training that knows nothing of tracekit: a small Llama on one GPU, compiled, in bf16 by autocast.

python plain_compiled.py compiled|graphs       (graphs: CUDA graphs, of mode="reduce-overhead")
"""

import sys

import torch
from torch import nn

from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig

VOCABULARY, SEQUENCES, TOKENS, STEPS = 8192, 8, 512, 14


def main(kind: str) -> None:
    torch.manual_seed(0)
    llama = Llama(ModelConfig(768, 6, 12, 12, 2048, VOCABULARY)).cuda()
    model = torch.compile(llama, mode="reduce-overhead" if kind == "graphs" else None)
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(0)
    loss = torch.zeros(())
    for _ in range(STEPS):
        tokens = torch.randint(VOCABULARY, (SEQUENCES, TOKENS + 1), generator=generator).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
