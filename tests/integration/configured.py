"""Train as the trainers' options say, on every rank of a process group and alone; compare. Not a test."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn

from instrumented_trainers import parallelism
from instrumented_trainers.build import build, model_axes, shard_options
from instrumented_trainers.config import TrainingConfig
from instrumented_trainers.config.parallelism import layout_problem
from instrumented_trainers.loss import next_token_loss
from instrumented_trainers.model import Llama
from instrumented_trainers.parallelism import ModelAxes, PipelineModel
from instrumented_trainers.sizes import model_config
from tests.integration import references
from tests.integration.hybrid import STEPS, weight_difference

_FIXED = {
    "model": "micro",
    "precision": "fp64",
    "batch": 2,
    "tokens": 8,
    "optimizer": "sgd",
    "momentum": 0.0,
    "weight_decay": 0.0,
}
_RATE = 0.5


class Trainer:
    """One rank's part of a training by options; weights differ by `seed`."""

    def __init__(self, options: dict[str, Any], *, seed: int = 0) -> None:
        from torch.distributed.tensor import debug  # imports the compiler, which only ranks need

        debug._clear_sharding_prop_cache()
        ranks = dist.get_world_size()
        config = TrainingConfig(out=Path("none"), world_size=ranks, seed=seed, **{**_FIXED, **options})
        assert (reason := layout_problem(config)) is None, reason
        mesh = parallelism.make_mesh(config.layout, "cpu", data_axes=config.data_axes)
        self.config, self.axes = config, model_axes(config, mesh)
        self.model, self.optimizer = build(config, shard_options(config, ()), mesh, (), self.axes)
        for group in self.optimizer.param_groups:
            group["lr"] = _RATE

    def step(self, number: int) -> float:
        """Train one step and return the mean loss over all ranks."""
        return _step(self.config, self.model, self.optimizer, self.axes, number)


def difference(options: dict[str, Any]) -> float:
    """Return the largest relative difference of losses, and of this rank's part of the weights after the last step."""
    trainer = Trainer(options)
    losses, whole = references.on_first_rank(functools.partial(_reference, trainer.config))
    found = [trainer.step(number) for number in range(STEPS)]
    largest = max(abs(loss - expected) / expected for loss, expected in zip(found, losses, strict=True))
    state = parallelism.checkpoint_state(trainer.model, trainer.optimizer)["model"]
    return max(largest, *(weight_difference(value, torch.from_numpy(whole[name])) for name, value in state.items()))


def _reference(config: TrainingConfig) -> tuple[list[float], dict[str, np.ndarray]]:
    """Train the whole model on the data of all ranks; return the loss of each step, and the weights at the end."""
    model = _whole(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    return [_reference_step(config, model, optimizer, n) for n in range(STEPS)], references.state_arrays(model)


def save(options: dict[str, Any], path: Path) -> list[float]:
    """Train, save a checkpoint, and return the losses of two more steps."""
    trainer = Trainer(options)
    for number in range(2):
        trainer.step(number)
    checkpoint.save(parallelism.checkpoint_state(trainer.model, trainer.optimizer), checkpoint_id=path)
    return [trainer.step(number) for number in (2, 3)]


def load(options: dict[str, Any], path: Path) -> list[float]:
    """Load into a model of other weights and return the losses of two more steps."""
    trainer = Trainer(options, seed=1)
    state = parallelism.checkpoint_state(trainer.model, trainer.optimizer)
    checkpoint.load(state, checkpoint_id=path)
    parallelism.restore_state(trainer.model, trainer.optimizer, state)
    return [trainer.step(number) for number in (2, 3)]


def _whole(config: TrainingConfig) -> Llama:
    model = Llama(model_config(config)).double()
    model.apply(model.initializer(config.seed))
    return model


def _batches(config: TrainingConfig, number: int) -> Tensor:
    """Return the tokens of a step, (data ranks, micro-batches, B, T + 1)."""
    shape = config.layout.data_ranks, config.micro_batches, config.batch, config.tokens + 1
    return torch.randint(256, shape, generator=torch.Generator().manual_seed(number))


def _step(config: TrainingConfig, model: nn.Module, optimizer: Any, axes: ModelAxes, number: int) -> float:
    rows = _batches(config, number)[config.layout.data_rank(dist.get_rank())]
    tokens, targets = axes.own_tokens(rows.flatten(0, 1)[:, :-1]), axes.own_tokens(rows.flatten(0, 1)[:, 1:])
    if isinstance(model, PipelineModel):
        loss = model.step(tokens, targets)
    else:
        loss = _accumulated(config, model, tokens, targets, axes)
    parallelism.clip_grad_norm(model, config.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.double()
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


def _accumulated(config: TrainingConfig, model: nn.Module, tokens: Tensor, targets: Tensor, axes: ModelAxes) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    pairs = zip(tokens.split(config.batch), targets.split(config.batch), strict=True)
    for index, (own, wanted) in enumerate(pairs):
        with parallelism.accumulate(model, index == config.micro_batches - 1):
            loss = axes.next_token_loss(model(own), wanted) / config.micro_batches
            loss.backward()
        total += loss.detach()
    return total


def _reference_step(config: TrainingConfig, model: Llama, optimizer: torch.optim.Optimizer, number: int) -> float:
    rows = _batches(config, number).flatten(0, 1)
    loss = torch.stack([next_token_loss(model(each[:, :-1]), each[:, 1:]) for each in rows]).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), config.max_norm)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
