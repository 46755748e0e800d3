"""A copy of a sharded module: sharded in the same way, with shards and buffers of its own. For averages of weights."""

import copy
from collections.abc import Sequence
from typing import Any

from torch import nn

from instrumented_trainers.parallelism.yafsdp.refusals import refuse_running
from instrumented_trainers.parallelism.yafsdp.sharded_functions import replace_functions
from instrumented_trainers.parallelism.yafsdp.unit import Unit


def copy_module(module: nn.Module, units: Sequence[Unit], memo: dict[int, Any]) -> Any:
    """Copy a sharded module with these units as `copy.deepcopy` should.

    Raises RuntimeError while the module runs or is unsharded.
    """
    is_outermost = not any(id(unit) in memo for unit in units)
    if is_outermost:
        for unit in units:
            refuse_running(unit, "be copied")
            memo[id(unit)] = _copy_unit(unit, memo)
    copied = memo[id(module)] = object.__new__(type(module))
    copied.__setstate__(copy.deepcopy(module.__getstate__(), memo))  # type: ignore[no-untyped-call]
    if is_outermost:
        for unit in units:
            _place(memo[id(unit)], memo)
    return copied


def _copy_unit(unit: Unit, memo: dict[int, Any]) -> Unit:
    copied = unit.duplicate()
    for parameter, other in zip(unit.parameters, copied.parameters, strict=True):
        memo[id(parameter.shard)] = other.shard
    return copied


def _place(unit: Unit, memo: dict[int, Any]) -> None:
    """Let a copied unit know the copied modules."""
    unit.module = memo[id(unit.module)]
    for parameter in unit.parameters:
        parameter.sites = [(memo[id(module)], name) for module, name in parameter.sites]
    replace_functions(unit)
