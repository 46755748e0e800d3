"""Train a toy under YaFSDP on all ranks and, on rank 0, the same toy alone on all ranks' data; compare. Not a test.

Both are in fp64, where the two may differ by rounding only. One of the world sizes must be other than 1, 2 and 4:
dividing by a power of two is exact, so a wrong order of dividing and summing could hide.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy
from torch.nn import functional

from instrumented_trainers.parallelism.yafsdp import MixedPrecisionPolicy, YaFSDPModule, fully_shard
from instrumented_trainers.parallelism.yafsdp.module import units_in
from tests.integration import references
from tests.integration.toy import RANK_DEPENDENT_PATHS, VOCABULARY, Toy

SEQUENCES, TOKENS = 2, 9


@dataclass(frozen=True)
class Case:
    """One way to train. Every field is what differs from the plain way."""

    path: str = "plain"
    tied: bool = False
    prepare: Callable[[Toy], None] | None = None
    """Applied to the model before it is sharded."""
    units: str = "layers"
    """What is sharded by itself: layers, root (nothing), all (every child), nested (feed-forwards in layers, too)."""
    norms_once: bool = False
    """Whether the layers leave their norms to the root."""
    replicas: int = 1
    """Over how many ranks each shard is replicated, if the world size can be divided by that."""
    meta: bool = False
    """Whether the model is sharded on the meta device and then given the reference's weights."""
    buffers: int = 2
    reshard_after_forward: bool = True
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    dtype: torch.dtype = torch.float64
    optimizer: str = "sgd"
    """SGD shows errors of scale that Adam hides; weight decay shows steps that should not have been."""
    offload: bool = False
    """Whether shards lie in host memory."""
    micro_batches: int = 1
    whole_gradients: bool = False
    """Whether micro-batches but the last add up whole gradients and are not reduced."""
    max_norm: float | None = None
    passes: int = 1
    """How many forward passes, on different data, one backward pass goes through."""
    backwards: str = "one"
    """one: for all passes together; each: for each of them; two: for all together, each of half the loss."""
    evaluate: bool = False
    """Whether a forward pass without gradients follows each micro-batch's forward and each step."""
    set_to_none: bool = True
    clear_every: int = 1
    """After how many steps gradients are cleared; until then they add up."""
    divisor_error: float = 1.0
    """The factor by which gradients are made too small: the negative control."""
    steps: int = 3
    device: str = "cpu"


@dataclass(frozen=True)
class Difference:
    """The largest relative differences between the sharded run and the reference."""

    loss: float
    gradient: float
    parameter: float
    norm: float

    @property
    def largest(self) -> float:
        """Return the largest of them."""
        return max(self.loss, self.gradient, self.parameter, self.norm)


def compare(case: Case) -> Difference:
    """Train both and return their differences. Raises AssertionError if only one of them has some gradient."""
    sharded, reference = _models(case)
    optimizers = [_optimizer(case, model) for model in (sharded, reference)]
    losses, gradients, norms = [0.0], [0.0], [0.0]
    for step in range(case.steps):
        batches = _batches(case, step)
        rank = dist.get_rank()
        loss = _train(case, sharded, {rank: batches[rank]}, step)
        train_reference = functools.partial(_train_reference, case, reference, batches, step)
        reference_loss, reference_norm = references.follow_first_rank(reference, train_reference)
        losses.append(relative(_mean_over_ranks(loss), reference_loss))
        if case.max_norm is not None:
            norms.append(relative(sharded.clip_grad_norm_(case.max_norm), reference_norm))
        gradients.append(_gradient_difference(case, sharded, reference))
        for optimizer in optimizers[: 2 if rank == 0 else 1]:
            optimizer.step()
            if (step + 1) % case.clear_every == 0:
                optimizer.zero_grad(set_to_none=case.set_to_none)
    references.follow_first_rank(reference, lambda: None)
    return Difference(max(losses), max(gradients), _parameter_difference(sharded, reference), max(norms))


def shard(toy: nn.Module, case: Case) -> nn.Module:
    """Shard the toy as the case says."""
    mesh = _mesh(case)
    offload = CPUOffloadPolicy() if case.offload else OffloadPolicy()
    options = {
        "mp_policy": case.policy,
        "buffers": case.buffers,
        "offload_policy": offload,
        "keep_whole_gradients": case.whole_gradients,
    }
    inner: list[nn.Module] = []
    if case.units == "nested":
        inner += [layer.feed_forward for layer in toy.layers]
    if case.units in ("layers", "nested", "all"):
        inner += toy.layers
    if case.units == "all":
        inner += [toy.embedding, toy.norm, toy.head]
    for module in inner:
        norms = [p for part in module.modules() if isinstance(part, nn.LayerNorm) for p in part.parameters()]
        left_out = norms if case.norms_once else []
        keep = {"reshard_after_forward": case.reshard_after_forward}
        fully_shard(module, mesh, left_out=left_out, **keep, **options)
    return fully_shard(toy, mesh, **options)


