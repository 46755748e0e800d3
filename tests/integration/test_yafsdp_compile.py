"""`torch.compile` of units and of the whole sharded model: compiled code trains as one process does."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from instrumented_trainers.parallelism.yafsdp import YaFSDPModule, fully_shard
from tests.integration import yafsdp_attacks
from tests.integration.yafsdp_attacks import DEPTH, Attack, Layer, Model, shard_layers
from tests.support import process_group
from tests.support.selection import others_in_accuracy

WORLD_SIZES, TOLERANCE, BACKEND = (2, 3), 1e-12, "aot_eager"


# Ways to compile -----------------------------------------------------------------------------------------------------


def compile_blocks(model: Any) -> Any:
    for layer in model.layers:
        layer.compile(backend=BACKEND, fullgraph=True)
    return model


def wrap_blocks(model: Any) -> nn.Module:
    """Shard what torch.compile returns of each block."""
    for number, layer in enumerate(model.layers):
        model.layers[number] = fully_shard(torch.compile(layer, backend=BACKEND, fullgraph=True))  # type: ignore[arg-type]
    return fully_shard(model)


def compile_model(model: Any) -> Any:
    model.compile(backend=BACKEND)
    return model


class CalledCompiled:
    """Calls a sharded model through what torch.compile returns of it, and one that is not sharded as it is."""

    def __init__(self) -> None:
        self.compiled: Any = None

    def __call__(self, model: nn.Module, x: Tensor, _: int) -> Tensor:
        if isinstance(model, YaFSDPModule):
            if self.compiled is None or self.compiled._orig_mod is not model:
                self.compiled = torch.compile(model, backend=BACKEND)
            return self.compiled(x).square().mean()
        return model(x).square().mean()


WAYS: dict[str, Callable[[nn.Module], Any]] = {
    "blocks compiled before": lambda model: shard_layers(compile_blocks(model)),
    "blocks compiled after": lambda model: compile_blocks(shard_layers(model)),
    "wrapped blocks sharded": wrap_blocks,
    "the model compiled": lambda model: compile_model(shard_layers(model)),
}


class Checkpoints(Model):
    def forward(self, x: Tensor) -> Tensor:
        x = self.inlet(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class FrozenLinear(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        self.inner = self.linear(self.norm(x)).tanh() @ self.linear.weight
        return x + torch.tanh(self.inner) * self.scale


ATTACKS = {name: Attack(shard=way) for name, way in WAYS.items()} | {
    "the model called compiled": Attack(loss=CalledCompiled()),
    "micro-batches": Attack(shard=WAYS["blocks compiled after"], micro_batches=3),
    "frozen layers": Attack(yafsdp_attacks.lora, shard=WAYS["blocks compiled after"]),
    "weights frozen beside trained ones": Attack(
        functools.partial(Model, FrozenLinear), shard=WAYS["wrapped blocks sharded"]
    ),
    "weights unfrozen later": Attack(loss=yafsdp_attacks.unfreeze_later, shard=WAYS["blocks compiled after"]),
    "checkpointed blocks": Attack(Checkpoints, shard=WAYS["blocks compiled after"]),
    "one buffer": Attack(shard=lambda model: compile_blocks(shard_layers(model, buffers=1))),
}


def outcome(name: str) -> Any:
    """Return the difference from one process, how many graphs were compiled, and how many graph breaks there were."""
    torch._dynamo.reset()
    counters.clear()
    difference = yafsdp_attacks.outcome_of(ATTACKS[name])
    return difference, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


# Every day, on three ranks: the ways to compile, and what changes the compiled graph most.
EVERYDAY = {*WAYS, "the model called compiled", "frozen layers", "checkpointed blocks"}


@functools.cache
def outcomes(world_size: int, *, everyday: bool) -> dict[str, process_group.Outcome]:
    names = [name for name in ATTACKS if everyday == (name in EVERYDAY)]
    return process_group.run_cases(
        world_size, {name: functools.partial(outcome, name) for name in names}, timeout_s=480
    )


@pytest.mark.parametrize("name", others_in_accuracy(ATTACKS, EVERYDAY))
@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_compiled_units_train_as_one_process_does(world_size: int, name: str) -> None:
    for difference, graphs, breaks in outcomes(world_size, everyday=name in EVERYDAY)[name].results():
        assert isinstance(difference, float), difference
        assert difference < TOLERANCE
        assert graphs > 0
        assert breaks == 0


@pytest.mark.parametrize("world_size", others_in_accuracy(WORLD_SIZES, {3}))
def test_equal_blocks_share_one_graph(world_size: int) -> None:
    assert DEPTH > 1
    for name in (*WAYS, "the model called compiled"):
        results = outcomes(world_size, everyday=True)[name].results()
        assert [graphs for _, graphs, _ in results] == [1] * world_size
