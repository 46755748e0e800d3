"""Random small models and ways to shard and train them, drawn from a seed. Not a test itself.

A model is the same whenever it is built from its seed, so that one can be sharded and the other not.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from instrumented_trainers.parallelism.yafsdp import fully_shard
from tests.integration.yafsdp_attacks import WIDTH, Attack, Box

LAYERS = (2, 5)


@dataclass
class Pair:
    """A dataclass among outputs."""

    value: Tensor
    other: Any = None


PACK: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda y: y),
    "tuple": (lambda x: (x, None), lambda y: y[0]),
    "dict": (lambda x: {"value": x, "n": 3}, lambda y: y["value"]),
    "nested": (lambda x: [{"a": (x,)}], lambda y: y[0]["a"][0]),
    "dataclass": (Pair, lambda y: y.value),
    "object": (Box, lambda y: y.value),
}


class Part(nn.Module):
    """A random computation from (B, WIDTH) to (B, WIDTH), with parts inside."""

    def __init__(self, rng: random.Random, depth: int) -> None:
        super().__init__()
        self.kind = rng.choice(("linear", "norm", "scale", "gated", "tied", "unused", "empty", "weight_norm", "lora"))
        self.linear = nn.Linear(WIDTH, WIDTH, bias=rng.random() < 0.7)
        self.norm = nn.LayerNorm(WIDTH) if self.kind in ("norm", "gated") or rng.random() < 0.3 else None
        if self.kind == "tied":
            self.second = nn.Linear(WIDTH, WIDTH, bias=False)
            self.second.weight = self.linear.weight
        elif self.kind == "unused":
            self.spare = nn.Parameter(torch.ones(3))
        elif self.kind == "empty":
            self.nothing, self.scalar = nn.Parameter(torch.empty(0, 2)), nn.Parameter(torch.tensor(0.7))
        elif self.kind == "weight_norm":
            parametrizations.weight_norm(self.linear)
        elif self.kind == "lora":
            self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        has_scale = self.kind in ("scale", "gated")
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9)) if has_scale else None
        self.is_fp32 = has_scale and rng.random() < 0.3
        self.register_buffer("shift", torch.full((WIDTH,), 0.01))
        self.inner = Part(rng, depth - 1) if depth and rng.random() < 0.5 else None
        self.uses = rng.choice((1, 1, 1, 2)) if self.inner is not None else 0
        self.stores_loss, self.skip = rng.random() < 0.15, rng.random() < 0.7
        self.auxiliary_loss: Any = None
        if rng.random() < 0.1:
            self.linear.register_forward_hook(self.capture)
        for parameter in self.parameters(recurse=False):
            parameter.requires_grad_(rng.random() > 0.15)
        if self.kind == "lora" or rng.random() < 0.15:
            self.linear.requires_grad_(False)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        if self.is_fp32:
            self.scale = nn.Parameter(self.scale.detach().float(), requires_grad=self.scale.requires_grad)
        return self

    def capture(self, _: nn.Module, args: Any, output: Tensor) -> None:
        if torch.is_grad_enabled():
            self.__dict__["captured"] = [output]

    def forward(self, x: Tensor) -> Tensor:
        x_in = x if self.norm is None else self.norm(x)
        y = self.linear(x_in)
        if self.kind == "tied":
            y = self.second(torch.tanh(y))
        elif self.kind == "empty":
            y = y * self.scalar + self.nothing.sum()
        elif self.kind == "lora":
            y = y + self.up(self.down(x_in))
        elif self.kind == "gated":
            y = y * torch.sigmoid(x)
        if self.scale is not None:
            y = y * self.scale
        y = torch.tanh(y) + self.shift
        for _ in range(self.uses):
            y = self.inner(y)  # type: ignore[misc]
        if self.stores_loss and torch.is_grad_enabled():
            self.auxiliary_loss = y.square().mean()
        return x + y if self.skip else y


class Layer(nn.Module):
    """A part whose output comes in some container."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.part, self.container = Part(rng, 2), rng.choice(tuple(PACK))

    def forward(self, x: Tensor) -> Any:
        return PACK[self.container][0](self.part(x))


