"""A model's and its optimizer's state as a distributed checkpoint takes it, the same keys for every strategy.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}}

Tensors are whole or know which part of the whole they are, so a checkpoint can be loaded by another number of ranks
and, since the keys agree, by another strategy.
"""

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.optim import Optimizer

from instrumented_trainers.parallelism import region_state, zero1
from instrumented_trainers.parallelism.combined_optimizer import CombinedOptimizer, parts_of
from instrumented_trainers.parallelism.optimizer import begin_missing_state
from instrumented_trainers.parallelism.yafsdp.module import YaFSDPModule

AnyOptimizer = Optimizer | CombinedOptimizer


def make_optimizer(
    model: nn.Module, kind: Callable[..., Optimizer], parameters: Iterable[Any] | None = None, **options: Any
) -> Optimizer:
    """Return an optimizer of that kind over the model's parameters, made with `options`; call it after sharding.

    `parameters` are some of them, or groups; None: all. Under zero1 a rank holds the state of its part of them only.
    """
    if parameters is None:
        parameters = model.parameters()
    if isinstance(model, zero1.Zero1DataParallel):
        return model.make_optimizer(kind, parameters, **options)
    return kind(parameters, **options)


def checkpoint_state(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the state to save, or, before ``torch.distributed.checkpoint.load``, the state to load into.

    Saving in the background (``async_save``) needs a process group of its own, or its collectives come between those
    of training.
    """
    parts = parts_of(optimizer)
    if isinstance(model, YaFSDPModule):
        for part in parts:
            begin_missing_state(part)  # so that what is saved does not depend on what was stepped
    if isinstance(model, zero1.Zero1DataParallel):
        model_state, optimizer_state = get_model_state_dict(model), zero1.optimizer_state(model, parts)
    else:
        model_state, optimizer_state = get_state_dict(model, parts)
    return region_state.with_whole_shapes(model, {"model": model_state, "optimizer": optimizer_state})


def restore_state(model: nn.Module, optimizer: AnyOptimizer, state: dict[str, Any]) -> None:
    """Give model and optimizer what was loaded into `state`, which `checkpoint_state` made for them."""
    parts, state = parts_of(optimizer), region_state.with_own_shapes(state)
    if isinstance(model, zero1.Zero1DataParallel):
        set_model_state_dict(model, state["model"])
        zero1.restore_optimizer(model, parts, state["optimizer"])
    else:
        set_state_dict(model, parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
