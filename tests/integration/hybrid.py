"""Train the trainers' model over tensor, context and expert axes and, on rank 0, the same alone; compare. Not a test.

All in fp64, where the two may differ by rounding only. The reference trains on the data of all ranks.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.nn import functional

from instrumented_trainers import parallelism
from instrumented_trainers.model import Llama
from instrumented_trainers.model_config import ModelConfig
from instrumented_trainers.parallelism import STRATEGIES, ShardOptions, context, expert, tensor
from instrumented_trainers.parallelism.vocabulary_loss import vocabulary_cross_entropy
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.regions import Axis
from tests.integration import references

CONFIG = ModelConfig(width=16, layers=2, heads=4, key_value_heads=2, hidden_width=24, vocabulary=32)
SEQUENCES, TOKENS, STEPS = 2, 8, 3


@dataclass(frozen=True)
class Hybrid:
    """One way to train on the ranks of a process group: mesh axes (data, cp, tp), experts cut out of data × cp."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    strategy: str = "ddp"
    sequence_parallel: bool = False
    loss_parallel: bool = False
    config: ModelConfig = CONFIG
    options: ShardOptions = field(default_factory=ShardOptions)
    cp_method: str = "gather"
    micro_batches: int = 1
    max_norm: float | None = None
    optimizer: str = "sgd"
    meta: bool = False
    """Whether the model is sharded on the meta device and gets its weights then."""
    divisor_error: float = 1.0
    """The factor by which losses are made too small: the negative control."""

    @property
    def data(self) -> int:
        """Return the number of data-parallel ranks."""
        return dist.get_world_size() // (self.tp * self.cp)


