"""Record passes of small models on the CPU, without marked steps: `python -m tests.recordings.passes.record_passes`.

Words after it name the scenarios; without, all are recorded.
"""

import gzip
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

LAYERS, WIDTH, VOCABULARY = 5, 32, 50


class Block(nn.Module):
    """A transformer block, with attention to what it has seen before where it is given that."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        query, key, value = self.qkv(self.norms[0](hidden)).chunk(3, dim=-1)
        if cache is not None:
            if cache:
                key, value = torch.cat((cache[0], key), 1), torch.cat((cache[1], value), 1)
            cache[:] = [key, value]
        weights = torch.softmax(query @ key.transpose(1, 2), -1)
        hidden = hidden + self.out(weights @ value)
        return hidden + self.down(nn.functional.gelu(self.up(self.norms[1](hidden))))


class Model(nn.Module):
    """A language model."""

    def __init__(self, *, layers: int = LAYERS) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(layers)), nn.LayerNorm(WIDTH)

    def forward(self, tokens: Tensor, caches: list[list[Tensor]] | None = None) -> Tensor:
        hidden = self.embedding(tokens)
        for block, cache in zip(self.blocks, caches or itertools.repeat(None), strict=False):
            hidden = block(hidden, cache)
        return self.head(self.norm(hidden))


class Experts(nn.Module):
    """Blocks whose experts are chosen on the host."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.gates = nn.ModuleList(nn.Linear(WIDTH, 2) for _ in range(LAYERS))

    def forward(self, hidden: Tensor) -> Tensor:
        for block, gate in zip(self.blocks, self.gates, strict=True):
            scale = gate(hidden).softmax(-1).sum()
            hidden = block(hidden) * scale if scale.isnan().any().item() is False else hidden
        return hidden


