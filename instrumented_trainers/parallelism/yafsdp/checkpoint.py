"""State of a sharded model and its optimizers: it leaves as `FlatShard` under whole names and shapes, and enters so.

``state_dict`` and ``load_state_dict`` of the model and of each optimizer that has stepped its shards do this by hooks,
so ``torch.distributed.checkpoint`` and all that calls these two works.
"""

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter
from instrumented_trainers.parallelism.yafsdp.flat_shard import FlatShard
from instrumented_trainers.parallelism.yafsdp.gather_hooks import plain_values
from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule, units_in
from instrumented_trainers.parallelism.yafsdp.optimizer_support import units_of
from instrumented_trainers.parallelism.yafsdp.shard_tensor import Shard
from instrumented_trainers.parallelism.yafsdp.unit import Unit

_hooked: WeakSet[Optimizer] = WeakSet()


def _by_shard(units: Iterable[Unit]) -> dict[int, UnitParameter]:
    """Parameters of the units, by the id of each one's shard."""
    return {id(parameter.shard): parameter for unit in units for parameter in unit.parameters}


# The model ------------------------------------------------------------------------------------------------------------


def hook_model(module: YaFSDPModule) -> None:
    """Let the state dict of a sharded module hold shards that know their place, and take these or whole tensors."""
    assert isinstance(module, nn.Module)
    module.register_state_dict_post_hook(_give_places)
    module.register_load_state_dict_pre_hook(_take_parts)


def _give_places(module: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    outer = module._yafsdp_unit.outer_unit
    by_shard = _by_shard((*units_in(module), *((outer,) if outer is not None else ())))
    for name, parameter in _prefixed_parameters(module, prefix):
        if name in state and not isinstance(state[name], FlatShard) and id(parameter) in by_shard:
            state[name] = FlatShard(parameter.detach().to_local(), by_shard[id(parameter)].place)  # type: ignore[attr-defined]


def _take_parts(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    by_shard = _by_shard([module._yafsdp_unit])  # each unit's module has this hook
    for name, parameter in _prefixed_parameters(module, prefix):
        if name in state and id(parameter) in by_shard:
            state[name] = Shard.of(_part(state[name], by_shard[id(parameter)], name), by_shard[id(parameter)].place)


def _prefixed_parameters(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Parameter]]:
    return ((prefix + name, value) for name, value in module.named_parameters(remove_duplicate=False))


def _part(value: Any, parameter: UnitParameter, name: str) -> Any:
    """Return this rank's part of a tensor that is loaded. Raises ValueError if nobody knows which that is."""
    place, numel = parameter.place, parameter.part.stop - parameter.part.start
    if isinstance(value, Shard):
        value = FlatShard(value.to_local(), value.place)
    if isinstance(value, FlatShard):
        if value.local.numel() != numel or (value.shape, value.place.origin) != (
            place.shape,
            place.origin,
        ):
            raise ValueError(
                f"YaFSDP: {name} is the shard of another place or of another number of ranks; load it through "
                "torch.distributed.checkpoint, which reshards"
            )
        return value.local
    full = value.full_tensor() if isinstance(value, DTensor) else plain_values(value)
    if full.shape != place.shape:
        raise ValueError(
            f"YaFSDP: {name} is {tuple(place.shape)} and cannot be loaded from {tuple(full.shape)}; load a whole "
            "tensor, or through torch.distributed.checkpoint"
        )
    return place.part_of(full, numel)


# Its optimizers -------------------------------------------------------------------------------------------------------


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
    by_shard = _by_shard(units_of(optimizer))
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    by_number = dict(zip(numbers, parameters, strict=False))
    converted = dict(state["state"])
    for number, values in state["state"].items():
        if (parameter := by_shard.get(id(by_number.get(number)))) is not None:
            converted[number] = {
                key: convert(value, parameter, key) if isinstance(value, Tensor) and value.dim() else value
                for key, value in values.items()
            }
    return converted


def _state_shard(value: Tensor, parameter: UnitParameter, key: str) -> Tensor:
    value = value.to_local() if isinstance(value, Shard) else value
    if value.shape != (parameter.part.stop - parameter.part.start,):
        raise NotImplementedError(
            f"YaFSDP: state {key!r} of an optimizer has not one value per element of a shard: {tuple(value.shape)}"
        )
    return FlatShard(value, parameter.place)


def _state_part(value: Tensor, parameter: UnitParameter, key: str) -> Tensor:
    part: Tensor = _part(value, parameter, f"state {key!r} of an optimizer")
    return part
