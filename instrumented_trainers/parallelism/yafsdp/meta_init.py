"""Initialize a model that was sharded on the meta device, one module at a time."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from instrumented_trainers.parallelism.yafsdp.flat_parameters import UnitParameter
from instrumented_trainers.parallelism.yafsdp.module import units_in


def reset_parameters(module: nn.Module) -> None:
    """Call the module's own method of this name. Raises NotImplementedError, by name, if it has none."""
    if not callable(method := getattr(module, "reset_parameters", None)):
        raise NotImplementedError(
            f"YaFSDP: {type(module).__name__} has no reset_parameters; say how to give it weights: "
            "materialize(model, lambda module: ...)"
        )
    method()


@torch.no_grad()
def materialize(model: nn.Module, reset: Callable[[nn.Module], None] = reset_parameters) -> None:
    """Draw the weights of a model that was sharded on the meta device; make its optimizer after that.

    `reset` is called with each module that has parameters or buffers of its own, in the order of ``model.modules()``,
    while these are whole and on the device; it must fill them, with the same values on every rank: seed the ranks
    alike. Each rank then keeps its shard. Raises ValueError, by name, where it leaves some of them unfilled.
    """
    waiting: dict[int, UnitParameter] = {}
    units = list(units_in(model))
    for unit in units:
        if unit.is_meta:
            if any(parameter.division is not None for parameter in unit.parameters):
                raise NotImplementedError(
                    "YaFSDP: materialize draws no parameters that are DTensors; call model.to_empty(device=…) and load "
                    "a checkpoint, or draw before parallelize_module"
                )
            unit.leave_meta()
            waiting |= {id(parameter.shard): parameter for parameter in unit.parameters}
    filled: set[UnitParameter] = set()
    for module in model.modules():
        unset = {name: waiting[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in waiting}
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in buffers:
            module._buffers[name] = _unfilled_like(module._buffers[name], units[0].device)
        if unset or buffers:
            _draw(module, unset, reset, filled)
            _refuse_unfilled(module, buffers)


def _draw(
    module: nn.Module,
    parameters: dict[str, UnitParameter],
    reset: Callable[[nn.Module], None],
    filled: set[UnitParameter],
) -> None:
    """Let `reset` fill whole parameters, then keep the shards of them. A tied one is drawn at each of its places."""
    for parameter in parameters.values():
        weight = torch.empty(parameter.shape, dtype=parameter.shard.dtype, device="meta")
        weight = _unfilled_like(weight, parameter.shard.device)
        parameter.register(nn.Parameter(weight, requires_grad=parameter.shard.requires_grad))
    reset(module)
    _refuse_unfilled(module, [name for name, parameter in parameters.items() if parameter not in filled])
    for name, parameter in parameters.items():
        weight = module._parameters[name]
        assert weight is not None
        if not weight.isnan().any():
            parameter.copy_from_whole(weight)
            filled.add(parameter)
        parameter.register(parameter.shard)


def _refuse_unfilled(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if getattr(module, name).isnan().any():
            raise ValueError(f"YaFSDP: {name!r} of {type(module).__name__} was not filled; see to it in `reset`")


def _unfilled_like(like: Tensor | None, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on the device, with NaN in it where the dtype has that."""
    assert like is not None
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0, device=device)
