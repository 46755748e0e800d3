"""Shard any model, not only the trainers' own: each unit, then the model."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from instrumented_trainers.parallelism import STRATEGIES, ShardOptions, yafsdp
from instrumented_trainers.verification.user_training import UnusableTrainingError, UserTraining

FULLY_SHARD: Mapping[str, Callable[..., Any]] = MappingProxyType({"fsdp2": fully_shard, "yafsdp": yafsdp.fully_shard})


def shard(training: UserTraining, strategy: str) -> nn.Module:
    """The model under a strategy, by the user's own code where there is one."""
    if training.shard is not None:
        return training.shard(training.model, strategy)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if strategy not in FULLY_SHARD:
        return STRATEGIES[strategy](training.model, mesh, ShardOptions())
    return _shard_units(training.model, units(training.model, training.units), mesh, FULLY_SHARD[strategy])


def units(model: nn.Module, names: Sequence[str] | None) -> list[nn.Module]:
    """Modules to shard one by one, inner ones first.

    Unless `names` states them: the elements of lists of modules, or the children of an nn.Sequential.
    """
    modules = dict(model.named_modules())
    if names is not None:
        if unknown := [name for name in names if name not in modules]:
            raise UnusableTrainingError(f"the model has no module {unknown[0]!r}, which units names")
        return [modules[name] for name in reversed(modules) if name in names and name]
    lists = [module for module in modules.values() if isinstance(module, nn.ModuleList)]
    elements = [element for outer in lists for element in outer if any(True for _ in element.parameters())]
    if not elements and isinstance(model, nn.Sequential):
        elements = [child for child in model if any(True for _ in child.parameters())]
    inner = {id(module) for element in elements for module in element.modules() if module is not element}
    return [element for element in dict.fromkeys(elements) if id(element) not in inner]


def _shard_units(
    model: nn.Module, modules: Sequence[nn.Module], mesh: DeviceMesh, fully_shard: Callable[..., Any]
) -> nn.Module:
    for module in modules:
        fully_shard(module, mesh=mesh)
    sharded: nn.Module = fully_shard(model, mesh=mesh)
    return sharded
