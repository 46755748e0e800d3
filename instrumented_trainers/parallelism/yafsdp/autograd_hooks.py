"""Hooks on a unit's inputs and outputs, and the spans of a unit in traces."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.profiler import record_function
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

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


def copy_weights_in(unit: Unit, outputs: Any) -> Any:
    """Return `outputs`, any nesting of containers, with copies of weights of the unit and of views of them.

    Their memory is the next unit's after this one's forward.
    """
    leaves, tree = tree_flatten(outputs)
    if not any(isinstance(leaf, Tensor) and unit.is_weight(leaf) for leaf in leaves):
        return outputs
    return tree_unflatten(
        [leaf.clone() if isinstance(leaf, Tensor) and unit.is_weight(leaf) else leaf for leaf in leaves], tree
    )


def left_tensors(unit: Unit, outputs: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that a forward left elsewhere than in known containers, and where: its loss may need them.

    Attributes of the unit's modules, such as a router's auxiliary loss, and of objects among its outputs.
    """
    for owner in (*unit.own_modules, *(leaf for leaf in tree_leaves(outputs) if hasattr(leaf, "__dict__"))):
        if not isinstance(owner, Tensor):
            for name, value in vars(owner).items():
                if isinstance(value, Tensor):
                    yield f"attribute {name!r} of {type(owner).__name__}", value


def span(label: str, unit: Unit) -> record_function:
    """Return a span named as FSDP2 names its own: the root has no suffix."""
    return record_function(f"YaFSDP::{label} ({unit.name})" if unit.name else f"YaFSDP::{label}")


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
        ctx.unit.engine.end_backward(ctx.unit)
        return (None, *gradients)