class Denoiser(nn.Module):
    """Layers of different sizes, and an encoding of the time."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (2, 8, 16, 24, 16, 8, 2)
        self.convolutions = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in itertools.pairwise(sizes))
        self.norms = nn.ModuleList(nn.GroupNorm(2, size) for size in sizes[1:])

    def forward(self, image: Tensor, time: float) -> Tensor:
        angles = torch.arange(4) * time
        image = image + torch.cat((angles.sin(), angles.cos())).mean()
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            image = nn.functional.silu(norm(convolution(image)))
        return image


MODEL, SHARED, EXPERTS, DENOISER = Model(), Model(layers=1), Experts(), Denoiser()
SHARED.blocks = nn.ModuleList([SHARED.blocks[0]] * LAYERS)
STACK = nn.Sequential(*(Block() for _ in range(LAYERS)))


def _tokens(length: int = 8) -> Tensor:
    return torch.arange(length)[None] % VOCABULARY


def one_forward() -> None:
    """One forward pass of equal blocks."""
    MODEL(_tokens())


def one_forward_without_gradients() -> None:
    with torch.no_grad():
        MODEL(_tokens())


def bare_blocks() -> None:
    """Equal blocks without anything before and after them."""
    hidden = torch.zeros(1, 8, WIDTH)
    with torch.no_grad():
        for block in STACK:
            hidden = block(hidden)


def annotated_forward() -> None:
    """One forward pass inside an annotation."""
    with torch.no_grad(), record_function("model_inference"):
        MODEL(_tokens())


def annotated_blocks() -> None:
    """One forward pass each of whose blocks is annotated."""
    hidden = torch.zeros(1, 8, WIDTH)
    for block in STACK:
        with record_function("transformer_block"):
            hidden = block(hidden)


def annotated_forwards() -> None:
    """Four forward passes of equal blocks, each inside an annotation."""
    for _ in range(4):
        with torch.no_grad(), record_function("model_inference"):
            STACK(torch.zeros(1, 8, WIDTH))


def experts() -> None:
    """One forward pass in which each block asks the host."""
    with torch.no_grad():
        EXPERTS(torch.zeros(1, 8, WIDTH))


def shared_block() -> None:
    """One forward pass that runs the same block again and again."""
    SHARED(_tokens())


def forward_backward() -> None:
    """One forward and one backward pass."""
    nn.functional.cross_entropy(MODEL(_tokens())[0], _tokens()[0]).backward()


def accumulation() -> None:
    """Forward and backward passes of three micro-batches, without an optimizer."""
    for _ in range(3):
        nn.functional.cross_entropy(MODEL(_tokens())[0], _tokens()[0]).backward()


def decoding() -> None:
    """Six tokens, one by one, after a prompt."""
    caches: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    with torch.no_grad():
        token = MODEL(_tokens(), caches)[:, -1:].argmax(-1)
        for _ in range(6):
            token = MODEL(token, caches)[:, -1:].argmax(-1)
            token.item()


def evaluation() -> None:
    """Batches of a data loader."""
    with torch.no_grad():
        for hidden in DataLoader(torch.zeros(4, 8, WIDTH), batch_size=1):
            STACK(hidden)


def diffusion() -> None:
    """Eight steps that remove noise, without random numbers."""
    image = torch.ones(1, 2, 8, 8)
    with torch.no_grad():
        for step in range(8):
            image = image - 0.1 * DENOISER(image, float(step))


def forwards() -> None:
    """Four forward passes of equal blocks, with nothing else between them."""
    hidden = torch.zeros(1, 8, WIDTH)
    with torch.no_grad():
        for _ in range(4):
            STACK(hidden)


def serving() -> None:
    """Eight passes of a server, each inside an annotation with its numbers: prompts in three, tokens in the others."""
    caches: list[list[Tensor]] = [[] for _ in range(LAYERS)]
    token = _tokens(1)
    with torch.no_grad():
        for number in range(8):
            if number % 3 == 0:
                length = 6 + number
                with record_function(f"execute_context_1({length})_generation_0(0)"):
                    logits = MODEL.head(nn.functional.normalize(MODEL.embedding(_tokens(length)).cumsum(1), dim=-1))
                    caches = [[] for _ in range(LAYERS)]
                    token = torch.multinomial(logits[:, -1].softmax(-1), 1)
            else:
                with record_function("execute_context_0(0)_generation_1(1)"):
                    token = MODEL(token, caches)[:, -1:].argmax(-1)
            token.item()


SCENARIOS: dict[str, Callable[[], None]] = {
    scenario.__name__: scenario
    for scenario in (
        one_forward, one_forward_without_gradients, bare_blocks, annotated_forward, annotated_blocks,
        annotated_forwards, experts, shared_block, forward_backward, accumulation, decoding, evaluation, diffusion,
        forwards, serving,
    )
}  # fmt: skip


def record(scenario: Callable[[], None], path: Path, *, stacks: bool) -> None:
    """Write the trace of a scenario after it ran once."""
    torch.manual_seed(0)
    scenario()
    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=stacks, profile_memory=True
    ) as profiler:
        scenario()
    profiler.export_chrome_trace(str(path))
    content = json.loads(path.read_text())
    path.unlink()
    events = [_slim(event) for event in content["traceEvents"]]
    content = {
        key: content[key] for key in ("schemaVersion", "baseTimeNanoseconds", "displayTimeUnit") if key in content
    }
    Path(f"{path}.gz").write_bytes(gzip.compress(json.dumps({**content, "traceEvents": events}).encode(), mtime=0))


def _slim(event: dict[str, Any]) -> dict[str, Any]:
    """An event without the folder of its source file, and without arguments that nothing reads."""
    folder = str(Path(__file__).parents[3])
    name = str(event.get("name", "")).replace(f"{folder}/", "").replace(sys.prefix, "")
    unused = {"Ev Idx", "Input Strides", "Concrete Inputs", "Record function id", "Module Hierarchy"}
    args = {key: value for key, value in (event.get("args") or {}).items() if key not in unused}
    return {**event, "name": name, "args": args}


def main() -> None:
    for name in sys.argv[1:] or SCENARIOS:
        for suffix, stacks in (("", False), ("_stacks", True)):
            record(SCENARIOS[name], Path(__file__).parent / f"{name}{suffix}.json", stacks=stacks)


if __name__ == "__main__":
    main()