class RandomModel(nn.Module):
    """Layers run in a random order, some twice, some not, with skips, detached branches and checkpointing."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        count = rng.randint(*LAYERS)
        self.inlet = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(rng) for _ in range(count))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        if rng.random() < 0.25:
            self.head.weight = self.inlet.weight
        order = list(range(count)) + rng.choices(range(count), k=rng.choice((0, 0, 1, 2)))
        rng.shuffle(order)
        self.order = order[: rng.randint(max(1, len(order) - 1), len(order))]
        self.how = [rng.choice(("plain",) * 5 + ("skip", "detach", "checkpoint", "reentrant")) for _ in self.order]
        if rng.random() < 0.2:
            self.inlet.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        first = x = self.inlet(x)
        for number, how in zip(self.order, self.how, strict=True):
            layer = self.layers[number]
            _, unpack = PACK[layer.container]
            if how in ("checkpoint", "reentrant"):
                x = unpack(checkpoint(layer, x, use_reentrant=how == "reentrant"))
            elif how == "detach":
                x = x + unpack(layer(x.detach()))
            else:
                x = unpack(layer(x))
            x = functional.layer_norm(x + first if how == "skip" else x, (WIDTH,))
        return self.head(x)


def loss_of(model: Any, x: Tensor, _: int) -> Tensor:
    """Return the mean square of the output, and the losses that parts stored."""
    for part in model.modules():
        if isinstance(part, Part):
            part.auxiliary_loss = None  # a checkpointed part stores one when it is computed again
            part.__dict__.pop("captured", None)
    out = model(x).square().mean()
    parts = [part for part in model.modules() if isinstance(part, Part)]
    losses = [part.auxiliary_loss for part in parts if part.auxiliary_loss is not None]
    losses += [part.captured[0].square().mean() for part in parts if hasattr(part, "captured")]
    return out + 0.1 * torch.stack(losses).sum() if losses else out


def has_fp32(seed: int) -> bool:
    """Return whether some parameters are in fp32, so that all are right within its rounding only."""
    return any(isinstance(part, Part) and part.is_fp32 for part in RandomModel(seed).modules())


def attack(seed: int) -> Attack:
    """Return the model of a seed and how to shard and train it."""
    rng = random.Random(seed + 1_000_000)
    buffers, nested, norms_once = rng.choice((1, 2, 2, 2, 3)), rng.random() < 0.25, rng.random() < 0.2
    keeps = [rng.random() < 0.2 for _ in range(LAYERS[1])]
    units = [rng.random() < 0.85 for _ in range(LAYERS[1])]

    def shard(model: nn.Module) -> nn.Module:
        for layer, keep, is_unit in zip(model.layers, keeps, units, strict=False):  # type: ignore[arg-type]
            if not is_unit:
                continue
            if nested and layer.part.inner is not None:
                fully_shard(layer.part.inner, buffers=buffers)
            norms = [p for part in layer.modules() if isinstance(part, nn.LayerNorm) for p in part.parameters()]
            left_out = norms if norms_once else []
            fully_shard(layer, buffers=buffers, reshard_after_forward=not keep, left_out=left_out)
        return fully_shard(model, buffers=buffers)

    clips, turned = rng.random() < 0.3, rng.choice((None,) * 5 + ("linear.weight", "norm.bias"))

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        if clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        for name, parameter in model.named_parameters():
            if turned is not None and name.endswith(turned):  # frozen if it was trained, trained if it was frozen
                parameter.requires_grad_(not parameter.requires_grad)
                optimizer.state.pop(parameter, None)

    micro_batches, sync_last_only = rng.choice((1, 1, 2, 3)), rng.random() < 0.5
    return Attack(lambda: RandomModel(seed), loss_of, micro_batches, sync_last_only, step, shard)
