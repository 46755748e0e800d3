"""Expert parallelism: the experts of each layer are divided over ranks, and tokens travel to theirs and back.

Dropless: each rank sends as many tokens to each expert as its router says, by an all-to-all with these counts. Router
and all else are replicated as data parallelism does it; an expert has as many replicas as there are groups of ranks.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from instrumented_trainers import regions
from instrumented_trainers.experts import MixtureOfExperts
from instrumented_trainers.parallelism.collective_functions import exchange_rows, scaled_gradient
from instrumented_trainers.parallelism.tensor import TensorParallelExperts
from instrumented_trainers.regions import Axis

DISPATCH, COMBINE = "EP::dispatch", "EP::combine"
"""Spans around the exchange of tokens; `backward` is added to their names where gradients go the other way."""
_WEIGHTS = ("gate", "up", "down")
_EXPERTS = 0  # dim of their weights


class ExpertParallelExperts(MixtureOfExperts):
    """A mixture of experts of which this rank has some, and sends its tokens to where the others are."""

    axis: Axis
    replicas: DeviceMesh
    """The ranks that have the same experts: one dim, or two to replicate shards."""

    def _expert_outputs(self, rows: Tensor, counts: Tensor) -> Tensor:
        sent = counts.view(self.axis.size, -1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent.contiguous(), group=self.axis.group)
        to_ranks, from_ranks = sent.sum(dim=1).tolist(), received.sum(dim=1).tolist()
        arrived = exchange_rows(rows, self.axis, to_ranks, from_ranks, span=DISPATCH)
        order = _by_expert(received)
        outputs = super()._expert_outputs(arrived[order], received.sum(dim=0))
        return exchange_rows(outputs[order.argsort()], self.axis, from_ranks, to_ranks, span=COMBINE)

    def _weights(self) -> tuple[Tensor, ...]:
        # An expert's gradient is the sum over the ranks that send it tokens; data parallelism takes the mean over its
        # replicas only, which are fewer than the ranks by this factor.
        return tuple(scaled_gradient(weight, 1 / self.axis.size) for weight in super()._weights())


class TensorExpertParallelExperts(ExpertParallelExperts, TensorParallelExperts):
    """Experts divided over ranks, and the hidden units of each over others."""


def parallelize(model: nn.Module, axis: Axis, replicas: DeviceMesh) -> nn.Module:
    """Divide the experts of each layer over the ranks of the axis, in place; return the model.

    `replicas` are the ranks that have the same experts then. Call it after tensor parallelism's plan. Raises ValueError
    if the experts cannot be divided.
    """
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            for name in _WEIGHTS:
                regions.cut(module, name, axis, _EXPERTS)
            is_tensor_parallel = isinstance(module, TensorParallelExperts)
            kind = TensorExpertParallelExperts if is_tensor_parallel else ExpertParallelExperts
            regions.specialize(module, kind, axis=axis, replicas=replicas)
    return model


def divided_experts(model: nn.Module) -> Iterator[tuple[str, ExpertParallelExperts]]:
    """Yield the mixtures of experts that are divided over ranks, with their names."""
    return ((name, module) for name, module in model.named_modules() if isinstance(module, ExpertParallelExperts))


def expert_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of experts that are divided over ranks, by name."""
    return {
        f"{prefix}.{name}" if prefix else name: parameter
        for prefix, module in divided_experts(model)
        for name, parameter in module.named_parameters(recurse=False)
    }


def gradient_mean(model: nn.Module) -> Callable[[], None] | None:
    """Function that averages the gradients of divided experts over their replicas; None if the model has none.

    For data-parallel strategies that average over all ranks, and leave these parameters out.
    """
    parameters = list(expert_parameters(model).values())
    if not parameters:
        return None
    group = next(module for _, module in divided_experts(model)).replicas.get_group()
    return lambda: _average([p.grad for p in parameters if p.grad is not None], group)


@torch.no_grad()
def _average(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    if group.size() == 1 or not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients]).div_(group.size())
    dist.all_reduce(flat, group=group)
    parts = flat.split([gradient.numel() for gradient in gradients])
    for gradient, part in zip(gradients, parts, strict=True):
        gradient.copy_(part.view_as(gradient))


def _by_expert(received: Tensor) -> Tensor:
    """Return the order that sorts by expert what arrives by sender and expert; `received` counts it so."""
    senders, experts = received.shape
    numbers = torch.arange(experts, device=received.device).repeat(senders)
    return numbers.repeat_interleave(received.flatten()).argsort(stable=True)
