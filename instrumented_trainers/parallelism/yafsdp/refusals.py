"""Refuse what would train on wrong weights or lose gradients: each by name, with what to do instead."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from instrumented_trainers.parallelism.yafsdp.shard_tensor import plain_tensors
from instrumented_trainers.parallelism.yafsdp.unit import Unit


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


def refuse_transforms(unit: Unit) -> None:
    """Raise NotImplementedError within vmap, grad or jvp of torch.func, which see no collectives and no buffers."""
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise NotImplementedError(
            f"YaFSDP: {unit_label(unit)} cannot run within a transform of torch.func (vmap, grad, jvp); transform a "
            "function inside the unit's forward, call backward() for gradients of weights, or use an unsharded copy"
        )


def refuse_other_parameters(unit: Unit) -> None:
    """Raise RuntimeError if the unit's modules have other tensors in the place of its parameters, for this call."""
    for parameter in unit.parameters:
        if not parameter.is_registered:
            module, name = parameter.sites[0]
            raise RuntimeError(
                f"YaFSDP: parameter {name!r} of {type(module).__name__} in {unit_label(unit)} is another tensor while "
                "the unit runs, as by torch.func.functional_call, but it computes with the weights that it gathers; "
                "call functional_call inside the unit's forward, on a module that is no unit"
            )


def refuse_weights_changed_in_forward(unit: Unit) -> None:
    """Raise RuntimeError if the unit's forward has changed its weights: they are copies, for this pass."""
    if unit.slots is not None and (changed := unit.changed_weight()) is not None:
        module, name = changed.sites[0]
        raise RuntimeError(
            f"YaFSDP: the forward of {unit_label(unit)} changed parameter {name!r} of {type(module).__name__}; whole "
            "weights are copies, so the change would be lost. Change a copy in forward, or the parameter between "
            "steps, within `with model.unshard():`"
        )


def refuse_running(unit: Unit, what: str) -> None:
    """Raise RuntimeError if the unit's weights, which shall do `what`, are whole just now."""
    if unit.in_use:
        raise RuntimeError(f"YaFSDP: {unit_label(unit)} cannot {what} while it runs; do that between steps")
    if unit.is_unsharded:
        raise RuntimeError(f"YaFSDP: {unit_label(unit)} cannot {what} while it is unsharded; call reshard() before")


def refuse_training_unsharded(unit: Unit) -> None:
    """Raise RuntimeError if the unit's forward would be part of a backward pass although it is unsharded."""
    if torch.is_grad_enabled():
        raise RuntimeError(
            f"YaFSDP: {unit_label(unit)} is unsharded, and gradients of its whole weights would be lost; run it under "
            "torch.no_grad(), or reshard() it before it is trained"
        )


def refuse_absent_weights(unit: Unit) -> None:
    """Raise RuntimeError if autograd goes back through the unit while its weights are not in its buffer."""
    if unit.slots is None:
        return
    slot = unit.slots.weights
    if slot.owner is not unit or slot.gather is not None:
        raise RuntimeError(
            f"YaFSDP: backward came to {unit_label(unit)} while its weights were not there, by a tensor that its "
            "forward did not return: one that a hook captured inside it, for example. Return what the loss needs, or "
            "keep it as an attribute of a module in the unit, or shard the unit with reshard_after_forward=False"
        )


def refuse_changed_weights(unit: Unit, version: int) -> None:
    """Raise RuntimeError if the optimizer changed the unit's weights after the forward pass with this version."""
    if unit.weights_version != version:
        raise RuntimeError(
            f"YaFSDP: the weights of {unit_label(unit)} were changed in place, as by optimizer.step(), between its "
            "forward and this backward, which needs them as they were; run all backward passes before the step"
        )


def refuse_unreduced_gradients(unit: Unit) -> None:
    """Raise RuntimeError if an optimizer steps while gradients of the unit wait for a backward pass with sync."""
    if unit.awaits_reduction:
        raise RuntimeError(
            f"YaFSDP: an optimizer steps {unit_label(unit)}, whose gradients are not reduced yet; call "
            "set_requires_gradient_sync(True) before the last micro-batch's backward"
        )


def refuse_stored_weight(unit: Unit, tensor: Tensor, where: str) -> None:
    """Raise RuntimeError if the tensor, which outlives the forward, is a weight of the unit or a view of one."""
    if unit.is_weight(tensor):
        raise RuntimeError(
            f"YaFSDP: a weight of {unit_label(unit)}, or a view of one, that its forward left in {where} would be "
            "another unit's afterwards, as they share a buffer; keep a copy there: weight.clone()"
        )


def refuse_gradient_hooks(unit: Unit) -> None:
    """Raise NotImplementedError if a shard has a hook that autograd would never call."""
    with plain_tensors():
        hooked = next((parameter for parameter in unit.parameters if parameter.shard._backward_hooks), None)
    if hooked is not None:
        module, name = hooked.sites[0]
        raise NotImplementedError(
            f"YaFSDP: parameter {name!r} of {type(module).__name__} in {unit_label(unit)} has a hook of "
            "register_hook, which would see no gradient: autograd computes those of the whole weights; use "
            "register_post_accumulate_grad_hook, which is called with the shard when its gradient is complete"
        )


_OF_AUTOGRAD = re.compile(r"\[torch\.\w+ \[([\d, ]*)\]\].* is at version (\d+); expected version (\d+)", re.DOTALL)


def name_missing_weight(words: str, units: Iterable[Unit]) -> str | None:
    """Explanation of autograd's words on a tensor's version; None if it is no weight of these units.

    A weight is recognised by its shape and by the versions that `FlatParameters.set_weights_present` gives.
    """
    if (match := _OF_AUTOGRAD.search(words)) is None:
        return None
    shape = sorted(int(size) for size in match[1].split(",") if size.strip())
    version, expected = int(match[2]), int(match[3])
    if expected % 2 or version <= expected:
        return None
    labels = [unit_label(unit) for unit in units if _has_weight(unit, shape, version)]
    if not labels:
        return None
    return (
        f"YaFSDP: backward needs a weight of {' or '.join(sorted(labels))} as it was in forward, but it is not there: "
        "backward came by a tensor that the unit's forward did not return, such as one that a hook captured inside it, "
        "or after an optimizer step. Return what the loss needs, or keep it as an attribute of one of its modules, or "
        "shard the unit with reshard_after_forward=False; run all backward passes before the step"
    )


def _has_weight(unit: Unit, shape: list[int], version: int) -> bool:
    return any(
        version // 2 == flat.master._version and any(sorted(p.shape) == shape for p in flat.parameters)
        for flat in unit.flats
    )


def unit_label(unit: Unit) -> str:
    """Name of the unit in a message."""
    return f"unit {unit.name!r}" if unit.name else "the root unit"
