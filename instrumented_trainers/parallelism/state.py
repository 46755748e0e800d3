"""A model's and its optimizer's state as a distributed checkpoint takes it, the same keys for every strategy.

    {"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}}

Tensors are whole or know which part of the whole they are, so a checkpoint can be loaded by another number of ranks
and, since the keys agree, by another strategy.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch.distributed as dist
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
from instrumented_trainers.parallelism.pipeline import PipelineModel, ReplicatedPart, Zero1Part
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
    if isinstance(model, (zero1.Zero1DataParallel, Zero1Part)):
        return model.make_optimizer(kind, parameters, **options)
    return kind(parameters, **options)


def checkpoint_state(model: nn.Module, optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the state to save, or, before ``torch.distributed.checkpoint.load``, the state to load into.

    Saving in the background (``async_save``) needs a process group of its own, or its collectives come between those
    of training.
    """
    if isinstance(model, PipelineModel):
        return _pipeline_state(model, optimizer)
    parts = parts_of(optimizer)
    if isinstance(model, YaFSDPModule):
        for part in parts:
            begin_missing_state(part)  # so that what is saved does not depend on what was stepped
    if isinstance(model, (zero1.Zero1DataParallel, Zero1Part)):
        model_state, optimizer_state = get_model_state_dict(_unwrap(model)), zero1.optimizer_state(model, parts)
    else:
        model_state, optimizer_state = get_state_dict(_unwrap(model), parts)
    return region_state.with_whole_shapes(model, {"model": model_state, "optimizer": optimizer_state})


def restore_state(model: nn.Module, optimizer: AnyOptimizer, state: dict[str, Any]) -> None:
    """Give model and optimizer what was loaded into `state`, which `checkpoint_state` made for them."""
    if isinstance(model, PipelineModel):
        _restore_pipeline(model, optimizer, state)
        return
    parts, state = parts_of(optimizer), region_state.with_own_shapes(state)
    if isinstance(model, (zero1.Zero1DataParallel, Zero1Part)):
        set_model_state_dict(_unwrap(model), state["model"])
        zero1.restore_optimizer(model, parts, state["optimizer"])
    else:
        set_state_dict(_unwrap(model), parts, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def _unwrap(model: nn.Module) -> nn.Module:
    """Return the module with the parameters' own names; torch's functions know only DDP's wrapper."""
    return model.module if isinstance(model, ReplicatedPart) else model


def _pipeline_state(model: PipelineModel, optimizer: AnyOptimizer) -> dict[str, Any]:
    """Return the state of this rank's stages. Every rank of the pipeline calls it: all save the same groups."""
    states = [checkpoint_state(part, inner) for part, inner in _optimizers(model, optimizer)]
    own_groups = [state["optimizer"]["param_groups"] for state in states]
    of_stages: list[Any] = [None] * dist.get_world_size(model.process_group)
    dist.all_gather_object(of_stages, own_groups, group=model.process_group)
    return {
        "model": {name: value for state in states for name, value in state["model"].items()},
        "optimizer": {
            "state": {name: value for state in states for name, value in state["optimizer"]["state"].items()},
            "param_groups": _merge_groups(groups for of_rank in of_stages for groups in of_rank),
        },
    }


def _restore_pipeline(model: PipelineModel, optimizer: AnyOptimizer, state: dict[str, Any]) -> None:
    for part, inner in _optimizers(model, optimizer):
        current = checkpoint_state(part, inner)
        by_name = {name: state["optimizer"]["state"][name] for name in current["optimizer"]["state"]}
        # Stages group their parameters as the training that saved may not have done; the settings are set each step.
        optimizer_state = {"state": by_name, "param_groups": current["optimizer"]["param_groups"]}
        weights = {name: state["model"][name] for name in current["model"]}
        restore_state(part, inner, {"model": weights, "optimizer": optimizer_state})


def _optimizers(model: PipelineModel, optimizer: AnyOptimizer) -> Iterator[tuple[nn.Module, CombinedOptimizer]]:
    """Yield each of the rank's stages with the optimizers of its parameters."""
    for part in model.parts:
        ids = {id(parameter) for parameter in part.parameters()}
        parts = [inner for inner in parts_of(optimizer) if id(inner.param_groups[0]["params"][0]) in ids]
        yield part, CombinedOptimizer(*parts)


def _merge_groups(of_stages: Iterable[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the stages' groups of parameters' names, with those of different stages and equal settings joined.

    Groups of one stage stay apart, also where their settings are equal, as they do without a pipeline.
    """
    merged: list[dict[str, Any]] = []
    for groups in of_stages:
        free = list(merged)
        for group in groups:
            same = next((other for other in free if {**other, "params": None} == {**group, "params": None}), None)
            if same is None:
                merged.append({**group, "params": list(group["params"])})
            else:
                same["params"] += group["params"]
                free.remove(same)
    return merged