def _mesh(case: Case) -> DeviceMesh:
    world_size = dist.get_world_size()
    replicas = case.replicas if world_size % case.replicas == 0 else 1
    shape = (world_size,) if case.replicas == 1 else (replicas, world_size // replicas)
    return init_device_mesh(case.device, shape)


def _models(case: Case) -> tuple[Toy, Toy]:
    reference = _toy(case)
    if not case.meta:
        return shard(_toy(case), case), reference
    with torch.device("meta"):
        toy = Toy(case.path, tied=case.tied).to(case.dtype)
    shard(toy, case).to_empty(device=case.device)
    toy.load_state_dict(reference.state_dict())
    return toy, reference


def _toy(case: Case) -> Toy:
    torch.manual_seed(0)
    toy = Toy(case.path, tied=case.tied).to(case.device, case.dtype)
    if case.prepare is not None:
        case.prepare(toy)
    return toy


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _batches(case: Case, step: int) -> Tensor:
    shape = dist.get_world_size(), case.micro_batches, SEQUENCES, TOKENS + 1
    return torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(step)).to(case.device)


def _train(case: Case, toy: Toy, batches: Mapping[int, Tensor], step: int) -> Tensor:
    """Run all micro-batches of the given ranks forward and backward and return the mean loss."""
    total = torch.zeros((), dtype=torch.float64, device=case.device)
    shares = case.micro_batches * len(batches)
    error = case.divisor_error if isinstance(toy, YaFSDPModule) else 1
    for rank, micro_batches in batches.items():
        toy.situation.step, toy.situation.rank = step, rank
        for index, tokens in enumerate(micro_batches):
            if isinstance(toy, YaFSDPModule):
                toy.set_requires_gradient_sync(index == case.micro_batches - 1)
            losses = [_loss(toy, tokens.roll(number, 1)) / shares for number in range(case.passes)]
            if case.evaluate:
                _evaluate(toy, tokens)
            _go_back(case, [loss / error for loss in losses])
            total += torch.stack(losses).detach().sum()
    if case.evaluate:
        _evaluate(toy, tokens)
    return total


def _train_reference(case: Case, reference: Toy, batches: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """Run the batches of all ranks forward and backward, and clip; return the mean loss and the gradients' norm."""
    together = case.path not in RANK_DEPENDENT_PATHS
    loss = _train(case, reference, {0: torch.cat(list(batches), dim=1)} if together else dict(enumerate(batches)), step)
    norm = torch.zeros(())
    if case.max_norm is not None:
        norm = nn.utils.clip_grad_norm_(reference.parameters(), case.max_norm)
    return loss.cpu(), norm.cpu()


def _go_back(case: Case, losses: list[Tensor]) -> None:
    if case.backwards == "each":
        for loss in losses:
            loss.backward()
        return
    loss = torch.stack(losses).sum()
    if case.backwards == "two":
        loss = loss / 2
        loss.backward(retain_graph=True)
    loss.backward()


def _loss(toy: Toy, tokens: Tensor) -> Tensor:
    logits = toy(tokens[:, :-1]).to(torch.float64)
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _evaluate(toy: Toy, tokens: Tensor) -> None:
    toy.eval()
    with torch.no_grad():
        _loss(toy, tokens.flip(0))
    with torch.inference_mode():
        _loss(toy, tokens)
    toy.train()


def _mean_over_ranks(value: Tensor) -> Tensor:
    value = value.clone()
    dist.all_reduce(value)
    return value / dist.get_world_size()


def relative(value: Tensor, expected: Tensor, *, scale: Tensor | None = None) -> float:
    """Return the largest difference relative to the largest expected value, or to that of `scale`."""
    scale = expected if scale is None else scale
    return float((value.to(expected.device) - expected).abs().max() / scale.abs().max().clamp(min=1e-30))


def pairs(sharded: nn.Module, reference: nn.Module) -> Iterator[tuple[nn.Parameter, nn.Parameter, slice]]:
    """Yield each shard, the reference's parameter, and which of its elements the shard holds."""
    parameters = dict(reference.named_parameters())
    parts = {id(p.shard): p.part for unit in units_in(sharded) for p in unit.parameters}
    for name, shard_ in sharded.named_parameters():
        part = parts[id(shard_)]
        yield (
            shard_,
            parameters[name.replace("_orig_mod.", "")],
            slice(part.origin, part.origin + part.stop - part.start),
        )


def _gradient_difference(case: Case, sharded: nn.Module, reference: nn.Module) -> float:
    largest = 0.0
    for shard_, parameter, elements in pairs(sharded, reference):
        assert (shard_.grad is None) == (parameter.grad is None), "a gradient on one side only"
        if parameter.grad is not None and shard_.to_local().numel():
            difference = relative(shard_.grad.to_local(), parameter.grad.flatten()[elements], scale=parameter.grad)
            largest = max(largest, difference)
    return largest


def _parameter_difference(sharded: nn.Module, reference: nn.Module) -> float:
    differences = [
        relative(shard_.to_local().detach(), parameter.detach().flatten()[elements], scale=parameter.detach())
        for shard_, parameter, elements in pairs(sharded, reference)
        if shard_.to_local().numel()
    ]
    return max(differences, default=0.0)