class Trainer:
    """One rank's model, optimizer and data."""

    def __init__(self, case: Hybrid, *, seed: int = 0) -> None:
        from torch.distributed.tensor import debug  # imports the compiler, which only ranks need

        self.case = case
        # DTensor's caches refer to equal meshes of earlier cases, whose process groups are gone.
        debug._clear_sharding_prop_cache()
        mesh = init_device_mesh("cpu", (case.data, case.cp, case.tp), mesh_dim_names=("dp_shard", "cp", "tp"))
        self.tp, self.cp = (Axis(name, mesh.get_group(name)) for name in ("tp", "cp"))
        self.data_rank = mesh.get_local_rank("dp_shard")
        self.model, self.optimizer = self._build(mesh, seed)

    def _build(self, mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        case, model = self.case, llama(self.case, seed=seed)
        initializer = None
        if case.meta:
            with torch.device("meta"):
                model = Llama(case.config).double()
            initializer = model.initializer(seed)
        if case.tp > 1:
            tensor.parallelize(
                model, self.tp, sequence_parallel=case.sequence_parallel, gather_logits=not case.loss_parallel
            )
        if case.cp > 1:
            context.parallelize(model, self.cp, case.cp_method)
        if case.ep > 1:
            experts = _expert_mesh(case)
            expert.parallelize(model, Axis("ep", experts.get_group("ep")), experts["replicas"])
        model = STRATEGIES[case.strategy](model, mesh["dp_shard", "cp"]._flatten("data"), case.options)
        if initializer is not None:
            parallelism.materialize(model, initializer, torch.device("cpu"), case.options)
        return model, optimizer_of(case, model)

    def step(self, number: int) -> tuple[float, float]:
        """Train one step; return the mean loss over all ranks and the norm of the gradients."""
        case, total, norm = self.case, torch.zeros((), dtype=torch.float64), torch.zeros(())
        torch.manual_seed(number)
        for index, rows in enumerate(batches(case, case.data, number)[self.data_rank]):
            with parallelism.accumulate(self.model, index == case.micro_batches - 1):
                loss = self._loss(rows) / case.micro_batches
                (loss / case.divisor_error).backward()
            total += loss.detach()
        if case.max_norm is not None:
            norm = parallelism.clip_grad_norm(self.model, case.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / dist.get_world_size(), norm.item()

    def _loss(self, rows: Tensor) -> Tensor:
        tokens, targets = rows[:, :-1], rows[:, 1:]
        if self.case.cp > 1:
            split = context.TokenSplit(self.cp)
            tokens, targets = split.own(tokens), split.own(targets)
        logits = self.model(tokens).flatten(0, 1)
        if self.case.loss_parallel:
            return vocabulary_cross_entropy(logits, targets.flatten(), self.tp).mean()
        return functional.cross_entropy(logits, targets.flatten())


def _expert_mesh(case: Hybrid) -> DeviceMesh:
    replicas = dist.get_world_size() // (case.ep * case.tp)
    return init_device_mesh("cpu", (replicas, case.ep, case.tp), mesh_dim_names=("replicas", "ep", "tp_of_experts"))


def llama(case: Hybrid, *, seed: int = 0) -> Llama:
    """Return the model whole, with the weights of a seed."""
    model = Llama(case.config).double()
    model.apply(model.initializer(seed))
    return model


def optimizer_of(case: Hybrid, model: nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded or a whole model."""
    if case.optimizer == "sgd":
        return parallelism.make_optimizer(model, torch.optim.SGD, lr=0.5)
    return parallelism.make_optimizer(model, torch.optim.AdamW, lr=1e-2, weight_decay=0.1)


def batches(case: Hybrid, ranks: int, number: int) -> Tensor:
    """Return the tokens of a step, (data ranks, micro-batches, B, T + 1)."""
    shape = ranks, case.micro_batches, SEQUENCES, TOKENS + 1
    return torch.randint(case.config.vocabulary, shape, generator=torch.Generator().manual_seed(number))


def difference(case: Hybrid) -> float:
    """Train both; return the largest relative difference of losses, norms, and this rank's part of the weights."""
    expected, whole = references.on_first_rank(functools.partial(_reference, case, case.data))
    trainer, largest = Trainer(case), 0.0
    for number, values in enumerate(expected):
        found = trainer.step(number)
        largest = max(largest, *(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(found, values, strict=True) if b))
    state = parallelism.checkpoint_state(trainer.model, trainer.optimizer)["model"]
    assert state.keys() == whole.keys()
    for name, value in state.items():
        largest = max(largest, weight_difference(value, torch.from_numpy(whole[name])))
    return largest


def _reference(case: Hybrid, ranks: int) -> tuple[list[tuple[float, float]], dict[str, np.ndarray]]:
    """Train the whole model on the data of all ranks; return loss and norm of each step, and the weights at the end."""
    model = llama(case)
    optimizer = optimizer_of(case, model)
    values = [_reference_step(case, ranks, model, optimizer, number) for number in range(STEPS)]
    return values, references.state_arrays(model)


def _reference_step(
    case: Hybrid, ranks: int, model: nn.Module, optimizer: torch.optim.Optimizer, number: int
) -> tuple[float, float]:
    rows = batches(case, ranks, number).flatten(0, 1)
    torch.manual_seed(number)
    losses = [functional.cross_entropy(model(each[:, :-1]).flatten(0, 1), each[:, 1:].flatten()) for each in rows]
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), case.max_norm) if case.max_norm else torch.zeros(())
    optimizer.step()
    optimizer.zero_grad()
    return loss.item(), norm.item()


def weight_difference(value: Any, whole: Tensor) -> float:
    """Return the largest difference of this rank's part of a tensor, relative to the largest of the whole."""
    assert value.shape == whole.shape
    differences = [0.0]
    for offsets, piece in pieces(value):
        expected = whole
        for dim, (offset, size) in enumerate(zip(offsets, piece.shape, strict=True)):
            expected = expected.narrow(dim, offset, size)
        if piece.numel():
            differences.append(float((piece - expected).abs().max() / whole.abs().max()))
    return max(differences)


def pieces(value: Tensor) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Yield the boxes that this rank has of a tensor, with their offsets in the whole."""
    if isinstance(value, FlatShard):
        yield from value.pieces
    elif isinstance(value, DTensor):
        _, offsets = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
        yield offsets, value.to_local()
    else:
        yield (0,) * value.dim(), value


# Checkpoints ---------------------------------------------------------------------------------------------------------
_BEFORE, _AFTER = range(3), range(3, 5)


def save(case: Hybrid, path: Path) -> list[float]:
    """Train, save a checkpoint, and return the losses of two more steps."""
    trainer = Trainer(case)
    for number in _BEFORE:
        trainer.step(number)
    checkpoint.save(parallelism.checkpoint_state(trainer.model, trainer.optimizer), checkpoint_id=path)
    return [trainer.step(number)[0] for number in _AFTER]


def load(case: Hybrid, path: Path) -> list[float]:
    """Load into a model of other weights and return the losses of two more steps."""
    trainer = Trainer(case, seed=1)
    state = parallelism.checkpoint_state(trainer.model, trainer.optimizer)
    checkpoint.load(state, checkpoint_id=path)
    parallelism.restore_state(trainer.model, trainer.optimizer, state)
    return [trainer.step(number)[0] for number in _AFTER]


def save_alone(case: Hybrid, path: Path) -> list[float]:
    """Do what `save` does with the whole model, on each rank alone; the first one saves."""
    model = llama(case)
    optimizer = optimizer_of(case, model)
    for number in _BEFORE:
        _reference_step(case, 1, model, optimizer, number)
    if dist.get_rank() == 0:
        checkpoint.save(parallelism.checkpoint_state(model, optimizer), checkpoint_id=path, no_dist=True)
    dist.barrier()
    return [_reference_step(case, 1, model, optimizer, number)[0] for number in _AFTER]


def load_alone(case: Hybrid, path: Path) -> list[float]:
    """Do what `load` does with the whole model, on each rank alone."""
    model = llama(case, seed=1)
    optimizer = optimizer_of(case, model)
    state = parallelism.checkpoint_state(model, optimizer)
    checkpoint.load(state, checkpoint_id=path, no_dist=True)
    parallelism.restore_state(model, optimizer, state)
    return [_reference_step(case, 1, model, optimizer, number)[0] for number in _AFTER]
