"""What a training loop does with gradients, the same words for every strategy."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from instrumented_trainers import regions
from instrumented_trainers.parallelism import expert
from instrumented_trainers.parallelism.pipeline import PipelineModel
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard

_EPSILON = 1e-6  # as torch's clip_grad_norm_


@contextmanager
def accumulate(model: nn.Module, last: bool) -> Iterator[None]:
    """Run forward and backward of one micro-batch inside; gradients are complete after the `last` of them.

    Gradients of micro-batches add up: divide the loss by their number.
    """
    with _local_accumulation(model, last):
        yield
    if last and isinstance(model, DistributedDataParallel) and (average := expert.gradient_mean(model)) is not None:
        average()


@contextmanager
def _local_accumulation(model: nn.Module, last: bool) -> Iterator[None]:
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        yield
    elif isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not last:
        with model.no_sync():
            yield
    else:
        yield


def clip_grad_norm(model: nn.Module, max_norm: float) -> Tensor:
    """Scale the gradients so that their norm over all ranks is at most `max_norm`; return the norm before."""
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    if isinstance(model, PipelineModel) or any(True for _ in regions.parameter_regions(model)):
        return _clip_divided(model, max_norm)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@torch.no_grad()
def _clip_divided(model: nn.Module, max_norm: float) -> Tensor:
    """Clip where ranks have other parameters, or parts of them: each element counts once."""
    gradients = [_local(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]
    squared = _squared_norm(model)
    if isinstance(model, PipelineModel):
        dist.all_reduce(squared, group=model.process_group)
    norm = squared.sqrt()
    torch._foreach_mul_(gradients, (max_norm / (norm + _EPSILON)).clamp(max=1.0).to(gradients[0]))
    return norm


def _squared_norm(model: nn.Module) -> Tensor:
    """Return the sum over all ranks of the gradients' squares, at least in fp32."""
    by_groups: dict[tuple[dist.ProcessGroup, ...], list[Tensor]] = {}
    divided = {id(parameter): region.groups for parameter, region in regions.parameter_regions(model)}
    for parameter in model.parameters():
        if parameter.grad is not None:
            groups = (*_shard_groups(parameter), *divided.get(id(parameter), ()))
            by_groups.setdefault(groups, []).append(_local(parameter.grad))
    sums = []
    for groups, gradients in by_groups.items():  # in the order of the parameters, the same on every rank
        dtype = torch.promote_types(gradients[0].dtype, torch.float32)
        norms = torch._foreach_norm([gradient for gradient in gradients if gradient.numel()], 2, dtype)
        total = torch.stack(norms).square().sum() if norms else torch.zeros((), dtype=dtype, device=gradients[0].device)
        for group in groups:
            dist.all_reduce(total, group=group)
        sums.append(total)
    return torch.stack(sums).sum()


def _shard_groups(parameter: nn.Parameter) -> tuple[dist.ProcessGroup, ...]:
    """Return the groups over which a data-parallel strategy shards the parameter."""
    if isinstance(parameter, DTensor):
        placements = enumerate(parameter.placements)
        return tuple(parameter.device_mesh.get_group(dim) for dim, placement in placements if placement.is_shard())
    return (parameter.place.ranks,) if isinstance(parameter, Shard) else ()


def _local(gradient: Tensor) -> Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor | Shard) else gradient
