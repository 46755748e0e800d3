"""ZeRO stage 1: data parallel, but each rank stores the optimizer state of, and steps, only a part of the parameters.

Whole parameters are assigned, the largest first, to the rank with the fewest elements so far; after its step each
rank broadcasts its parameters. https://arxiv.org/abs/1910.02054 names the stages.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim import Optimizer

from instrumented_trainers.parallelism import ddp, expert
from instrumented_trainers.parallelism.combined_optimizer import CombinedOptimizer
from instrumented_trainers.parallelism.host_optimizer import HostOptimizer
from instrumented_trainers.parallelism.optimizer import begin_missing_state
from instrumented_trainers.parallelism.options import ShardOptions


def shard(model: nn.Module, mesh: DeviceMesh, options: ShardOptions) -> nn.Module:
    """Replicate the model over the mesh's ranks; `make_optimizer` then shares out the optimizer state."""
    return Zero1DataParallel(*ddp.replica_setup(model, mesh, options), offload=options.offload)


class Zero1DataParallel(ddp.AutocastDataParallel):
    """A model whose parameters are replicated and whose optimizer is not."""

    def __init__(self, module: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None, *, offload: bool) -> None:
        super().__init__(module, mesh, dtype)
        self._offload = offload

    def make_optimizer(
        self, kind: Callable[..., Optimizer], parameters: Iterable[Any], **options: Any
    ) -> ZeroRedundancyOptimizer | CombinedOptimizer:
        """Return this rank's part of an optimizer of that kind over `parameters`, or groups of them.

        It is in host memory if the model's options ask for it. Experts that are divided over ranks are stepped by a
        part of their own, as their replicas are other ranks.
        """
        make = functools.partial(HostOptimizer, kind=kind) if self._offload else kind
        return divided_optimizer(self, self.process_group, make, parameters, **options)


def divided_optimizer(
    model: nn.Module,
    group: dist.ProcessGroup,
    kind: Callable[..., Optimizer],
    parameters: Iterable[Any],
    **options: Any,
) -> ZeroRedundancyOptimizer | CombinedOptimizer:
    """Return this rank's part of an optimizer over the replicas in `group`; that of divided experts has their own."""
    experts, replicas = _divided_experts(model)
    dense, of_experts = _partition(parameters, experts)
    parts = [
        ZeroRedundancyOptimizer(part, kind, process_group=ranks, **options)
        for part, ranks in ((dense, group), (of_experts, replicas))
        if part
    ]
    return parts[0] if len(parts) == 1 else CombinedOptimizer(*parts)


def _divided_experts(model: nn.Module) -> tuple[set[int], dist.ProcessGroup | None]:
    """Return the ids of the parameters of experts that are divided over ranks, and the ranks with the same ones."""
    ids = {id(parameter) for parameter in expert.expert_parameters(model).values()}
    layer = next(expert.divided_experts(model), None)
    return ids, layer[1].replicas.get_group() if layer is not None else None


def _partition(parameters: Iterable[Any], expert_ids: set[int]) -> tuple[list[Any], list[Any]]:
    """Return the parameters, or groups of them, that are not in `expert_ids`, and those that are."""
    listed = list(parameters)
    if listed and not isinstance(listed[0], dict):
        return [p for p in listed if id(p) not in expert_ids], [p for p in listed if id(p) in expert_ids]
    parts = []
    for of_experts in (False, True):
        groups = [{**g, "params": [p for p in g["params"] if (id(p) in expert_ids) is of_experts]} for g in listed]
        parts.append([group for group in groups if group["params"]])
    return parts[0], parts[1]


def optimizer_state(model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer]) -> dict[str, Any]:
    """Return the optimizers' state of this rank's parameters, whole tensors by name, in the form of `checkpoint_state`.

    Other ranks' parameters have no entry: each rank saves its own, and a load asks for what the rank has then.
    """
    names, state = _names(model), {}
    for optimizer in optimizers:
        begin_missing_state(optimizer.optim)
        state |= {name: dict(optimizer.optim.state[p]) for name, p in _own_parameters(names, optimizer)}
    groups: list[dict[str, Any]] = []
    for optimizer in optimizers:
        named_groups = [_group(group, names) for group in optimizer.param_groups]
        groups = _join_groups(groups, named_groups) if _steps_experts(model, optimizer) else [*groups, *named_groups]
    return {"state": state, "param_groups": groups}


def restore_optimizer(model: nn.Module, optimizers: Sequence[ZeroRedundancyOptimizer], state: dict[str, Any]) -> None:
    """Give this rank's part of the optimizers what was loaded into `state`."""
    names = _names(model)
    for optimizer in optimizers:
        for name, parameter in _own_parameters(names, optimizer):
            optimizer.optim.state[parameter] = state["state"][name]
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        saved = next(other for other in state["param_groups"] if names[group["params"][0]] in other["params"])
        group.update({key: value for key, value in saved.items() if key != "params"})


def _own_parameters(
    names: dict[nn.Parameter, str], optimizer: ZeroRedundancyOptimizer
) -> Iterator[tuple[str, nn.Parameter]]:
    for group in optimizer.optim.param_groups:
        for parameter in group["params"]:
            yield names[parameter], parameter


def _names(model: nn.Module) -> dict[nn.Parameter, str]:
    return {parameter: name.removeprefix("module.") for name, parameter in model.named_parameters()}


def _group(group: dict[str, Any], names: dict[nn.Parameter, str]) -> dict[str, Any]:
    return {**group, "params": [names[parameter] for parameter in group["params"]]}


def _steps_experts(model: nn.Module, optimizer: ZeroRedundancyOptimizer) -> bool:
    experts = expert.expert_parameters(model).values()
    return any(optimizer.param_groups[0]["params"][0] is parameter for parameter in experts)


def _join_groups(groups: list[dict[str, Any]], of_experts: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return groups of names with divided experts in those of equal settings, where other strategies have them."""
    joined = [dict(group) for group in groups]
    for group in of_experts:
        same = next((old for old in reversed(joined) if {**old, "params": None} == {**group, "params": None}), None)
        if same is None:
            joined.append(group)
        else:
            same["params"] = [*same["params"], *group["params"]]
    return joined
