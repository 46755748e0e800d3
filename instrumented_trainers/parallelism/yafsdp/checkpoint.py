"""State of a sharded model and its optimizers: it leaves as `FlatShard` under whole names and shapes, and enters so.

``state_dict`` and ``load_state_dict`` of the model and of each optimizer that has stepped its shards do this by hooks,
so ``torch.distributed.checkpoint`` and all that calls these two works.
"""

from collections.abc import Iterable
from typing import Any, TypeAlias
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from instrumented_trainers import regions
from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard, Place
from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule, units_in
from instrumented_trainers.parallelism.yafsdp.sharded_functions import units_of
from instrumented_trainers.parallelism.yafsdp.unit import Unit

Places: TypeAlias = dict[int, tuple[UnitParameter, Place]]
"""By the id of each shard: its parameter and where it lies."""

_hooked: WeakSet[Optimizer] = WeakSet()


def places(units: Iterable[Unit]) -> Places:
    """Places of the units' shards, by id."""
    return {
        id(parameter.shard): (
            parameter,
            Place(
                parameter.layout,
                parameter.index,
                parameter.part.origin,
                unit.ranks.shards,
                unit.device,
                regions.region_of(*parameter.sites[0]),
            ),
        )
        for unit in units
        for parameter in unit.parameters
    }


# The model -----------------------------------------------------------------------------------------------------------


def hook_model(module: YaFSDPModule) -> None:
    """Let the state dict of a sharded module hold shards that know their place, and take these or whole tensors."""
    assert isinstance(module, nn.Module)
    module.register_state_dict_post_hook(_give_places)
    module.register_load_state_dict_pre_hook(_take_parts)


def _give_places(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    outer = module._yafsdp_unit.outer_unit
    shard_places = places((*units_in(module), *((outer,) if outer is not None else ())))
    for name, parameter in _prefixed_parameters(module, prefix):
        if name in state and not isinstance(state[name], FlatShard) and id(parameter) in shard_places:
            state[name] = FlatShard(parameter.detach(), shard_places[id(parameter)][1])


def _take_parts(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    shard_places = places([module._yafsdp_unit])  # each unit's module has this hook
    for name, parameter in _prefixed_parameters(module, prefix):
        if name in state and id(parameter) in shard_places:
            state[name] = _part(state[name], *shard_places[id(parameter)], name)


def _prefixed_parameters(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Parameter]]:
    return ((prefix + name, value) for name, value in module.named_parameters(remove_duplicate=False))


def _part(value: Any, parameter: UnitParameter, place: Place, name: str) -> Any:
    """Return this rank's part of a tensor that is loaded. Raises ValueError if nobody knows which that is."""
    if isinstance(value, FlatShard):
        if value.local.shape != parameter.shard.shape or (value.shape, value.place.origin) != (
            place.shape,
            place.origin,
        ):
            raise ValueError(
                f"YaFSDP: {name} is the shard of another place or of another number of ranks; load it through "
                "torch.distributed.checkpoint, which reshards"
            )
        return value.local
    full = value.full_tensor() if isinstance(value, DTensor) else value
    if full.shape != place.shape:
        raise ValueError(
            f"YaFSDP: {name} is {tuple(place.shape)} and cannot be loaded from {tuple(full.shape)}; load a whole "
            "tensor, or through torch.distributed.checkpoint"
        )
    return place.part_of(full, parameter.shard.numel())


# Its optimizers ------------------------------------------------------------------------------------------------------


def hook_optimizer(optimizer: Optimizer) -> None:
    """Do for the state of an optimizer of shards what `hook_model` does for the model's."""
    if optimizer not in _hooked:
        _hooked.add(optimizer)
        optimizer.register_state_dict_post_hook(_give_places_of_state)
        optimizer.register_load_state_dict_pre_hook(_take_parts_of_state)


def _give_places_of_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return state | {"state": _each_state(optimizer, state, _state_shard)}


def _take_parts_of_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    return state | {"state": _each_state(optimizer, state, _state_part)}


def _each_state(optimizer: Optimizer, state: dict[str, Any], convert: Any) -> dict[Any, Any]:
    """Return the state of each parameter, converted where it has one value per element of a shard."""
    shard_places = places(units_of(optimizer))
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    converted = dict(state["state"])
    for number, values in state["state"].items():
        if (known_place := shard_places.get(id(by_number.get(number)))) is not None:
            converted[number] = {
                key: convert(value, *known_place, key) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values.items()
            }
    return converted


def _state_shard(value: Tensor, parameter: UnitParameter, place: Place, key: str) -> Tensor:
    if value.shape != parameter.shard.shape:
        raise NotImplementedError(
            f"YaFSDP: state {key!r} of an optimizer has not one value per element of a shard: {tuple(value.shape)}"
        )
    return FlatShard(value, place)


def _state_part(value: Tensor, parameter: UnitParameter, place: Place, key: str) -> Tensor:
    part: Tensor = _part(value, parameter, place, f"state {key!r} of an optimizer")
    return part
