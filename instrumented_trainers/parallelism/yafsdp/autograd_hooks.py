"""Autograd hooks that detect the end of a unit's backward; a unit's name in traces and messages."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_unflatten

from instrumented_trainers.parallelism.yafsdp.unit import Unit


def hook_inputs(unit: Unit, inputs: Any) -> Any:
    """Return `inputs`, any nesting of containers, hooked: the engine learns when their gradients are ready."""
    if not torch.is_grad_enabled():
        return inputs
    leaves, tree = tree_flatten(inputs)
    differentiable = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not differentiable:
        return inputs
    for i, tensor in zip(differentiable, _BackwardEnd.apply(unit, *(leaves[i] for i in differentiable)), strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, tree)


def refuse_evicted(unit: Unit) -> None:
    """Raise RuntimeError if another unit evicted the weights during this unit's backward."""
    if unit.evicted:
        raise RuntimeError(
            f"YaFSDP: another unit evicted the weights of {unit_label(unit)} during its backward; shard it with "
            "reshard_after_forward=False, which gives it a buffer of its own"
        )


def refuse_replaced_parameters(unit: Unit) -> None:
    """Raise RuntimeError if an optimizer's parameter is no longer the shard that the engine gathers from."""
    if (parameter := unit.replaced_parameter()) is not None:
        module, name = parameter.sites[0]
        raise RuntimeError(
            f"YaFSDP: parameter {name!r} of {type(module).__name__} in {unit_label(unit)} was replaced after "
            "fully_shard, or given other memory or another dtype; copy values in place, and cast before sharding"
        )


def span(label: str, unit: Unit) -> record_function:
    """Return a span named as FSDP2 names its own: the root has no suffix."""
    return record_function(f"YaFSDP::{label} ({unit.name})" if unit.name else f"YaFSDP::{label}")


def unit_label(unit: Unit) -> str:
    """Return what to call the unit in a message."""
    return f"unit {unit.name!r}" if unit.name else "the root unit"


class _BackwardEnd(torch.autograd.Function):
    """The identity on a unit's inputs; their gradients are ready when the unit's backward has ended."""

    @staticmethod
    def forward(ctx: Any, unit: Unit, *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.unit = unit
        ctx.set_materialize_grads(False)
        return inputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        refuse_evicted(ctx.unit)
        ctx.unit.engine.post_backward(ctx.unit)
        return (None, *gradients)
