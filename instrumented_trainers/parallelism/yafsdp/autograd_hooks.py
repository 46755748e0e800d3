"""Hooks on a unit's inputs and outputs, and the spans of a unit in traces."""

from collections import deque
from collections.abc import Iterator, Mapping
from types import ModuleType
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

    Attributes of the unit's modules, such as a router's auxiliary losses, and what objects among its outputs hold, at
    any depth.
    """
    for module in unit.own_modules:
        yield from _held(module, {name: v for name, v in vars(module).items() if name not in _OF_MODULES})
    for leaf in tree_leaves(outputs):
        if not isinstance(leaf, Tensor):
            yield from _held(leaf, _attributes(leaf))


# What every module has: parameters, buffers and children, which are no outputs, and hooks.
_OF_MODULES = frozenset((*vars(torch.nn.Module()), "_yafsdp_unit"))
_MOST_OBJECTS = 1000
"""An output that holds more, such as a whole dataset, holds no tensor of this forward that anybody looks for."""


def _held(owner: object, attributes: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, value in attributes.items():
        if value is None or isinstance(value, bool | int | float | str):
            continue
        waiting, seen = [value], {id(owner)}
        while waiting and len(seen) < _MOST_OBJECTS:
            held = waiting.pop()
            if id(held) in seen or isinstance(held, bool | int | float | str):
                continue
            seen.add(id(held))
            if isinstance(held, Tensor):
                yield f"attribute {name!r} of {type(owner).__name__}", held
            elif isinstance(held, Mapping):
                waiting += held.values()
            elif isinstance(held, list | tuple | set | frozenset | deque):
                waiting += held
            else:
                waiting += _attributes(held).values()


def _attributes(owner: object) -> dict[str, Any]:
    """Attributes of an object that holds values; of classes, functions and modules none."""
    if isinstance(owner, type | ModuleType | torch.nn.Module) or callable(owner):
        return {}
    slots = (name for kind in type(owner).__mro__ for name in _names(getattr(kind, "__slots__", ())))
    return {name: getattr(owner, name) for name in slots if hasattr(owner, name)} | getattr(owner, "__dict__", {})


def _names(slots: Any) -> tuple[str, ...]:
    return (slots,) if isinstance(slots, str) else tuple(slots)


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
