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
            unit.leave_meta()
            waiting |= {id(parameter.shard): parameter for parameter in unit.parameters}
    drawn: set[UnitParameter] = set()
    for module in model.modules():
        own = {name: waiting[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in waiting}
        buffers = [name for name, buffer in module._buffers.items() if buffer is not None and buffer.is_meta]
        for name in buffers:
            module._buffers[name] = _unfilled(module._buffers[name], units[0].device)
        if own or buffers:
            _draw(module, own, reset, drawn)
            _refuse_unfilled(module, buffers)


def _draw(
    module: nn.Module,
    parameters: dict[str, UnitParameter],
    reset: Callable[[nn.Module], None],
    drawn: set[UnitParameter],
) -> None:
    """Let `reset` fill whole parameters, then keep the shards of them. A tied one is drawn at each of its places."""
    for parameter in parameters.values():
        whole = torch.empty(parameter.shape, dtype=parameter.shard.dtype, device="meta")
        whole = _unfilled(whole, parameter.shard.device)
        parameter.register(nn.Parameter(whole, requires_grad=parameter.shard.requires_grad))
    reset(module)
    _refuse_unfilled(module, [name for name, parameter in parameters.items() if parameter not in drawn])
    for name, parameter in parameters.items():
        whole = module._parameters[name]
        assert whole is not None
        if not whole.isnan().any():
            parameter.copy_from_whole(whole)
            drawn.add(parameter)
        parameter.register(parameter.shard)


def _refuse_unfilled(module: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        if getattr(module, name).isnan().any():
            raise ValueError(f"YaFSDP: {name!r} of {type(module).__name__} was not filled; see to it in `reset`")


def _unfilled(like: Tensor | None, device: torch.device) -> Tensor:
    """Return a tensor of the same shape and dtype on the device, with NaN in it where the dtype has that."""
    assert like is not None
    return torch.full_like(like, torch.nan if like.is_floating_point() else 0, device=device)
